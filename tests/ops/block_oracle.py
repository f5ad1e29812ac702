"""Block drafting operations in float64: one function per formula, contexts as plain arrays."""

from __future__ import annotations

import numpy as np
from ops.harness import Array

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
