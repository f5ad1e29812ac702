"""Memory of a real GPU: transfers, exhaustion, graphs that allocate nothing, and teardown."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ninfer.device import Device
from ninfer.errors import OutOfDeviceMemory

pytestmark = pytest.mark.device
SLACK = 64 << 20
"""Bytes by which free memory may differ between two readings: what the driver keeps for itself."""


def finish(device: Device) -> None:
    event = device.event()
    event.record()
    event.wait()


@pytest.mark.parametrize("nbytes", [1, 1000, 16 << 20, (48 << 20) + 12345, 200 << 20])
def test_weights_arrive_whole(gpu: Device, nbytes: int) -> None:
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)
    buffers = [gpu.weights(data), gpu.weights(data[::-1].copy())]
    out = gpu.host((nbytes,), "u8")
    for buffer, want in zip(buffers, (data, data[::-1])):
        gpu.download(out, buffer)
        finish(gpu)
        assert np.array_equal(out, want)


def test_arenas_are_zero_and_exhaustion_is_typed(gpu: Device) -> None:
    free = gpu.memory().free
    arena = gpu.arena(1 << 30)
    out = gpu.host((1 << 20,), "u8")
    gpu.download(out, arena.buffer((1 << 30) - (1 << 20), (1 << 20,), "u8"))
    finish(gpu)
    assert not out.any()
    with pytest.raises(OutOfDeviceMemory) as caught:
        gpu.arena(gpu.memory().total)
    assert 0 < caught.value.free < gpu.memory().total
    arena.close()
    assert abs(gpu.memory().free - free) < SLACK


def test_a_replay_sees_new_inputs_and_allocates_nothing(gpu: Device) -> None:
    arena = gpu.arena(1 << 20)
    source, target = (arena.buffer(at, (64, 256), "f32") for at in (0, 1 << 18))
    index = arena.buffer(1 << 19, (16,), "i32")
    rng = np.random.default_rng(0)
    graph = gpu.capture(lambda: gpu.ops.gather(target.head(16, 256), source, index))
    host, out = gpu.host((64, 256), "f32"), gpu.host((16, 256), "f32")
    rows = gpu.host((16,), "i32")
    free = gpu.memory().free
    for _ in range(5):
        host[:], rows[:] = rng.normal(size=host.shape), rng.integers(0, 64, 16)
        gpu.upload(source, host)
        gpu.upload(index, rows)
        graph.launch()
        gpu.download(out, target.head(16, 256))
        finish(gpu)
        np.testing.assert_array_equal(out, host[rows])
    assert gpu.memory().free == free
    graph.close()
    arena.close()


def test_rows_of_many_planes_are_copied(gpu: Device) -> None:
    arena, rng = gpu.arena(1 << 24), np.random.default_rng(0)
    planes = [arena.buffer(at << 20, (6, 4, n), "bf16") for at, n in enumerate((64, 2, 8192, 12))]
    before = []
    for plane in planes:
        host = gpu.host(plane.shape, "bf16")
        host[:] = rng.integers(0, 1 << 16, plane.shape)
        gpu.upload(plane, host)
        before.append(host)
    gpu.copy_rows(planes, 1, 4)
    gpu.copy_rows(planes, 4, 0)
    for plane, host in zip(planes, before):
        out = gpu.host(plane.shape, "bf16")
        gpu.download(out, plane)
        finish(gpu)
        np.testing.assert_array_equal(out, host[[1, 1, 2, 3, 1, 5]])
    arena.close()


def test_bandwidth_is_plausible(gpu: Device) -> None:
    assert 100e9 < gpu.read_bandwidth() < 50e12  # type: ignore[attr-defined]


CYCLES = """
import numpy as np
from ninfer._cuda.device import CudaDevice
free = []
for _ in range(5):
    device = CudaDevice(0)
    free.append(device.memory().free)
    arena = device.arena(1 << 30)
    device.weights(np.ones(100 << 20, np.uint8))
    graph = device.capture(lambda: device.zero(arena.buffer(0, (256,), "u8")))
    graph.launch()
    device.close()
assert max(free) - min(free) < 64 << 20, free
"""

FAULT = """
import numpy as np
import pytest
from ninfer._cpu.device import CpuDevice
from ninfer._cuda.products import pack
from ninfer._cuda.device import CudaDevice
from ninfer.errors import DeviceError
device = CudaDevice(0)
arena = device.arena(1 << 20)
device.launch(device.function("sweep", "sweep"), 1, 512, pack(arena.buffer(0, (4096,), "u64"), 0x10, 64, 1))
event = device.event()
event.record()
with pytest.raises(DeviceError):
    event.wait()
device.close()
with pytest.raises(DeviceError, match="new process"):
    CudaDevice(0)
CpuDevice().close()
"""


ENGINE_FAULT = """
import time
import pytest
import ninfer
from device import prebuilt
from ninfer._cuda.products import pack
prebuilt.use_named()
model, greedy = "examples/tiny/tiny.ninfer", ninfer.SamplingParams(temperature=0)
engine = ninfer.Engine(model, device="cuda:0", max_context=512, progress=False)
want = engine.generate("Hello!", max_tokens=8, sampling=greedy).token_ids
device = engine._core._worker._program._units.device
handle = engine.submit("Hello!", max_tokens=400, ignore_eos=True)
while not handle.text:  # it decodes
    time.sleep(0.001)
device.launch(device.function("sweep", "sweep"), 1, 512, pack(0x10, 0x10, 64, 1))
with pytest.raises(ninfer.EngineFailed) as caught:
    handle.result(timeout=30)
assert isinstance(caught.value.cause, ninfer.DeviceError), repr(caught.value.cause)
assert not engine.available
engine.close()
with pytest.raises(ninfer.DeviceError, match="new process"):
    ninfer.Engine(model, device="cuda:0", progress=False)
with ninfer.Engine(model, device="auto", progress=False) as engine:
    assert "cpu" in repr(engine)
    assert len(engine.generate("Hello!", max_tokens=8, sampling=greedy).token_ids) == len(want)
"""


@pytest.mark.parametrize("script", [CYCLES, FAULT, ENGINE_FAULT], ids=["five cycles", "device fault", "engine fault"])
@pytest.mark.usefixtures("gpu")
def test_processes_of_their_own(script: str) -> None:
    """A device opens five times over without losing memory. After a kernel that read where there is nothing the device
    closes, every request has ended, the next device says that CUDA needs a new process, and the host still serves."""
    here = Path(__file__).parents[3]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
