"""cuBLAS, for products of many columns with bf16 matrices."""

from __future__ import annotations

from typing import Any

import numpy as np

from ninfer._cuda.driver import EXTRAS
from ninfer.errors import DeviceError


class Blas:
    """Products on a device's stream. Raises DeviceError where the library is missing."""

    def __init__(self, device: Any) -> None:
        try:
            import cupy  # noqa: F401  (finds the library that the next import needs)
            from cupy_backends.cuda.libs import cublas
        except ImportError as error:
            raise DeviceError(f"no cuBLAS ({error}): {EXTRAS}") from error
        self._cublas = cublas
        self._stream = int(device.stream)
        self._handle = cublas.create()
        cublas.setStream(self._handle, self._stream)

    def __call__(self, c: int, c_stride: int, c_type: str, a: int, b: int, m: int, n: int, k: int, add: bool) -> None:
        """c [n, m] = b [n, k] a[m, k]^T, or c += where ``add``; rows of c are ``c_stride`` elements apart.

        a, b, c are addresses; a and b are bf16, c is ``c_type`` bf16 or f32; sums are fp32.
        """
        one, beta = np.ones(1, np.float32), np.full(1, float(add), np.float32)
        bf16, f32, compute = 14, 0, 68  # CUDA_R_16BF, CUDA_R_32F, CUBLAS_COMPUTE_32F
        self._cublas.gemmEx(
            self._handle, self._cublas.CUBLAS_OP_T, self._cublas.CUBLAS_OP_N, m, n, k, one.ctypes.data, a, bf16, k, b,
            bf16, k, beta.ctypes.data, c, bf16 if c_type == "bf16" else f32, c_stride, compute, -1,
        )  # fmt: skip

    def close(self) -> None:
        """Give the library's memory back. Idempotent."""
        handle, self._handle = self._handle, 0
        if handle:
            self._cublas.destroy(handle)
