"""The host device, with one thread and with two."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from ops.harness import Lab

from ninfer._cpu.device import CpuDevice


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    device = CpuDevice()
    yield Lab(device)
    device.close()


@pytest.fixture(scope="session")
def lab1() -> Iterator[Lab]:
    """The same device with a single thread."""
    device = CpuDevice(threads=1)
    yield Lab(device)
    device.close()


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Seeded by the test's own name."""
    return np.random.default_rng(list(request.node.name.encode()))
