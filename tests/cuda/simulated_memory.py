"""Kernels that move memory, in a process that simulates CUDA (see test_simulator)."""

from __future__ import annotations

import numpy as np
from numba import cuda

from ninfer._cuda import memory_kernels


def test_rows_of_planes() -> None:
    rng = np.random.default_rng(0)
    memory = rng.integers(0, 2**63, 200, np.uint64)
    want, planes = memory.copy(), [(3, 7), (60, 1), (70, 20)]  # first word, words of a row
    for first, words in planes:
        want[first + 4 * words : first + 5 * words] = memory[first + words : first + 2 * words]
    table = np.array(planes, np.int64).reshape(-1)
    cuda.jit(memory_kernels.copy_rows)[(2, len(planes)), 4](memory, table, 1, 4)
    np.testing.assert_array_equal(memory, want)
