"""The attention kernels, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernels.checks import close, poison
from ops.harness import Array, Lab, bf16
from ops.test_attention import EPS, attend, fill, norm1, rotate, shape_of

from ninfer.ops import AttentionShape

SHAPES = [shape_of(6, 2, 32, 16), shape_of(3, 1, 20, 10), shape_of(2, 2, 96, 32), shape_of(8, 2, 256, 64)]


@pytest.mark.parametrize("shape", SHAPES)
def test_prepare(device: Any, rng: np.random.Generator, shape: AttentionShape) -> None:
    lab, B, W, room = Lab(device), 2, 5, 200
    start, width = [0, 126], [3, 5]
    cache = fill(lab, rng, shape, B, 0, room, "bf16")
    before = [[cache.read(plane, b, room) for b in range(B)] for plane in (cache.kv.k, cache.kv.v)]
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
    for plane, values, old in zip((cache.kv.k, cache.kv.v), (rotate(norm1(k, wk), positions, shape), v), before):
        for b in range(B):
            stored, want = cache.read(plane, b, room), old[b].copy()
            for w in range(width[b]):
                want[start[b] + w] = values[b * W + w]
            close(stored, want, 3e-3)
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


@pytest.mark.parametrize("shape", SHAPES)
def test_equals_float64(device: Any, rng: np.random.Generator, shape: AttentionShape) -> None:
    lab = Lab(device)
    for i, (B, W, start) in enumerate(
        ((1, 1, [700]), (2, 4, [0, 63]), (2, 13, [5, 130]), (1, 70, [1]), (3, 1, [0, 64, 511]), (9, 7, [30] * 9))
    ):
        device.order = i % 2
        room = max(start) + W
        cache = fill(lab, rng, shape, B, room, room, "bf16")
        q, gate = (bf16(rng.normal(size=(B, W, shape.hq, shape.hd))) for _ in range(2))
        got = run(lab, bf16(q * 3), gate, cache, lab.rows(B, W, start))
        want = [attend(bf16(q[b] * 3), cache.k[b], cache.v[b], gate[b], start[b], shape) for b in range(B)]
        close(got, np.stack(want), 6e-3)


def test_unwritten_pages_and_padding_rows_are_not_read(device: Any, rng: np.random.Generator) -> None:
    """Page ids beyond a row's length may be anything; what follows its last ordinal in a page may be NaN."""
    lab, shape = Lab(device), SHAPES[0]
    for W, width in ((3, [2, 0]), (30, [7, 30])):
        start = [100, 20]
        cache = fill(lab, rng, shape, 2, 192, 192, "bf16")
        blocks, pages = lab.get(cache.kv.blocks), [lab.get(p) for p in (cache.kv.k, cache.kv.v)]
        for b in range(2):
            for p in range(start[b] + width[b], 192):
                for plane in pages:
                    plane[blocks[b, p >> 6], :, p & 63] = np.nan
            blocks[b, -(-(start[b] + width[b]) // 64) :] = 2**30
        planes = [lab.put(p, "bf16") for p in pages]
        kv = type(cache.kv)(*planes, lab.put(blocks, "i32"))
        q, gate = (bf16(rng.normal(size=(2, W, shape.hq, shape.hd))) for _ in range(2))
        got = run(lab, q, gate, type(cache)(lab, shape, kv, cache.k, cache.v), lab.rows(2, W, start, width))
        for b in range(2):
            if n := width[b]:
                want = attend(q[b, :n], cache.k[b], cache.v[b], gate[b, :n], start[b], shape)
                close(got[b, :n], want, 6e-3)
