"""Where the CUDA Ops run: on the GPU that NINFER_TEST_DEVICE names ("cuda:0"), else on the host, emulated."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kernels.machine import EmulatedDevice

from ninfer.device import working


@pytest.fixture(scope="session")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    device: Any
    if name := os.environ.get("NINFER_TEST_DEVICE"):
        from device import prebuilt

        from ninfer._cuda.device import CudaDevice

        prebuilt.use_named()
        device = CudaDevice(int(name.removeprefix("cuda:")))
    elif shutil.which("g++") is None or platform.machine() != "x86_64":
        pytest.skip("the emulator needs g++ on x86-64")
    else:
        base = tmp_path_factory.getbasetemp()  # pytest-xdist: a worker's own, within that of the run
        device = EmulatedDevice((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "emulator")
    with working(device):
        yield device
    device.close()


@pytest.fixture
def device(opened: Any) -> Iterator[Any]:
    """A test may lower ``shared_limit``, change ``pairs`` and the emulator's ``order`` and ``together``."""
    limit, pairs = opened.shared_limit, opened.pairs
    yield opened
    opened.shared_limit, opened.pairs, opened.order, opened.together = limit, pairs, 0, 1


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Seeded by the test's own name."""
    return np.random.default_rng(list(request.node.name.encode()))
