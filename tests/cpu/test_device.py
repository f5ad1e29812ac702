"""The host device: memory, recordings, threads, forks; and the delayed device that tests borrow."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fakes.async_device import AsyncDevice
from ops.harness import Lab

from ninfer._cpu import device as device_module
from ninfer._cpu import threads
from ninfer._cpu.device import CpuDevice
from ninfer.errors import DeviceError, EngineClosed, InvariantError, OutOfDeviceMemory


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(threads=2)
    yield device
    device.close()


def test_buffers_are_views(device: CpuDevice) -> None:
    arena = device.arena(4096)
    whole = arena.buffer(256, (4, 8), "f32")
    values = np.arange(32, dtype=np.float32).reshape(4, 8)
    device.upload(whole, values)
    out = device.host((2, 8), "f32")
    device.download(out, whole.slice(1, 3))
    np.testing.assert_array_equal(out, values[1:3])
    head = whole.head(3, 2)
    assert (head.shape, head.dtype, head.nbytes) == ((3, 2), "f32", 24)
    device.copy(whole.slice(3, 4), whole.head(1, 8))
    device.zero(whole.slice(0, 1))
    out = device.host((4, 8), "f32")
    device.download(out, whole)
    np.testing.assert_array_equal(out, [values[0] * 0, values[1], values[2], values[0]])
    arena.close()
    arena.close()


def test_memory_starts_as_zeros_and_is_bounded(device: CpuDevice) -> None:
    arena = device.arena(1 << 20)
    out = device.host((1 << 20,), "u8")
    device.download(out, arena.buffer(0, (1 << 20,), "u8"))
    assert not out.any()
    for offset, shape in ((128, (4,)), ((1 << 20) - 256, (65,)), (-256, (4,))):
        with pytest.raises(InvariantError):
            arena.buffer(offset, shape, "f32")
    with pytest.raises(InvariantError):
        arena.buffer(0, (4,), "f32").head(5)
    with pytest.raises(InvariantError):
        arena.buffer(0, (4,), "f32").slice(2, 5)
    memory = device.memory()
    assert 0 < memory.free <= memory.total
    with pytest.raises(OutOfDeviceMemory) as caught:
        device.arena(memory.total * 2)
    assert caught.value.free > 0


def test_closing_an_arena_returns_its_pages(device: CpuDevice) -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    size = 96 << 20
    arena = device.arena(size)
    buffer = arena.buffer(0, (size,), "u8")
    ones = np.ones(size, np.uint8)
    device.upload(buffer, ones)
    before = resident()
    arena.close()
    assert resident() < before - size // 2


def test_transfers_are_checked(device: CpuDevice) -> None:
    buffer = device.arena(4096).buffer(0, (4, 4), "f32")
    for wrong in (np.zeros(16), np.zeros(15, np.float32), np.zeros((4, 8), np.float32)[:, ::2]):
        with pytest.raises(InvariantError):
            device.upload(buffer, wrong)
        with pytest.raises(InvariantError):
            device.download(wrong, buffer)
    with pytest.raises(InvariantError):
        device.copy(buffer, buffer.head(3))


def test_weights_are_not_copied(device: CpuDevice) -> None:
    data = np.arange(256, dtype=np.uint8)
    data.flags.writeable = False
    buffer = device.weights(data)
    out = device.host((256,), "u8")
    device.download(out, buffer)
    np.testing.assert_array_equal(out, data)
    assert np.shares_memory(buffer.array, data)
    with pytest.raises(InvariantError):
        device.weights(data[::2])


def test_a_recording_runs_when_launched(device: CpuDevice) -> None:
    lab = Lab(device)
    x, y, z = lab.put([[1.0, 2.0]]), lab.put([[0.0, 0.0]]), lab.put([[9.0, 9.0]])
    graph = device.capture(lambda: (device.copy(z, y), device.copy(y, x)))  # type: ignore[arg-type, func-returns-value]
    assert lab.get(y).tolist() == [[0.0, 0.0]]
    graph.launch()
    assert lab.get(y).tolist() == [[1.0, 2.0]]
    assert lab.get(z).tolist() == [[0.0, 0.0]]
    device.upload(x, np.array([[5.0, 6.0]], np.float32))
    graph.launch()
    assert lab.get(y).tolist() == [[5.0, 6.0]]
    assert lab.get(z).tolist() == [[1.0, 2.0]]
    graph.close()
    with pytest.raises(InvariantError):
        graph.launch()


def test_a_recording_keeps_what_it_points_to(device: CpuDevice) -> None:
    lab = Lab(device)
    target = lab.empty(1 << 16)

    def work() -> None:
        device.upload(target, np.arange(1 << 16, dtype=np.float32))

    graph = device.capture(work)
    np.random.default_rng(0).normal(size=1 << 17)
    graph.launch()
    np.testing.assert_array_equal(lab.get(target), np.arange(1 << 16))


def test_a_failed_recording_leaves_the_device_usable(device: CpuDevice) -> None:
    def work() -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        device.capture(work)
    with pytest.raises(InvariantError):
        device.capture(lambda: device.capture(lambda: None))  # type: ignore[arg-type, return-value]
    lab = Lab(device)
    assert lab.get(lab.put([3.0])).tolist() == [3.0]


def project(lab: Lab, rounds: int) -> np.ndarray:
    rng = np.random.default_rng(5)
    matrix, _ = lab.matrix("q8_g32_fp16", rng.normal(size=(700, 256)))
    x, out = lab.put(rng.normal(size=(3, 256))), lab.empty(3, 700)
    for _ in range(rounds):
        lab.ops.norm_project([out], x, None, [matrix], 0.0, lab.scratch(1))
    return lab.get(out)


def test_several_devices_and_threads_at_once() -> None:
    """Devices of one process do not disturb each other, and a device may be handed from thread to thread."""
    results: list[np.ndarray] = []

    def work(threads: int) -> None:
        device = CpuDevice(threads=threads)
        results.append(project(Lab(device), 60))
        device.close()

    workers = [threading.Thread(target=work, args=(n,)) for n in (1, 2, 3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(results) == 3
    for result in results:
        np.testing.assert_array_equal(result, results[0])


def test_close_ends_the_threads() -> None:
    before = threading.active_count()
    device = CpuDevice(threads=4)
    assert threading.active_count() == before + 3
    device.close()
    device.close()
    assert threading.active_count() == before
    with pytest.raises(EngineClosed):
        device.zero(CpuDevice(threads=1).arena(256).buffer(0, (4,), "f32"))


def test_a_dropped_device_ends_its_threads() -> None:
    before = threading.active_count()
    project(Lab(CpuDevice(threads=3)), 2)
    gc.collect()
    assert threading.active_count() == before


def test_a_container_bounds_threads_and_memory(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("NINFER_CPU_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(threads, "_QUOTA", quota)
    for text, expected in (("150000 100000", 2), ("max 100000", 16), ("1000 100000", 1), ("", 16)):
        quota.write_text(text)
        assert threads.count(None) == expected
    assert threads.count(5) == 5
    monkeypatch.setattr(device_module, "_GROUP", tmp_path)
    host = device.memory()
    for name, text in (("max", "1000000"), ("current", "700000"), ("stat", "anon 5\ninactive_file 100000")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert (device.memory().total, device.memory().free) == (1_000_000, 400_000)
    (tmp_path / "memory.max").write_text("max")
    assert device.memory().total == host.total


def test_a_fork_is_refused(device: CpuDevice) -> None:
    lab = Lab(device)
    project(lab, 1)
    buffer = lab.put([1.0])

    def child() -> None:
        try:
            device.zero(buffer)
        except EngineClosed:
            device.close()
            os._exit(17)
        os._exit(1)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(30)
    assert process.exitcode == 17


def test_threads_follow_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NINFER_CPU_THREADS", "3")
    device = CpuDevice()
    assert device.threads == 3
    device.close()


# -- the delayed device


@pytest.fixture
def delayed(device: CpuDevice) -> AsyncDevice:
    return AsyncDevice(device)


def test_delayed_results_are_garbage_until_waited_for(delayed: AsyncDevice) -> None:
    buffer = delayed.arena(256).buffer(0, (2,), "f32")
    delayed.upload(buffer, np.array([1, 2], np.float32))
    out = delayed.host((2,), "f32")
    delayed.download(out, buffer)
    event = delayed.event()
    event.record()
    assert out.tolist() != [1.0, 2.0]
    assert not event.done()
    assert event.done()
    assert out.tolist() == [1.0, 2.0]
    assert delayed.waits == 0


def test_delayed_uploads_read_their_source_late(delayed: AsyncDevice) -> None:
    buffer = delayed.arena(256).buffer(0, (2,), "f32")
    source, out = np.array([1, 2], np.float32), delayed.host((2,), "f32")
    delayed.upload(buffer, source)
    source[0] = 7
    delayed.download(out, buffer)
    event = delayed.event()
    event.record()
    event.wait()
    assert out.tolist() == [7.0, 2.0]


def test_delayed_ops_and_graphs_compute_the_same(device: CpuDevice, delayed: AsyncDevice) -> None:
    want = project(Lab(device), 1)
    np.testing.assert_array_equal(project(Lab(delayed), 1), want)
    assert delayed.pending == 0
    lab = Lab(delayed)
    x, y = lab.put([1.0]), lab.put([0.0])
    graph = delayed.capture(lambda: delayed.copy(y, x))
    assert delayed.pending == 0
    graph.launch()
    with pytest.raises(AssertionError):
        graph.close()
    assert lab.get(y).tolist() == [1.0]
    graph.close()


def test_delayed_failures_surface_in_wait(delayed: AsyncDevice) -> None:
    arena = delayed.arena(256)
    event = delayed.event()
    delayed.fail(DeviceError("gone"))
    delayed.zero(arena.buffer(0, (2,), "f32"))
    event.record()
    with pytest.raises(DeviceError, match="gone"):
        event.wait()
    with pytest.raises(AssertionError):
        arena.close()
