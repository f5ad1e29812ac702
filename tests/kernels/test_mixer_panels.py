"""Products of 17 to 128 columns that take what a mixer left for them in order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernels.checks import close, poison
from kernels.test_gdn import Layer, rounded
from kernels.test_panels import forget, launched
from ops.harness import Array, Lab, bf16
from ops.test_attention import fill, shape_of
from ops.test_gdn import EPS, make

from ninfer.ops import AttentionShape, GdnShape

N = 48


class Output:
    """x [T, N] += y W^T for y [T, K]."""

    def __init__(self, lab: Lab, rng: np.random.Generator, T: int, K: int) -> None:
        self.lab, self.x = lab, bf16(rng.normal(size=(T, N)))
        self.weight, self.exact = lab.matrix("q5_g64_fp16", rng.normal(size=(N, K)) / np.sqrt(K))
        self.y, self.target = lab.put(np.full((T, K), np.nan), "bf16"), lab.put(self.x, "bf16")

    def add(self) -> None:
        self.lab.ops.project_add(self.target, self.y, self.weight)

    def check(self, real: Array) -> None:
        """Columns that are real were added to, and the others are as they were."""
        y, x = self.lab.get(self.y), self.lab.get(self.target)
        close(x[real], self.x[real] + y[real] @ self.exact.T)
        padding = np.setdiff1d(np.arange(len(x)), real)
        np.testing.assert_array_equal(x[padding], self.x[padding])


def real_columns(W: int, width: list[int]) -> Array:
    return np.array([b * W + w for b, n in enumerate(width) for w in range(n)])


@pytest.mark.parametrize(
    ("W", "width", "columns"),
    [(6, [6, 2, 0], 32), (8, [8, 5, 0, 1, 8], 64), (11, [11, 9], 32), (15, [15, 1, 9, 0, 8, 15], 128)],
)
@pytest.mark.parametrize("shape", [GdnShape(2, 4, 128, 128, 4), GdnShape(1, 32, 20, 8, 3)])
@pytest.mark.parametrize("recorded", [False, True])
def test_a_step_of_gated_deltanet(
    device: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, W: int, width: list[int], columns: int,
    shape: GdnShape, recorded: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr(device, "overlaps", True, raising=False)
    lab, B = Lab(device), len(width)
    case = rounded(make(rng, shape, B, W))
    layer, output = Layer(lab, case), Output(lab, rng, B * W, shape.nv * shape.dv)
    record = layer.record(B * W) if recorded else None
    q, k, v, *gates = (lab.put(x.reshape(B * W, -1), "bf16") for x in case.inputs)
    rows, scratch = lab.rows(B, W, case.start, width), poison(lab, lab.ops.gdn_scratch(B * W, shape))
    forget(device)

    def work() -> None:
        lab.ops.gdn(output.y, (q, k, v), *gates, *layer.fixed, layer.state, record, rows, shape, EPS, scratch)
        output.add()

    device.pairs = 1000
    few = "gdn_few_pair" if recorded and W <= 8 else "gdn_few"
    assert launched(device, work) == [few, f"wide_{columns}"]
    output.check(real_columns(W, width))


@pytest.mark.parametrize(("shape", "dtype"), [(shape_of(8, 2, 32, 16), "bf16"), (shape_of(2, 1, 256, 64), "i8")])
@pytest.mark.parametrize("W", [6, 9])
def test_attention_over_split_contexts(
    device: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, shape: AttentionShape, dtype: str, W: int
) -> None:
    monkeypatch.setattr(device, "multiprocessors", 32)
    monkeypatch.setattr(device, "overlaps", True, raising=False)
    lab, B, start = Lab(device), 3, [5, 130, 62]
    cache = fill(lab, rng, shape, B, 130 + W, 130 + W, dtype)
    output = Output(lab, rng, B * W, shape.hq * shape.hd)
    q, k, v, gate = (
        lab.put(rng.normal(size=(B * W, h * shape.hd)), "bf16") for h in (shape.hq, shape.hk, shape.hk, shape.hq)
    )
    norms = [lab.put(rng.normal(size=shape.hd) * 0.2, "bf16") for _ in range(2)]
    rows, scratch = lab.rows(B, W, start), poison(lab, lab.ops.attention_scratch(B * W, 192, shape))

    def work() -> None:
        lab.ops.attend(output.y, q, k, v, gate, *norms, cache.kv, rows, shape, 1e-6, scratch)
        output.add()

    work()  # makes the table of rotary frequencies
    lab.device.upload(output.target, np.zeros_like(lab.device.host(output.target.shape, "bf16")))
    output.x = np.zeros_like(output.x)
    forget(device)
    names = launched(device, work)
    assert "attention_merge" in names
    assert names[-1] == "wide_32"
    assert "panels" not in names
    output.check(np.arange(B * W))


def test_what_a_mixer_left_is_for_the_next_product_alone(device: Any, rng: np.random.Generator) -> None:
    lab, shape, B, W = Lab(device), GdnShape(2, 16, 16, 16, 4), 3, 6
    case = rounded(make(rng, shape, B, W))
    layer, output = Layer(lab, case), Output(lab, rng, B * W, 256)
    q, k, v, *gates = (lab.put(x.reshape(B * W, -1), "bf16") for x in case.inputs)
    rows, other = lab.rows(B, W, case.start), bf16(rng.normal(size=(B * W, 256)))
    copied, scratch = lab.put(other, "bf16"), poison(lab, lab.ops.gdn_scratch(B * W, shape))

    def step() -> None:
        lab.ops.gdn(output.y, (q, k, v), *gates, *layer.fixed, layer.state, None, rows, shape, EPS, scratch)

    step()
    lab.device.zero(output.y)
    assert "panels" in launched(device, output.add)
    output.check(np.arange(B * W))
    step()
    output.y = copied
    assert "panels" in launched(device, output.add)
    output.check(np.arange(B * W))
