"""Put arrays on a device, read them back, and describe rows, for the tests of Ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ninfer.artifact.decoding import decode
from ninfer.artifact.encoding import encode
from ninfer.artifact.formats import bf16_to_f32, f32_to_bf16
from ninfer.device import ITEM_BYTES, Buffer, Device
from ninfer.ops import Matrix, Rows, Segment, Stored

Array = npt.NDArray[Any]

FORMATS = (
    "bf16", "fp32", "q4_g64_fp16", "q5_g64_fp16", "q6_g64_fp16", "q8_g32_fp16", "nvfp4", "fp8_e4m3fn_row_bf16",
)  # fmt: skip


class Lab:
    """One device and shorthands."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.ops = device.ops

    def empty(self, *shape: int, dtype: str = "f32") -> Buffer:
        nbytes = int(np.prod(shape)) * ITEM_BYTES[dtype]
        return self.device.arena(max(256, -(-nbytes // 256) * 256)).buffer(0, shape, dtype)

    def put(self, values: Any, dtype: str = "f32") -> Buffer:
        """A buffer holding ``values``; bf16 rounds them."""
        kind = {
            "f32": np.float32, "f16": np.float16, "i32": np.int32, "u8": np.uint8, "i8": np.int8, "u32": np.uint32,
            "i64": np.int64,
        }  # fmt: skip
        array = np.asarray(values)
        words = f32_to_bf16(np.ascontiguousarray(array, np.float32)) if dtype == "bf16" else array.astype(kind[dtype])
        buffer = self.empty(*array.shape, dtype=dtype)
        self.device.upload(buffer, np.ascontiguousarray(words))
        self._finish()
        return buffer

    def get(self, buffer: Buffer) -> Array:
        out = self.device.host(buffer.shape, buffer.dtype)
        self.device.download(out, buffer)
        self._finish()
        return bf16_to_f32(out) if buffer.dtype == "bf16" else out

    def scratch(self, nbytes: int) -> Buffer:
        return self.empty(max(1, nbytes), dtype="u8")

    def matrix(self, format: str, values: Array) -> tuple[Matrix, Array]:
        """The matrix in ``format`` and its decoded values, float64."""
        stored, exact = self.stored(format, values)
        return self.ops.matrix([Segment(stored, 0, values.shape[0])]), exact

    def stored(self, format: str, values: Array) -> tuple[Stored, Array]:
        data = encode(format, np.ascontiguousarray(values, np.float32))
        buffer = self.device.weights(data)
        return Stored(format, values.shape, buffer), decode(format, data, values.shape).astype(np.float64)

    def rows(
        self,
        B: int,
        W: int,
        start: Sequence[int],
        width: Sequence[int] | None = None,
        read: Sequence[int] | None = None,
        write: Sequence[int] | None = None,
        positions: Array | None = None,
    ) -> Rows:
        lanes = list(range(B))
        own = [s + w for s in start for w in range(W)]
        return Rows(
            B=B,
            W=W,
            start=self.put(start, "i32"),
            width=self.put([W] * B if width is None else width, "i32"),
            read=self.put(lanes if read is None else read, "i32"),
            write=self.put(lanes if write is None else write, "i32"),
            table=self.put(lanes, "i32"),
            tokens=self.put([0] * (B * W), "i32"),
            positions=self.put([own] * 3 if positions is None else positions, "i32"),
        )

    def _finish(self) -> None:
        event = self.device.event()
        event.record()
        event.wait()


def bf16(values: Array) -> Array:
    """``values`` rounded to bf16, float64."""
    return bf16_to_f32(f32_to_bf16(np.ascontiguousarray(values, np.float32))).astype(np.float64)


def near(got: Array, want: Array, tolerance: float) -> None:
    """Every element within ``tolerance``, and the message says by how much it is not."""
    assert got.shape == want.shape
    worst = float(np.max(np.abs(got - want), initial=0.0))
    assert worst <= tolerance, f"{worst:.3e} > {tolerance:.3e}"
