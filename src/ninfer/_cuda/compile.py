"""Kernel sources become machine code, once per machine.

A ``Source`` knows everything its code depends on. Its cubin is kept under ``env.cache_dir()`` in a file named after the
source, the options, the architecture and the compiler. The driver is not part of the name: a cubin is final machine
code, which every driver of the compiler's major CUDA version runs as it is. What is used no more goes (``kept``).
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from ninfer import env, kept
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


def cubin(source: Source, arch: str) -> Path:
    """The file of a source's machine code, compiled if the cache does not have it. Raises DeviceError with the
    diagnostics."""
    path = source.path(arch)
    return path if _whole(path) else _save(path, source.build(arch))


def compile_all(sources: Sequence[Source], arch: str, progress: Progress | None = None) -> list[Path]:
    """Files of the machine code of many sources, compiled side by side."""
    with ThreadPoolExecutor(max_workers=min(len(os.sched_getaffinity(0)), max(1, len(sources)))) as pool:
        pending = [pool.submit(cubin, source, arch) for source in sources]
        for done, (source, each) in enumerate(zip(sources, pending, strict=True), 1):
            each.result()
            if progress is not None:
                progress(done, len(sources), source.name)
        return [each.result() for each in pending]


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
    known = _nvrtc("nvrtcGetSupportedArchs")
    if int(arch[3:].rstrip("a")) not in known:
        raise DeviceError(
            f"{nvrtc_version()} compiles for sm_{min(known)} to sm_{max(known)}, not {arch}: {driver.EXTRAS}"
        )
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

_WRITTEN = re.compile(r"(\w+-sm_\d+a?-[0-9a-f]{24})\.(?:cubin|sum)(?:\.\w+\.tmp)?")
"""Names of the files of this cache, with those that a process left half written; its first group is an entry."""


def _whole(path: Path) -> bool:
    """Whether the file is there and is what was written."""
    kept.used(path)  # first, so that nobody deletes it from here on
    try:
        code, digest = path.read_bytes(), _sum(path).read_bytes()
    except OSError:
        return False
    whole = hashlib.blake2b(code, digest_size=_DIGEST).digest() == digest
    if not whole:
        log.warning("ignoring the damaged kernel %s", path.name)
    return whole


def _save(path: Path, code: bytes) -> Path:
    """Keep code in its file, whole or not at all, whoever else writes it, and its digest beside it; what was not used
    for long makes room. A folder that cannot be used only costs time: the code then lies in a temporary file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, code)
        _replace(_sum(path), hashlib.blake2b(code, digest_size=_DIGEST).digest())
        kept.prune(path.parent, _WRITTEN)
        return path
    except OSError as error:
        log.warning("compiled kernels cannot be kept in %s: %s", path.parent, error)
    with tempfile.NamedTemporaryFile(dir=_scratch(), suffix=path.suffix, delete=False) as file:
        file.write(code)
    return Path(file.name)


def _replace(path: Path, data: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=".tmp")
    try:
        with open(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except OSError:
        os.unlink(name)
        raise


def _sum(path: Path) -> Path:
    return path.with_suffix(".sum")


@cache
def _scratch() -> str:
    """A folder of this process, removed with it."""
    folder = tempfile.mkdtemp(prefix="ninfer-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
