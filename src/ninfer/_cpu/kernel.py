"""Native kernels: how they are declared, compiled once per machine, and found again on disk.

A kernel is a Numba function ``f(a, begin, end, ws)`` of int64 addresses compiled to a C function: ``a`` its argument
words (addresses, integers, float64 bits), ``[begin, end)`` the tasks to do, ``ws`` the calling thread's workspace. It
raises nothing and touches no Python object, so one native call can walk a whole recording of kernels.

Compiled code is kept under ``env.cache_dir()`` in a folder named after everything it depends on: the source of the
kernel's module and of the modules that one imports, Numba, llvmlite, Python and the CPU.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import logging
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
from llvmlite import binding
from numba import types
from numba.core import config
from numba.core.caching import CompileResultCacheImpl, FunctionCache
from numba.core.ccallback import CFunc
from numba.core.runtime import rtsys

from ninfer import env

log = logging.getLogger("ninfer")

_PACKAGE = "ninfer._cpu"
_IMPORT = re.compile(rf"^from ({re.escape(_PACKAGE)}[.\w]*) import", re.MULTILINE)
_OPTIONS = {"error_model": "numpy"}

KERNEL_MODULES = (
    "launch", "kernels.products", "kernels.rows", "kernels.project", "kernels.attention", "kernels.gdn", "kernels.moe",
    "kernels.sample", "kernels.probe",
)  # fmt: skip
"""Modules of this room that declare native functions."""

kernels: dict[str, Kernel] = {}
"""Every declared kernel by name."""


def cpu_features() -> str:
    """LLVM's list of the instruction sets that code is made for: this machine's, unless Numba was told of others."""
    told: str | None = vars(config)["CPU_FEATURES"]
    return str(binding.get_host_cpu_features().flatten()) if told is None else told


@cache
def _machine() -> str:
    cpu = f"{binding.get_process_triple()} {binding.get_host_cpu_name()} {cpu_features()}"
    return f"{sys.version} {numba.__version__} {llvmlite.__version__} {cpu}"


@cache
def source_key(module: str) -> str:
    """Hash of the machine and of the sources that ``module`` and its imports inside this room are made of."""
    seen: dict[str, bytes] = {}
    todo = [module, __name__]
    while todo:
        name = todo.pop()
        if name not in seen:
            text = Path(str(sys.modules[name].__file__)).read_bytes()
            seen[name] = text
            todo += _IMPORT.findall(text.decode())
    parts = [_machine().encode(), *(seen[name] for name in sorted(seen))]
    return hashlib.blake2b(b"\0".join(parts), digest_size=12).hexdigest()


def folder(module: str) -> Path:
    """Where compiled kernels of a module are kept."""
    return env.cache_dir() / "cpu" / source_key(module)


class _Locator:
    """Numba's idea of a cache place. The folder already names the sources, so there is nothing left to stamp."""

    def __init__(self, function: Any, file: str) -> None:
        self._py_file = file
        self._folder = folder(function.__module__)

    @classmethod
    def from_function(cls, function: Any, file: str) -> _Locator:
        return cls(function, file)

    def ensure_cache_path(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)

    def get_cache_path(self) -> str:
        return str(self._folder)

    def get_source_stamp(self) -> str:
        return ""

    def get_disambiguator(self) -> str:
        return ""


class _CacheImpl(CompileResultCacheImpl):
    _locator_classes = [_Locator]


class DiskCache(FunctionCache):
    """Numba's on-disk cache in this package's folder; a folder that cannot be used only costs time."""

    _impl_class = _CacheImpl

    def __init__(self, function: Any, name: str) -> None:
        super().__init__(function)
        self._cache_file._index_name = f"{name}.nbi"
        self.index = self._cache_file._index_path = str(Path(self._cache_path) / f"{name}.nbi")
        self._cache_file._data_name_pattern = name + ".{number:d}.nbc"

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return (sig, codegen.magic_tuple())

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        # Numba would first load every type and function it knows; finished code needs its memory routines alone.
        try:
            rtsys.initialize(target_context)
            return self._load_overload(sig, target_context)
        except Exception as error:  # a damaged entry of any kind is a miss
            log.warning("compiling %s again: %s", self._name, error)
            with suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            log.warning("compiled kernels cannot be kept in %s: %s", self._cache_path, error)


class Kernel:
    """A native function compiled (or loaded) when its address is first asked for."""

    def __init__(self, function: Any, name: str, arity: int) -> None:
        signature = types.void(*(types.int64,) * arity)
        self.name = name
        native: Any = CFunc(function, (signature.args, signature.return_type), locals={}, options=_OPTIONS)
        native._cache = DiskCache(function, name)
        self._native = native
        self._address = 0
        self._arity = arity
        self._entry: Any = None

    def compile(self) -> None:
        """Compile the function or load it from the cache, unless that is done."""
        if not self._address:
            self._native.compile()
            self._address = self._native.address

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
