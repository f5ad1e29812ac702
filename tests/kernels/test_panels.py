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

from ninfer._cuda.area import OPERANDS
from ninfer._cuda.buffers import CudaBuffer
from ninfer.artifact.formats import f32_to_bf16
from ninfer.ops import Segment

BF16, Q4, Q5, FP8 = "bf16", "q4_g64_fp16", "q5_g64_fp16", "fp8_e4m3fn_row_bf16"
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


def test_whoever_adds_up_a_tile(device: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four blocks have parts of down's rows. One after another, each but the last leaves its slabs to that one; all
    together, each adds up its own; of two at a time, some are left and some are not. The sums are the same bits."""
    monkeypatch.setattr(device, "multiprocessors", 9)
    monkeypatch.setattr(device, "overlaps", True, raising=False)
    ffn = Ffn(device, rng, 40, Q4, inner=2048)
    tickets, found = device.ops._area.tickets, []
    for together in (1, 2, 4):
        for order in range(2):
            monkeypatch.setattr(device, "together", together, raising=False)
            monkeypatch.setattr(device, "order", order, raising=False)
            out = ffn.lab.put(ffn.y, "bf16")
            ffn.up(), ffn.down(x=out)
            found.append(ffn.lab.get(out))
            assert not ffn.lab.get(tickets).any(), "a count is left"
    close(found[0], ffn.y + ffn.lab.get(ffn.product) @ ffn.weights[2][1].T)
    assert all((x == found[0]).all() for x in found)


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


class Layer:
    """x of ``T`` columns of ``H`` features += what a mixer gives; then the inputs of the next, stored in ``formats``.
    Columns are of every size, so that some are no larger than what the norm adds to them."""

    def __init__(
        self, device: Any, rng: np.random.Generator, T: int, H: int = 768, formats: tuple[str, ...] = (Q4, BF16)
    ) -> None:
        lab = self.lab = Lab(device)
        self.T, self.H = T, H
        self.output, self.exact_output = lab.matrix(Q5, rng.normal(size=(H, K)) / np.sqrt(K))
        self.inputs = [lab.matrix(f, rng.normal(size=(N, H)) / np.sqrt(H)) for f in formats]
        size = 10 ** rng.uniform(-4, 2, (T, 1))
        self.x, self.y, self.w = (bf16(v) for v in (
            size * rng.normal(size=(T, H)), size * rng.normal(size=(T, K)), rng.normal(size=H)))  # fmt: skip
        self.columns, self.mixed, self.norm = (lab.put(v, "bf16") for v in (self.x, self.y, self.w))
        self.outs = [lab.empty(T, N, dtype="bf16") for _ in formats]
        self.scratch = poison(lab, lab.ops.norm_scratch(T, H))

    def add(self, scale: Any = None, norm: Any = None) -> None:
        self.lab.ops.project_add(self.columns, self.mixed, self.output, scale, norm or self.norm)

    def take(self, x: Any = None, norm: Any = None) -> None:
        weights = [matrix for matrix, _ in self.inputs]
        outs = [out.head(x.shape[0], N) for out in self.outs] if x else self.outs
        self.lab.ops.norm_project(outs, x or self.columns, norm or self.norm, weights, EPS, self.scratch)

    def check(self, x: np.ndarray, w: np.ndarray | None = None) -> None:
        """The inputs are those of columns ``x``, every column by itself."""
        u = norm1(x, self.w if w is None else w)
        for out, (_, exact) in zip(self.outs, self.inputs):
            want = u @ exact.T
            got = self.lab.get(out)[: len(want)]
            length = np.linalg.norm(want, axis=1, keepdims=True)
            close(got / length, want / length)


def words(values: np.ndarray) -> np.ndarray:
    return f32_to_bf16(np.ascontiguousarray(values, np.float32))


def forget(device: Any) -> None:
    """Columns that were made ready become NaN, those of panels that nobody uses with them."""
    room = CudaBuffer(device.ops._area.room.ptr, (OPERANDS,), "u8")
    device.upload(room, np.full(OPERANDS, 0xFF, np.uint8))


@pytest.mark.parametrize(("T", "width"), [(17, 32), (33, 64), (64, 64), (70, 128)])
@pytest.mark.parametrize(("formats", "blocks"), [((Q4, BF16), 3), ((FP8, Q5, BF16), 11)])
def test_inputs_take_what_was_added_to(
    device: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, T: int, width: int,
    formats: tuple[str, ...], blocks: int,
) -> None:  # fmt: skip
    """Twice, from the first thread to the last and back; then with a scale for each column."""
    monkeypatch.setattr(device, "multiprocessors", blocks)
    monkeypatch.setattr(device, "overlaps", True, raising=False)
    layer = Layer(device, rng, T, formats=formats)
    scale, x = np.float32(rng.uniform(size=T)), layer.x
    scales = layer.lab.put(scale)
    for device.order, own in ((0, None), (1, None), (0, scales)):
        forget(device)
        names = launched(device, lambda own=own: (layer.add(own), layer.take())[0])
        assert names == ["panels", f"wide_{width}", f"wide_{width}"]
        want = x + (1 if own is None else scale[:, None]) * (layer.y @ layer.exact_output.T)
        x = layer.lab.get(layer.columns)
        close(x, want)
        layer.check(x)


def test_long_columns_of_a_layer(device: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixer's output, gate and up, down, and inputs of the next: one launch puts columns in order."""
    monkeypatch.setattr(device, "overlaps", True, raising=False)
    T, H, lab = 20, 2816, Lab(device)
    layer = Layer(device, rng, T, H)
    (gate, g), (up, u), (down, d) = (
        lab.matrix(FP8, rng.normal(size=size) / np.sqrt(size[1])) for size in ((256, H), (256, H), (H, 256))
    )
    v, product = bf16(rng.normal(size=H)), lab.empty(T, 256, dtype="bf16")
    post = lab.put(v, "bf16")

    def work() -> None:
        layer.add(norm=post)
        lab.ops.norm_swiglu(product, layer.columns, post, gate, up, EPS, layer.scratch)
        lab.ops.project_add(layer.columns, product, down, norm=layer.norm)
        layer.take()

    forget(device)
    assert launched(device, work) == ["panels", *["wide_32"] * 4]
    middle = layer.x + layer.y @ layer.exact_output.T
    columns = norm1(middle, v)
    inner = silu(columns @ g.T) * (columns @ u.T)
    close(lab.get(product), inner, 1e-2)
    x = lab.get(layer.columns)
    close(x, middle + inner @ d.T, 1e-2)
    layer.check(x)


def test_what_was_added_to_is_for_the_next_product_and_its_norm_alone(device: Any, rng: np.random.Generator) -> None:
    layer = Layer(device, rng, 40)
    lab, v = layer.lab, bf16(rng.normal(size=layer.H))
    other, others = lab.put(v, "bf16"), bf16(rng.normal(size=(40, layer.H)))
    copied = lab.put(others, "bf16")
    cases: dict[str, tuple[Callable[[], None], Callable[[], None], Any, Any]] = {
        "the norm is replaced": (lambda: lab.device.upload(layer.norm, words(v)), layer.take, None, v),
        "the norm is another": (lambda: None, lambda: layer.take(norm=other), None, v),
        "columns are replaced": (lambda: lab.device.upload(layer.columns, words(others)), layer.take, others, None),
        "a product took them": (layer.take, layer.take, None, None),
        "others are wanted": (lambda: None, lambda: layer.take(copied), others, None),
        "fewer are wanted": (lambda: None, lambda: layer.take(layer.columns.head(36, layer.H)), 36, None),
        "they were added to again": (lambda: layer.add(norm=other), layer.take, None, None),
    }
    for name, (between, take, want, w) in cases.items():
        lab.device.upload(layer.norm, words(layer.w))
        layer.add()
        between()
        assert "panels" in launched(device, take), name
        x = lab.get(layer.columns)
        layer.check(want if isinstance(want, np.ndarray) else x[:want], w)
    outs = lab.empty(40, N, dtype="bf16")
    layer.add()
    matrix, exact = layer.inputs[0]
    names = launched(device, lambda: lab.ops.norm_project([outs], layer.columns, None, [matrix], 0.0, layer.scratch))
    assert "panels" in names, "they are wanted as they are"
    close(lab.get(outs), lab.get(layer.columns) @ exact.T)


@pytest.mark.parametrize(
    ("T", "H", "limit", "edge", "panels"),
    [
        (40, 256, 227, 32, 1),
        (40, 256, 227, 24, 2),  # rows of two segments that share a tile
        (40, 328, 227, 0, 2),  # features to be filled up with zeros
        (100, 256, 99, 0, 4),  # columns in two launches each
        (130, 256, 227, 0, 0),
        (12, 256, 227, 0, 0),
    ],
)
def test_columns_that_are_not_left(
    device: Any, rng: np.random.Generator, T: int, H: int, limit: int, edge: int, panels: int
) -> None:
    device.shared_limit = limit << 10
    layer = Layer(device, rng, T, H)
    if edge:
        parents = [layer.lab.stored(f, rng.normal(size=(H, K)) / np.sqrt(K)) for f in (Q5, FP8)]
        spans = [(0, edge), (edge, H)]
        layer.output = layer.lab.ops.matrix([Segment(stored, *span) for (stored, _), span in zip(parents, spans)])
        layer.exact_output = np.concatenate([exact[slice(*span)] for (_, exact), span in zip(parents, spans)])
    names = launched(device, lambda: (layer.add(), layer.take())[0])
    assert names.count("panels") == panels
    x = layer.lab.get(layer.columns)
    close(x, layer.x + layer.y @ layer.exact_output.T)
    layer.check(x)
