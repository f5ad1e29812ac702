"""Kernel sources become machine code, once per machine.

A ``Source`` knows everything its code depends on. Its cubin is kept under ``env.cache_dir()`` in a file named after the
source, the options, the architecture and the compiler. The driver is not part of the name: a cubin is final machine
code, which every driver of the compiler's major CUDA version runs as it is.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from ninfer import env
from ninfer._cuda import driver
from ninfer.errors import DeviceError

log = logging.getLogger("ninfer")

KERNELS = Path(__file__).parent / "kernels"
OPTIONS = ("--std=c++17", "--device-as-default-execution-space")

Progress = Callable[[int, int, str], None]
"""Called as (done, total, name of what was compiled)."""

_DIGEST = 32


@dataclass(frozen=True, slots=True)
class Source:
    """``build(arch)`` makes the cubin; ``text`` is everything that it depends on besides the compiler."""

    name: str
    text: str
    build: Callable[[str], bytes]
    compiler: Callable[[], str]

    def path(self, arch: str) -> Path:
        """Where the cubin for an architecture is kept."""
        parts = "\0".join((self.text, arch, self.compiler()))
        key = hashlib.blake2b(parts.encode(), digest_size=12).hexdigest()
        return env.cache_dir() / "cuda" / f"{self.name}-{arch}-{key}.cubin"


def architecture(capability: tuple[int, int]) -> str:
    """The target to compile for: on Hopper the one that has its own instructions."""
    major, minor = capability
    return "sm_90a" if capability == (9, 0) else f"sm_{major}{minor}"


@cache
def nvrtc_version() -> str:
    """Version of the CUDA C++ compiler. Raises DeviceError where it is missing."""
    return "nvrtc {}.{}".format(*_nvrtc("nvrtcVersion"))


def compiler_major() -> int:
    return int(nvrtc_version().split()[1].split(".")[0])


@cache
def cuda_source(name: str, defines: tuple[str, ...] = ()) -> Source:
    """``kernels/<name>.cu`` with preprocessor ``defines`` such as "TILE=64". It may include any ``kernels/*.cuh``."""
    headers = {path.name: path.read_text() for path in sorted(KERNELS.glob("*.cuh"))}
    text = (KERNELS / f"{name}.cu").read_text()
    options = (*OPTIONS, *(f"--define-macro={d}" for d in defines))
    parts = "\0".join((text, *options, *(f"{file}\0{content}" for file, content in headers.items())))
    return Source(name, parts, lambda arch: _nvrtc_cubin(name, text, headers, options, arch), nvrtc_version)


def kernel_names() -> list[str]:
    """Every CUDA C++ module of the package."""
    return sorted(path.stem for path in KERNELS.glob("*.cu"))


def cubin(source: Source, arch: str) -> bytes:
    """The machine code of a source, compiled if the cache does not have it. Raises DeviceError with the diagnostics."""
    path = source.path(arch)
    cached = _load(path)
    if cached is None:
        cached = source.build(arch)
        _save(path, cached)
    return cached


def compile_all(sources: Sequence[Source], arch: str, progress: Progress | None = None) -> list[bytes]:
    """Cubins of many sources, compiled side by side."""
    with ThreadPoolExecutor(max_workers=min(len(os.sched_getaffinity(0)), max(1, len(sources)))) as pool:
        pending = [pool.submit(cubin, source, arch) for source in sources]
        for done, (source, each) in enumerate(zip(sources, pending, strict=True), 1):
            each.result()
            if progress is not None:
                progress(done, len(sources), source.name)
        return [each.result() for each in pending]


class Module:
    """A cubin loaded into the current context. Functions stay valid until ``close``."""

    def __init__(self, code: bytes) -> None:
        self._handle = driver.call("cuModuleLoadData", code)
        self._functions: dict[str, Any] = {}
        self._shared: dict[str, int] = {}

    def function(self, symbol: str, shared: int = 0) -> Any:
        """The kernel ``symbol`` (extern "C"), allowed at least ``shared`` bytes of dynamic shared memory a block."""
        known = self._functions.get(symbol)
        if known is None:
            known = self._functions[symbol] = driver.call("cuModuleGetFunction", self._handle, symbol.encode())
        if shared > self._shared.get(symbol, 48 << 10):  # one limit a kernel: what was allowed once stays allowed
            limit = driver.bindings().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            driver.call("cuFuncSetAttribute", known, limit, shared)
            self._shared[symbol] = shared
        return known

    def close(self) -> None:
        self._functions.clear()
        driver.call("cuModuleUnload", self._handle)


# -- compilers -----------------------------------------------------------------------------------------------------


def _nvrtc(name: str, *args: Any) -> Any:
    """Call an NVRTC function; its values. Raises DeviceError."""
    try:
        from cuda.bindings import nvrtc

        status, *values = getattr(nvrtc, name)(*args)
    except (ImportError, RuntimeError) as error:
        raise DeviceError(f"no CUDA compiler ({error}): {driver.EXTRAS}") from error
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise DeviceError(f"{name}: {status.name}")
    return values[0] if len(values) == 1 else values


def _nvrtc_cubin(name: str, text: str, headers: dict[str, str], options: Sequence[str], arch: str) -> bytes:
    include = [content.encode() for content in headers.values()]
    names = [file.encode() for file in headers]
    program = _nvrtc("nvrtcCreateProgram", text.encode(), f"{name}.cu".encode(), len(names), include, names)
    try:
        flags = [f"--gpu-architecture={arch}", *options, *(f"--include-path={path}" for path in _include_paths())]
        try:
            _nvrtc("nvrtcCompileProgram", program, len(flags), [flag.encode() for flag in flags])
        except DeviceError as error:
            message = bytearray(_nvrtc("nvrtcGetProgramLogSize", program))
            _nvrtc("nvrtcGetProgramLog", program, message)
            raise DeviceError(f"{name}.cu for {arch}: {error}\n{message.decode().rstrip(chr(0))}") from None
        code = bytearray(_nvrtc("nvrtcGetCUBINSize", program))
        _nvrtc("nvrtcGetCUBIN", program, code)
        return bytes(code)
    finally:
        _nvrtc("nvrtcDestroyProgram", program)


@cache
def _include_paths() -> tuple[str, ...]:
    """Where CUDA's own headers (cuda_bf16.h and its like) are."""
    from cuda.pathfinder import find_nvidia_header_directory

    found = find_nvidia_header_directory("cudart")
    if found is None:
        raise DeviceError(f"no CUDA headers: {driver.EXTRAS}")
    return (found,)


def assemble(name: str, ptx: str, arch: str) -> bytes:
    """The cubin of PTX text."""
    try:
        from cuda.bindings import nvjitlink

        handle = nvjitlink.create(1, [f"-arch={arch}"])
    except (ImportError, RuntimeError) as error:
        raise DeviceError(f"no CUDA linker ({error}): {driver.EXTRAS}") from error
    try:
        data = ptx.encode()
        nvjitlink.add_data(handle, nvjitlink.InputType.PTX, data, len(data), name)
        nvjitlink.complete(handle)
        code = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, code)
        return bytes(code)
    except nvjitlink.nvJitLinkError as error:
        raise DeviceError(f"{name} for {arch}: {error}") from error
    finally:
        nvjitlink.destroy(handle)


@cache
def package_versions(*names: str) -> str:
    return " ".join(f"{name} {metadata.version(name)}" for name in names)


# -- the folder ----------------------------------------------------------------------------------------------------


def _load(path: Path) -> bytes | None:
    """The cubin in a file, or None where there is none or it is damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    code = data[_DIGEST:]
    if hashlib.blake2b(code, digest_size=_DIGEST).digest() != data[:_DIGEST]:
        log.warning("ignoring the damaged kernel %s", path.name)
        return None
    return code


def _save(path: Path, code: bytes) -> None:
    """Write a file that is whole or absent, whoever else writes it; a folder that cannot be used only costs time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.blake2b(code, digest_size=_DIGEST).digest() + code)
        os.replace(file.name, path)
    except OSError as error:
        log.warning("compiled kernels cannot be kept in %s: %s", path.parent, error)
