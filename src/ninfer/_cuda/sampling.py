"""The sampler's Ops: which kernels run, over how many blocks, in which part of the scratch."""

from __future__ import annotations

from typing import Any

from ninfer._cuda.buffers import CudaBuffer
from ninfer.errors import InvariantError
from ninfer.ops import Drafts, SampleOut, SampleRows

NO_LEGAL_TOKEN = -1
NOT_FINITE = -2
ACCEPTANCE, CORRECTION = 2, 3
"""RNG purposes of the acceptance test and of the draw that replaces a refused draft."""

ALTERNATIVES = 20
"""Log-probability alternatives of a position, and the most candidates of a proposal."""

LISTED = 64
"""Best ids of a position that are listed in order; more only where a distribution over everything needs them."""

SURVEY_THREADS, DECIDE_THREADS = 128, 512
SHIFT = 8
"""log2 of the ids of a group."""
MOST_GROUPS = 1024
CAPACITY = LISTED * (-(-(LISTED << SHIFT) // DECIDE_THREADS))
"""Keys that ``decide`` can gather: at most LISTED threads hold any, each at most its share of LISTED groups."""


class Sampler:
    """``Ops.sample``, ``Ops.accept`` and ``Ops.count`` over one device's kernels."""

    def __init__(self, device: Any) -> None:
        self._launch = device.launch
        names = ("survey", "decide", "chain", "count")
        self._survey, self._decide, self._chain, self._count = (device.function(name, name) for name in names)

    def sample(self, out: SampleOut, logits: Any, masks: Any, counts: Any, rows: SampleRows, scratch: Any) -> None:
        self._positions(out, logits, masks, counts, rows, None, scratch)

    def accept(
        self,
        out: SampleOut,
        accepted: Any,
        logits: Any,
        masks: Any,
        counts: Any,
        rows: SampleRows,
        drafts: Drafts,
        scratch: Any,
    ) -> None:
        flags = self._positions(out, logits, masks, counts, rows, drafts, scratch)
        self._launch(self._chain, -(-rows.B // 32), 32, accepted, flags, drafts.count, rows.B, rows.W)

    def scratch(self, positions: int, vocab: int) -> int:
        """Bytes that ``sample`` and ``accept`` need."""
        return positions * (16 * _groups(vocab) + 4)

    def count(self, counts: Any, lanes: Any, tokens: Any, width: Any) -> None:
        B, W = tokens.shape
        self._launch(self._count, -(-B // 32), 32, counts, lanes, tokens, width, B, W, *counts.shape)

    def _positions(
        self, out: SampleOut, logits: Any, masks: Any, counts: Any, rows: SampleRows, drafts: Drafts | None,
        scratch: Any,
    ) -> CudaBuffer:  # fmt: skip
        """Decide every position on its own; the flags i32 [P] of accepted drafts."""
        positions, V = logits.shape
        groups = _groups(V)
        if scratch.nbytes < self.scratch(positions, V):
            raise InvariantError(f"scratch of {scratch.nbytes} bytes")
        words = positions * groups
        heads = CudaBuffer(scratch.ptr, (words,), "u64")
        norms = CudaBuffer(scratch.ptr + 8 * words, (words,), "f32")
        masses = CudaBuffer(norms.ptr + 4 * words, (words,), "f32")
        flags = CudaBuffer(masses.ptr + 4 * words, (positions,), "i32")
        columns, candidates = 0, 0
        number: Any = 0
        tokens, ids, q = number, number, number
        if drafts is not None:
            columns = drafts.tokens.shape[1]
            number, tokens = drafts.count, drafts.tokens
            if drafts.ids is not None:
                candidates, ids, q = drafts.ids.shape[2], drafts.ids, drafts.q
                if candidates > ALTERNATIVES:
                    raise InvariantError(f"proposals of {candidates} candidates")
        shape = (rows.W, V, SHIFT)
        self._launch(
            self._survey, (groups, positions), SURVEY_THREADS, heads, norms, masses, logits, masks, counts, rows.real,
            rows.whole, tokens, *shape, groups, columns,
        )  # fmt: skip
        self._launch(
            self._decide, positions, DECIDE_THREADS, out.token, out.logprob, out.alt_ids, out.alt_logprobs, flags,
            heads, norms, masses, logits, masks, counts, rows.real, rows.whole, rows.seed, rows.index, rows.purpose,
            number, tokens, ids, q, *shape, groups, columns, candidates,
        )  # fmt: skip
        return flags


def _groups(vocab: int) -> int:
    """Groups of a vocabulary."""
    groups = (vocab + (1 << SHIFT) - 1) >> SHIFT
    if groups > MOST_GROUPS:
        raise InvariantError(f"a vocabulary of {vocab} exceeds {MOST_GROUPS << SHIFT}")
    return groups
