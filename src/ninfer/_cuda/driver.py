"""The one door to CUDA: CuPy's runtime, found when first used, every status checked, every failure typed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from ninfer.errors import DeviceError, OutOfDeviceMemory

MIN_CAPABILITY = (8, 0)
"""Oldest compute capability the kernels are written for."""

MIN_DRIVER = 12000
"""Oldest CUDA version a driver must support, as the driver counts: 1000 * major + 10 * minor."""

OUT_OF_MEMORY, NOT_READY = 2, 600
"""Statuses that mean something here."""

LASTING = {214, 700, 702, 710, 714, 715, 716, 717, 718, 719}
"""Faults (uncorrectable memory, illegal address, timeout, assertion, hardware stack, illegal instruction, misaligned
address, address space, program counter, launch failure) after which every CUDA call of the process fails."""

EXTRAS = "install ninfer[cuda12] or ninfer[cuda13]"


@cache
def cupy() -> Any:
    """CuPy. Raises DeviceError where it is missing."""
    try:
        import cupy
    except ImportError as error:
        raise DeviceError(f"no CuPy ({error}): {EXTRAS}") from error
    return cupy


@cache
def bindings() -> Any:
    """``cuda.bindings.driver``, for what CuPy's launches lack. Raises DeviceError where it is missing."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DeviceError(f"no cuda.bindings ({error}): {EXTRAS}") from error
    return driver


def call(name: str, *args: Any) -> Any:
    """Call a function of the CUDA runtime by its name in CuPy; its result. Raises DeviceError with its status."""
    work = getattr(cupy().cuda.runtime, name)
    try:
        return work(*args)
    except RuntimeError as error:
        raise _refusal(name, error) from None


def checked(name: str, work: Callable[..., Any], *args: Any) -> Any:
    """The result of ``work``, which CuPy does. Raises DeviceError, beginning with ``name``, when CUDA refuses it."""
    try:
        return work(*args)
    except RuntimeError as error:
        raise _refusal(name, error) from None


def _refusal(name: str, error: RuntimeError) -> Exception:
    """What to raise for an error that CuPy raised: itself, if it is not CUDA's."""
    return failure(name, error.status, str(error)) if hasattr(error, "status") else error


def failure(name: str, status: int, text: str) -> DeviceError:
    """The error of a call that did not succeed. text: CUDA's name of the status and what it says."""
    if status == OUT_OF_MEMORY:
        return OutOfDeviceMemory(f"{name}: out of device memory")
    advice = "; CUDA works again in a new process" if status in LASTING else ""
    return DeviceError(f"{name}: {text}{advice}")


def check_machine(compiler_major: Callable[[], int]) -> int:
    """How many GPUs this process sees. Raises DeviceError where the driver is missing or cannot run the kernels: code
    of a major CUDA version needs a driver of that version."""
    version = call("driverGetVersion")
    if not version:
        raise DeviceError("no NVIDIA driver on this machine")
    needed = max(MIN_DRIVER, 1000 * compiler_major())
    if version < needed:
        raise DeviceError(
            f"the NVIDIA driver supports CUDA {version_text(version)}, kernels need {version_text(needed)}: "
            "update the driver or install the extra of its CUDA version"
        )
    return int(call("getDeviceCount"))


def version_text(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def check_capability(name: str, capability: tuple[int, int]) -> None:
    """Refuse a GPU older than the kernels."""
    if capability < MIN_CAPABILITY:
        found, needed = (".".join(map(str, c)) for c in (capability, MIN_CAPABILITY))
        raise DeviceError(f"{name} has compute capability {found}, kernels need {needed} or newer")
