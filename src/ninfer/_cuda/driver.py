"""The one door to the CUDA driver: found when first used, every status checked, every failure typed."""

from __future__ import annotations

from functools import cache
from typing import Any

from ninfer.errors import DeviceError, OutOfDeviceMemory

MIN_CAPABILITY = (8, 0)
"""Oldest compute capability the kernels are written for."""

MIN_DRIVER = 12000
"""Oldest CUDA version a driver must support, as the driver counts: 1000 * major + 10 * minor."""

LASTING = {
    f"CUDA_ERROR_{name}"
    for name in (
        "ILLEGAL_ADDRESS", "LAUNCH_TIMEOUT", "ASSERT", "HARDWARE_STACK_ERROR", "ILLEGAL_INSTRUCTION",
        "MISALIGNED_ADDRESS", "INVALID_ADDRESS_SPACE", "INVALID_PC", "LAUNCH_FAILED", "ECC_UNCORRECTABLE",
    )
}  # fmt: skip
"""Faults after which every CUDA call of the process fails, whatever is destroyed and made anew."""

EXTRAS = "install ninfer[cuda12] or ninfer[cuda13]"


@cache
def bindings() -> Any:
    """``cuda.bindings.driver``, with the driver initialised. Raises DeviceError naming what is missing."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DeviceError(f"no CUDA Python packages ({error}): {EXTRAS}") from error
    try:
        (status,) = driver.cuInit(0)
    except RuntimeError as error:
        raise DeviceError(f"no NVIDIA driver on this machine: {error}") from error
    if status == driver.CUresult.CUDA_ERROR_NO_DEVICE:
        raise DeviceError("no NVIDIA GPU is visible to this process")
    if status != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"the NVIDIA driver cannot start: {status.name}")
    return driver


def call(name: str, *args: Any) -> Any:
    """Call a driver function by name; its result (None, a value, or a tuple). Raises DeviceError with its status."""
    driver = bindings()
    status, *values = getattr(driver, name)(*args)
    if status != driver.CUresult.CUDA_SUCCESS:
        fail(name, status)
    return values[0] if len(values) == 1 else tuple(values) or None


def fail(name: str, status: Any) -> None:
    """Raise the error of a status. ``status`` is a CUresult other than success."""
    driver = bindings()
    if status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        raise OutOfDeviceMemory(f"{name}: out of device memory")
    _, text = driver.cuGetErrorString(status)
    advice = "; CUDA works again in a new process" if status.name in LASTING else ""
    raise DeviceError(f"{name}: {status.name}: {text.decode() if text else 'unknown error'}{advice}")


def driver_version() -> int:
    """CUDA version the driver supports, 1000 * major + 10 * minor."""
    return int(call("cuDriverGetVersion"))


def version_text(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def check_driver(version: int, compiler_major: int) -> None:
    """Refuse a driver that cannot run the kernels. Code of a major CUDA version needs a driver of that version."""
    needed = max(MIN_DRIVER, 1000 * compiler_major)
    if version < needed:
        raise DeviceError(
            f"the NVIDIA driver supports CUDA {version_text(version)}, kernels need {version_text(needed)}: "
            "update the driver or install the extra of its CUDA version"
        )


def check_capability(name: str, capability: tuple[int, int]) -> None:
    """Refuse a GPU older than the kernels."""
    if capability < MIN_CAPABILITY:
        found, needed = (".".join(map(str, c)) for c in (capability, MIN_CAPABILITY))
        raise DeviceError(f"{name} has compute capability {found}, kernels need {needed} or newer")
