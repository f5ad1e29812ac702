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

RANKED = 2 * LISTED
"""Keys that may have to be put in order for that."""

SURVEY_THREADS, DECIDE_THREADS = 128, 512
SHIFT = 8
"""log2 of the ids of a group."""
MOST_GROUPS = 1024
SPAN = 4
"""Groups that a block of ``survey`` goes through together."""
CAPACITY = LISTED * (-(-(LISTED << SHIFT) // DECIDE_THREADS))
"""Keys that ``decide`` has room for: it can choose them so that at most LISTED threads hold any, each at most its share
of LISTED groups."""

WHOLE_THREADS, WHOLE_BLOCKS = 256, 64
"""Of the kernels that look for a sum of weights among all ids; blocks that share a position."""
BINS, CANDIDATES = 2048, 1024
"""Bins of one pass, and ids of the last one that are listed."""
KEYS, FACTS, NOTES = LISTED + ALTERNATIVES + CANDIDATES, 3 + ALTERNATIVES, 5
"""What is kept of a position for them: keys u64 (listed, removed, candidates), facts f64 (sum of weights, normaliser of
log-probabilities, goal, removed weights), notes i32 (stage, listed ids, candidates of the cut and of the draw, removed
ids)."""
COARSE, CUT, DRAW = 0, 1, 2
"""Bins of all ids, and of those of one coarse bin: that of the cut, that of the draw."""
OPEN, DRAWN = 1, 2
"""Stages: the cut or the decision is open; only the draw is."""


class Sampler:
    """``Ops.sample``, ``Ops.accept`` and ``Ops.count`` over one device's kernels."""

    def __init__(self, device: Any) -> None:
        self._launch = device.launch
        names = ("survey", "decide", "chain", "count", "tally", "collect", "settle", "finish")
        self._kernels = {name: device.function(name, name) for name in names}

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
        self._launch(self._kernels["chain"], -(-rows.B // 32), 32, accepted, flags, drafts.count, rows.B, rows.W)

    def scratch(self, positions: int, vocab: int) -> int:
        """Bytes that ``sample`` and ``accept`` need."""
        return _Scratch(0, positions, _groups(vocab)).nbytes

    def count(self, counts: Any, lanes: Any, tokens: Any, width: Any) -> None:
        B, W = tokens.shape
        self._launch(self._kernels["count"], -(-B // 32), 32, counts, lanes, tokens, width, B, W, *counts.shape)

    def _positions(
        self, out: SampleOut, logits: Any, masks: Any, counts: Any, rows: SampleRows, drafts: Drafts | None,
        scratch: Any,
    ) -> CudaBuffer:  # fmt: skip
        """Decide every position on its own; the flags i32 [P] of accepted drafts."""
        (positions, V), kernels = logits.shape, self._kernels
        groups = _groups(V)
        s = _Scratch(scratch.ptr, positions, groups)
        if scratch.nbytes < s.nbytes:
            raise InvariantError(f"scratch of {scratch.nbytes} bytes")
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
        shape, given, kept = (rows.W, V, SHIFT), (logits, masks, counts), (s.keys, s.facts, s.notes)
        chance = (rows.real, rows.whole, rows.seed, rows.index, rows.purpose, number, tokens, ids, q)
        self._launch(
            kernels["survey"], (-(-groups // SPAN), positions), SURVEY_THREADS, s.heads, s.norms, s.masses, s.bins,
            s.notes, *given, rows.real, rows.whole, tokens, *shape, groups, columns,
            3 * BINS if rows.everything else 0,
        )  # fmt: skip
        self._launch(
            kernels["decide"], positions, DECIDE_THREADS, out.token, out.logprob, out.alt_ids, out.alt_logprobs,
            s.flags, s.heads, s.norms, s.masses, *kept, *given, *chance, *shape, groups, columns, candidates,
        )  # fmt: skip
        if not rows.everything:
            return s.flags
        shared = (s.bins, *kept, *given, rows.real, rows.whole, tokens)
        for name, which in (("tally", COARSE), ("tally", CUT), ("collect", CUT)):
            self._all(name, positions, *shared, which, rows.W, V, columns)
        self._launch(
            kernels["settle"], positions, WHOLE_THREADS, out.token, out.logprob, s.flags, s.bins, *kept, *given,
            *chance, rows.W, V, columns, candidates,
        )  # fmt: skip
        for name, which in (("tally", DRAW), ("collect", DRAW)):
            self._all(name, positions, *shared, which, rows.W, V, columns)
        self._launch(kernels["finish"], positions, WHOLE_THREADS, out.token, out.logprob, *shared, rows.W, V, columns)
        return s.flags

    def _all(self, name: str, positions: int, *args: Any) -> None:
        self._launch(self._kernels[name], (WHOLE_BLOCKS, positions), WHOLE_THREADS, *args)


class _Scratch:
    """Where the kernels of ``positions`` positions and ``groups`` groups of ids keep what they hand on."""

    def __init__(self, ptr: int, positions: int, groups: int) -> None:
        self.nbytes = 0

        def take(dtype: str, *shape: int) -> CudaBuffer:
            buffer = CudaBuffer(ptr + self.nbytes, shape, dtype)
            self.nbytes += buffer.nbytes
            return buffer

        self.heads = take("u64", positions * groups)
        self.bins, self.keys = take("u64", positions * 3 * BINS), take("u64", positions * KEYS)
        self.facts = take("f64", positions * FACTS)
        self.norms, self.masses = take("f32", positions * groups), take("f32", positions * groups)
        self.notes, self.flags = take("i32", positions * NOTES), take("i32", positions)


def _groups(vocab: int) -> int:
    """Groups of a vocabulary."""
    groups = (vocab + (1 << SHIFT) - 1) >> SHIFT
    if groups > MOST_GROUPS:
        raise InvariantError(f"a vocabulary of {vocab} exceeds {MOST_GROUPS << SHIFT}")
    return groups
