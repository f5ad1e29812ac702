"""What work is expected to take, in whole nanoseconds. Prices order choices; they never decide what is possible.

Rates are Q32 fixed point (nanoseconds per unit, times 2^32), so that comparisons are exact and repeatable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ninfer.work import MachineWork, PrefillWork, RecoveryRecipe, TransferBatch

Q = 32


@dataclass(frozen=True, slots=True)
class TransferRate:
    """Of one direction. batch_ns: to start a batch of copies. op_ns: of one copy call. byte_q32: of one byte."""

    batch_ns: int
    op_ns: int
    byte_q32: int


@dataclass(frozen=True, slots=True)
class PrefillRate:
    """chunk_ns: of one unit. token_q32: of one token. pair_q32: of one (query, key) pair of attention."""

    chunk_ns: int
    token_q32: int
    pair_q32: int


@dataclass(frozen=True, slots=True)
class CostModel:
    """Resolved once, when an engine starts."""

    transfers: Mapping[str, TransferRate]
    prefill: PrefillRate

    def transfer_ns(self, batch: TransferBatch) -> int:
        """A batch takes as long as its copy calls or its bytes, whichever is longer."""
        rate = self.transfers[batch.direction]
        return max(batch.batches * rate.batch_ns + batch.ops * rate.op_ns, (batch.bytes * rate.byte_q32) >> Q)

    def prefill_ns(self, work: PrefillWork) -> int:
        rate = self.prefill
        variable = ((work.tokens * rate.token_q32) >> Q) + ((work.pairs * rate.pair_q32) >> Q)
        return work.chunks * rate.chunk_ns + variable

    def transfers_ns(self, batches: Iterable[TransferBatch]) -> int:
        return sum(self.transfer_ns(batch) for batch in batches)

    def price(self, work: MachineWork) -> int:
        return self.transfers_ns(work.transfers) + self.prefill_ns(work.prefill)

    def recovery_ns(self, recipes: Iterable[RecoveryRecipe]) -> int:
        """Of several ways to have a prefix again, the cheapest."""
        return min(self.transfers_ns(recipe.restore) + self.prefill_ns(recipe.prefill) for recipe in recipes)


def pairs(reused: int, suffix: int) -> int:
    """(query, key) pairs of causal attention when ``suffix`` tokens follow ``reused`` ones."""
    return reused * suffix + suffix * (suffix + 1) // 2


GENERIC = CostModel(
    MappingProxyType(
        {
            "d2h": TransferRate(48_655, 7_433, 91_692_315),
            "h2d": TransferRate(0, 8_457, 83_354_284),
            "d2d": TransferRate(3_343, 9_520, 2_658_314),
        }
    ),
    PrefillRate(200_000, 40_000 << Q, 2 << Q),
)
"""What is assumed where nothing was measured: copies of a current desktop GPU, prefill of a few tens of microseconds a
token."""
