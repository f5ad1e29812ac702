"""Gated DeltaNet against float64, in the recurrent and the chunked form of the same function."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from ops.harness import Array, Lab, bf16, near

from ninfer.ops import GdnRecord, GdnShape, GdnState

EPS = 1e-6


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def recurrent(q: Array, k: Array, v: Array, g: Array, beta: Array, S: Array) -> tuple[Array, Array]:
    """q, k [T, dk], v [T, dv], g, beta [T] of one head: (o [T, dv], final state)."""
    out = []
    for t in range(len(q)):
        S = np.exp(g[t]) * S
        S = S + np.outer(k[t], beta[t] * (v[t] - S.T @ k[t]))
        out.append(S.T @ q[t])
    return np.array(out), S


def chunked(q: Array, k: Array, v: Array, g: Array, beta: Array, S: Array, size: int) -> tuple[Array, Array]:
    """The same by chunks: a unit lower triangular solve, then products with the entry state."""
    out = []
    for at in range(0, len(q), size):
        Q, K, V, G, b = (x[at : at + size] for x in (q, k, v, g, beta))
        n = len(Q)
        lower = np.tril(np.ones((n, n), bool))
        between = np.array([[G[j + 1 : i + 1].sum() for j in range(n)] for i in range(n)])
        D = np.where(lower, np.exp(np.where(lower, between, 0)), 0)
        A = np.tril(b[:, None] * (K @ K.T) * D, -1)
        decay = np.exp(np.cumsum(G))
        delta = np.linalg.solve(np.eye(n) + A, b[:, None] * (V - decay[:, None] * (K @ S)))
        out.append(decay[:, None] * (Q @ S) + np.where(lower, Q @ K.T, 0) * D @ delta)
        S = decay[-1] * S + (D[-1][:, None] * K).T @ delta
    return np.concatenate(out), S


@dataclass
class Case:
    """One layer's weights and the inputs [B, W, ...] of a unit."""

    shape: GdnShape
    q: Array
    k: Array
    v: Array
    z: Array
    a: Array
    b: Array
    convolution: Array
    a_log: Array
    dt_bias: Array
    norm: Array
    s: Array
    tail: Array
    start: list[int] = field(default_factory=list)

    @property
    def inputs(self) -> tuple[Array, ...]:
        return self.q, self.k, self.v, self.z, self.a, self.b


def make(rng: np.random.Generator, shape: GdnShape, B: int, W: int, slots: int = 0) -> Case:
    nk, nv, dk, dv, C = shape.nk, shape.nv, shape.dk, shape.dv, shape.channels

    def normal(*size: int, std: float = 1.0) -> Array:
        return (rng.normal(size=size) * std).astype(np.float32)

    return Case(
        shape, normal(B, W, nk * dk), normal(B, W, nk * dk), normal(B, W, nv * dv), normal(B, W, nv * dv),
        normal(B, W, nv), normal(B, W, nv), normal(shape.taps, C, std=0.5),
        np.log(rng.uniform(0.05, 8, nv)).astype(np.float32), normal(nv, std=0.2),
        1 + normal(dv, std=0.2), normal(slots or B, nv, dk, dv, std=0.1), normal(slots or B, shape.taps - 1, C),
        [7] * B,
    )  # fmt: skip


def reference(case: Case, b: int, slot: int, width: int, chunk: int = 0) -> dict[str, Array]:
    """Outputs, state, tail and record of one row in float64."""
    g = case.shape
    nk, nv, dk, dv = g.nk, g.nv, g.dk, g.dv
    fresh = case.start[b] == 0
    c = np.concatenate([case.q[b], case.k[b], case.v[b]], axis=1)[:width].astype(np.float64)
    tail = np.zeros((g.taps - 1, g.channels)) if fresh else case.tail[slot].astype(np.float64)
    S = np.zeros((nv, dk, dv)) if fresh else case.s[slot].astype(np.float64)
    rows = np.concatenate([tail, c])
    w = bf16(case.convolution)
    y = silu(sum(w[j] * rows[j : j + width] for j in range(g.taps)))
    q = y[:, : nk * dk].reshape(width, nk, dk)
    k = y[:, nk * dk : 2 * nk * dk].reshape(width, nk, dk)
    v = y[:, 2 * nk * dk :].reshape(width, nv, dv)
    q = q / np.sqrt(np.sum(q * q, -1, keepdims=True) + 1e-6) / np.sqrt(dk)
    k = k / np.sqrt(np.sum(k * k, -1, keepdims=True) + 1e-6)
    a, beta = case.a[b, :width].astype(np.float64), sigmoid(case.b[b, :width].astype(np.float64))
    decay = -np.exp(case.a_log.astype(np.float64)) * np.logaddexp(0, a + case.dt_bias.astype(np.float64))
    out = np.zeros((width, nv, dv))
    for j in range(nv):
        head = j // (nv // nk)
        arguments = (q[:, head], k[:, head], v[:, j], decay[:, j], beta[:, j], S[j])
        out[:, j], S[j] = chunked(*arguments, chunk) if chunk else recurrent(*arguments)
    normed = out / np.sqrt(np.mean(out * out, -1, keepdims=True) + EPS) * bf16(case.norm)
    return {
        "out": (normed * silu(case.z[b, :width].astype(np.float64).reshape(width, nv, dv))).reshape(width, -1),
        "raw": out, "s": S, "tail": rows[width:], "k": k, "g": decay, "c": c,
    }  # fmt: skip


class Layer:
    """A case on the device."""

    def __init__(self, lab: Lab, case: Case) -> None:
        self.lab, self.case = lab, case
        self.state = GdnState(lab.put(case.s), lab.put(case.tail))
        self.fixed = (
            lab.put(case.convolution, "bf16"), lab.put(case.a_log), lab.put(case.dt_bias), lab.put(case.norm, "bf16"),
        )  # fmt: skip

    def record(self, tokens: int) -> GdnRecord:
        g, lab = self.case.shape, self.lab
        return GdnRecord(
            lab.empty(tokens, g.nk, g.dk), lab.empty(tokens, g.nv, g.dv), lab.empty(tokens, g.nv),
            lab.empty(tokens, g.channels),
        )  # fmt: skip

    def run(self, begin: int, end: int, record: GdnRecord | None = None, **where: Any) -> Array:
        """Columns [begin, end) of every row; out [B, W, nv*dv]."""
        case, lab, g = self.case, self.lab, self.case.shape
        B, W = len(case.start), end - begin
        q, k, v, z, a, b = (lab.put(x[:, begin:end].reshape(B * W, -1)) for x in case.inputs)
        starts = [s + begin for s in case.start]
        rows = lab.rows(B, W, starts, **where)
        out = lab.put(np.full((B * W, g.nv * g.dv), 77.0))
        lab.ops.gdn(
            out, (q, k, v), z, a, b, *self.fixed, self.state, record, rows, g, EPS,
            lab.scratch(lab.ops.gdn_scratch(B * W, g)),
        )  # fmt: skip
        return lab.get(out).reshape(B, W, -1)

    def image(self) -> tuple[Array, Array]:
        return self.lab.get(self.state.s), self.lab.get(self.state.tail)


SHAPES = [GdnShape(2, 4, 32, 48, 4), GdnShape(1, 3, 20, 36, 3), GdnShape(2, 2, 128, 128, 4), GdnShape(3, 3, 5, 7, 2)]


def test_golden_head() -> None:
    """A worked example, one head of two features, three tokens from a zero state."""
    q, k = np.array([[3.0, 4], [1, 0], [1, -1]]), np.array([[1.0, 0], [0, 2], [1, 1]])
    v, a, b = np.array([[1.0, 2], [3, -1], [-2, 0.5]]), np.array([0.0, 1, -1]), np.array([0.0, 2, -1])
    q = q / np.sqrt((q * q).sum(1, keepdims=True) + 1e-6) / np.sqrt(2)
    k = k / np.sqrt((k * k).sum(1, keepdims=True) + 1e-6)
    g = -np.exp(0.5) * np.logaddexp(0, a + 0.25)
    near(g, np.array([-1.361743890, -2.476262423, -0.637842457]), 1e-9)
    want = np.array([[0.212131924, 0.424263848], [0.029718540, 0.059437079], [-0.687056313, 0.254929397]])
    state = np.array([[-0.548882200, 0.196118517], [0.825230769, -0.313740404]])
    for out, S in (
        recurrent(q, k, v, g, sigmoid(b), np.zeros((2, 2))),
        chunked(q, k, v, g, sigmoid(b), np.zeros((2, 2)), 3),
        chunked(q, k, v, g, sigmoid(b), np.zeros((2, 2)), 2),
    ):
        near(out, want, 1e-6)
        near(S, state, 1e-6)


def test_golden_head_on_the_device(lab: Lab) -> None:
    """The same numbers through the Op: a convolution of one tap must undo SiLU, so the inputs are its inverse."""
    q, k = np.array([[3.0, 4], [1, 0], [1, -1]]), np.array([[1.0, 0], [0, 2], [1, 1]])
    v, a, b = np.array([[1.0, 2], [3, -1], [-2, 0.5]]), np.array([0.0, 1, -1]), np.array([0.0, 2, -1])
    # SiLU reaches no value below -0.2785: scale q and k (their norms cancel it) and v (the state is linear in it)
    unit = 1 / 16

    def inverse(y: Array) -> Array:
        x = np.where(y < 0, -0.1, y)
        for _ in range(200):
            s = sigmoid(x)
            x = x - (x * s - y) / (s + x * s * (1 - s))
        return x

    shape = GdnShape(1, 1, 2, 2, 1 + 1)
    zero = np.zeros((1, 1, 6))
    case = Case(
        shape, inverse(q * unit)[None], inverse(k * unit)[None], inverse(v * unit)[None], np.zeros((1, 3, 2)),
        a.reshape(1, 3, 1), b.reshape(1, 3, 1), np.array([[0.0] * 6, [1.0] * 6]), np.array([0.5]), np.array([0.25]),
        np.ones(2), np.ones((1, 1, 2, 2)), zero, [0],
    )  # fmt: skip
    layer = Layer(lab, case)
    record = layer.record(3)
    layer.run(0, 3, record)
    layer.run(0, 3)
    state = np.array([[-0.548882200, 0.196118517], [0.825230769, -0.313740404]]) * unit
    # the fixed 1e-6 weighs more against scaled-down q and k
    near(layer.image()[0][0, 0], state, 3e-5)
    near(lab.get(record.g)[:, 0], np.array([-1.361743890, -2.476262423, -0.637842457]), 2e-6)


def test_chunked_and_recurrent_agree(rng: np.random.Generator) -> None:
    for shape in SHAPES[:2]:
        case = make(rng, shape, 1, 70)
        want = reference(case, 0, 0, 70)
        for chunk in (1, 16, 64, 128):
            got = reference(case, 0, 0, 70, chunk)
            near(got["out"], want["out"], 1e-10)
            near(got["s"], want["s"], 1e-12)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("start", [0, 7])
def test_equals_float64(lab: Lab, rng: np.random.Generator, shape: GdnShape, start: int) -> None:
    W = 41
    case = make(rng, shape, 2, W)
    case.start = [start, start]
    layer = Layer(lab, case)
    record = layer.record(2 * W)
    before = layer.image()
    recorded = layer.run(0, W, record)
    for old, new in zip(before, layer.image()):
        np.testing.assert_array_equal(old, new, err_msg="a recorded pass must not touch the state")
    out = layer.run(0, W)
    np.testing.assert_array_equal(out, recorded)
    s, tail = layer.image()
    for b in range(2):
        want = reference(case, b, b, W, 64)
        raw = float(np.max(np.abs(want["raw"])))
        # the gated norm amplifies what the recurrence left: scale by the smallest rms it divides by
        rms = float(np.sqrt(np.min(np.mean(want["raw"] ** 2, -1)) + EPS))
        near(out[b], want["out"], 5e-7 * max(1.0, raw) / rms * 8)
        near(s[b], want["s"], 5e-7 * max(1.0, float(np.max(np.abs(want["s"])))))
        near(tail[b], want["tail"], 0)
        for name in ("k", "g", "c"):
            got = lab.get(getattr(record, name)).reshape(2, W, -1)[b]
            near(got, want[name].reshape(W, -1), 2e-6 * max(1.0, float(np.max(np.abs(want[name])))))


@pytest.mark.parametrize("kind", ["strong decay", "no decay", "equal keys", "alternating keys"])
def test_stress(lab: Lab, rng: np.random.Generator, kind: str) -> None:
    W, shape = 160, GdnShape(1, 2, 64, 64, 2)
    case = make(rng, shape, 1, W)
    case.start = [0]
    case.convolution = np.stack([np.zeros(shape.channels), np.ones(shape.channels)])
    if kind == "strong decay":
        case.a = np.where(rng.uniform(size=case.a.shape) < 0.5, rng.uniform(0, 60, case.a.shape), -20.0)
        case.a_log, case.dt_bias = np.zeros(2), np.zeros(2)
    elif kind == "no decay":
        case.a, case.b = np.full(case.a.shape, -40.0), np.full(case.b.shape, 40.0)
    elif kind == "equal keys":
        case.k = case.k[:, :1] + 1e-3 * case.k
    else:
        case.k = case.k[:, :1] * np.where(np.arange(W) % 2, -1, 1)[None, :, None]
    case = replace(case, **{n: np.float32(getattr(case, n)) for n in ("a", "b", "k", "a_log", "dt_bias")})
    layer = Layer(lab, case)
    layer.run(0, W)
    want = reference(case, 0, 0, W)
    near(layer.image()[0][0], want["s"], 1e-6 * max(1.0, float(np.max(np.abs(want["s"])))))


def test_any_cut_gives_the_same_bits(lab: Lab, lab1: Lab, rng: np.random.Generator) -> None:
    W, shape = 37, GdnShape(2, 4, 24, 80, 4)
    case = make(rng, shape, 1, W)
    results = []
    for one in (lab, lab1):
        for size in (37, 1, 7, 16):
            layer = Layer(one, case)
            parts = [layer.run(at, min(at + size, W)) for at in range(0, W, size)]
            results.append((np.concatenate(parts, axis=1), *layer.image()))
    for result in results[1:]:
        for got, want in zip(result, results[0]):
            np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


def test_a_batch_gives_the_bits_of_its_rows(lab: Lab, rng: np.random.Generator) -> None:
    B, W, shape = 3, 5, GdnShape(1, 2, 16, 32, 4)
    case = make(rng, shape, B, W)
    case.start = [0, 3, 9]
    together = Layer(lab, case)
    out = together.run(0, W)
    for b in range(B):
        one = replace(case, **{n: getattr(case, n)[b : b + 1] for n in ("q", "k", "v", "z", "a", "b", "s", "tail")})
        one.start = case.start[b : b + 1]
        alone = Layer(lab, one)
        np.testing.assert_array_equal(alone.run(0, W)[0], out[b])
        for got, want in zip(alone.image(), together.image()):
            np.testing.assert_array_equal(got[0], want[b])


def test_padding_leaves_no_trace(lab: Lab, rng: np.random.Generator) -> None:
    W, shape = 6, GdnShape(1, 2, 16, 32, 4)
    case = make(rng, shape, 2, W, slots=4)
    layer = Layer(lab, case)
    record = layer.record(2 * W)
    for buffer in (record.k, record.d, record.g, record.c):
        lab.device.upload(buffer, np.full(buffer.shape, 5.0, np.float32))
    layer.run(0, W, record, width=[4, 0], read=[1, 0], write=[3, 2])
    for buffer in (record.k, record.d, record.g, record.c):
        got = lab.get(buffer).reshape(2, W, -1)
        assert (got[0, 4:] == 5.0).all()
        assert (got[1] == 5.0).all()
        assert (got[0, :4] != 5.0).all()
    layer.run(0, W, width=[4, 0], read=[1, 0], write=[3, 2])
    s, tail = layer.image()
    np.testing.assert_array_equal(s[:3], case.s[:3])
    np.testing.assert_array_equal(tail[:3], case.tail[:3])
    want = reference(case, 0, 1, 4)
    near(s[3], want["s"], 1e-6)
    near(tail[3], want["tail"], 0)


@pytest.mark.parametrize("start", [0, 5])
def test_fold_equals_the_recurrence_for_every_prefix(lab: Lab, rng: np.random.Generator, start: int) -> None:
    W, shape = 8, GdnShape(2, 4, 20, 48, 4)
    case = make(rng, shape, 1, W, slots=2)
    case.start = [start]
    for accepted in range(W + 1):
        layer, plain = Layer(lab, case), Layer(lab, case)
        record = layer.record(W)
        layer.run(0, W, record)
        rows = lab.rows(1, W, [start], read=[0], write=[1])
        lab.ops.gdn_fold([(layer.state, record)], lab.put([accepted], "i32"), rows, shape)
        s, tail = layer.image()
        if accepted == 0:
            np.testing.assert_array_equal(s, case.s)
            np.testing.assert_array_equal(tail, case.tail)
            continue
        plain.run(0, accepted, read=[0], write=[1])
        for got, want in zip((s, tail), plain.image()):
            np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))
        near(s[1], reference(case, 0, 0, accepted)["s"], 1e-6)
        np.testing.assert_array_equal(s[0], case.s[0])


def fold_reference(
    entry: tuple[Array, Array], record: dict[str, Array], accepted: int, fresh: bool
) -> tuple[Array, Array]:
    """State and tail of one row in float64, ``accepted`` > 0 of its columns folded; record: k, d, g, c [W, ...]."""
    k, d, g, c = (record[name][:accepted].astype(np.float64) for name in "kdgc")
    s, tail = (np.zeros_like(x) if fresh else x.astype(np.float64) for x in entry)
    left = np.exp([g[t + 1 :].sum(axis=0) for t in range(accepted)])
    keys = np.repeat(k, s.shape[0] // k.shape[1], axis=1)
    s = np.exp(g.sum(axis=0))[:, None, None] * s + np.einsum("th,thk,thv->hkv", left, keys, d)
    return s, np.concatenate([tail, c])[-len(tail) :]


def check_fold(lab: Lab, rng: np.random.Generator, shape: GdnShape, count: int) -> None:
    """``count`` layers at once, of rows that keep none, some and all of their columns, in place and elsewhere."""
    W, slots, accepted, start = 6, 8, [0, 3, 6, 1, 0], [5, 0, 7, 9, 3]
    read, write = [0, 1, 2, 3, 6], [0, 4, 2, 5, 7]
    sizes = {"k": (shape.nk, shape.dk), "d": (shape.nv, shape.dv), "g": (shape.nv,), "c": (shape.channels,)}
    act, B = lab.device.activation, len(accepted)
    layers, entries, records = [], [], []
    for _ in range(count):
        s = rng.normal(size=(slots, shape.nv, shape.dk, shape.dv)).astype(np.float32)
        tail = bf16(rng.normal(size=(slots, shape.taps - 1, shape.channels))).astype(np.float32)
        values = {name: bf16(rng.normal(size=(B, W, *size))).astype(np.float32) for name, size in sizes.items()}
        values["g"] = -np.abs(values["g"])
        flat = {name: x.reshape(B * W, *x.shape[2:]) for name, x in values.items()}
        record = GdnRecord(*(lab.put(flat[name], act if name == "c" else "f32") for name in "kdgc"))
        layers.append((GdnState(lab.put(s), lab.put(tail, act)), record))
        entries.append((s, tail))
        records.append(values)
    lab.ops.gdn_fold(layers, lab.put(accepted, "i32"), lab.rows(B, W, start, read=read, write=write), shape)
    for (state, _), (s, tail), values in zip(layers, entries, records, strict=True):
        got_s, got_tail = lab.get(state.s), lab.get(state.tail)
        for b in range(B):
            if not accepted[b]:
                continue
            row = {name: x[b] for name, x in values.items()}
            want_s, want_tail = fold_reference((s[read[b]], tail[read[b]]), row, accepted[b], start[b] == 0)
            near(got_s[write[b]], want_s, 1e-6 * float(np.max(np.abs(want_s))))
            np.testing.assert_array_equal(got_tail[write[b]], want_tail)
        kept = [slot for slot in range(slots) if slot not in [w for w, n in zip(write, accepted) if n]]
        np.testing.assert_array_equal(got_s[kept], s[kept])
        np.testing.assert_array_equal(got_tail[kept], tail[kept])


@pytest.mark.parametrize("shape", SHAPES)
def test_fold_of_many_layers(lab: Lab, rng: np.random.Generator, shape: GdnShape) -> None:
    check_fold(lab, rng, shape, 3)


def test_fold_of_many_layers_on_one_thread(lab1: Lab, rng: np.random.Generator) -> None:
    check_fold(lab1, rng, SHAPES[0], 2)
