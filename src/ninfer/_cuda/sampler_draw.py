"""What one thread decides: where a distribution is cut, what a refused draft takes from it, and the draw."""

from __future__ import annotations

from numba import cuda

from ninfer._cuda.sampler_keys import F0, F1, NONE, key_of, weight_of
from ninfer._cuda.sampling import ALTERNATIVES


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
def _left(j, listed, weights, removed_keys, removed):
    """Weight of a listed id less what is removed."""
    weight = weights[j]
    for c in range(ALTERNATIVES):
        if removed_keys[c] == listed[j]:
            weight -= removed[c]
    return weight


@cuda.jit(device=True)
def draw(u, whole_mass, beyond, least, limit, listed, weights, removed_keys, removed):
    """Draw from what is left of the kept weights: the key and the goal of its search, key 0 where that goes beyond the
    listed ids (``beyond``: kept ids do)."""
    left = F0
    for j in range(limit):
        if listed[j] >= least:
            left += _left(j, listed, weights, removed_keys, removed)
    if beyond:
        left = whole_mass
        for c in range(ALTERNATIVES):
            left -= removed[c]
    if left <= F0:  # only rounding can leave nothing: the distribution itself, then
        left = whole_mass
        for c in range(ALTERNATIVES):
            removed_keys[c] = NONE
            removed[c] = F0
    goal = u * left
    run, key = F0, listed[0]
    for j in range(limit):
        weight = _left(j, listed, weights, removed_keys, removed)
        if listed[j] >= least and weight > F0:
            run += weight
            key = listed[j]
            if run > goal:
                return key, goal
    return (NONE if beyond else key), goal
