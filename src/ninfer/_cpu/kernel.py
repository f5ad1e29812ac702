"""Native kernels: how they are declared, compiled once per machine, and found again on disk.

A kernel is a Numba function ``f(a, begin, end, ws)`` of int64 addresses compiled to a C function: ``a`` its argument
words (addresses, integers, float64 bits), ``[begin, end)`` the tasks to do, ``ws`` the calling thread's workspace. It
raises nothing and touches no Python object, so one native call can walk a whole recording of kernels.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import types
from numba.core.ccallback import CFunc
from numba.core.runtime import rtsys

from ninfer.native import DiskCache

_PACKAGE = "ninfer._cpu"
_OPTIONS = {"error_model": "numpy"}

KERNEL_MODULES = (
    "launch", "kernels.products", "kernels.rows", "kernels.project", "kernels.attention", "kernels.gdn", "kernels.moe",
    "kernels.sample", "kernels.block", "kernels.probe",
)  # fmt: skip
"""Modules of this room that declare native functions."""

kernels: dict[str, Kernel] = {}
"""Every declared kernel by name."""


class _KernelCache(DiskCache):
    """Numba would first load every type and function it knows; a kernel needs its memory routines alone."""

    def _ready(self, target_context: Any) -> None:
        rtsys.initialize(target_context)


class Kernel:
    """A native function compiled (or loaded) when its address is first asked for."""

    def __init__(self, function: Any, name: str, arity: int) -> None:
        signature = types.void(*(types.int64,) * arity)
        self.name = name
        native: Any = CFunc(function, (signature.args, signature.return_type), locals={}, options=_OPTIONS)
        native._cache = _KernelCache(function, name)
        self._native = native
        self._address = 0
        self._arity = arity
        self._entry: Any = None

    def compile(self) -> None:
        """Compile the function or load it from the cache, unless that is done."""
        if not self._address:
            self._native.compile()
            self._address = self._native.address
            # Parsed code, kept for functions that would call this one; there are none.
            self._native._library._shared_module = None

    @property
    def ready(self) -> bool:
        """Whether the function is compiled, here or in the cache."""
        return bool(self._address) or Path(self._native._cache.index).exists()

    @property
    def address(self) -> int:
        self.compile()
        return self._address

    def __call__(self, *words: int) -> None:
        """Call the function with int64 words, without holding the interpreter's lock."""
        if self._entry is None:
            self._entry = ctypes.CFUNCTYPE(None, *(ctypes.c_int64,) * self._arity)(self.address)
        self._entry(*words)


def kernel(name: str, arity: int = 4) -> Callable[[Any], Kernel]:
    """Declare a native function of ``arity`` int64 arguments; 4 for a kernel, as the module says."""

    def declare(function: Any) -> Kernel:
        kernels[name] = Kernel(function, name, arity)
        return kernels[name]

    return declare


def compile_all(progress: Callable[[int, int, str], None] | None = None) -> None:
    """Compile what the cache lacks; ``progress(done, total, name)`` after each. The rest is loaded when first used."""
    for module in KERNEL_MODULES:
        importlib.import_module(f"{_PACKAGE}.{module}")
    missing = [each for each in kernels.values() if not each.ready]
    for done, each in enumerate(missing, 1):
        each.compile()
        if progress is not None:
            progress(done, len(missing), each.name)
