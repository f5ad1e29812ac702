"""Block drafting operations in float64: one function per formula, contexts as plain arrays."""

from __future__ import annotations

import numpy as np
from ops.harness import Array, Lab, bf16

from ninfer._cpu.sampling import uniform
from ninfer.block_ops import Candidates, Chain, Selection

EPS = 1e-6


def norm0(x: Array, w: Array, eps: float = EPS) -> Array:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * w


def rotate(x: Array, ordinals: Array, theta: float, rot: int) -> Array:
    """x [T, heads, hd], its first ``rot`` features turned."""
    n = rot // 2
    inverse = (theta ** (-2.0 * np.arange(n) / rot)).astype(np.float32)
    angle = (np.asarray(ordinals, np.float32)[:, None] * inverse).astype(np.float64)[:, None, :]
    low, high = x[..., :n], x[..., n:rot]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin, x[..., rot:]], -1)


def attention(q: Array, keys: Array, values: Array, k: Array, v: Array, window: int | None, causal: bool) -> Array:
    """q [W, hq, hd], k and v [W, hk, hd] behind a history keys, values [n, hk, hd]."""
    W, hq, hd = q.shape
    n = len(keys)
    allk, allv = np.concatenate([keys, k]), np.concatenate([values, v])
    own, other = n + np.arange(W)[:, None], np.arange(n + W)[None]
    seen = np.abs(own - other) < window if window else np.ones((W, n + W), bool)
    if causal:
        seen &= other <= own
    out = np.empty_like(q)
    for h in range(hq):
        g = h // (hq // k.shape[1])
        scores = np.where(seen, q[:, h] @ allk[:, g].T / np.sqrt(hd), -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, h] = weights / weights.sum(-1, keepdims=True) @ allv[:, g]
    return out


def convolve(x: Array, base: Array, delta: Array, side: int, columns: int) -> Array:
    """x [T, H], base [2, taps, H], delta [T, 2 * taps * G]."""
    T, H = x.shape
    taps = base.shape[1]
    own = np.repeat(delta.reshape(T, 2, taps, -1), H // (delta.shape[1] // (2 * taps)), -1)
    out = np.zeros_like(x)
    for i in range(T):
        for tap in range(min(taps, i % columns + 1)):
            out[i] += (base[side, tap] + own[i, side, tap]) * x[i - tap]
    return out


def chain(ids: Array, scores: Array, gamma: Array, books: tuple[Array, Array], anchor: int, temperature: float,
          tokens: Array) -> tuple[Array, Array]:  # fmt: skip
    """Scores s and q [K, count] of a row's candidates along the chosen ``tokens`` [K]."""
    previous, s = [anchor, *tokens[:-1]], np.empty(ids.shape)
    for i in range(len(ids)):
        s[i] = scores[i] + (books[0][previous[i]] * gamma[i] * books[1][ids[i]]).sum(-1)
    if temperature == 0:
        return s, (np.arange(ids.shape[1]) == s.argmax(-1)[:, None]).astype(float)
    q = np.exp((s - s.max(-1, keepdims=True)) / temperature)
    return s, q / q.sum(-1, keepdims=True)


def check_selection(lab: Lab, rng: np.random.Generator, dtype: str, tolerance: float) -> None:
    """Rows of several temperatures; the walk, its q, and that a token is the draw that its number says."""
    B, K, count, rank, R, stride = 3, 5, 6, 40, 90, 20
    temperatures, seeds, starts = [0.0, 1.0, 0.7], rng.integers(0, 2**32, (B, 2)), [4, 900, 17]
    ids = np.stack([rng.permutation(R)[:stride] for _ in range(K * B)])
    scores = rng.normal(size=(K * B, stride)).astype(np.float32)
    gamma, books = bf16(rng.normal(size=(K * B, rank)) / 6), [bf16(rng.normal(size=(R, rank))) for _ in range(2)]
    anchors, real = rng.integers(0, R, (B, K + 1)), np.zeros((B, 5))
    real[:, 0] = temperatures
    out = Selection(lab.empty(K, B, dtype="i32"), lab.empty(B, K, count, dtype="i32"), lab.empty(B, K, count))
    candidates = Candidates(
        lab.put(ids, "i32"), lab.put(scores), count, lab.put(gamma, dtype), *(lab.put(b, "bf16") for b in books)
    )
    rows = Chain(B, lab.put(anchors, "i32"), lab.put(starts, "i32"), lab.put(real), lab.put(seeds, "u32"))
    lab.ops.block.select(out, candidates, rows)
    tokens, q = lab.get(out.token), lab.get(out.q)
    for b in range(B):
        own = ids.reshape(K, B, stride)[:, b, :count]
        np.testing.assert_array_equal(lab.get(out.ids)[b], own)
        parts = (x.reshape(K, B, -1)[:, b] for x in (scores[:, :count].astype(np.float64), gamma))
        _, want = chain(own, *parts, (books[0], books[1]), anchors[b, 0], temperatures[b], tokens[:, b])
        np.testing.assert_allclose(q[b], want, atol=tolerance)
        for i in range(K):
            u = uniform(*(np.uint32(s) for s in seeds[b]), np.int64(starts[b] + 1 + i), np.uint32(5))
            drawn = int(np.searchsorted(np.cumsum(want[i]), u, side="right")) if temperatures[b] else want[i].argmax()
            assert tokens[i, b] == own[i, min(drawn, count - 1)]
