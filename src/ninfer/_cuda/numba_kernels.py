"""Numba kernels become machine code the way CUDA C++ does: one source each, compiled once per machine.

A kernel is an entry of its module's ``KERNELS``: a function over flat arrays and the types of its arguments, by address
("f32*") or by value ("i32"). Numba is imported only to compile what the cache does not have.
"""

from __future__ import annotations

import importlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ninfer._cuda import compile as compiler
from ninfer._cuda import driver
from ninfer.errors import DeviceError

MODULES = {
    "sampler_kernels": ("survey", "decide", "chain", "count", "tally", "collect", "settle", "finish"),
    "memory_kernels": ("copy_rows",),
}
"""Modules of this room and the kernels they define."""

_compiling = threading.Lock()
_ENTRY = re.compile(r"\.entry (\w+)\(")


def sources() -> list[compiler.Source]:
    """Every Numba kernel; the symbol in its cubin is its name."""
    return [
        compiler.Source(name, _text(module), partial(_build, name, module), _versions)
        for module, names in MODULES.items()
        for name in names
    ]


def _build(name: str, module: str, arch: str) -> bytes:
    return compiler.assemble(name, ptx(name, module, arch), arch)


def ptx(name: str, module: str, arch: str) -> str:
    """PTX of one kernel; its name is the only entry. Raises DeviceError where Numba's CUDA target is missing."""
    try:
        from numba import cuda, types
    except ImportError as error:
        raise DeviceError(f"no Numba CUDA target ({error}): {driver.EXTRAS}") from error
    function, arguments = importlib.import_module(f"ninfer._cuda.{module}").KERNELS[name]
    scalars = {"i32": types.int32, "u32": types.uint32, "i64": types.int64, "u64": types.uint64, "f32": types.float32}
    scalars["f64"] = types.float64

    def kind(argument: str) -> Any:
        scalar = scalars[argument.rstrip("*")]
        return types.CPointer(scalar) if argument.endswith("*") else scalar

    signature = types.void(*map(kind, arguments.split()))
    digits = re.fullmatch(r"sm_(\d+)(\d)a?", arch)
    assert digits is not None
    capability = (int(digits[1]), int(digits[2]))
    with _compiling, _compiling_for(capability):
        code, _ = cuda.compile(function, signature, device=False, cc=capability, output="ptx", abi="numba")
    (entry,) = _ENTRY.findall(code)
    return str(code).replace(entry, name)


@contextmanager
def _compiling_for(capability: tuple[int, int]) -> Iterator[None]:
    """Numba asks the present GPU what to compile device functions for; let the wanted architecture answer."""
    from numba.cuda import dispatcher

    ask = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=capability)
    try:
        yield
    finally:
        dispatcher.get_current_device = ask


def _text(module: str) -> str:
    folder = Path(__file__).parent
    used = [folder / "atomics.py", *sorted(folder.glob("sampler_*.py"))]
    used = used if module == "sampler_kernels" else [folder / f"{module}.py"]
    return "\0".join(file.read_text() for file in (folder / "numba_kernels.py", folder / "sampling.py", *used))


def _versions() -> str:
    return compiler.package_versions("numba", "numba-cuda") + " " + compiler.nvrtc_version()
