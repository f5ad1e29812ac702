"""What an inactive history is: its content, its paged spaces, and the checkpoints at which it can be continued.

A checkpoint is complete by construction: it names a state image and lies within the spaces of the same execution.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from ninfer.context import CheckpointKind, CheckpointRef, ShortlistKey
from ninfer.contract import Handle, HandleTable
from ninfer.errors import StaleHandle
from ninfer.identity import PrefixIdentity, digest_at, digest_chain
from ninfer.program.layout import PoolKind
from ninfer.program.sequence import SequenceRecord


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """frontier: tokens. image: the state after them, of which the checkpoint holds one reference. key: for lookup."""

    kind: CheckpointKind
    frontier: int
    image: Handle
    key: ShortlistKey


@dataclass(slots=True)
class History:
    """identity: of the tokens up to the deepest checkpoint, or more. spaces: inactive ones, one per pool."""

    identity: PrefixIdentity
    spaces: dict[PoolKind, Handle]
    checkpoints: dict[int, Checkpoint] = field(default_factory=dict)

    @property
    def frontier(self) -> int:
        """Tokens that the checkpoints need."""
        return max(c.frontier for c in self.checkpoints.values())


class Histories:
    """All inactive histories: "continuation" belongs to one conversation, "shared" to whoever matches."""

    def __init__(self) -> None:
        self._tables: Mapping[str, HandleTable[History]] = {
            kind: HandleTable(kind) for kind in ("continuation", "shared")
        }

    def insert(self, kind: str, history: History) -> Handle:
        return self._tables[kind].insert(history)

    def try_get(self, owner: Handle) -> History | None:
        table = self._tables.get(owner.kind)
        return None if table is None else table.try_get(owner)

    def get(self, owner: Handle) -> History:
        """Raises StaleHandle."""
        history = self.try_get(owner)
        if history is None:
            raise StaleHandle(f"{owner} does not name a live history")
        return history

    def remove(self, owner: Handle) -> History:
        self.get(owner)
        return self._tables[owner.kind].remove(owner)

    def find(self, ref: CheckpointRef) -> tuple[History, Checkpoint] | None:
        """The checkpoint, or None for one that is gone."""
        history = self.try_get(ref.owner)
        checkpoint = None if history is None else history.checkpoints.get(ref.checkpoint)
        return None if history is None or checkpoint is None else (history, checkpoint)

    def live(self) -> Iterator[tuple[Handle, History]]:
        for table in self._tables.values():
            yield from table.live()


def resident_identity(record: SequenceRecord, frontier: int) -> PrefixIdentity:
    """Content of the first ``frontier`` tokens of a row: its prompt, then generated text whose rotary axes agree."""
    prompt, n = record.request.identity, record.prompt
    splits = (*prompt.execution_frontiers, *record.boundaries)
    if frontier <= n:
        types, positions = prompt.token_types[:frontier], prompt.positions[:, :frontier]
    else:
        generated = np.arange(n, frontier, dtype=np.int32) + np.int32(prompt.rope_delta)
        types = np.concatenate([prompt.token_types, np.zeros(frontier - n, np.uint8)])
        positions = np.concatenate([prompt.positions, np.broadcast_to(generated, (3, frontier - n))], axis=1)
    return PrefixIdentity(
        tokens=record.ledger[:frontier].copy(),
        token_types=types,
        positions=positions,
        rope_delta=prompt.rope_delta,
        vision=tuple(span for span in prompt.vision if span.begin < frontier),
        mode=prompt.mode,
        execution_frontiers=tuple(sorted({f for f in splits if 0 < f <= frontier})),
    )


def shortlist_key(record: SequenceRecord, frontier: int) -> ShortlistKey:
    """The key under which a later prompt that starts with these tokens looks."""
    if frontier <= record.prompt and record.request.digest.chain:
        identity, digest = record.request.identity, record.request.digest
    else:
        identity = resident_identity(record, frontier)
        digest = digest_chain(identity, record.request.digest)
    return ShortlistKey(frontier, identity.mode, digest_at(identity, digest, frontier))
