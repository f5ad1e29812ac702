"""The sampler on a GPU, as Numba kernels: two launches decide every position, however many rows and columns.

``survey`` reads all logits once, many blocks a position, and leaves the best key of every group of ids. ``decide`` then
looks into few groups: the k best ids lie in the k groups with the best heads. One block sorts the heads, gathers what
can be among the best ``LISTED`` ids, sorts that, and decides. Only a distribution over the whole vocabulary whose
decision falls beyond the listed ids reads all logits again (``_search``). ``chain`` counts the kept drafts of a row.

An id's key orders by value, then by lower id, and is unique; 0 is an id that is not legal. Steps, their order and the
random numbers are those of ``Ops.sample`` and ``Ops.accept``; listed weights are summed in fp32 in candidate order, the
rest in float64 in a fixed order, so results do not depend on the batch.

Kernels take addresses as flat arrays. Block sizes are parameters of the functions that make them, so that they also run
under Numba's CUDA simulator.
"""

from __future__ import annotations

import math
from collections import namedtuple

import numpy as np
from numba import cuda

from ninfer._cuda.sampling import (
    ACCEPTANCE,
    ALTERNATIVES,
    CAPACITY,
    CORRECTION,
    DECIDE_THREADS,
    LISTED,
    MOST_GROUPS,
    NO_LEGAL_TOKEN,
    NOT_FINITE,
    SURVEY_THREADS,
)

BROKEN = np.uint64(0xFFFFFFFFFFFFFFFF)
_NONE = np.uint64(0)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_SIGN = np.uint64(0x80000000)
_BYTE = np.uint32(8)
_BITS = np.uint32(31)
_ONE = np.uint32(1)
_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_F0, _F1 = np.float32(0.0), np.float32(1.0)
_UNIT = np.float32(2.0**-24)

Position = namedtuple(
    "Position", "p before V logits masks counts lane masked presence frequency temperature drafts first_draft"
)
"""One position ``p``: where its logits and mask are, how they are penalised, and the ``before`` drafts of its row from
``drafts[first_draft]`` on that precede it."""


@cuda.jit(device=True)
def _uniform(seed_low, seed_high, index, purpose):
    """fp32 in [0, 1): word 0 of Philox4x32-10 (Salmon et al., 2011) at counter (index, purpose, 0), key seed."""
    i = np.uint64(index)
    x0, x1, x2, x3 = i & _LOW, i >> _HALF, np.uint64(purpose), np.uint64(0)
    y0, y1 = np.uint64(seed_low), np.uint64(seed_high)
    for _ in range(10):
        p0 = _M0 * x0
        p1 = _M1 * x2
        x0, x1, x2, x3 = (p1 >> _HALF) ^ x1 ^ y0, p1 & _LOW, (p0 >> _HALF) ^ x3 ^ y1, p0 & _LOW
        y0 = (y0 + _W0) & _LOW
        y1 = (y1 + _W1) & _LOW
    return np.float32(np.uint32(x0) >> _BYTE) * _UNIT


@cuda.jit(device=True)
def _order_key(value, token):
    bits = np.uint64(np.float32(value + _F0).view(np.uint32))
    flipped = (bits ^ _LOW) if bits & _SIGN else (bits | _SIGN)
    return (flipped << _HALF) | (_LOW - np.uint64(token))


@cuda.jit(device=True)
def _token(key):
    return np.int32(_LOW - (key & _LOW))


@cuda.jit(device=True)
def _value(key):
    flipped = key >> _HALF
    bits = (flipped ^ _SIGN) if flipped & _SIGN else (flipped ^ _LOW)
    return np.uint32(bits).view(np.float32)


@cuda.jit(device=True)
def _exp(x):
    return np.float32(math.exp(np.float32(x)))


@cuda.jit(device=True)
def _weight(key, top, temperature):
    return _exp((_value(key) - top) / temperature)


@cuda.jit(device=True)
def _key(v, at):
    """Key of id ``v`` at a position: 0 if it is not legal, BROKEN if not finite."""
    if at.masked and not (at.masks[at.p * ((at.V + 31) >> 5) + (v >> 5)] >> (np.uint32(v) & _BITS)) & _ONE:
        return _NONE
    z = at.logits[at.p * at.V + v]
    if not math.isfinite(z):
        return BROKEN
    if at.presence != _F0 or at.frequency != _F0:
        n = at.counts[at.lane * at.V + v]
        for j in range(at.before):
            if at.drafts[at.first_draft + j] == v:
                n += 1
        if n > 0:  # in float64 the product is exact, so that no machine can round it differently
            z = z - np.float32(np.float64(at.presence) + np.float64(at.frequency) * np.float64(n))
    return _order_key(z, v)


@cuda.jit(device=True)
def _position(p, W, V, columns, logits, masks, counts, real, whole, drafts):
    b = p // W
    before = p % W if columns else 0
    return Position(
        p, before, V, logits, masks, counts, whole[4 * b + 3], whole[4 * b + 2] != 0, real[5 * b + 3],
        real[5 * b + 4], real[5 * b], drafts, columns * b,
    )  # fmt: skip


# -- a block's threads together ------------------------------------------------------------------------------------


@cuda.jit(device=True)
def _tree_sum(value, sums):
    """Sum of every thread's float64 ``value``, for all of them. The block has a power of two of threads."""
    tid, stride = cuda.threadIdx.x, cuda.blockDim.x >> 1
    cuda.syncthreads()
    sums[tid] = value
    cuda.syncthreads()
    while stride > 0:
        if tid < stride:
            sums[tid] += sums[tid + stride]
        cuda.syncthreads()
        stride >>= 1
    return sums[0]


@cuda.jit(device=True)
def _sort(keys, n):
    """Bitonic sort of ``keys[:n]``, descending; n is a power of two."""
    cuda.syncthreads()
    size = 2
    while size <= n:
        stride = size >> 1
        while stride > 0:
            for i in range(cuda.threadIdx.x, n >> 1, cuda.blockDim.x):
                low = 2 * i - (i & (stride - 1))
                x, y = keys[low], keys[low + stride]
                if (x < y) == ((low & size) == 0):
                    keys[low] = y
                    keys[low + stride] = x
            cuda.syncthreads()
            stride >>= 1
        size <<= 1


@cuda.jit(device=True)
def _fill_and_sort(keys, filled):
    """Sort ``keys[:filled]``, descending, zeros after it."""
    n = 2
    while n < filled:
        n <<= 1
    for i in range(filled + cuda.threadIdx.x, n, cuda.blockDim.x):
        keys[i] = _NONE
    _sort(keys, n)


@cuda.jit(device=True)
def _tally(begin, end, top, at, sums):
    """Sum of the weights of the ids whose key is in ``[begin, end)``, ``begin`` > 0."""
    total = np.float64(0.0)
    for v in range(cuda.threadIdx.x, at.V, cuda.blockDim.x):
        key = _key(v, at)
        if begin <= key and key < end:
            total += np.float64(_weight(key, top, at.temperature))
    return _tree_sum(total, sums)


@cuda.jit(device=True)
def _search(goal, strict, removed_keys, removed, top, at, sums):
    """Key of the id at which the running sum of weights, less what is ``removed`` from some, reaches (strict: passes)
    ``goal``. Four bits of the key a pass, from the top."""
    digits = cuda.local.array(16, np.float64)
    found, end, above = _NONE, BROKEN, np.float64(0.0)  # the key is in [found, end); above: the sum of keys from end on
    for shift in range(60, -1, -4):
        if shift < 32 and (1 << shift) >= at.V:  # every id's key has these bits
            found |= np.uint64(15) << np.uint64(shift)
            continue
        for digit in range(16):
            digits[digit] = 0.0
        for v in range(cuda.threadIdx.x, at.V, cuda.blockDim.x):
            key = _key(v, at)
            if found <= key and key < end:
                digits[(key >> np.uint64(shift)) & np.uint64(15)] += np.float64(_weight(key, top, at.temperature))
        digit, reached = 15, False
        while digit > 0 and not reached:
            total = above + _tree_sum(digits[digit], sums)
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
def _gather(listed, want, groups, shift, heads, top_keys, thread_best, filled, at):
    """Sort into ``listed`` the ids that can be among the ``want`` best, those and perhaps more; their number, and
    whether ids were left out. ``top_keys`` are the sorted heads."""
    tid, threads = cuda.threadIdx.x, cuda.blockDim.x
    scanned = 0
    while scanned < min(want, groups) and top_keys[scanned] != _NONE:
        scanned += 1
    elements, ids = scanned << shift, (1 << shift) - 1
    # No worse than the want-th best of what each thread has seen.
    mine = _NONE
    for i in range(tid, elements, threads):
        v = (_token(top_keys[i >> shift]) & ~ids) + (i & ids)
        if v < at.V:
            mine = max(mine, _key(v, at))
    thread_best[tid] = mine
    if tid == 0:
        filled[0] = 0
    _sort(thread_best, threads)
    floor = thread_best[want - 1] if want <= threads else _NONE
    for i in range(tid, elements, threads):
        v = (_token(top_keys[i >> shift]) & ~ids) + (i & ids)
        if v < at.V:
            key = _key(v, at)
            if key != _NONE and key >= floor:
                listed[cuda.atomic.add(filled, 0, 1)] = key
    cuda.syncthreads()
    gathered = filled[0]
    _fill_and_sort(listed, gathered)
    return gathered, floor != _NONE


@cuda.jit(device=True)
def _sum_of_groups(parts, scale, top, groups, heads, at, sums):
    """Sum over all ids of exp((z - top) / scale), from each group's sum relative to its head."""
    total = np.float64(0.0)
    for g in range(cuda.threadIdx.x, groups, cuda.blockDim.x):
        head = heads[at.p * groups + g]
        if head != _NONE:
            total += np.float64(parts[at.p * groups + g]) * math.exp(np.float64(_value(head) - top) / np.float64(scale))
    return _tree_sum(total, sums)


# -- one thread ----------------------------------------------------------------------------------------------------


@cuda.jit(device=True)
def _truncate(weights, limit, total, min_p, top_p):
    """How many of the listed weights stay, their sum, and whether the cut fell among them."""
    target = top_p * total
    run, kept = _F0, 0
    while kept < limit:
        if kept > 0 and (weights[kept] < min_p or (top_p < _F1 and run >= target)):
            return kept, run, True
        run += weights[kept]
        kept += 1
    return kept, run, False


@cuda.jit(device=True)
def _proposed(draft, first, candidates, ids, q):
    """Probability with which ``draft`` was drawn from the proposal at ``ids[first]``; without candidates, certainty."""
    if candidates == 0:
        return _F1
    for c in range(candidates):
        if ids[first + c] == draft:
            return q[first + c]
    return _F0


@cuda.jit(device=True)
def _remove(removed_keys, removed, draft, first, candidates, ids, q, least, mass, top, at):
    """What the proposal of a refused draft takes from the weights of kept ids."""
    for c in range(max(candidates, 1)):
        v = ids[first + c] if candidates else draft
        if v >= 0 and v < at.V:
            key = _key(v, at)
            if key != _NONE and key >= least:
                removed_keys[c] = key
                removed[c] = min(_weight(key, top, at.temperature), (q[first + c] if candidates else _F1) * mass)


@cuda.jit(device=True)
def _left(j, listed, weights, removed_keys, removed):
    """Weight of a listed id less what is removed."""
    weight = weights[j]
    for c in range(ALTERNATIVES):
        if removed_keys[c] == listed[j]:
            weight -= removed[c]
    return weight


@cuda.jit(device=True)
def _draw(u, whole_mass, beyond, least, limit, listed, weights, removed_keys, removed):
    """Draw from what is left of the kept weights: the key and the goal of its search, key 0 where that goes beyond the
    listed ids (``beyond``: kept ids do)."""
    left = _F0
    for j in range(limit):
        if listed[j] >= least:
            left += _left(j, listed, weights, removed_keys, removed)
    if beyond:
        left = whole_mass
        for c in range(ALTERNATIVES):
            left -= removed[c]
    if left <= _F0:  # only rounding can leave nothing: the distribution itself, then
        left = whole_mass
        for c in range(ALTERNATIVES):
            removed_keys[c] = _NONE
            removed[c] = _F0
    goal = u * left
    run, key = _F0, listed[0]
    for j in range(limit):
        weight = _left(j, listed, weights, removed_keys, removed)
        if listed[j] >= least and weight > _F0:
            run += weight
            key = listed[j]
            if run > goal:
                return key, goal
    return (_NONE if beyond else key), goal


# -- kernels -------------------------------------------------------------------------------------------------------


def make_survey(threads):
    """The kernel ``survey`` for blocks of ``threads``, a power of two. Grid (groups, positions)."""

    def survey(heads, norms, masses, logits, masks, counts, real, whole, drafts, W, V, shift, groups, columns):
        """heads u64 [P, groups]: best key of each group of ``2**shift`` ids, or BROKEN. Where they will be needed,
        norms and masses f32 [P, groups]: the group's sums of exp(z - head) and of exp((z - head) / temperature)."""
        best = cuda.shared.array(threads, np.uint64)
        sums = cuda.shared.array(threads, np.float64)
        tid, g, p = cuda.threadIdx.x, cuda.blockIdx.x, cuda.blockIdx.y
        at = _position(p, W, V, columns, logits, masks, counts, real, whole, drafts)
        begin, end = g << shift, min((g + 1) << shift, V)
        mine = _NONE
        for v in range(begin + tid, end, threads):
            mine = max(mine, _key(v, at))
        best[tid] = mine
        cuda.syncthreads()
        half = threads >> 1
        while half > 0:
            if tid < half:
                best[tid] = max(best[tid], best[tid + half])
            cuda.syncthreads()
            half >>= 1
        head = best[0]
        if tid == 0:
            heads[p * groups + g] = head
        b = p // W
        wants_norm = whole[4 * b + 1] >= 0
        wants_mass = whole[4 * b] == 0 and at.temperature > _F0
        if head == BROKEN or head == _NONE or not (wants_norm or wants_mass):  # noqa: SIM109
            return
        norm, mass = np.float64(0.0), np.float64(0.0)
        for v in range(begin + tid, end, threads):
            key = _key(v, at)
            if key != _NONE:
                if wants_norm:
                    norm += np.float64(_exp(_value(key) - _value(head)))
                if wants_mass:
                    mass += np.float64(_weight(key, _value(head), at.temperature))
        norm = _tree_sum(norm, sums)
        mass = _tree_sum(mass, sums)
        if tid == 0:
            norms[p * groups + g] = np.float32(norm)
            masses[p * groups + g] = np.float32(mass)

    return survey


def make_decide(threads, most_groups, capacity):
    """The kernel ``decide`` for blocks of ``threads``, a power of two, at most ``most_groups`` groups and ``capacity``
    gathered keys: at least ``LISTED * ceil(LISTED * group / threads)``, or the vocabulary where threads < LISTED."""

    def decide(
        token, logprob, alt_ids, alt_logprobs, flags, heads, norms, masses, logits, masks, counts, real, whole, seed,
        index, purpose, draft_count, drafts, draft_ids, draft_q, W, V, shift, groups, columns, candidates,
    ):  # fmt: skip
        """One block a position. ``columns`` is 0 without drafts; ``candidates`` is 0 where drafts are certain.

        flags i32 [P]: 1 where the position keeps its draft; its token is then the draft.
        """
        top_keys = cuda.shared.array(most_groups, np.uint64)
        listed = cuda.shared.array(capacity, np.uint64)
        weights = cuda.shared.array(LISTED, np.float32)
        thread_best = cuda.shared.array(threads, np.uint64)
        sums = cuda.shared.array(threads, np.float64)
        filled = cuda.shared.array(1, np.int32)
        removed_keys = cuda.shared.array(ALTERNATIVES, np.uint64)
        removed = cuda.shared.array(ALTERNATIVES, np.float32)
        shared_key = cuda.shared.array(2, np.uint64)  # the least kept key; the decided key
        shared_sum = cuda.shared.array(2, np.float64)  # the sum of kept weights; the goal of the last search
        open_ = cuda.shared.array(1, np.int32)  # 1 where kept ids may lie beyond the listed ones

        tid, p = cuda.threadIdx.x, cuda.blockIdx.x
        at = _position(p, W, V, columns, logits, masks, counts, real, whole, drafts)
        b, w = p // W, p % W
        last = draft_count[b] if columns else w
        if w > last:
            return
        temperature, top_p, min_p = at.temperature, real[5 * b + 1], real[5 * b + 2]
        top_k, alternatives = whole[4 * b], whole[4 * b + 1]
        greedy = temperature <= _F0

        for g in range(tid, groups, threads):
            top_keys[g] = heads[p * groups + g]
        _fill_and_sort(top_keys, groups)
        best = top_keys[0]
        if best == BROKEN or best == _NONE:  # noqa: SIM109
            if tid == 0:
                token[p] = NOT_FINITE if best == BROKEN else NO_LEGAL_TOKEN
                logprob[p] = _F0
                flags[p] = 0
            return
        limit = 1 if greedy else (top_k if top_k > 0 else LISTED)
        want = min(max(limit, alternatives), LISTED)
        gathered, narrowed = _gather(listed, want, groups, shift, heads, top_keys, thread_best, filled, at)
        found = min(gathered, want)
        limit = min(limit, found)
        unlisted = top_k == 0 and not greedy and (narrowed or gathered > LISTED)
        top = _value(listed[0])
        for j in range(tid, limit, threads):
            weights[j] = _F1 if greedy else _weight(listed[j], top, temperature)
        for c in range(tid, ALTERNATIVES, threads):
            removed_keys[c] = _NONE
            removed[c] = _F0
        total, norm = np.float64(0.0), np.float64(0.0)
        if unlisted:
            total = _sum_of_groups(masses, temperature, top, groups, heads, at, sums)
        if alternatives >= 0:
            norm = np.float64(top) + math.log(_sum_of_groups(norms, _F1, top, groups, heads, at, sums))
        cuda.syncthreads()

        if tid == 0:
            listed_total = _F0
            for j in range(limit):
                listed_total += weights[j]
            of = np.float32(total) if unlisted else listed_total
            kept, run, cut = _truncate(weights, limit, of, min_p, top_p)
            shared_key[0] = listed[kept - 1]
            shared_sum[0], shared_sum[1] = np.float64(run), np.float64(top_p * of)
            open_[0] = 1 if unlisted and not cut else 0
        cuda.syncthreads()
        beyond = open_[0] != 0
        if beyond:
            least, mass, target = np.uint64(1), total, shared_sum[1]
            if min_p > _F0:  # weights fall with the key, so what min-p keeps are the keys from some value up
                least = _order_key(top + temperature * np.float32(math.log(min_p)), V)
                mass = _tally(least, BROKEN, top, at, sums)
            if top_p < _F1 and mass > target:
                least = _search(target, False, removed_keys, removed, top, at, sums)
                mass = _tally(least, BROKEN, top, at, sums)
            cuda.syncthreads()
            if tid == 0:
                shared_key[0], shared_sum[0] = least, mass
        cuda.syncthreads()

        if tid == 0:
            kept_from, whole_mass = shared_key[0], np.float32(shared_sum[0])
            key, flag, draft, first = _NONE, 0, -1, (columns * b + w) * candidates
            if w < last:
                draft = drafts[columns * b + w]
                if draft >= 0 and draft < V:
                    key = _key(draft, at)
                if greedy:
                    flag = 1 if key == listed[0] else 0
                elif key != _NONE and key >= kept_from:
                    u = _uniform(seed[2 * b], seed[2 * b + 1], index[p], ACCEPTANCE)
                    odds = u * _proposed(draft, first, candidates, draft_ids, draft_q) * whole_mass
                    flag = 1 if odds < _weight(key, top, temperature) else 0
            if flag == 0 and greedy:
                key = listed[0]
            elif flag == 0:
                if w < last:
                    _remove(removed_keys, removed, draft, first, candidates, draft_ids, draft_q, kept_from, whole_mass,
                            top, at)  # fmt: skip
                u = _uniform(seed[2 * b], seed[2 * b + 1], index[p], CORRECTION if w < last else purpose[p])
                key, goal = _draw(u, whole_mass, beyond, kept_from, limit, listed, weights, removed_keys, removed)
                shared_sum[1] = np.float64(goal)
            flags[p] = flag
            shared_key[1] = key
        cuda.syncthreads()
        key = shared_key[1]
        if key == _NONE:
            key = _search(shared_sum[1], True, removed_keys, removed, top, at, sums)
        if tid == 0:
            token[p] = _token(key)
            logprob[p] = np.float32(np.float64(_value(key)) - norm) if alternatives >= 0 else _F0
        for j in range(tid, alternatives, threads):
            alt_ids[p * ALTERNATIVES + j] = _token(listed[j]) if j < found else -1
            alt_logprobs[p * ALTERNATIVES + j] = (
                np.float32(np.float64(_value(listed[j])) - norm) if j < found else np.float32(-math.inf)
            )

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
    "survey": (make_survey(SURVEY_THREADS), "u64* f32* f32* f32* u32* i32* f32* i32* i32* i32 i32 i32 i32 i32"),
    "decide": (
        make_decide(DECIDE_THREADS, MOST_GROUPS, CAPACITY),
        "i32* f32* i32* f32* i32* u64* f32* f32* f32* u32* i32* f32* i32* u32* i64* i32* i32* i32* i32* f32* "
        "i32 i32 i32 i32 i32 i32",
    ),
    "chain": (chain, "i32* i32* i32* i32 i32"),
    "count": (count, "i32* i32* i32* i32* i32 i32 i32 i32"),
}
"""Every kernel: its function and the types of its arguments."""
