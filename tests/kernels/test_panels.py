"""Products of 17 to 128 columns whose columns the kernel before them left in order, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kernels.checks import close, poison
from kernels.machine import EmulatedDevice
from kernels.test_projections import EPS, norm1, silu
from ops.harness import Lab, bf16

Q4, Q5, FP8 = "q4_g64_fp16", "q5_g64_fp16", "fp8_e4m3fn_row_bf16"
I, K, N = 512, 192, 48


class Ffn:
    """x += (silu(norm1(x) G^T) * (norm1(x) U^T)) D^T of ``T`` columns, one Op after the other."""

    def __init__(self, device: Any, rng: np.random.Generator, T: int, format: str = Q4, inner: int = I) -> None:
        self.lab, self.T, self.rng = Lab(device), T, rng
        self.weights = [self.lab.matrix(f, rng.normal(size=size) / np.sqrt(size[1])) for f, size in (
            (format, (inner, K)), (format, (inner, K)), (Q5, (N, inner)))]  # fmt: skip
        self.x, self.w, self.y = (bf16(rng.normal(size=size)) for size in ((T, K), (K,), (T, N)))
        self.norm, self.scratch = self.lab.put(self.w, "bf16"), poison(self.lab, self.lab.ops.norm_scratch(T, K))
        self.product, self.out = self.lab.empty(T, inner, dtype="bf16"), self.lab.put(self.y, "bf16")
        self.columns = self.lab.put(self.x, "bf16")

    def up(self) -> None:
        (gate, _), (up, _), _ = self.weights
        self.lab.ops.norm_swiglu(self.product, self.columns, self.norm, gate, up, EPS, self.scratch)

    def down(self, y: Any = None, x: Any = None, scale: Any = None) -> None:
        self.lab.ops.project_add(x or self.out, y or self.product, self.weights[2][0], scale)

    @property
    def exact(self) -> np.ndarray:
        u = norm1(self.x, self.w)
        return silu(u @ self.weights[0][1].T) * (u @ self.weights[1][1].T)


def launched(device: Any, work: Callable[[], None]) -> list[str]:
    """Kernels that ``work`` launches, by name."""
    if isinstance(device, EmulatedDevice):
        before = len(device.launches)
        work()
        return sorted(device.launches[before:])
    asked = device.asked.copy()
    work()
    return sorted(name.split(".")[1] for name in (device.asked - asked).elements())


@pytest.mark.parametrize(("T", "width"), [(17, 32), (33, 64), (64, 64), (70, 128), (128, 128)])
@pytest.mark.parametrize(("format", "blocks"), [(Q4, 3), (FP8, 11)])
def test_down_takes_what_gate_and_up_left(
    device: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, T: int, width: int, format: str, blocks: int
) -> None:
    """With many blocks these share tiles. Twice, once from the last thread to the first: the second pass finds what the
    first left in both places."""
    monkeypatch.setattr(device, "multiprocessors", blocks)
    monkeypatch.setattr(device, "overlaps", True, raising=False)
    ffn, want = Ffn(device, rng, T, format), None
    scale = np.float32(rng.uniform(size=T))
    for device.order in range(2):
        names = launched(device, lambda: (ffn.up(), ffn.down(scale=ffn.lab.put(scale)))[0])
        assert names.count("panels") == 2, "something was uploaded in between"
        names = launched(device, lambda: (ffn.up(), ffn.down())[0])
        assert names == ["panels", f"wide_{width}", f"wide_{width}"]
        product = ffn.lab.get(ffn.product)
        close(product, ffn.exact, 8e-3)
        added = product @ ffn.weights[2][1].T
        want = (ffn.y if want is None else want) + (1 + scale[:, None]) * added
        close(ffn.lab.get(ffn.out), want)


def test_what_was_left_is_for_the_next_product_alone(device: Any, rng: np.random.Generator) -> None:
    """Whatever happens in between, the product is of what its columns are then."""
    ffn = Ffn(device, rng, 40)
    lab, other = ffn.lab, bf16(rng.normal(size=(40, I)))
    copied, words = lab.put(other, "bf16"), np.zeros((40, I), np.uint16)
    (down,) = (exact for _, exact in ffn.weights[2:])
    zeros = np.zeros((40, I))
    cases: dict[str, tuple[Callable[[], None], Any, np.ndarray]] = {
        "columns are replaced": (lambda: lab.device.upload(ffn.product, words), None, zeros),
        "columns are zeroed": (lambda: lab.device.zero(ffn.product), None, zeros),
        "a product took them": (ffn.down, None, ffn.exact),
        "another product has run": (lambda: ffn.down(copied, lab.empty(40, N, dtype="bf16")), None, ffn.exact),
        "others are wanted": (lambda: None, copied, other),
        "fewer are wanted": (lambda: None, ffn.product.head(36, I), ffn.exact[:36]),
        "some of them, in narrower panels": (lambda: None, ffn.product.slice(8, 40), ffn.exact[8:]),
    }
    for name, (between, columns, y) in cases.items():
        target = lab.put(np.zeros((len(y), N)), "bf16")
        ffn.up()
        between()
        names = launched(device, lambda columns=columns, target=target: ffn.down(columns, target))
        assert "panels" in names, name
        close(lab.get(target), y @ down.T, 1e-2)


@pytest.mark.parametrize("inner", [I - 8, I - 64, I - 4])
def test_columns_that_panels_would_be_filled_up_for_are_put_in_order(
    device: Any, rng: np.random.Generator, inner: int
) -> None:
    ffn = Ffn(device, rng, 20, FP8, inner)
    names = launched(device, lambda: (ffn.up(), ffn.down())[0])
    assert names.count("panels") == 2
    close(ffn.lab.get(ffn.out), ffn.y + ffn.exact @ ffn.weights[2][1].T, 8e-3)
