"""Draws from the whole vocabulary that may fall beyond the listed ids: where the sum of weights, from the likeliest id
on, reaches a goal.

All blocks add weights up in ``BINS`` bins of the logit (``tally``), then those of the one bin in which the goal is
reached in as many bins again, and put the ids of one of these into a list (``collect``); one block sorts it and finds
the id. First for where top-p and min-p cut the distribution, which settles most decisions (``settle``), then for the
draw (``finish``). A list that does not hold them all, because very many logits are alike, is left to one block and all
logits (``search``).

Weights are added up as integers, in units of 2**-44: their sum does not depend on the order, and so not on the blocks.
"""

from __future__ import annotations

import math

import numpy as np
from numba import cuda

from ninfer._cuda.atomics import atomic_add
from ninfer._cuda.sampler_block import fill_and_sort, tree_sum
from ninfer._cuda.sampler_draw import conclude
from ninfer._cuda.sampler_keys import BROKEN, F0, F1, NONE, key_of, order_key, position, token_of, value_of, weight_of
from ninfer._cuda.sampling import (
    ALTERNATIVES,
    BINS,
    CANDIDATES,
    COARSE,
    CUT,
    DRAW,
    DRAWN,
    FACTS,
    KEYS,
    LISTED,
    NOTES,
    OPEN,
    WHOLE_THREADS,
)

_UNITS = np.float64(2.0**44)
_A_BIN = np.float32(64.0)
_MANY = np.float32(BINS)
_FAR = np.float32(1e6)


@cuda.jit(device=True)
def _units(weight):
    return np.uint64(np.float64(weight) * _UNITS)


@cuda.jit(device=True)
def _coarse(z, top, temperature):
    """The bin of a value, 64 to a factor of e in weight, and how far into it the value lies, as a fine bin. Both rise
    as the value falls."""
    far = min((top - z) / temperature * _A_BIN, _FAR)
    coarse = min(np.int32(far), BINS - 1)
    return coarse, min(np.int32(min((far - np.float32(coarse)) * _MANY, _FAR)), BINS - 1)


@cuda.jit(device=True)
def _reached(units, goal, strict):
    total = np.float64(units) / _UNITS
    return total > goal or (total == goal and not strict)


@cuda.jit(device=True)
def _locate(bins, first, goal, strict, before, at_most, parts, place, ahead):
    """The bin of ``bins[first:]`` in which the running sum, ``before`` ahead of them, reaches the goal, or ``at_most``
    if that comes first; BINS where neither does. The sum ahead of it."""
    tid, threads = cuda.threadIdx.x, cuda.blockDim.x
    share = BINS // threads
    own = np.uint64(0)
    for i in range(share):
        own += bins[first + tid * share + i]
    cuda.syncthreads()
    parts[tid] = own
    if tid == 0:
        place[0], ahead[0] = BINS, before
    step = 1
    while step < threads:
        cuda.syncthreads()
        other = parts[tid - step] if tid >= step else np.uint64(0)
        cuda.syncthreads()
        parts[tid] += other
        step <<= 1
    run = before + parts[tid] - own
    for i in range(share):
        n = tid * share + i
        end = run + bins[first + n]
        if n <= at_most and not _reached(run, goal, strict) and (n == at_most or _reached(end, goal, strict)):
            place[0], ahead[0] = n, run
        run = end
    cuda.syncthreads()
    return place[0], ahead[0]


@cuda.jit(device=True)
def _find(which, at, bins, goal, top, min_p, parts, place, ahead):
    """Coarse and fine bin of the cut or of the draw, and the sum ahead of the fine one; BINS where nothing is cut."""
    first, strict = 3 * BINS * at.p, which == DRAW
    coarse_most, fine_most = BINS, BINS
    if which == CUT and min_p > F0:
        coarse_most, fine_most = _coarse(top + at.temperature * np.float32(math.log(min_p)), top, at.temperature)
    coarse, before = _locate(bins, first, goal, strict, np.uint64(0), coarse_most, parts, place, ahead)
    if coarse != coarse_most:
        fine_most = BINS
    fine, before = _locate(bins, first + which * BINS, goal, strict, before, fine_most, parts, place, ahead)
    return coarse, fine, before


@cuda.jit(device=True)
def _busy(which, at, notes, real):
    """Whether the position needs that step."""
    stage = notes[NOTES * at.p]
    if which == DRAW:
        return stage == DRAWN
    return stage == OPEN and (which == COARSE or real[5 * at.b + 1] < F1 or real[5 * at.b + 2] > F0)


@cuda.jit(device=True)
def _left(key, top, at, keys, facts, notes):
    """Units of an id's weight, less what a refused draft takes from it."""
    units = _units(weight_of(key, top, at.temperature))
    for c in range(notes[NOTES * at.p + 4]):
        if keys[KEYS * at.p + LISTED + c] == key:
            units -= _units(facts[FACTS * at.p + 3 + c])
    return units


@cuda.jit(device=True)
def _refused(count, at, keys, facts, removed_keys, removed):
    """What a refused draft takes from the weights of the first ``count`` ids; nothing from others."""
    c = cuda.threadIdx.x
    while c < ALTERNATIVES:
        removed_keys[c] = keys[KEYS * at.p + LISTED + c] if c < count else NONE
        removed[c] = np.float32(facts[FACTS * at.p + 3 + c]) if c < count else F0
        c += cuda.blockDim.x
    cuda.syncthreads()


@cuda.jit(device=True)
def _listed(which, at, keys, notes, found):
    """Sort the collected ids into ``found``; how many there are, if all of them are there, else -1."""
    n = notes[NOTES * at.p + 1 + which]
    if n > CANDIDATES:
        return -1
    i = cuda.threadIdx.x
    while i < n:
        found[i] = keys[KEYS * at.p + LISTED + ALTERNATIVES + i]
        i += cuda.blockDim.x
    fill_and_sort(found, n)
    return n


@cuda.jit(device=True)
def _between(begin, end, top, at, sums):
    """Sum of the weights of the ids whose key is in ``[begin, end)``, ``begin`` > 0."""
    total = np.float64(0.0)
    v = cuda.threadIdx.x
    while v < at.V:
        key = key_of(v, at)
        if begin <= key and key < end:
            total += np.float64(weight_of(key, top, at.temperature))
        v += cuda.blockDim.x
    return tree_sum(total, sums)


@cuda.jit(device=True)
def _search(goal, strict, removed_keys, removed, top, at, sums):
    """Key of the id at which the running sum of weights, less what is ``removed`` from some, reaches (strict: passes)
    ``goal``. Four bits of the key a pass, from the top."""
    digits = cuda.local.array(16, np.float64)
    found, end, above = NONE, BROKEN, np.float64(0.0)  # the key is in [found, end); above: the sum of keys from end on
    for shift in range(60, -1, -4):
        if shift < 32 and (1 << shift) >= at.V:  # every id's key has these bits
            found |= np.uint64(15) << np.uint64(shift)
            continue
        for digit in range(16):
            digits[digit] = 0.0
        v = cuda.threadIdx.x
        while v < at.V:
            key = key_of(v, at)
            if found <= key and key < end:
                digits[(key >> np.uint64(shift)) & np.uint64(15)] += np.float64(weight_of(key, top, at.temperature))
            v += cuda.blockDim.x
        digit, reached = 15, False
        while digit > 0 and not reached:
            total = above + tree_sum(digits[digit], sums)
            probe = found | (np.uint64(digit) << np.uint64(shift))
            left = total
            for c in range(ALTERNATIVES):
                if removed_keys[c] >= probe:
                    left -= np.float64(removed[c])
            if left > goal or (left == goal and not strict):
                reached = True
            else:
                above = total
                end = probe
                digit -= 1
        found |= np.uint64(digit) << np.uint64(shift)
    return found


@cuda.jit(device=True)
def _add(which, key, outer, inner, coarse, fine, top, at, bins, keys, facts, notes):
    """Of all ids, or of those in the coarse bin, the weights by bin."""
    if which == COARSE:
        atomic_add(bins, 3 * BINS * at.p + outer, _units(weight_of(key, top, at.temperature)))
    elif outer == coarse:
        atomic_add(bins, (3 * at.p + which) * BINS + inner, _left(key, top, at, keys, facts, notes))


@cuda.jit(device=True)
def _keep(which, key, outer, inner, coarse, fine, top, at, bins, keys, facts, notes):
    """The ids of the fine bin, in the position's list; their number counts on beyond what it holds."""
    if outer == coarse and inner == fine:
        n = atomic_add(notes, NOTES * at.p + 1 + which, 1)
        if n < CANDIDATES:
            keys[KEYS * at.p + LISTED + ALTERNATIVES + n] = key


def _sweep(threads, visit):
    """A kernel that shows ``visit`` all ids of the positions that need the step ``which``, for blocks of ``threads``, a
    power of two up to BINS. Grid (any, positions); bins u64 [P, 3, BINS]."""

    def sweep(bins, keys, facts, notes, logits, masks, counts, real, whole, drafts, which, W, V, columns):
        parts = cuda.shared.array(threads, np.uint64)
        place = cuda.shared.array(1, np.int32)
        ahead = cuda.shared.array(1, np.uint64)
        p = cuda.blockIdx.y
        at = position(p, W, V, columns, logits, masks, counts, real, whole, drafts)
        if not _busy(which, at, notes, real):
            return
        top, coarse, fine = value_of(keys[KEYS * p]), BINS, BINS
        if which != COARSE:
            coarse, fine, _ = _find(which, at, bins, facts[FACTS * p + 2], top, real[5 * at.b + 2], parts, place, ahead)
        v = cuda.blockIdx.x * threads + cuda.threadIdx.x
        while v < V:
            key = key_of(v, at)
            if key != NONE:
                outer, inner = _coarse(value_of(key), top, at.temperature)
                visit(which, key, outer, inner, coarse, fine, top, at, bins, keys, facts, notes)
            v += cuda.gridDim.x * threads

    return sweep


def make_tally(threads):
    """The kernel ``tally``: weights of bins."""
    return _sweep(threads, _add)


def make_collect(threads):
    """The kernel ``collect``: ids of a bin."""
    return _sweep(threads, _keep)


def make_settle(threads):
    """The kernel ``settle`` for blocks of ``threads``, a power of two up to BINS. One block a position."""

    def settle(
        token, logprob, flags, bins, keys, facts, notes, logits, masks, counts, real, whole, seed, index, purpose,
        draft_count, drafts, draft_ids, draft_q, W, V, columns, candidates,
    ):  # fmt: skip
        """Where the distribution is cut, and the decision, unless it is a draw beyond the listed ids."""
        parts = cuda.shared.array(threads, np.uint64)
        place = cuda.shared.array(1, np.int32)
        ahead = cuda.shared.array(1, np.uint64)
        sums = cuda.shared.array(threads, np.float64)
        found = cuda.shared.array(CANDIDATES, np.uint64)
        listed = cuda.shared.array(LISTED, np.uint64)
        weights = cuda.shared.array(LISTED, np.float32)
        removed = cuda.shared.array(ALTERNATIVES, np.float32)
        removed_keys = cuda.shared.array(ALTERNATIVES, np.uint64)
        tid, p = cuda.threadIdx.x, cuda.blockIdx.x
        at = position(p, W, V, columns, logits, masks, counts, real, whole, drafts)
        if notes[NOTES * p] != OPEN:
            return
        b, w, limit, top = at.b, at.w, notes[NOTES * p + 1], value_of(keys[KEYS * p])
        total, goal = facts[FACTS * p], facts[FACTS * p + 2]
        top_p, min_p = real[5 * b + 1], real[5 * b + 2]
        j = tid
        while j < limit:
            listed[j] = keys[KEYS * p + j]
            weights[j] = weight_of(listed[j], top, at.temperature)
            j += threads
        _refused(0, at, keys, facts, removed_keys, removed)

        least, mass = np.uint64(1), total
        if min_p > F0:  # weights fall with the key, so what min-p keeps are the keys from some value up
            least = order_key(top + at.temperature * np.float32(math.log(min_p)), V)
        if _busy(CUT, at, notes, real):
            coarse, fine, before = _find(CUT, at, bins, goal, top, min_p, parts, place, ahead)
            n = _listed(CUT, at, keys, notes, found)
            if n < 0:
                if min_p > F0:
                    mass = _between(least, BROKEN, top, at, sums)
                if top_p < F1 and mass > goal:
                    least = _search(goal, False, removed_keys, removed, top, at, sums)
                    mass = _between(least, BROKEN, top, at, sums)
            elif coarse < BINS and fine < BINS:
                run, bound = before, least
                for j in range(n):
                    if found[j] < bound or _reached(run, goal, False):
                        break
                    run += _units(weight_of(found[j], top, at.temperature))
                    least = found[j]
                mass = np.float64(run) / _UNITS
        key, flag, goal = conclude(
            at, w, draft_count[b] if columns else w, limit, least, np.float32(mass), True, listed, weights,
            removed_keys, removed, seed, index, purpose, columns, candidates, drafts, draft_ids, draft_q, threads,
        )  # fmt: skip
        if tid == 0:
            flags[p] = flag
            notes[NOTES * p] = DRAWN if key == NONE else 0
            if key != NONE:
                token[p] = token_of(key)
                logprob[p] = _logprob(key, at, whole, facts)
                return
            facts[FACTS * p + 2] = goal
            taken = max(candidates, 1) if columns and w < draft_count[b] else 0
            notes[NOTES * p + 4] = taken
            for c in range(taken):
                keys[KEYS * p + LISTED + c] = removed_keys[c]
                facts[FACTS * p + 3 + c] = removed[c]
                if removed_keys[c] != NONE:
                    outer, _ = _coarse(value_of(removed_keys[c]), top, at.temperature)
                    bins[3 * BINS * p + outer] -= _units(removed[c])

    return settle


def make_finish(threads):
    """The kernel ``finish``, as ``settle``."""

    def finish(token, logprob, bins, keys, facts, notes, logits, masks, counts, real, whole, drafts, W, V, columns):
        """Draws beyond the listed ids."""
        parts = cuda.shared.array(threads, np.uint64)
        place = cuda.shared.array(1, np.int32)
        ahead = cuda.shared.array(1, np.uint64)
        sums = cuda.shared.array(threads, np.float64)
        found = cuda.shared.array(CANDIDATES, np.uint64)
        removed = cuda.shared.array(ALTERNATIVES, np.float32)
        removed_keys = cuda.shared.array(ALTERNATIVES, np.uint64)
        tid, p = cuda.threadIdx.x, cuda.blockIdx.x
        at = position(p, W, V, columns, logits, masks, counts, real, whole, drafts)
        if notes[NOTES * p] != DRAWN:
            return
        top, goal = value_of(keys[KEYS * p]), facts[FACTS * p + 2]
        _, _, run = _find(DRAW, at, bins, goal, top, F0, parts, place, ahead)
        n, key = _listed(DRAW, at, keys, notes, found), NONE
        for j in range(n):
            run += _left(found[j], top, at, keys, facts, notes)
            if _reached(run, goal, True):
                key = found[j]
                break
        if key == NONE:
            _refused(notes[NOTES * p + 4], at, keys, facts, removed_keys, removed)
            key = _search(goal, True, removed_keys, removed, top, at, sums)
        if tid == 0:
            token[p] = token_of(key)
            logprob[p] = _logprob(key, at, whole, facts)

    return finish


@cuda.jit(device=True)
def _logprob(key, at, whole, facts):
    if whole[4 * at.b + 1] < 0:
        return F0
    return np.float32(np.float64(value_of(key)) - facts[FACTS * at.p + 1])


_SHARED = "u64* u64* f64* i32* f32* u32* i32* f32* i32* i32* i32 i32 i32 i32"
KERNELS = {
    "tally": (make_tally(WHOLE_THREADS), _SHARED),
    "collect": (make_collect(WHOLE_THREADS), _SHARED),
    "settle": (
        make_settle(WHOLE_THREADS),
        "i32* f32* i32* u64* u64* f64* i32* f32* u32* i32* f32* i32* u32* i64* i32* i32* i32* i32* f32* "
        "i32 i32 i32 i32",
    ),
    "finish": (make_finish(WHOLE_THREADS), "i32* f32* u64* u64* f64* i32* f32* u32* i32* f32* i32* i32* i32 i32 i32"),
}
