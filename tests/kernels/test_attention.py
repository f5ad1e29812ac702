"""The attention kernels, against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kernels.checks import close, poison
from ops.harness import Array, Lab, bf16
from ops.test_attention import EPS, HARD, attend, fill, norm1, quantised, rotate, shape_of

from ninfer.ops import AttentionShape

SHAPES = [shape_of(6, 2, 32, 16), shape_of(3, 1, 20, 10), shape_of(2, 2, 96, 32), shape_of(8, 2, 256, 64)]


KINDS = ["bf16", "i8"]


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_prepare(device: Any, rng: np.random.Generator, shape: AttentionShape, dtype: str) -> None:
    lab, B, W, room = Lab(device), 2, 5, 200
    start, width = [0, 126], [3, 5]
    cache = fill(lab, rng, shape, B, 0, room, dtype)
    before = [[read(b, room) for b in range(B)] for read in (cache.keys, cache.values)]
    q, k, v = (bf16(rng.normal(size=(B * W, h, shape.hd))) for h in (shape.hq, shape.hk, shape.hk))
    positions = rng.integers(0, 262_144, (3, B * W))
    wq, wk = (bf16(rng.normal(size=shape.hd) * 0.2) for _ in range(2))
    query, key, value = (lab.put(x.reshape(B * W, -1), "bf16") for x in (q, k, v))
    lab.ops.attention_prepare(
        query, key, value, lab.put(wq, "bf16"), lab.put(wk, "bf16"), cache.kv,
        lab.rows(B, W, start, width, positions=positions), shape, EPS,
    )  # fmt: skip
    real = np.array([b * W + w for b in range(B) for w in range(width[b])])
    close(lab.get(query).reshape(q.shape)[real], rotate(norm1(q, wq), positions, shape)[real], 3e-3)
    for read, values, old in zip((cache.keys, cache.values), (rotate(norm1(k, wk), positions, shape), v), before):
        for b in range(B):
            stored, want = read(b, room), old[b].copy()
            for w in range(width[b]):
                want[start[b] + w] = values[b * W + w]
            close(stored, want, 3e-3 if dtype == "bf16" else 1e-2)
            untouched = np.setdiff1d(np.arange(room), start[b] + np.arange(width[b]))
            np.testing.assert_array_equal(stored[untouched], old[b][untouched])


def run(lab: Lab, q: Array, gate: Array, cache: Any, rows: Any) -> Array:
    shape, T = cache.shape, rows.B * rows.W
    out = lab.put(np.full((T, shape.hq * shape.hd), np.nan), "bf16")
    scratch = poison(lab, lab.ops.attention_scratch(T, cache.kv.blocks.shape[1] * 64, shape))
    lab.ops.attention(
        out, lab.put(q.reshape(T, -1), "bf16"), lab.put(gate.reshape(T, -1), "bf16"), cache.kv, rows, shape, scratch
    )
    return lab.get(out).reshape(rows.B, rows.W, shape.hq, shape.hd)


def test_int8_rows_are_the_codes_and_scales_of_their_definition(device: Any, rng: np.random.Generator) -> None:
    lab = Lab(device)
    for shape in (SHAPES[1], shape_of(1, 1, 130, 8)):
        W = 2 * len(HARD)
        cache = fill(lab, rng, shape, 1, 0, W, "i8")
        v = rng.normal(size=(W, shape.hk, shape.hd)) * np.repeat(HARD, 2)[:, None, None]
        v[0, 0, :3] = 127.0, 0.5, 1.5  # ties go to the even code
        q, k = (lab.put(np.ones((W, h * shape.hd)), "bf16") for h in (shape.hq, shape.hk))
        ones, values = lab.put(np.ones(shape.hd), "bf16"), lab.put(v.reshape(W, -1), "bf16")
        lab.ops.attention_prepare(q, k, values, ones, ones, cache.kv, lab.rows(1, W, [0]), shape, EPS)
        codes, scales, _ = quantised(v)
        assert cache.kv.v_scale is not None
        np.testing.assert_array_equal(cache.read(cache.kv.v, 0, W), codes)
        np.testing.assert_array_equal(cache.read(cache.kv.v_scale, 0, W), scales)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_float64(device: Any, rng: np.random.Generator, shape: AttentionShape, dtype: str) -> None:
    lab = Lab(device)
    for i, (B, W, start) in enumerate(
        (
            (1, 1, [700]),
            (2, 4, [0, 63]),
            (2, 13, [5, 130]),
            (1, 70, [1]),
            (3, 1, [0, 64, 511]),
            (9, 7, [30] * 9),
            (1, 512 * shape.hk // shape.hq + 3, [20]),
        )
    ):
        device.order = i % 2
        room = max(start) + W
        cache = fill(lab, rng, shape, B, room, room, dtype)
        q, gate = (bf16(rng.normal(size=(B, W, shape.hq, shape.hd))) for _ in range(2))
        got = run(lab, bf16(q * 3), gate, cache, lab.rows(B, W, start))
        want = [attend(bf16(q[b] * 3), cache.k[b], cache.v[b], gate[b], start[b], shape) for b in range(B)]
        close(got, np.stack(want), 6e-3)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("shape", [*SHAPES, shape_of(3, 1, 200, 48)])
def test_attend_prepares_what_attention_sees(
    device: Any, rng: np.random.Generator, shape: AttentionShape, dtype: str
) -> None:
    """New columns at the start, across pages and beside padding; few enough for attention's blocks, and more."""
    lab = Lab(device)
    for i, (W, start, width) in enumerate(
        (
            (1, [700, 0], [1, 1]),
            (1, [63, 128], [1, 0]),
            (5, [0, 126], [3, 5]),
            (8, [60, 640], [8, 2]),
            (9, [3, 61], [9, 9]),
        )
    ):
        device.order = i % 2
        room = max(start) + W
        caches = [fill(lab, np.random.default_rng(i), shape, 2, room, room, dtype) for _ in range(2)]
        q, k, v = (bf16(rng.normal(size=(2 * W, h, shape.hd))) for h in (shape.hq, shape.hk, shape.hk))
        gate = bf16(rng.normal(size=q.shape))
        norms = [lab.put(bf16(rng.normal(size=shape.hd) * 0.2), "bf16") for _ in range(2)]
        rows = lab.rows(2, W, start, width, positions=rng.integers(0, 262_144, (3, 2 * W)))
        got = []
        for cache, together in zip(caches, (True, False)):
            query, key, value, gates = (lab.put(x.reshape(2 * W, -1), "bf16") for x in (q, k, v, gate))
            out = lab.put(np.full((2 * W, shape.hq * shape.hd), np.nan), "bf16")
            scratch = poison(lab, lab.ops.attention_scratch(2 * W, cache.kv.blocks.shape[1] * 64, shape))
            if together:
                lab.ops.attend(out, query, key, value, gates, *norms, cache.kv, rows, shape, EPS, scratch)
            else:
                lab.ops.attention_prepare(query, key, value, *norms, cache.kv, rows, shape, EPS)
                lab.ops.attention(out, query, gates, cache.kv, rows, shape, scratch)
            got.append(lab.get(out).reshape(2, W, -1))
        for b in range(2):
            close(got[0][b, : width[b]], got[1][b, : width[b]], 6e-3)
            close(caches[0].keys(b, room), caches[1].keys(b, room), 2e-3)
            close(caches[0].values(b, room), caches[1].values(b, room), 2e-3)


@pytest.mark.parametrize("dtype", KINDS)
def test_in_little_shared_memory(device: Any, rng: np.random.Generator, dtype: str) -> None:
    """As much as the smallest GPUs allow a block."""
    device.shared_limit = 99 << 10
    lab, shape, W = Lab(device), SHAPES[3], 130
    cache = fill(lab, rng, shape, 1, 130 + W, 130 + W, dtype)
    q, gate = (bf16(rng.normal(size=(1, W, shape.hq, shape.hd))) for _ in range(2))
    got = run(lab, q, gate, cache, lab.rows(1, W, [130]))
    close(got[0], attend(q[0], cache.k[0], cache.v[0], gate[0], 130, shape), 6e-3)


@pytest.mark.parametrize("dtype", KINDS)
def test_unwritten_pages_and_padding_rows_are_not_read(device: Any, rng: np.random.Generator, dtype: str) -> None:
    """Page ids beyond a row's length may be anything; what follows its last ordinal in a page may be NaN."""
    lab, shape = Lab(device), SHAPES[0]
    for W, width in ((3, [2, 0]), (30, [7, 30]), (172, [9, 172])):
        start = [100, 20]
        cache = fill(lab, rng, shape, 2, 192, 192, dtype)
        poisoned = {"blocks": lab.get(cache.kv.blocks)}
        real = start[0] + width[0], start[1] + width[1]
        for name in ("k", "v") if dtype == "bf16" else ("k_scale", "v_scale"):
            plane = poisoned[name] = lab.get(getattr(cache.kv, name))
            for b in range(2):
                for p in range(real[b], 192):
                    plane[poisoned["blocks"][b, p >> 6], :, p & 63] = np.nan
        for b in range(2):
            poisoned["blocks"][b, -(-real[b] // 64) :] = 2**30
        kv = replace(cache.kv, **{n: lab.put(x, getattr(cache.kv, n).dtype) for n, x in poisoned.items()})
        q, gate = (bf16(rng.normal(size=(2, W, shape.hq, shape.hd))) for _ in range(2))
        got = run(lab, q, gate, type(cache)(lab, shape, kv, cache.k, cache.v), lab.rows(2, W, start, width))
        for b in range(2):
            if n := width[b]:
                want = attend(q[b, :n], cache.k[b], cache.v[b], gate[b, :n], start[b], shape)
                close(got[b, :n], want, 6e-3)
