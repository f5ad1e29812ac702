"""The sampler on a GPU, as Numba kernels: two launches decide every position, however many rows and columns.

``survey`` reads all logits once, many blocks a position, and leaves the best key of every group of ids. ``decide`` then
looks into few groups: the k best ids lie in the k groups with the best heads. One block sorts the heads, gathers what
can be among the best ``LISTED`` ids, sorts that, and decides. A distribution over the whole vocabulary whose decision
may fall beyond the listed ids it leaves to the kernels of ``sampler_whole``. ``chain`` counts the kept drafts of a row.

Steps, their order and the random numbers are those of ``Ops.sample`` and ``Ops.accept``; listed weights are summed in
fp32 in candidate order, the rest in float64 in a fixed order, so results do not depend on the batch.

Kernels take addresses as flat arrays. Strides are ``while`` loops, because a range with a step begins with a 64-bit
division, and one block runs no faster than its instructions come in. Block sizes are parameters of the functions that
make them, so that they also run under Numba's CUDA simulator.
"""

from __future__ import annotations

import math

import numpy as np
from numba import cuda

from ninfer._cuda import sampler_whole
from ninfer._cuda.sampler_block import best_of_groups, sum_groups, sum_of_groups
from ninfer._cuda.sampler_draw import conclude, truncate
from ninfer._cuda.sampler_keys import (
    BROKEN,
    F0,
    F1,
    NONE,
    exp,
    look_up,
    order_key,
    position,
    rounds,
    thread,
    token_of,
    value_of,
    weight_of,
)
from ninfer._cuda.sampler_select import best_of, gather, rank
from ninfer._cuda.sampling import (
    ALTERNATIVES,
    CAPACITY,
    DECIDE_THREADS,
    FACTS,
    KEYS,
    LISTED,
    MOST_GROUPS,
    NO_LEGAL_TOKEN,
    NOT_FINITE,
    NOTES,
    OPEN,
    SHIFT,
    SPAN,
    SURVEY_THREADS,
)


@cuda.jit(device=True)
def _sums(values, share, scale, best, sums, threads):
    """Of each of SPAN groups, the sum of exp((z - head) / scale), beginning at each ``threads`` of ``sums``."""
    for s in range(SPAN):
        top, mine = value_of(best[s * threads]), np.float64(0.0)
        for k in range(s * share, (s + 1) * share):
            if values[k] == values[k]:
                mine += np.float64(exp((values[k] - top) / scale))
        sums[s * threads + thread()] = mine
    sum_groups(sums, threads)


def make_survey(threads, group):
    """The kernel ``survey`` for blocks of ``threads``, a power of two, up to the ids of a ``group`` and no fewer than
    SPAN. Grid (groups / SPAN, positions)."""
    share = group // threads
    places, room = SPAN * share, SPAN * threads

    def survey(
        heads, norms, masses, bins, notes, logits, masks, counts, real, whole, drafts, W, V, shift, groups, columns,
        words,
    ):  # fmt: skip
        """heads u64 [P, groups]: best key of each group of ``2**shift`` ids, or BROKEN. Where they will be needed,
        norms and masses f32 [P, groups]: the group's sums of exp(z - head) and of exp((z - head) / temperature); and
        bins u64 [P, words], notes i32 [P, NOTES] made zero."""
        best = cuda.shared.array(room, np.uint64)
        sums = cuda.shared.array(room, np.float64)
        ids = cuda.local.array(places, np.int32)
        values = cuda.local.array(places, np.float32)
        tid, block, p = thread(), cuda.blockIdx.x, cuda.blockIdx.y
        at = position(p, W, V, columns, logits, masks, counts, real, whole, drafts)
        i = block * threads + tid
        while i < words:
            bins[p * words + i] = np.uint64(0)
            i += cuda.gridDim.x * threads
        for k in range(rounds(NOTES, threads)):
            if block == 0 and k * threads + tid < NOTES:
                notes[p * NOTES + k * threads + tid] = 0
        for k in range(places):
            ids[k] = (block * SPAN << shift) + k * threads + tid
        look_up(ids, places, values, at)
        for s in range(SPAN):
            mine = NONE
            for k in range(s * share, (s + 1) * share):
                if values[k] == values[k]:
                    mine = max(mine, BROKEN if values[k] == math.inf else order_key(values[k], ids[k]))
            best[s * threads + tid] = mine
        best_of_groups(best, threads)
        g = block * SPAN + tid
        if tid < SPAN and g < groups:
            heads[p * groups + g] = best[tid * threads]
        if whole[4 * at.b + 1] >= 0:
            _sums(values, share, F1, best, sums, threads)
            if tid < SPAN and g < groups:
                norms[p * groups + g] = np.float32(sums[tid * threads])
        if whole[4 * at.b] == 0 and at.temperature > F0:
            cuda.syncthreads()
            _sums(values, share, at.temperature, best, sums, threads)
            if tid < SPAN and g < groups:
                masses[p * groups + g] = np.float32(sums[tid * threads])

    return survey


def make_decide(threads, most_groups, capacity):
    """The kernel ``decide`` for blocks of ``threads``, a power of eight, and at most ``most_groups`` groups.
    capacity: keys that there is room for, no fewer than most_groups, and than ``LISTED * ceil(LISTED * group /
    threads)`` or, where threads < LISTED, the vocabulary."""
    room = capacity + threads

    def decide(
        token, logprob, alt_ids, alt_logprobs, flags, heads, norms, masses, keys, facts, notes, logits, masks, counts,
        real, whole, seed, index, purpose, draft_count, drafts, draft_ids, draft_q, W, V, shift, groups, columns,
        candidates,
    ):  # fmt: skip
        """One block a position. ``columns`` is 0 without drafts; ``candidates`` is 0 where drafts are certain.

        flags i32 [P]: 1 where the position keeps its draft; its token is then the draft.
        """
        seen = cuda.shared.array(room, np.uint64)
        listed = cuda.shared.array(LISTED, np.uint64)
        weights = cuda.shared.array(LISTED, np.float32)
        sums = cuda.shared.array(threads, np.float64)
        removed_keys = cuda.shared.array(ALTERNATIVES, np.uint64)
        removed = cuda.shared.array(ALTERNATIVES, np.float32)

        tid, p = thread(), cuda.blockIdx.x
        at = position(p, W, V, columns, logits, masks, counts, real, whole, drafts)
        b, w = at.b, at.w
        last = draft_count[b] if columns else w
        if w > last:
            return
        temperature, top_p, min_p = at.temperature, real[5 * b + 1], real[5 * b + 2]
        top_k, alternatives = whole[4 * b], whole[4 * b + 1]
        greedy = temperature <= F0

        mine = NONE
        for k in range(rounds(most_groups, threads)):
            g = tid + k * threads
            if g < groups:
                seen[g] = heads[p * groups + g]
                mine = max(mine, seen[g])
        best, low = best_of(mine, seen, capacity, threads)
        if best == BROKEN or best == NONE:  # noqa: SIM109
            if tid == 0:
                token[p] = NOT_FINITE if best == BROKEN else NO_LEGAL_TOKEN
                logprob[p] = F0
                flags[p] = 0
            return
        limit = 1 if greedy else (top_k if top_k > 0 else LISTED)
        want = min(max(limit, alternatives), LISTED)
        gathered, narrowed = 1, True
        if want > 1:
            gathered, narrowed = gather(seen, capacity, most_groups, want, groups, shift, low, best, threads, at)
            rank(seen, gathered, listed, threads)
        else:
            if tid == 0:
                listed[0] = best
            cuda.syncthreads()
        found = min(gathered, want)
        limit = min(limit, found)
        unlisted = top_k == 0 and not greedy and (narrowed or gathered > LISTED)
        top = value_of(best)
        total, norm = np.float64(0.0), np.float64(0.0)
        if unlisted:
            total = sum_of_groups(masses, temperature, top, groups, heads, at, sums)
        if alternatives >= 0:
            norm = np.float64(top) + math.log(sum_of_groups(norms, F1, top, groups, heads, at, sums))
        for k in range(rounds(ALTERNATIVES, threads)):
            j = tid + k * threads
            if j < alternatives:
                alt_ids[p * ALTERNATIVES + j] = token_of(listed[j]) if j < found else -1
                alt_logprobs[p * ALTERNATIVES + j] = (
                    np.float32(np.float64(value_of(listed[j])) - norm) if j < found else np.float32(-math.inf)
                )
        if unlisted:  # what the kernels of the whole vocabulary begin with
            for k in range(rounds(LISTED, threads)):
                j = tid + k * threads
                if j < limit:
                    keys[p * KEYS + j] = listed[j]

        kept, mass = 1, F1
        if not greedy:
            for k in range(rounds(LISTED, threads)):
                j = tid + k * threads
                if j < limit:
                    weights[j] = weight_of(listed[j], top, temperature)
            cuda.syncthreads()
            kept, mass, of = truncate(weights, limit, np.float32(total), unlisted, min_p, top_p, threads)
            if unlisted and kept == limit:
                if tid == 0:
                    facts[p * FACTS], facts[p * FACTS + 1] = total, norm
                    facts[p * FACTS + 2] = np.float64(top_p * of) if top_p < F1 else math.inf
                    notes[p * NOTES], notes[p * NOTES + 1] = OPEN, limit
                return
        key, flag, _ = conclude(
            at, w, last, kept, listed[kept - 1], mass, False, listed, weights, removed_keys, removed, seed, index,
            purpose, columns, candidates, drafts, draft_ids, draft_q, threads,
        )  # fmt: skip
        if tid == 0:
            flags[p], token[p] = flag, token_of(key)
            logprob[p] = np.float32(np.float64(value_of(key)) - norm) if alternatives >= 0 else F0

    return decide


def chain(accepted, flags, draft_count, B, W):
    """accepted[b]: drafts of row b before the first that is refused. One thread a row."""
    b = cuda.grid(1)
    if b < B:
        n = 0
        while n < draft_count[b] and flags[b * W + n] != 0:
            n += 1
        accepted[b] = n


def count(counts, lanes, tokens, width, B, W, rows, V):
    """``Ops.count``; one thread a row, so a token counted twice is two steps of one thread."""
    b = cuda.grid(1)
    if b < B and lanes[b] >= 0 and lanes[b] < rows:
        for w in range(min(width[b], W)):
            v = tokens[b * W + w]
            if v >= 0 and v < V:
                counts[lanes[b] * V + v] += 1


KERNELS = {
    "survey": (
        make_survey(SURVEY_THREADS, 1 << SHIFT),
        "u64* f32* f32* u64* i32* f32* u32* i32* f32* i32* i32* i32 i32 i32 i32 i32 i32",
    ),
    "decide": (
        make_decide(DECIDE_THREADS, MOST_GROUPS, CAPACITY),
        "i32* f32* i32* f32* i32* u64* f32* f32* u64* f64* i32* f32* u32* i32* f32* i32* u32* i64* i32* i32* i32* "
        "i32* f32* i32 i32 i32 i32 i32 i32",
    ),
    "chain": (chain, "i32* i32* i32* i32 i32"),
    "count": (count, "i32* i32* i32* i32* i32 i32 i32 i32"),
    **sampler_whole.KERNELS,
}
"""Every kernel: its function and the types of its arguments."""
