"""What a block decides: where a distribution is cut, whether a draft is kept, what a refused one takes from the
distribution, and the draw. Every thread runs through it and knows the result; sums in order are one after another in
each of them."""

from __future__ import annotations

import numpy as np
from numba import cuda

from ninfer._cuda.sampler_keys import F0, F1, NONE, key_of, rounds, thread, token_of, uniform, value_of, weight_of
from ninfer._cuda.sampling import ACCEPTANCE, ALTERNATIVES, CORRECTION, LISTED

_SUMS = LISTED + 1


@cuda.jit(device=True)
def truncate(weights, limit, whole, unlisted, min_p, top_p, threads):
    """How many of the listed weights stay, their sum, and that of all: ``whole`` where there are ``unlisted`` ones."""
    runs = cuda.shared.array(_SUMS, np.float32)
    cut = cuda.shared.array(1, np.int32)
    tid = thread()
    if tid == 0:
        run = F0
        for i in range(limit):
            runs[i] = run
            run += weights[i]
        runs[limit] = run
        cut[0] = limit
    cuda.syncthreads()
    total = whole if unlisted else runs[limit]
    target = top_p * total
    for k in range(rounds(LISTED, threads)):
        j = tid + k * threads
        if j > 0 and j < limit and (weights[j] < min_p or (top_p < F1 and runs[j] >= target)):
            cuda.atomic.min(cut, 0, j)
    cuda.syncthreads()
    return cut[0], runs[cut[0]], total


@cuda.jit(device=True)
def proposed(draft, first, candidates, ids, q):
    """Probability with which ``draft`` was drawn from the proposal at ``ids[first]``; without candidates, certainty."""
    if candidates == 0:
        return F1
    for c in range(candidates):
        if ids[first + c] == draft:
            return q[first + c]
    return F0


@cuda.jit(device=True)
def remove(taken, removed_keys, removed, draft, first, candidates, ids, q, least, mass, top, at, threads):
    """What the proposal of a refused draft takes from the weights of its ``taken`` ids, those that are kept."""
    for k in range(rounds(ALTERNATIVES, threads)):
        c = thread() + k * threads
        if c < ALTERNATIVES:
            removed_keys[c] = NONE
            removed[c] = F0
        v = -1
        if c < taken:
            v = ids[first + c] if candidates else draft
        if v >= 0 and v < at.V:
            key = key_of(v, at)
            if key != NONE and key >= least:
                removed_keys[c] = key
                removed[c] = min(weight_of(key, top, at.temperature), (q[first + c] if candidates else F1) * mass)
    cuda.syncthreads()


@cuda.jit(device=True)
def _reduce(whole_mass, beyond, limit, listed, weights, taken, removed_keys, removed, top, at, threads):
    """Take what is removed from the listed weights; what is left of all kept ones."""
    tid = thread()
    for k in range(rounds(LISTED, threads)):
        j = tid + k * threads
        if j < limit:
            for c in range(taken):
                if removed_keys[c] == listed[j]:
                    weights[j] -= removed[c]
    cuda.syncthreads()
    left = whole_mass if beyond else F0
    if beyond:
        for c in range(taken):
            left -= removed[c]
    else:
        for i in range(limit):
            left += weights[i]
    if left > F0:
        return left
    cuda.syncthreads()  # only rounding can leave nothing: the distribution itself, then
    for k in range(rounds(LISTED, threads)):
        j = tid + k * threads
        if j < limit:
            weights[j] = weight_of(listed[j], top, at.temperature)
        if j < taken:
            removed_keys[j] = NONE
            removed[j] = F0
    cuda.syncthreads()
    return whole_mass


@cuda.jit(device=True)
def draw(goal, beyond, least, limit, listed, weights):
    """The key at which the sum of kept weights passes ``goal``; 0 where that is beyond the listed ids (``beyond``: kept
    ids are)."""
    run, last = F0, 0
    for j in range(limit):
        weight = weights[j]
        if weight > F0 and (not beyond or listed[j] >= least):
            run += weight
            last = j
            if run > goal:
                return listed[j]
    return NONE if beyond else listed[last]


@cuda.jit(device=True)
def conclude(
    at, w, last, limit, least, mass, beyond, listed, weights, removed_keys, removed, seed, index, purpose, columns,
    candidates, drafts, draft_ids, draft_q, threads,
):  # fmt: skip
    """Column ``w`` of a row of ``last`` drafts, over kept ids: those from the key ``least`` on, whose weights sum to
    ``mass``: the ``limit`` listed ones or, ``beyond``, perhaps fewer of them and perhaps more. The decided key, whether
    it is the draft, and the goal of the search where the key is NONE."""
    p, b, draft, top = at.p, at.b, -1, value_of(listed[0])
    first = (columns * b + w) * candidates
    if w < last:
        draft = drafts[columns * b + w]
    if at.temperature <= F0:
        return listed[0], 1 if token_of(listed[0]) == draft else 0, F0
    left = mass
    if w < last:
        key = key_of(draft, at) if draft >= 0 and draft < at.V else NONE
        if key != NONE and key >= least:
            u = uniform(seed[2 * b], seed[2 * b + 1], index[p], ACCEPTANCE)
            odds = u * proposed(draft, first, candidates, draft_ids, draft_q) * mass
            if odds < weight_of(key, top, at.temperature):
                return key, 1, F0
        taken = max(candidates, 1)
        remove(
            taken, removed_keys, removed, draft, first, candidates, draft_ids, draft_q, least, mass, top, at, threads
        )
        left = _reduce(mass, beyond, limit, listed, weights, taken, removed_keys, removed, top, at, threads)
    goal = uniform(seed[2 * b], seed[2 * b + 1], index[p], CORRECTION if w < last else purpose[p]) * left
    return draw(goal, beyond, least, limit, listed, weights), 0, goal
