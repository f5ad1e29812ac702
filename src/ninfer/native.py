"""Native code kept on disk, so that a machine compiles a function once.

It lies under ``env.cache_dir()`` in a folder named after everything it depends on: the source of the function's module
and of the modules that one imports, Numba, llvmlite, Python and the CPU. What is used no more goes (``kept``). Imports
Numba; to be imported where needed.
"""

from __future__ import annotations

import hashlib
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
from numba.core import config
from numba.core.caching import CompileResultCacheImpl, FunctionCache

from ninfer import env, kept

log = logging.getLogger("ninfer")


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
    """Hash of the machine and of the sources that ``module`` and its imports inside its room are made of."""
    room = ".".join(module.split(".")[:2])
    imported = re.compile(rf"^from ({re.escape(room)}[.\w]*) import", re.MULTILINE)
    seen: dict[str, bytes] = {}
    todo = [module, __name__]
    while todo:
        name = todo.pop()
        if name not in seen:
            text = Path(str(sys.modules[name].__file__)).read_bytes()
            seen[name] = text
            todo += imported.findall(text.decode())
    parts = [_machine().encode(), *(seen[name] for name in sorted(seen))]
    return hashlib.blake2b(b"\0".join(parts), digest_size=12).hexdigest()


def folder(module: str) -> Path:
    """Where compiled functions of a module are kept."""
    return _all() / source_key(module)


def _all() -> Path:
    return env.cache_dir() / "cpu"


_WRITTEN = re.compile(r"([0-9a-f]{24})/[^/]+\.nb[ic](?:\.tmp\.\w+)?")
"""Files that Numba writes, with those that it left half written; those of one folder are one entry."""


@cache
def _prune(folder: Path) -> None:
    """Once in a process, because functions are many and small."""
    kept.prune(folder, _WRITTEN)


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
        try:
            self._ready(target_context)
            kept.used(Path(self.index))
            return self._load_overload(sig, target_context)
        except Exception as error:  # a damaged entry of any kind is a miss
            log.warning("compiling %s again: %s", self._name, error)
            with suppress(OSError):
                self.flush()
            return None

    def _ready(self, target_context: Any) -> None:
        """Have what loaded code may call."""
        target_context.refresh()

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
            _prune(_all())
        except OSError as error:
            log.warning("compiled code cannot be kept in %s: %s", self._cache_path, error)


def jit(**options: Any) -> Callable[[Any], Any]:
    """``numba.njit`` whose results are kept. Names must differ within a module."""

    def declare(function: Any) -> Any:
        native = numba.njit(**options)(function)
        native._cache = DiskCache(function, function.__name__)
        return native

    return declare
