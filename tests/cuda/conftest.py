"""A CUDA device over a fake driver."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest
from fakes.cuda_driver import FakeDriver

from ninfer._cuda import blas
from ninfer._cuda import compile as compiler
from ninfer._cuda import device as device_module
from ninfer._cuda import driver as driver_module
from ninfer._cuda.device import CudaDevice


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, cache: object) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(driver_module, "cupy", lambda: fake.cupy)
    monkeypatch.setattr(driver_module, "bindings", lambda: fake.bindings)
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: "nvrtc 13.0")
    source = compiler.Source("add", "text", lambda arch: arch.encode(), lambda: "compiler")
    monkeypatch.setattr(device_module, "kernel_sources", lambda: [source])
    ops = ModuleType("ninfer._cuda.ops")
    ops.CudaOps = lambda device: SimpleNamespace(close=lambda: None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ninfer._cuda.ops", ops)
    return fake


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> object:
    """A folder of compiled kernels of the test's own."""
    monkeypatch.setenv("NINFER_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def device(driver: FakeDriver) -> Iterator[CudaDevice]:
    device = CudaDevice()
    yield device
    device.close()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, cache: object) -> FakeDriver:
    """A driver under the product's own Ops; kernels do nothing, so every logit and token is 0."""
    fake = FakeDriver(memory=2 << 30)
    sources = [without_code(source) for source in device_module.kernel_sources()]
    monkeypatch.setattr(driver_module, "cupy", lambda: fake.cupy)
    monkeypatch.setattr(driver_module, "bindings", lambda: fake.bindings)
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: "nvrtc 13.0")
    monkeypatch.setattr(device_module, "kernel_sources", lambda: sources)
    for name in ("__init__", "__call__", "use", "close"):
        monkeypatch.setattr(blas.Blas, name, lambda *arguments, **options: None)
    return fake


def without_code(source: compiler.Source) -> compiler.Source:
    return compiler.Source(source.name, "text", lambda arch: b"code", lambda: "compiler")
