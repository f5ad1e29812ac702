"""The CUDA device over a driver that needs no GPU: memory, order of work, teardown, faults."""

from __future__ import annotations

import ctypes
import re
import struct
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from fakes.cuda_driver import ILLEGAL_ADDRESS, INVALID_HANDLE, NOT_READY, OUT_OF_MEMORY, FakeDriver

from ninfer._cuda import residency
from ninfer._cuda.device import CudaDevice
from ninfer.errors import DeviceError, InvariantError, OutOfDeviceMemory


def alive(driver: FakeDriver) -> dict[str, int]:
    return {kind: count for kind, count in driver.live.items() if count}


def test_arenas_are_zeroed_aligned_and_returned(device: CudaDevice, driver: FakeDriver) -> None:
    before = driver.used
    arena = device.arena(1000)
    buffer = arena.buffer(256, (3, 5), "i32")
    assert buffer.ptr % 256 == 0
    out = device.host((3, 5), "i32")
    out[:] = 7
    device.download(out, buffer)
    assert not out.any()
    for offset, shape in ((1, (1,)), (-256, (1,)), (768, (100,))):
        with pytest.raises(InvariantError):
            arena.buffer(offset, shape, "i32")
    arena.close()
    arena.close()
    assert driver.used == before


def test_memory_that_is_not_there(device: CudaDevice, driver: FakeDriver) -> None:
    driver.total = driver.used + (1 << 24)
    taken = device.arena(1 << 20)
    with pytest.raises(OutOfDeviceMemory, match=f"{1 << 24} bytes needed, {(1 << 24) - (1 << 20)} free") as caught:
        device.arena(1 << 24)
    assert caught.value.free == (1 << 24) - (1 << 20)
    taken.close()
    device.arena(1 << 24)


def test_copies_check_both_sides(device: CudaDevice) -> None:
    buffer = device.arena(256).buffer(0, (4, 4), "f32")
    values = np.arange(16, dtype=np.float32).reshape(4, 4)
    device.upload(buffer, values)
    back = np.empty((2, 4), np.float32)
    device.copy(buffer.slice(0, 2), buffer.slice(2, 4))
    device.download(back, buffer.slice(0, 2))
    np.testing.assert_array_equal(back, values[2:])
    device.zero(buffer.slice(1, 2))
    device.download(back, buffer.head(2, 4))
    np.testing.assert_array_equal(back, [values[2], [0] * 4])
    for wrong in (values.astype(np.float64), values[:2], values.T):
        with pytest.raises(InvariantError):
            device.upload(buffer, wrong)
    with pytest.raises(InvariantError):
        device.copy(buffer, buffer.slice(0, 1))
    with pytest.raises(InvariantError):
        buffer.head(17)
    with pytest.raises(InvariantError):
        buffer.slice(3, 5)


@pytest.mark.parametrize("sizes", [(1, 300, 5000), (70_000, 200_000, 130_000, 1), (0, 65_536)])
def test_weights_arrive_whole(
    device: CudaDevice, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]
) -> None:
    """Objects smaller than a slab share one; larger ones travel in chunks, each filled by several threads."""
    for name, value in (("SLAB", 1 << 17), ("OWN", 1 << 17), ("CHUNK", 1 << 15)):
        monkeypatch.setattr(residency, name, value)
    rng = np.random.default_rng(0)
    data = [rng.integers(0, 256, size, dtype=np.uint8) for size in sizes]
    buffers = [device.weights(each) for each in data]
    for each, buffer in zip(data, buffers):
        assert buffer.ptr % 256 == 0
        back = device.host((each.size,), "u8")
        device.download(back, buffer)
        np.testing.assert_array_equal(back, each)
    spans = sorted((b.ptr, b.ptr + b.nbytes) for b in buffers)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    with pytest.raises(InvariantError):
        device.weights(np.zeros((2, 2), np.uint8))


def test_a_graph_repeats_what_was_recorded(device: CudaDevice, driver: FakeDriver) -> None:
    buffer = device.arena(256).buffer(0, (8,), "u8")
    other = device.arena(256).buffer(0, (8,), "u8")
    add = device.function("add", "add")
    device.upload(buffer, np.arange(8, dtype=np.uint8))

    def work() -> None:
        device.launch(add, 3, (32, 2), buffer, 5)
        device.copy(other, buffer)

    graph = device.capture(work)
    assert driver.launches == []
    out = device.host((8,), "u8")
    before = driver.live.copy()
    for _ in range(3):
        device.zero(other)
        graph.launch()
        device.download(out, other)
        np.testing.assert_array_equal(out, np.arange(8))
    assert driver.live == before
    assert len(driver.launches) == 3
    assert driver.launches[0][:2] == ("add", (3, 1, 1))
    graph.close()
    graph.close()
    with pytest.raises(InvariantError):
        graph.launch()


def test_tables_are_filled_while_work_is_recorded(device: CudaDevice, driver: FakeDriver) -> None:
    tables = []
    graph = device.capture(lambda: tables.append(device.table([1, -7, 1 << 62])))
    out = device.host((3,), "i64")
    device.download(out, tables[0])
    assert out.tolist() == [1, -7, 1 << 62]
    graph.close()


def test_tables_take_no_memory_that_was_not_there_at_the_start(device: CudaDevice, driver: FakeDriver) -> None:
    """Nobody has planned for them: they are made when recordings or copies first need them."""
    device.weights(np.ones(residency.SLAB // 16 - 256, np.uint8))
    used, words = driver.used, np.arange(residency.TABLES // 4 // 8)
    tables = [device.table(words + i) for i in range(4)]
    assert driver.used == used
    tables.append(device.table([5]))  # the slab of the weights has room
    assert driver.used == used
    out = device.host(words.shape, "i64")
    for i, table in enumerate(tables[:4]):
        device.download(out, table)
        np.testing.assert_array_equal(out, words + i)
    spans = sorted((table.ptr, table.ptr + table.nbytes) for table in tables)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))


def test_a_recording_that_raises_leaves_nothing(device: CudaDevice, driver: FakeDriver) -> None:
    before = alive(driver)

    def broken() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError):
        device.capture(broken)
    with pytest.raises(InvariantError):
        device.capture(lambda: device.capture(lambda: None))
    driver.fail["graphInstantiate"] = OUT_OF_MEMORY
    with pytest.raises(OutOfDeviceMemory):
        device.capture(lambda: None)
    assert alive(driver) == before
    driver.fail.clear()
    device.capture(lambda: None).close()


def test_close_frees_everything_graphs_first(driver: FakeDriver) -> None:
    for _ in range(5):
        device = CudaDevice()
        arena = device.arena(4096)
        device.host((10,), "f32")
        device.weights(np.ones(100, np.uint8))
        event = device.event()
        event.record()
        assert event.done()
        event.wait()
        graph = device.capture(lambda: None)
        driver.order.clear()
        device.close()
        device.close()
        assert alive(driver) == {}
        assert driver.used == 0
        assert driver.order[0] == "graph"
        assert driver.order[-1] == "stream"
        assert driver.order.index("graph") < driver.order.index("memory")
        arena.close()
        graph.close()
        with pytest.raises(DeviceError, match="closed"):
            device.arena(1)


def test_kernels_are_loaded_from_their_files(device: CudaDevice, driver: FakeDriver) -> None:
    kernel = device.function("add", "add", 64 << 10)
    device.launch(kernel, (2, 3), 32, 1, shared=64 << 10, dependent=True)
    assert driver.launches[0][:4] == ("add", (2, 3, 1), (32, 1, 1), 64 << 10)
    assert {Path(path).read_bytes() for path in driver.loaded} == {b"sm_90a"}
    driver.fail = {"cuLaunchKernelEx": ILLEGAL_ADDRESS}
    with pytest.raises(DeviceError, match=r"ILLEGAL_ADDRESS; CUDA works again in a new process"):
        device.launch(kernel, 1, 32)
    driver.fail = {"load": INVALID_HANDLE}
    with pytest.raises(DeviceError, match="InvalidResourceHandle"):
        device.function("add", "other")


def test_a_file_that_went_before_it_was_loaded_is_made_again(
    device: CudaDevice, driver: FakeDriver, cache: Path
) -> None:
    for path in (cache / "cuda").iterdir():
        path.unlink()
    device.function("add", "add")
    assert {Path(path).read_bytes() for path in driver.loaded} == {b"sm_90a"}


def test_copies_run_beside_the_work(device: CudaDevice, driver: FakeDriver) -> None:
    copies = device.copies()
    assert copies is device.copies()
    buffer, values = device.arena(256).buffer(0, (8,), "i32"), device.host((8,), "i32")
    values[:] = range(8)
    copies.follow()
    copies.upload(buffer.slice(2, 6), values[4:])
    event = copies.event()
    event.record()
    assert event.done()
    back = device.host((8,), "i32")
    copies.download(back, buffer)
    assert back.tolist() == [0, 0, 4, 5, 6, 7, 0, 0]
    with pytest.raises(InvariantError):
        copies.upload(buffer, values[:4])
    assert driver.calls["streamWaitEvent"] == 1


def test_rows_of_many_planes_are_copied_in_one_launch(device: CudaDevice, driver: FakeDriver, rows: None) -> None:
    arena = device.arena(4096)
    planes = [arena.buffer(at, (4, *shape), dtype) for at, shape, dtype in ((0, (3, 8), "bf16"), (1024, (16,), "f16"))]
    for source, target in ((1, 3), (0, 2)):
        device.copy_rows(planes, source, target)
    assert [launch[0] for launch in driver.launches] == ["copy_rows"] * 2
    (_, grid, _, _, slots) = driver.launches[0]
    assert grid[1] == len(planes)
    assert (slots[0], slots[2], slots[3]) == (planes[0].ptr, 1, 3)
    assert driver.launches[1][-1][1] == slots[1], "one table for the same planes"
    table = np.ctypeslib.as_array((ctypes.c_int64 * 4).from_address(slots[1]))
    assert table.tolist() == [0, 48 // 8, 1024 // 8, 32 // 8]
    longer = [planes[0], arena.buffer(1024, (4, 32), "f16")]
    device.copy_rows(longer, 1, 3)
    assert driver.launches[2][-1][1] != slots[1], "other rows at the same addresses"
    for bad in ((4, 0), (0, -1)):
        with pytest.raises(InvariantError, match="rows"):
            device.copy_rows(planes, *bad)
    with pytest.raises(InvariantError, match="rows of 6 bytes"):
        device.copy_rows([arena.buffer(0, (4, 3), "bf16")], 0, 1)


@pytest.fixture
def rows(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "function", lambda module, symbol: symbol)


def test_events_report_faults_and_pending_work(device: CudaDevice, driver: FakeDriver) -> None:
    event = device.event()
    driver.fail["eventQuery"] = NOT_READY
    assert not event.done()
    driver.fail["eventQuery"] = driver.fail["eventSynchronize"] = ILLEGAL_ADDRESS
    with pytest.raises(DeviceError, match=r"700; CUDA works again in a new process"):
        event.done()
    with pytest.raises(DeviceError, match="eventSynchronize"):
        event.wait()


def test_a_device_closes_after_a_fault(driver: FakeDriver) -> None:
    device = CudaDevice()
    device.arena(100)
    broken = ILLEGAL_ADDRESS
    driver.fail = dict.fromkeys(("streamSynchronize", "free", "streamDestroy"), broken)
    device.close()
    driver.fail = {"streamCreateWithFlags": broken}
    with pytest.raises(DeviceError, match="new process"):
        CudaDevice()


def test_bandwidth_is_bytes_over_time(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    device = CudaDevice()
    monkeypatch.setattr(device, "function", lambda module, symbol: symbol)
    read: list[tuple[int, ...]] = []
    launch = device.launch

    def watched(function: object, grid: int, block: int, words: bytes) -> None:
        read.append(struct.unpack("<4q", words))
        launch(function, grid, block, words)

    monkeypatch.setattr(device, "launch", watched)
    before = alive(driver)
    bandwidth = device.read_bandwidth()
    assert alive(driver) == before
    assert {launch[0] for launch in driver.launches} == {"sweep"}
    out, data, tiles, rounds = read[0]
    assert bandwidth == pytest.approx(rounds * (out - data) / 0.25e-3)
    assert out - data == tiles * 512 * 8 * 16
    device.close()


FALLIBLE = (
    "driverGetVersion", "getDeviceCount", "getDeviceProperties", "setDevice", "streamCreateWithFlags",
    "eventCreateWithFlags",
)  # fmt: skip


@pytest.mark.parametrize("name", FALLIBLE)
def test_a_start_that_fails_leaves_nothing(driver: FakeDriver, name: str) -> None:
    driver.fail[name] = INVALID_HANDLE
    with pytest.raises(DeviceError, match=name):
        CudaDevice()
    assert alive(driver) == {}


def test_machines_that_cannot_serve(driver: FakeDriver) -> None:
    driver.version = 12040
    with pytest.raises(DeviceError, match=r"supports CUDA 12\.4, kernels need 13\.0"):
        CudaDevice()
    driver.version = 13000
    with pytest.raises(DeviceError, match=r"cuda:3: 1 GPU visible"):
        CudaDevice(3)
    driver.properties |= {"major": 7, "minor": 5}
    with pytest.raises(DeviceError, match=r"Fake GPU has compute capability 7\.5, kernels need 8\.0"):
        CudaDevice()
    assert alive(driver) == {}


CALLED = {
    name
    for path in Path(residency.__file__).parent.glob("*.py")
    for called in re.findall(r'driver\.call\(\s*"(\w+)"|callback\(driver\.call, "(\w+)"', path.read_text())
    for name in called
    if name
}
"""Functions of CuPy's runtime that the package calls."""


def test_the_fake_has_what_is_called(driver: FakeDriver) -> None:
    assert len(CALLED) > 20
    assert {name for name in CALLED if not hasattr(driver.cupy.cuda.runtime, name)} == set()


def test_cupy_has_what_is_called() -> None:
    cupy = pytest.importorskip("cupy", reason="no CuPy: pip install ninfer[cuda13]")
    assert {name for name in CALLED if not hasattr(cupy.cuda.runtime, name)} == set()
    assert {"get_function"} <= set(dir(cupy.RawModule))
    assert {"kernel", "max_dynamic_shared_size_bytes", "preferred_shared_memory_carveout"} <= set(dir(cupy.RawKernel))
    for error in (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError):
        assert issubclass(error, RuntimeError)
