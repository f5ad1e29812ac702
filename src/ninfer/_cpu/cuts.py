"""How much of an operation one task takes: enough to be worth taking, little enough for every thread to get some."""

from __future__ import annotations

from ninfer._cpu.kernels import products
from ninfer._cpu.matrix import CpuMatrix
from ninfer.device import Buffer
from ninfer.errors import InvariantError

_TASK_BYTES = 32 << 10
"""Stored bytes a task of one column reads, about."""

_TILE_BYTES = 256 << 10
"""Decoded rows a task of many columns keeps beside the columns in the second-level cache, about."""

_SERIAL_BYTES = 128 << 10
"""A launch that moves no more runs on the calling thread: waking the others would take longer."""


def grain(buffer: Buffer) -> int:
    """Rows of a buffer that one thread takes at a time."""
    return max(1, _SERIAL_BYTES * buffer.shape[0] // max(1, buffer.nbytes))


def alone(tasks: int, nbytes: int) -> int:
    """A grain that keeps a small launch on the calling thread."""
    return tasks if nbytes <= _SERIAL_BYTES else 1


def rows_per_task(weight: CpuMatrix, columns: int, threads: int, results: int) -> int:
    """Rows of a task: enough to be worth taking, few enough for the workspace and for every thread to get some."""
    if columns <= 8:
        block = _TASK_BYTES // weight.row_bytes
    else:
        block = min(64, _TILE_BYTES // (4 * weight.cols), products.RESULT_BYTES // (4 * (columns + 1) * results))
    block = min(block, products.MAX_ROWS, -(-weight.rows // (2 * threads)))
    block = max(4, block // 4 * 4)
    if 4 * (columns + 1) * results * block > products.RESULT_BYTES:
        raise InvariantError(f"{columns} columns exceed the workspace")
    return block


def moe_cut(matrix: CpuMatrix, slots: int, experts: int, results: int, parts: int) -> tuple[int, int]:
    """(rows of a task, columns at once) that fit the workspace beside the lists of a task."""
    room = products.RESULT_BYTES - 4 * (slots + experts + 16)
    block = max(4, min(32, products.TILE_BYTES // (4 * matrix.cols + 64) // 4 * 4))
    while block > 4 and 4 * block * parts > room // 2:
        block -= 4
    most = min(slots, (room - 4 * block * parts) // (8 + 4 * block * results) - 1)
    if most < 1:
        raise InvariantError(f"{slots} expert slots exceed the workspace")
    return block, most
