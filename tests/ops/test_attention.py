"""Gated attention over paged keys and values against float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from ops.harness import Array, Lab, bf16, near

from ninfer.device import Buffer
from ninfer.ops import AttentionShape, KVPlanes, Rows

EPS = 1e-6


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def rotate(x: Array, positions: Array, shape: AttentionShape) -> Array:
    """x [T, heads, hd] at positions [3, T]; the angle is one fp32 product."""
    half = shape.rot // 2
    frequency = np.float32(float(shape.theta) ** (-2.0 * np.arange(half) / shape.rot))
    angle = np.float64(np.float32(positions[list(shape.axes)].T) * frequency)[:, None]
    low, high = x[..., :half], x[..., half : shape.rot]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin, x[..., shape.rot :]], axis=-1)


def norm1(x: Array, w: Array) -> Array:
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + EPS) * (1 + w)


def attend(q: Array, k: Array, v: Array, gate: Array, start: int, shape: AttentionShape) -> Array:
    """q [W, hq, hd] over k, v [n, hk, hd]; column w sees ordinals 0..start+w."""
    out = np.zeros_like(q)
    for w in range(len(q)):
        seen = start + w + 1
        for h in range(shape.hq):
            g = h // (shape.hq // shape.hk)
            s = k[:seen, g] @ q[w, h] / np.sqrt(shape.hd)
            p = np.exp(s - s.max())
            out[w, h] = p @ v[:seen, g] / p.sum()
    return out * sigmoid(gate)


def quantised(x: Array) -> tuple[Array, Array, Array]:
    """Codes, fp16 scales, and what they decode to, of rows [..., hd]: a scale for every 64 features."""
    codes, scales = np.zeros(x.shape, np.int8), np.zeros((*x.shape[:-1], -(-x.shape[-1] // 64)), np.float16)
    exact = np.zeros(x.shape)
    for g in range(scales.shape[-1]):
        part = np.s_[..., 64 * g : 64 * g + 64]
        group = np.float32(bf16(x[part]))
        scale = np.float16(np.minimum(np.abs(group).max(-1, keepdims=True) / np.float32(127), 65504))
        wide = np.float32(scale)
        inverse = np.divide(np.float32(1), wide, out=np.zeros_like(wide), where=wide != 0)
        codes[part] = np.clip(np.rint(group * inverse), -127, 127)
        scales[..., g] = scale[..., 0]
        exact[part] = codes[part] * wide.astype(np.float64)
    return codes, scales, exact


@dataclass
class Cache:
    """Planes whose pages are dealt out of order, filled with ``n`` ordinals of every row."""

    lab: Lab
    shape: AttentionShape
    kv: KVPlanes
    k: Array
    v: Array

    def keys(self, b: int, n: int) -> Array:
        """What ordinals 0..n-1 of row b decode to, [n, hk, hd]."""
        return self._decoded(self.kv.k, self.kv.k_scale, b, n)

    def values(self, b: int, n: int) -> Array:
        return self._decoded(self.kv.v, self.kv.v_scale, b, n)

    def _decoded(self, plane: Buffer, scales: Buffer | None, b: int, n: int) -> Array:
        stored = self.read(plane, b, n)
        if scales is None:
            return stored
        return stored * np.repeat(np.float64(self.read(scales, b, n)), 64, -1)[..., : self.shape.hd]

    def read(self, plane: Buffer, b: int, n: int) -> Array:
        """Ordinals 0..n-1 of row b as they are stored, [n, hk, elements]."""
        pages, blocks = self.lab.get(plane), self.lab.get(self.kv.blocks)
        return (
            np.stack([pages[blocks[b, p >> 6], :, p & 63] for p in range(n)]) if n else np.zeros((0, *self.k.shape[2:]))
        )


def fill(lab: Lab, rng: np.random.Generator, shape: AttentionShape, B: int, n: int, room: int, dtype: str) -> Cache:
    L = -(-room // 64)
    blocks = rng.permutation(B * L + 2)[: B * L].reshape(B, L)
    k, v = (rng.normal(size=(B, room, shape.hk, shape.hd)) for _ in range(2))

    def plane(values: Array, dtype: str) -> Buffer:
        pages = np.full((B * L + 2, shape.hk, 64, values.shape[-1]), 9.0)
        for b in range(B):
            for p in range(n):
                pages[blocks[b, p >> 6], :, p & 63] = values[b, p]
        return lab.put(pages, dtype)

    table = lab.put(blocks, "i32")
    if dtype == "i8":
        (kc, ks, ke), (vc, vs, ve) = quantised(k), quantised(v)
        return Cache(
            lab, shape, KVPlanes(plane(kc, "i8"), plane(vc, "i8"), table, plane(ks, "f16"), plane(vs, "f16")), ke, ve
        )
    exact = bf16 if dtype == "bf16" else lambda x: np.float64(np.float32(x))
    return Cache(lab, shape, KVPlanes(plane(k, dtype), plane(v, dtype), table), exact(k), exact(v))


def run(lab: Lab, q: Array, gate: Array, cache: Cache, rows: Rows) -> Array:
    shape, T = cache.shape, rows.B * rows.W
    out = lab.put(np.full((T, shape.hq * shape.hd), 77.0))
    scratch = lab.scratch(lab.ops.attention_scratch(T, cache.kv.blocks.shape[1] * 64, shape))
    lab.ops.attention(out, lab.put(q.reshape(T, -1)), lab.put(gate.reshape(T, -1)), cache.kv, rows, shape, scratch)
    return lab.get(out).reshape(rows.B, rows.W, shape.hq, shape.hd)


def shape_of(hq: int, hk: int, hd: int, rot: int) -> AttentionShape:
    return AttentionShape(hq, hk, hd, rot, 10_000.0, tuple(j % 3 for j in range(rot // 2)))


SHAPES = [shape_of(6, 2, 32, 16), shape_of(3, 1, 20, 10), shape_of(2, 2, 96, 32), shape_of(8, 2, 256, 64)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "i8"])
def test_prepare(lab: Lab, rng: np.random.Generator, shape: AttentionShape, dtype: str) -> None:
    B, W, room = 2, 5, 200
    start, width = [0, 126], [3, 5]
    cache = fill(lab, rng, shape, B, 0, room, dtype)
    before = [read(b, room) for read in (cache.keys, cache.values) for b in range(B)]
    q, k, v = (rng.normal(size=(B * W, h, shape.hd)).astype(np.float32) for h in (shape.hq, shape.hk, shape.hk))
    positions = rng.integers(0, 262_144, (3, B * W))
    wq, wk = (rng.normal(size=shape.hd) * 0.2 for _ in range(2))
    rows = lab.rows(B, W, start, width, positions=positions)
    query = lab.put(q.reshape(B * W, -1))
    lab.ops.attention_prepare(
        query, lab.put(k.reshape(B * W, -1)), lab.put(v.reshape(B * W, -1)), lab.put(wq, "bf16"), lab.put(wk, "bf16"),
        cache.kv, rows, shape, EPS,
    )  # fmt: skip
    real = np.array([b * W + w for b in range(B) for w in range(width[b])])
    got = lab.get(query).reshape(B * W, shape.hq, shape.hd)
    wanted = rotate(norm1(q.astype(np.float64), bf16(wq)), positions, shape)
    near(got[real], wanted[real], 2e-6 * float(np.max(np.abs(wanted))))
    keys = rotate(norm1(k.astype(np.float64), bf16(wk)), positions, shape)
    steps = {"f32": 2e-6, "bf16": 2.0**-8, "i8": 2.0**-8 + 1 / 127}
    for read, values, old in ((cache.keys, keys, before[:B]), (cache.values, v.astype(np.float64), before[B:])):
        for b in range(B):
            want = old[b].copy()
            for w in range(width[b]):
                want[start[b] + w] = values[b * W + w]
            near(read(b, room), want, steps[dtype] * float(np.max(np.abs(want))))


HARD = (1.0, 1e-6, 3e-8, 0.0, 1e4, 1e30)


def test_int8_rows_are_the_codes_and_scales_of_their_definition(lab: Lab, rng: np.random.Generator) -> None:
    """Values, which nothing is done to before: every bit, from zeros and subnormal scales to scales that saturate."""
    for shape in (*SHAPES, shape_of(1, 1, 130, 8)):
        W = 2 * len(HARD)
        cache = fill(lab, rng, shape, 1, 0, W, "i8")
        v = (rng.normal(size=(W, shape.hk, shape.hd)) * np.repeat(HARD, 2)[:, None, None]).astype(np.float32)
        v[0, 0, :3] = 127.0, 0.5, 1.5  # ties go to the even code
        q, k = (lab.put(np.ones((W, h * shape.hd))) for h in (shape.hq, shape.hk))
        ones = lab.put(np.ones(shape.hd), "bf16")
        lab.ops.attention_prepare(
            q, k, lab.put(v.reshape(W, -1)), ones, ones, cache.kv, lab.rows(1, W, [0]), shape, EPS
        )
        codes, scales, _ = quantised(v)
        assert cache.kv.v_scale is not None
        np.testing.assert_array_equal(cache.read(cache.kv.v, 0, W), codes)
        np.testing.assert_array_equal(cache.read(cache.kv.v_scale, 0, W), scales)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "i8"])
def test_equals_float64(lab: Lab, rng: np.random.Generator, shape: AttentionShape, dtype: str) -> None:
    for B, W, start in ((1, 1, [700]), (2, 4, [0, 63]), (2, 13, [5, 130]), (1, 70, [1]), (3, 1, [0, 64, 511])):
        room = max(start) + W
        cache = fill(lab, rng, shape, B, room, room, dtype)
        q, gate = (rng.normal(size=(B, W, shape.hq, shape.hd)).astype(np.float32) for _ in range(2))
        got = run(lab, q * 3, gate, cache, lab.rows(B, W, start))
        for b in range(B):
            want = attend(q[b].astype(np.float64) * 3, cache.k[b], cache.v[b], gate[b], start[b], shape)
            near(got[b], want, 1e-5)


def test_any_cut_gives_the_same_bits(lab: Lab, lab1: Lab, rng: np.random.Generator) -> None:
    """One pass, single steps, widths that spread splits over threads and widths that do not."""
    for shape, dtype in zip(SHAPES[:2], ("f32", "i8")):
        first, n = 400, 190
        q, gate = (rng.normal(size=(1, n, shape.hq, shape.hd)).astype(np.float32) for _ in range(2))
        state = rng.bit_generator.state
        results = []
        for one in (lab, lab1):
            rng.bit_generator.state = state
            cache = fill(one, rng, shape, 1, first + n, first + n, dtype)
            for size in (n, 1, 7, 64):
                parts = [
                    run(one, q[:, at : at + size], gate[:, at : at + size], cache, one.rows(1, m, [first + at]))
                    for at in range(0, n, size)
                    for m in [min(size, n - at)]
                ]
                results.append(np.concatenate(parts, axis=1).view(np.uint32))
        for result in results[1:]:
            np.testing.assert_array_equal(result, results[0])


def test_a_batch_gives_the_bits_of_its_rows(lab: Lab, rng: np.random.Generator) -> None:
    shape, B, W, start = SHAPES[0], 3, 4, [0, 600, 77]
    cache = fill(lab, rng, shape, B, 604, 604, "f32")
    q, gate = (rng.normal(size=(B, W, shape.hq, shape.hd)).astype(np.float32) for _ in range(2))
    together = run(lab, q, gate, cache, lab.rows(B, W, start))
    blocks = lab.get(cache.kv.blocks)
    for b in range(B):
        alone = Cache(lab, shape, KVPlanes(cache.kv.k, cache.kv.v, lab.put(blocks[b : b + 1], "i32")), cache.k, cache.v)
        got = run(lab, q[b : b + 1], gate[b : b + 1], alone, lab.rows(1, W, start[b : b + 1]))
        np.testing.assert_array_equal(got[0].view(np.uint32), together[b].view(np.uint32))


def test_large_scores_do_not_overflow(lab: Lab, rng: np.random.Generator) -> None:
    shape = SHAPES[0]
    cache = fill(lab, rng, shape, 1, 140, 140, "f32")
    q, gate = rng.normal(size=(1, 1, shape.hq, shape.hd)) * 1e3, np.zeros((1, 1, shape.hq, shape.hd))
    got = run(lab, q.astype(np.float32), gate, cache, lab.rows(1, 1, [139]))
    want = attend(np.float64(np.float32(q[0])), cache.k[0], cache.v[0], gate[0], 139, shape)
    assert np.isfinite(got).all()
    near(got[0], want, 2e-3)  # fp32 scores near 1e4 are good to 1e-3


def test_padding_columns_append_nothing(lab: Lab, rng: np.random.Generator) -> None:
    shape = SHAPES[0]
    cache = fill(lab, rng, shape, 2, 10, 64, "f32")
    before = [lab.get(cache.kv.k), lab.get(cache.kv.v)]
    T = 6
    zero = lab.put(np.zeros(shape.hd), "bf16")
    q, k, v = (lab.put(rng.normal(size=(T, h * shape.hd))) for h in (shape.hq, shape.hk, shape.hk))
    lab.ops.attention_prepare(q, k, v, zero, zero, cache.kv, lab.rows(2, 3, [10, 10], [0, 0]), shape, EPS)
    for old, plane in zip(before, (cache.kv.k, cache.kv.v)):
        np.testing.assert_array_equal(lab.get(plane), old)
