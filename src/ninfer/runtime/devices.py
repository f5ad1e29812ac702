"""Which device an engine runs on, and what it runs with there unless the options say otherwise."""

from __future__ import annotations

import logging

from ninfer.device import Device
from ninfer.errors import DeviceError, InvalidRequest
from ninfer.options import EngineOptions
from ninfer.program import KVCodec
from ninfer.progress import Meter

log = logging.getLogger("ninfer")

DEFAULT_CHUNK = {"cpu": 512, "cuda": 2048}
"""Tokens of one prefill unit, by kind of device."""


def open_device(options: EngineOptions) -> Device:
    """The device that ``options.device`` names, its kernels compiled. Raises DeviceError where it cannot serve; "auto"
    then takes the CPU and says so in the log."""
    if options.device == "cpu":
        return _cpu(options)
    if options.device == "auto":
        try:
            return _cuda(0, options)
        except DeviceError as error:
            log.info("running on the CPU: %s", error)
            return _cpu(options)
    return _cuda(int(options.device.removeprefix("cuda:")), options)


def codec(options: EngineOptions, device: Device) -> KVCodec:
    """How keys and values are stored. Raises InvalidRequest for a type that the device does not have."""
    if options.kv_dtype == "auto":
        return KVCodec.FP32 if device.kind == "cpu" else KVCodec.BF16
    if options.kv_dtype == "fp32" and device.kind != "cpu":
        raise InvalidRequest(f"'fp32' is not available on {device.name}", field="kv_dtype")
    return {"fp32": KVCodec.FP32, "bf16": KVCodec.BF16, "int8": KVCodec.INT8}[options.kv_dtype]


def _cpu(options: EngineOptions) -> Device:
    from ninfer._cpu.device import CpuDevice
    from ninfer._cpu.kernel import compile_all

    with Meter("compile", None, options.progress, unit="kernel", delay=0.5) as meter:
        compile_all(meter.reach)  # takes long only when the machine's cache of kernels is empty
    return CpuDevice()


def _cuda(index: int, options: EngineOptions) -> Device:
    from ninfer._cuda.device import CudaDevice

    with Meter("compile", None, options.progress, unit="kernel", delay=0.5) as meter:
        return CudaDevice(index, meter.reach)
