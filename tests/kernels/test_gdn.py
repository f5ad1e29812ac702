"""The Gated DeltaNet kernels, against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kernels.checks import close, poison
from ops.harness import Array, Lab, bf16
from ops.test_gdn import EPS, Case, check_fold, make, reference

from ninfer.ops import GdnRecord, GdnShape, GdnState

SHAPES = [GdnShape(2, 4, 32, 48, 4), GdnShape(1, 3, 20, 36, 3), GdnShape(2, 2, 128, 128, 4), GdnShape(3, 3, 5, 7, 2)]


def rounded(case: Case) -> Case:
    """The case with everything that a bf16 device holds in bf16 rounded."""
    names = ("q", "k", "v", "z", "a", "b", "convolution", "norm", "tail")
    return replace(case, **{n: bf16(getattr(case, n)) for n in names})


class Layer:
    def __init__(self, lab: Lab, case: Case) -> None:
        self.lab, self.case = lab, case
        self.state = GdnState(lab.put(case.s), lab.put(case.tail, "bf16"))
        self.fixed = (
            lab.put(case.convolution, "bf16"), lab.put(case.a_log), lab.put(case.dt_bias), lab.put(case.norm, "bf16"),
        )  # fmt: skip

    def record(self, tokens: int) -> GdnRecord:
        g, lab = self.case.shape, self.lab
        return GdnRecord(
            lab.put(np.full((tokens, g.nk, g.dk), 5.0)), lab.put(np.full((tokens, g.nv, g.dv), 5.0)),
            lab.put(np.full((tokens, g.nv), 5.0)), lab.put(np.full((tokens, g.channels), 5.0), "bf16"),
        )  # fmt: skip

    def run(self, begin: int, end: int, record: GdnRecord | None = None, **where: Any) -> Array:
        case, lab, g = self.case, self.lab, self.case.shape
        B, W = len(case.start), end - begin
        q, k, v, z, a, b = (lab.put(x[:, begin:end].reshape(B * W, -1), "bf16") for x in case.inputs)
        rows = lab.rows(B, W, [s + begin for s in case.start], **where)
        out = lab.put(np.full((B * W, g.nv * g.dv), np.nan), "bf16")
        scratch = poison(lab, lab.ops.gdn_scratch(B * W, g))
        lab.ops.gdn(out, (q, k, v), z, a, b, *self.fixed, self.state, record, rows, g, EPS, scratch)
        return lab.get(out).reshape(B, W, -1)

    def image(self) -> tuple[Array, Array]:
        return self.lab.get(self.state.s), self.lab.get(self.state.tail)


def exact(W: int) -> float:
    """How well a pass of W columns keeps the state: many go through products of bf16, into sums of fp32."""
    return 2e-6 if W <= 16 else 1e-2


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("start", [0, 7])
@pytest.mark.parametrize("W", [1, 3, 6, 11, 17, 130])
def test_equals_float64(device: Any, rng: np.random.Generator, shape: GdnShape, start: int, W: int) -> None:
    lab = Lab(device)
    device.order = W % 2
    case = rounded(make(rng, shape, 2, W))
    case.start = [start, start]
    layer = Layer(lab, case)
    before = layer.image()
    passes = []
    for device.pairs in (0, 1000):
        record = layer.record(2 * W)
        passes.append(layer.run(0, W, record))
        for old, new in zip(before, layer.image()):
            np.testing.assert_array_equal(old, new, err_msg="a recorded pass must not touch the state")
    out = layer.run(0, W)
    for recorded in passes:
        np.testing.assert_array_equal(out, recorded)
    deltas = lab.get(record.d).reshape(2, W, shape.nv, shape.dv)
    s, tail = layer.image()
    for b in range(2):
        want = reference(case, b, b, W)
        close(out[b], want["out"], 4e-3 if W <= 16 else 1e-2 if shape.dk >= 16 else 3e-2)
        close(s[b], want["s"], exact(W))
        np.testing.assert_array_equal(tail[b], want["tail"])
        for name, tolerance in (("k", 1e-6), ("g", 1e-6), ("c", 0)):
            close(lab.get(getattr(record, name)).reshape(2, W, -1)[b], want[name].reshape(W, -1), tolerance)
        close(folded(case, b, want, deltas[b]), want["s"], exact(W))


def folded(case: Case, b: int, want: dict[str, Array], deltas: Array) -> Array:
    """The state that deltas [W, nv, dv] lead to from the case's own."""
    shape, g = case.shape, np.cumsum(want["g"], axis=0)
    keys = np.repeat(want["k"], shape.nv // shape.nk, axis=1)
    entry = np.zeros_like(case.s[b]) if case.start[b] == 0 else case.s[b]
    left = np.exp(g[-1] - g)[..., None] * keys
    return np.exp(g[-1])[:, None, None] * entry + np.einsum("thk,thv->hkv", left, deltas)


@pytest.mark.parametrize("correlated", [False, True])
def test_every_decay_over_a_long_prompt(device: Any, rng: np.random.Generator, correlated: bool) -> None:
    """Decays of 1 to 1e-12 a token over more than 1,024 blocks; keys that are all but the same are the hardest for an
    inverse."""
    lab, W, shape = Lab(device), 1100, GdnShape(1, 8, 16, 8, 4)
    case = make(rng, shape, 1, W)
    if correlated:
        case.k[:] = case.k[:, :1] + 0.05 * case.k
        case.convolution[:, 16:32] = np.abs(case.convolution[:, 16:32])
    case.a[:], case.dt_bias[:] = 0.0, np.log(np.e - 1)  # softplus of this is 1
    rates = -np.log([1 - 1e-7, 1 - 1e-4, 0.99, 0.7, 0.1, 1e-3, 1e-7, 1e-12])
    case.a_log[:] = np.log(rates)
    case = rounded(case)
    layer = Layer(lab, case)
    out = layer.run(0, W)
    want = reference(case, 0, 0, W)
    close(out[0], want["out"], 3e-2 if correlated else 6e-3)
    for head in range(shape.nv):
        close(layer.image()[0][0, head], want["s"][head], 3e-2 if correlated else 6e-3)


def test_steps_equal_one_pass(device: Any, rng: np.random.Generator) -> None:
    lab, W, shape = Lab(device), 37, GdnShape(2, 4, 24, 80, 4)
    case = rounded(make(rng, shape, 1, W))
    want = reference(case, 0, 0, W)
    for size in (37, 1, 7, 20):
        layer = Layer(lab, case)
        parts = [layer.run(at, min(at + size, W)) for at in range(0, W, size)]
        close(np.concatenate(parts, axis=1)[0], want["out"], 4e-3)
        close(layer.image()[0][0], want["s"], exact(size))
        np.testing.assert_array_equal(layer.image()[1][0], want["tail"])


@pytest.mark.parametrize("W", [8, 70])
def test_in_little_shared_memory(device: Any, rng: np.random.Generator, W: int) -> None:
    """As much as the smallest GPUs allow a block."""
    device.shared_limit = 99 << 10
    lab = Lab(device)
    case = rounded(make(rng, GdnShape(1, 3, 128, 128, 4), 1, W))
    layer = Layer(lab, case)
    out, want = layer.run(0, W), reference(case, 0, 0, W)
    close(out[0], want["out"], 1e-2)
    close(layer.image()[0][0], want["s"], 1e-2)


@pytest.mark.parametrize("W", [6, 24])
def test_padding_leaves_no_trace(device: Any, rng: np.random.Generator, W: int) -> None:
    lab, shape = Lab(device), GdnShape(1, 2, 16, 32, 4)
    case = rounded(make(rng, shape, 2, W, slots=4))
    layer = Layer(lab, case)
    record = layer.record(2 * W)
    where: dict[str, Any] = {"width": [4, 0], "read": [1, 0], "write": [3, 2]}
    layer.run(0, W, record, **where)
    for buffer in (record.k, record.d, record.g, record.c):
        got = lab.get(buffer).reshape(2, W, -1)
        assert (got[0, 4:] == 5.0).all()
        assert (got[1] == 5.0).all()
        assert (got[0, :4] != 5.0).any()
    layer.run(0, W, **where)
    s, tail = layer.image()
    np.testing.assert_array_equal(s[:3], case.s[:3])
    np.testing.assert_array_equal(tail[:3], case.tail[:3])
    want = reference(case, 0, 1, 4)
    close(s[3], want["s"], exact(W))
    np.testing.assert_array_equal(tail[3], want["tail"])


@pytest.mark.parametrize("start", [0, 5])
def test_fold_equals_the_recurrence_for_every_prefix(device: Any, rng: np.random.Generator, start: int) -> None:
    lab, W, shape = Lab(device), 8, GdnShape(2, 4, 20, 48, 4)
    case = rounded(make(rng, shape, 1, W, slots=2))
    case.start = [start]
    for accepted in range(W + 1):
        for target in (0, 1):
            layer = Layer(lab, case)
            record = layer.record(W)
            layer.run(0, W, record)
            rows = lab.rows(1, W, [start], read=[0], write=[target])
            lab.ops.gdn_fold([(layer.state, record)], lab.put([accepted], "i32"), rows, shape)
            s, tail = layer.image()
            if accepted == 0:
                np.testing.assert_array_equal(s, case.s)
                np.testing.assert_array_equal(tail, case.tail)
                continue
            want = reference(case, 0, 0, accepted)
            close(s[target], want["s"], 2e-6)
            np.testing.assert_array_equal(tail[target], want["tail"])
            np.testing.assert_array_equal(s[1 - target], case.s[1 - target])


@pytest.mark.parametrize("shape", [*SHAPES, GdnShape(1, 2, 70, 64, 4)])
@pytest.mark.parametrize("order", [0, 1])
def test_fold_of_many_layers(device: Any, rng: np.random.Generator, shape: GdnShape, order: int) -> None:
    device.order = order
    check_fold(Lab(device), rng, shape, 3)


def test_fold_of_more_layers_than_a_launch_takes(device: Any, rng: np.random.Generator) -> None:
    check_fold(Lab(device), rng, GdnShape(1, 1, 4, 4, 2), 66)
