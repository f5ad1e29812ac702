"""What one thread decides: where a distribution is cut, whether a draft is kept, what a refused one takes from the
distribution, and the draw."""

from __future__ import annotations

from numba import cuda

from ninfer._cuda.sampler_keys import F0, F1, NONE, key_of, uniform, value_of, weight_of
from ninfer._cuda.sampling import ACCEPTANCE, CORRECTION


@cuda.jit(device=True)
def truncate(weights, limit, total, min_p, top_p):
    """How many of the listed weights stay, their sum, and whether the cut fell among them."""
    target = top_p * total
    run, kept = F0, 0
    while kept < limit:
        if kept > 0 and (weights[kept] < min_p or (top_p < F1 and run >= target)):
            return kept, run, True
        run += weights[kept]
        kept += 1
    return kept, run, False


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
def remove(removed_keys, removed, draft, first, candidates, ids, q, least, mass, top, at):
    """What the proposal of a refused draft takes from the weights of kept ids."""
    for c in range(max(candidates, 1)):
        v = ids[first + c] if candidates else draft
        if v >= 0 and v < at.V:
            key = key_of(v, at)
            if key != NONE and key >= least:
                removed_keys[c] = key
                removed[c] = min(weight_of(key, top, at.temperature), (q[first + c] if candidates else F1) * mass)


@cuda.jit(device=True)
def _left(j, listed, weights, taken, removed_keys, removed):
    """Weight of a listed id less what is removed."""
    weight = weights[j]
    for c in range(taken):
        if removed_keys[c] == listed[j]:
            weight -= removed[c]
    return weight


@cuda.jit(device=True)
def draw(u, whole_mass, beyond, least, limit, listed, weights, taken, removed_keys, removed):
    """Draw from what is left of the kept weights: the key and the goal of its search, key 0 where that goes beyond the
    listed ids (``beyond``: kept ids do). taken: of how many ids something is removed."""
    left = F0
    for j in range(limit):
        if listed[j] >= least:
            left += _left(j, listed, weights, taken, removed_keys, removed)
    if beyond:
        left = whole_mass
        for c in range(taken):
            left -= removed[c]
    if left <= F0:  # only rounding can leave nothing: the distribution itself, then
        left = whole_mass
        for c in range(taken):
            removed_keys[c] = NONE
            removed[c] = F0
    goal = u * left
    run, key = F0, listed[0]
    for j in range(limit):
        weight = _left(j, listed, weights, taken, removed_keys, removed)
        if listed[j] >= least and weight > F0:
            run += weight
            key = listed[j]
            if run > goal:
                return key, goal
    return (NONE if beyond else key), goal


@cuda.jit(device=True)
def conclude(
    at, w, last, limit, least, mass, beyond, listed, weights, removed_keys, removed, seed, index, purpose, columns,
    candidates, drafts, draft_ids, draft_q,
):  # fmt: skip
    """Column ``w`` of a row of ``last`` drafts, over kept ids: those from the key ``least`` on, whose weights sum to
    ``mass``. The decided key, whether it is the draft, and the goal of the search where the key is NONE."""
    p, b, draft = at.p, at.b, -1
    first = (columns * b + w) * candidates
    greedy = at.temperature <= F0
    if w < last:
        draft = drafts[columns * b + w]
        key = key_of(draft, at) if draft >= 0 and draft < at.V else NONE
        if greedy:
            if key == listed[0]:
                return key, 1, F0
        elif key != NONE and key >= least:
            u = uniform(seed[2 * b], seed[2 * b + 1], index[p], ACCEPTANCE)
            odds = u * proposed(draft, first, candidates, draft_ids, draft_q) * mass
            if odds < weight_of(key, value_of(listed[0]), at.temperature):
                return key, 1, F0
    if greedy:
        return listed[0], 0, F0
    taken = 0
    if w < last:
        taken, top = max(candidates, 1), value_of(listed[0])
        remove(removed_keys, removed, draft, first, candidates, draft_ids, draft_q, least, mass, top, at)
    u = uniform(seed[2 * b], seed[2 * b + 1], index[p], CORRECTION if w < last else purpose[p])
    key, goal = draw(u, mass, beyond, least, limit, listed, weights, taken, removed_keys, removed)
    return key, 0, goal
