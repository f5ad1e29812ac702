"""One GPU for the tests of this folder, which are skipped, and say why, where there is none."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from ops.harness import Lab

from ninfer.device import Device
from ninfer.errors import DeviceError


@pytest.fixture(scope="session")
def gpu() -> Iterator[Device]:
    from device import prebuilt

    from ninfer._cuda.device import CudaDevice

    prebuilt.use_named()
    try:
        device = CudaDevice(0)
    except DeviceError as error:
        pytest.skip(f"no usable GPU: {error}")
    yield device
    device.close()


@pytest.fixture(scope="session")
def lab(gpu: Device) -> Lab:
    return Lab(gpu)


@pytest.fixture(scope="session")
def reference() -> Iterator[Lab]:
    """The host, for comparison."""
    from ninfer._cpu.device import CpuDevice

    device = CpuDevice()
    yield Lab(device)
    device.close()


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    return np.random.default_rng(list(request.node.name.encode()))
