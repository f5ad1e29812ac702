"""cuBLAS, for products of many columns with bf16 matrices."""

from __future__ import annotations

import ctypes
from typing import Any

from ninfer._cuda.buffers import CudaBuffer
from ninfer._cuda.driver import EXTRAS
from ninfer.errors import DeviceError

_BF16, _F32, _COMPUTE_F32 = 14, 0, 68
_TRANSPOSED, _PLAIN, _DEFAULT = 1, 0, -1


class Blas:
    """Products on a device's stream. Raises DeviceError where the library is missing.

    The library is called directly: CuPy's binding sets a stream before every call, which takes the workspace given here
    away again, so that the library would allocate memory inside recordings.
    """

    def __init__(self, device: Any) -> None:
        try:
            from cuda.pathfinder import load_nvidia_dynamic_lib

            self._library = ctypes.CDLL(load_nvidia_dynamic_lib("cublas").abs_path)
        except (ImportError, OSError, RuntimeError) as error:
            raise DeviceError(f"no cuBLAS ({error}): {EXTRAS}") from error
        self._device = device
        self._handle = ctypes.c_void_p()
        self._call("cublasCreate_v2", ctypes.byref(self._handle))
        self._call("cublasSetStream_v2", self._handle, ctypes.c_void_p(int(device.stream)))

    def use(self, workspace: CudaBuffer) -> None:
        """Work in ``workspace`` u8, given before any product: in recordings the library must not allocate."""
        room = ctypes.c_void_p(workspace.ptr), ctypes.c_size_t(workspace.nbytes)
        self._call("cublasSetWorkspace_v2", self._handle, *room)

    def __call__(self, c: int, c_stride: int, c_type: str, a: int, b: int, m: int, n: int, k: int, add: bool) -> None:
        """c [n, m] = b [n, k] a[m, k]^T, or c += where ``add``; rows of c are ``c_stride`` elements apart.

        a, b, c are addresses; a and b are bf16, c is ``c_type`` bf16 or f32; sums are fp32.
        """
        self._device.enter()
        one, beta = ctypes.c_float(1.0), ctypes.c_float(float(add))
        self._call(
            "cublasGemmEx", self._handle, _TRANSPOSED, _PLAIN, m, n, k, ctypes.byref(one), ctypes.c_void_p(a), _BF16, k,
            ctypes.c_void_p(b), _BF16, k, ctypes.byref(beta), ctypes.c_void_p(c),
            _BF16 if c_type == "bf16" else _F32, c_stride, _COMPUTE_F32, _DEFAULT,
        )  # fmt: skip

    def close(self) -> None:
        """Give the library's memory back. Idempotent."""
        handle, self._handle = self._handle, ctypes.c_void_p()
        if handle:
            self._call("cublasDestroy_v2", handle)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise DeviceError(f"{name}: status {status}")
