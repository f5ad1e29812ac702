"""Arguments of a launch, as the driver would read them."""

from __future__ import annotations

import ctypes
import struct

import numpy as np
import pytest

from ninfer._cuda.buffers import CudaBuffer
from ninfer._cuda.launch import MAX_ARGUMENTS, Packer


def slots(packer: Packer, count: int, width: int = 8) -> list[bytes]:
    pointers = (ctypes.c_void_p * MAX_ARGUMENTS).from_address(packer.address)
    return [ctypes.string_at(pointers[i], width) for i in range(count)]


def test_every_kind_of_argument() -> None:
    packer = Packer()
    structure = bytes(range(128))
    args = (
        CudaBuffer(0x7F00_0000_1000, (4,), "f32"), -3, 1 << 40, 2**64 - 1, 1.5, np.float32(0.1), np.float64(0.1),
        np.int32(-7), np.uint64(1 << 63), True, structure,
    )  # fmt: skip
    keep = packer.pack(args)
    got = slots(packer, len(args))
    assert got[0] == struct.pack("<q", 0x7F00_0000_1000)
    assert got[1] == struct.pack("<q", -3)
    assert got[1][:4] == struct.pack("<i", -3)  # what a 32-bit parameter reads
    assert got[2] == struct.pack("<q", 1 << 40)
    assert got[3] == b"\xff" * 8
    assert got[4][:4] == struct.pack("<f", 1.5)
    assert got[5][:4] == struct.pack("<f", 0.1)
    assert got[6] == struct.pack("<d", 0.1)
    assert got[7][:4] == struct.pack("<i", -7)
    assert got[8] == struct.pack("<Q", 1 << 63)
    assert got[9][:4] == struct.pack("<i", 1)
    assert slots(packer, len(args), 128)[10] == structure
    packer.release(keep)
    packer.pack((1,) * len(args))
    assert slots(packer, len(args))[10] == struct.pack("<q", 1)


def test_arguments_that_cannot_be_passed() -> None:
    packer = Packer()
    with pytest.raises(TypeError, match="argument 1: list"):
        packer.pack((1, [2]))
    with pytest.raises(TypeError, match="at most"):
        packer.pack((0,) * (MAX_ARGUMENTS + 1))
