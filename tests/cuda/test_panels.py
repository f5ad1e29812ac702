"""Panels that a kernel left are taken by the next launch alone, in recordings too."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fakes.cuda_driver import FakeDriver

from ninfer._cuda.blas import Blas
from ninfer._cuda.device import CudaDevice
from ninfer.device import working
from ninfer.ops import Segment, Stored

T, H, I = 20, 256, 256


class Ffn:
    """Gate, up and down, of zeros. What down adds to is normed next."""

    def __init__(self, device: CudaDevice) -> None:
        self.device, self.ops = device, device.ops
        self.x, self.product, self.norm = (self.empty(*size) for size in ((T, H), (T, I), (1, H)))
        self.scratch = self.empty(1 << 15, dtype="u8")
        self.gate, self.down_weight = (
            self.ops.matrix([Segment(Stored("bf16", size, self.empty(2 * size[0] * size[1], dtype="u8")), 0, size[0])])
            for size in ((I, H), (H, I))
        )

    def empty(self, *shape: int, dtype: str = "bf16") -> Any:
        return self.device.arena(4 << 20).buffer(0, shape, dtype)

    def up(self) -> None:
        self.ops.norm_swiglu(self.product, self.x, self.norm, self.gate, self.gate, 1e-6, self.scratch)

    def down(self) -> None:
        self.ops.project_add(self.x, self.product, self.down_weight, norm=self.norm)

    def both(self) -> None:
        self.up()
        self.down()


@pytest.fixture
def ffn(machine: FakeDriver) -> Iterator[Ffn]:
    device = CudaDevice()
    with working(device):
        yield Ffn(device)
    device.close()


def made(device: CudaDevice, work: Callable[[], object]) -> int:
    """Launches in ``work`` that put columns in order."""
    before = device.asked["rows.panels"]
    work()
    return device.asked["rows.panels"] - before


def test_a_recording_relies_on_nothing_before_it(ffn: Ffn) -> None:
    device = ffn.device
    assert made(device, ffn.both) == 1
    assert made(device, lambda: device.capture(ffn.both)) == 1
    ffn.up()
    assert made(device, lambda: device.capture(ffn.down)) == 1
    assert made(device, lambda: device.capture(ffn.up)) == 1
    assert made(device, ffn.down) == 1, "what was recorded has not run"
    graph = device.capture(lambda: None)
    ffn.up()
    graph.launch()
    assert made(device, ffn.down) == 1, "nobody knows what a recording has written"


def test_what_was_added_to_is_left_with_its_norm(ffn: Ffn) -> None:
    device = ffn.device
    assert made(device, ffn.down) == 1
    assert made(device, ffn.both) == 0
    assert made(device, lambda: device.capture(ffn.both)) == 1
    ffn.down()
    ffn.norm = ffn.empty(1, H)
    assert made(device, ffn.up) == 1
    ffn.ops.project_add(ffn.x, ffn.product, ffn.down_weight)
    assert made(device, ffn.up) == 1, "nobody said that a norm comes next"


def test_a_recording_that_failed_leaves_nothing(ffn: Ffn) -> None:
    def fail() -> None:
        ffn.up()
        raise RuntimeError

    with pytest.raises(RuntimeError):
        ffn.device.capture(fail)
    assert made(ffn.device, ffn.down) == 1


def test_whatever_is_submitted_counts(ffn: Ffn) -> None:
    device, word = ffn.device, np.zeros((T, H), np.uint16)
    other, copies = ffn.empty(T, H), device.copies()
    for work in (
        lambda: device.upload(ffn.x, word),
        lambda: device.zero(ffn.x),
        lambda: device.copy(ffn.x, other),
        lambda: device.copy_rows([ffn.x], 0, 1),
        lambda: device.download(word, ffn.x),
        lambda: copies.upload(ffn.x, word),
        lambda: device.weights(np.zeros(64, np.uint8)),
        lambda: device.arena(256),
        lambda: device.ops.gather(ffn.x, other, ffn.empty(T, dtype="i32")),
    ):
        ffn.up()
        work()
        assert made(device, ffn.down) == 1


def test_products_of_the_library_count(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    library = Blas.__new__(Blas)
    library._device = SimpleNamespace(enter=lambda: asked.append("enter"))
    library._handle = ctypes.c_void_p()
    monkeypatch.setattr(library, "_call", lambda name, *arguments: asked.append(name))
    library(0, 8, "bf16", 0, 0, 8, 8, 8, False)
    assert asked == ["enter", "cublasGemmEx"]
