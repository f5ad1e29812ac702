"""Token sampling on the CPU: mask, penalties, exact top-k or the whole vocabulary, truncation, draw or verification.

The steps, their order and the random numbers are those of ``Ops.sample`` and ``Ops.accept``. Weights and their sums are
fp32, taken in candidate order (value descending, ties to the smaller id), so a draw never depends on the batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

NO_LEGAL_TOKEN = -1
NOT_FINITE = -2
ACCEPTANCE, CORRECTION = 2, 3
MAX_TOP_K = 64
MAX_ALTERNATIVES = 20


@njit
def philox(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> Any:
    """Philox4x32-10 (Salmon et al., 2011): word 0 of the output block for one counter and key, all uint32."""
    mask = np.uint64(0xFFFFFFFF)
    x0, x1, x2, x3 = np.uint64(c0), np.uint64(c1), np.uint64(c2), np.uint64(c3)
    y0, y1 = np.uint64(k0), np.uint64(k1)
    for _ in range(10):
        p0 = np.uint64(0xD2511F53) * x0
        p1 = np.uint64(0xCD9E8D57) * x2
        x0, x1, x2, x3 = (
            (p1 >> np.uint64(32)) ^ x1 ^ y0,
            p1 & mask,
            (p0 >> np.uint64(32)) ^ x3 ^ y1,
            p0 & mask,
        )
        y0 = (y0 + np.uint64(0x9E3779B9)) & mask
        y1 = (y1 + np.uint64(0xBB67AE85)) & mask
    return np.uint32(x0)


@njit
def uniform(seed_low: Any, seed_high: Any, index: Any, purpose: Any) -> Any:
    """The request's fp32 number in [0, 1) for one sequence index and purpose."""
    i = np.uint64(index)
    word = philox(i & np.uint64(0xFFFFFFFF), i >> np.uint64(32), purpose, 0, seed_low, seed_high)
    return np.float32(word >> np.uint32(8)) * np.float32(2.0**-24)


@njit
def order_key(value: Any, token: Any) -> Any:
    """uint64 that sorts by value, then by lower id; -0 equals +0."""
    bits = np.uint64(np.float32(value + np.float32(0.0)).view(np.uint32))
    sign = bits >> np.uint64(31)
    flipped = (bits ^ np.uint64(0xFFFFFFFF)) if sign else (bits | np.uint64(0x80000000))
    return (flipped << np.uint64(32)) | np.uint64(np.uint32(0xFFFFFFFF) - np.uint32(token))


@njit
def key_token(key: Any) -> Any:
    return np.int32(np.uint32(0xFFFFFFFF) - np.uint32(key & np.uint64(0xFFFFFFFF)))


@njit
def key_value(key: Any) -> Any:
    flipped = np.uint32(key >> np.uint64(32))
    bits = (flipped ^ np.uint32(0x80000000)) if flipped & np.uint32(0x80000000) else flipped ^ np.uint32(0xFFFFFFFF)
    return np.uint32(bits).view(np.float32)


@njit
def penalised(logit: Any, count: Any, presence: Any, frequency: Any) -> Any:
    """The penalty is summed in float64, where its product is exact, so that no machine can round it differently."""
    if count > 0:
        logit = logit - np.float32(np.float64(presence) + np.float64(frequency) * np.float64(count))
    return logit


@njit
def times(counts: Any, drafts: Any, v: Any) -> Any:
    """How often ``v`` was generated, the drafts before this column included."""
    n = counts[v]
    for draft in drafts:
        if draft == v:
            n += 1
    return n


@njit
def allowed(mask: Any, v: Any) -> Any:
    """Whether an id's bit is set."""
    return (mask[v >> 5] >> np.uint32(v & 31)) & np.uint32(1)


@njit(nogil=True)
def best(
    logits: Any, masked: Any, mask: Any, counts: Any, drafts: Any, presence: Any, frequency: Any, keys: Any
) -> Any:
    """Fill ``keys`` with the order keys of its length's largest legal logits, descending; their number or an error."""
    size = keys.shape[0]
    plain = presence == np.float32(0.0) and frequency == np.float32(0.0)
    found = 0
    floor = -np.float32(np.inf)
    for v in range(logits.shape[0]):
        if masked and not allowed(mask, v):
            continue
        z = logits[v]
        if not np.isfinite(z):
            return NOT_FINITE
        if not plain:
            z = penalised(z, times(counts, drafts, v), presence, frequency)
        # Ids ascend, so an equal value never displaces an earlier one.
        if found == size and z <= floor:
            continue
        key = order_key(z, v)
        at = found if found < size else size - 1
        while at > 0 and keys[at - 1] < key:
            keys[at] = keys[at - 1]
            at -= 1
        keys[at] = key
        if found < size:
            found += 1
        if found == size:
            floor = key_value(keys[size - 1])
    return found


@njit(nogil=True)
def everything(
    logits: Any, masked: Any, mask: Any, counts: Any, drafts: Any, presence: Any, frequency: Any, keys: Any
) -> Any:
    """Order keys of every legal logit, descending; their number or an error."""
    found = 0
    for v in range(logits.shape[0]):
        if masked and not allowed(mask, v):
            continue
        z = logits[v]
        if not np.isfinite(z):
            return NOT_FINITE
        keys[found] = ~order_key(penalised(z, times(counts, drafts, v), presence, frequency), v)
        found += 1
    keys[:found].sort()
    for i in range(found):
        keys[i] = ~keys[i]
    return found


@njit
def weight(key: Any, top: Any, temperature: Any) -> Any:
    return np.exp((key_value(key) - top) / temperature)


@njit(nogil=True)
def truncate(keys: Any, found: Any, temperature: Any, min_p: Any, top_p: Any) -> Any:
    """How many of the candidates ``keys[:found]`` stay, and the sum of their weights; found >= 1, temperature > 0."""
    top = key_value(keys[0])
    total = np.float32(0.0)
    for j in range(found):
        total += weight(keys[j], top, temperature)
    goal = top_p * total
    kept = 0
    mass = np.float32(0.0)
    for j in range(found):
        w = weight(keys[j], top, temperature)
        if kept > 0 and (w < min_p or (top_p < np.float32(1.0) and mass >= goal)):
            break
        mass += w
        kept += 1
    return kept, mass


@njit(nogil=True)
def proposed(token: Any, draft: Any, ids: Any, q: Any) -> Any:
    """Probability with which ``token`` would have been drafted; a draft without candidates was certain."""
    if ids.shape[0] == 0:
        return np.float32(1.0) if token == draft else np.float32(0.0)
    for c in range(ids.shape[0]):
        if ids[c] == token:
            return q[c]
    return np.float32(0.0)


@njit(nogil=True)
def draw(keys: Any, kept: Any, mass: Any, temperature: Any, draft: Any, ids: Any, q: Any, u: Any) -> Any:
    """Index of the candidate drawn from ``keys[:kept]``; where a draft was refused, from what its proposal left."""
    top = key_value(keys[0])
    left = mass
    residual = draft >= 0
    if residual:
        left = np.float32(0.0)
        for j in range(kept):
            w = weight(keys[j], top, temperature)
            left += w - min(w, proposed(key_token(keys[j]), draft, ids, q) * mass)
        if left <= np.float32(0.0):  # only rounding can leave nothing: the distribution itself, then
            residual, left = False, mass
    r = u * left
    run = np.float32(0.0)
    chosen = 0
    for j in range(kept):
        w = weight(keys[j], top, temperature)
        if residual:
            w -= min(w, proposed(key_token(keys[j]), draft, ids, q) * mass)
        if w > np.float32(0.0):
            run += w
            chosen = j
            if run > r:
                break
    return chosen


@njit(nogil=True)
def log_normaliser(
    logits: Any, masked: Any, mask: Any, counts: Any, drafts: Any, presence: Any, frequency: Any, top: Any
) -> Any:
    """log sum exp of the legal, penalised logits (float64), given the largest."""
    total = 0.0
    for v in range(logits.shape[0]):
        if masked and not allowed(mask, v):
            continue
        total += np.exp(np.float64(penalised(logits[v], times(counts, drafts, v), presence, frequency)) - top)
    return top + np.log(total)


@njit(nogil=True)
def decide_position(
    logits: Any, mask: Any, counts: Any, real: Any, whole: Any, seed: Any, index: Any, purpose: Any, keys: Any,
    alt_ids: Any, alt_logprobs: Any, drafts: Any, draft: Any, ids: Any, q: Any,
) -> Any:  # fmt: skip
    """Token and log-probability of one position, and whether the token is its ``draft`` (-1: none to verify).

    drafts: what was drafted before this column. ids, q: the draft's proposal. ``keys`` is scratch of at least the
    vocabulary's size.
    """
    temperature, top_p, min_p, presence, frequency = real[0], real[1], real[2], real[3], real[4]
    top_k, alternatives, masked = whole[0], whole[1], whole[2] != 0
    greedy = temperature <= np.float32(0.0)
    if top_k == 0 and not greedy:
        found = everything(logits, masked, mask, counts, drafts, presence, frequency, keys)
        limit = found
    else:
        limit = 1 if greedy else top_k
        size = min(max(limit, alternatives), logits.shape[0])
        found = best(logits, masked, mask, counts, drafts, presence, frequency, keys[:size])
        limit = min(limit, found)
    if found == NOT_FINITE:
        return np.int32(NOT_FINITE), np.float32(0.0), False
    if found == 0:
        return np.int32(NO_LEGAL_TOKEN), np.float32(0.0), False
    j = -1
    if greedy:
        accepted = key_token(keys[0]) == draft
        j = 0
    else:
        kept, mass = truncate(keys, limit, temperature, min_p, top_p)
        accepted = False
        if draft >= 0:
            for i in range(kept):
                if key_token(keys[i]) == draft:
                    u = uniform(seed[0], seed[1], index, ACCEPTANCE)
                    w = weight(keys[i], key_value(keys[0]), temperature)
                    accepted = u * proposed(draft, draft, ids, q) * mass < w
                    j = i
        if not accepted:
            u = uniform(seed[0], seed[1], index, CORRECTION if draft >= 0 else purpose)
            j = draw(keys, kept, mass, temperature, draft, ids, q, u)
    logprob = np.float32(0.0)
    if alternatives >= 0:
        top = np.float64(key_value(keys[0]))
        norm = log_normaliser(logits, masked, mask, counts, drafts, presence, frequency, top)
        logprob = np.float32(np.float64(key_value(keys[j])) - norm)
        for i in range(alternatives):
            alt_ids[i] = key_token(keys[i]) if i < found else np.int32(-1)
            alt_logprobs[i] = np.float32(np.float64(key_value(keys[i])) - norm) if i < found else -np.float32(np.inf)
    return key_token(keys[j]), logprob, accepted


@njit(nogil=True)
def sample(
    token: Any, logprob: Any, alt_ids: Any, alt_logprobs: Any, logits: Any, masks: Any, counts: Any, real: Any,
    whole: Any, seed: Any, index: Any, purpose: Any, scratch: Any,
) -> None:  # fmt: skip
    """``Ops.sample`` over arrays; logits [B*W, V], scratch uint64 [V]."""
    nothing, certain = np.empty(0, np.int32), np.empty(0, np.float32)
    for b in range(token.shape[0]):
        for w in range(token.shape[1]):
            token[b, w], logprob[b, w], _ = decide_position(
                logits[b * token.shape[1] + w], masks[b, w], counts[whole[b, 3]], real[b], whole[b], seed[b],
                index[b, w], purpose[b, w], scratch, alt_ids[b, w], alt_logprobs[b, w], nothing, -1, nothing, certain,
            )  # fmt: skip


@njit(nogil=True)
def accept(
    token: Any, logprob: Any, alt_ids: Any, alt_logprobs: Any, accepted: Any, logits: Any, masks: Any, counts: Any,
    real: Any, whole: Any, seed: Any, index: Any, purpose: Any, draft_count: Any, drafts: Any, draft_ids: Any,
    draft_q: Any, scratch: Any,
) -> None:  # fmt: skip
    """``Ops.accept`` over arrays; drafts [B, W-1], draft_ids and draft_q [B, W-1, C] with C 0 for certain drafts. What
    follows the first column that is not a kept draft is left alone."""
    for b in range(token.shape[0]):
        accepted[b] = 0
        for w in range(draft_count[b] + 1):
            last = w == draft_count[b]
            at = 0 if last else w  # the last column has no draft, but its arrays must have a shape
            draft = -1 if last else drafts[b, w]
            token[b, w], logprob[b, w], kept = decide_position(
                logits[b * token.shape[1] + w], masks[b, w], counts[whole[b, 3]], real[b], whole[b], seed[b],
                index[b, w], purpose[b, w], scratch, alt_ids[b, w], alt_logprobs[b, w], drafts[b, :w], draft,
                draft_ids[b, at], draft_q[b, at],
            )  # fmt: skip
            if not kept:
                break
            accepted[b] += 1


@njit(nogil=True)
def count(counts: Any, lanes: Any, tokens: Any, width: Any) -> None:
    """``Ops.count`` over arrays."""
    for b in range(tokens.shape[0]):
        for w in range(width[b]):
            counts[lanes[b], tokens[b, w]] += 1


def sample_scratch(vocab: int) -> int:
    """Bytes of ``sample``'s scratch."""
    return vocab * 8
