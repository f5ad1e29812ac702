"""Hypothesis profiles, checked indices, the folder of public test files, and how processes share the work."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("NINFER_CHECKS", "1")
_quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
settings.register_profile("test", max_examples=30, deadline=None, suppress_health_check=_quiet, derandomize=True)
settings.register_profile("full", max_examples=500, deadline=None, suppress_health_check=_quiet)
settings.load_profile(os.environ.get("NINFER_HYPOTHESIS_PROFILE", "test"))

LONGEST = (
    "examples/test_speculation.py", "cuda/test_compile.py", "examples/test_enumerated.py", "kernels/test_overlap.py",
    "cuda/test_simulator.py", "examples/test_tiny_model.py", "kernels/test_model.py", "gateway/cli/test_run.py",
    "gateway/http/test_operations.py", "device/test_measure.py", "engine/test_dflash.py", "constraints/test_emit.py",
    "examples/test_scripted_drafts.py", "kernels/test_companion.py", "gateway/http/test_description.py",
)  # fmt: skip
"""Files that take longest, in the order in which processes that share the work begin them."""


def pytest_configure(config: pytest.Config) -> None:
    """Before pytest-xdist starts its processes: each has few threads, or they would wait for each other."""
    if getattr(config.option, "numprocesses", None):
        os.environ.setdefault("NINFER_CPU_THREADS", "2")
        for library in ("OMP", "OPENBLAS", "MKL"):
            os.environ.setdefault(f"{library}_NUM_THREADS", "1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        order = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
        items.sort(key=lambda item: order.get(item.path, len(order)))


@pytest.fixture(scope="session")
def test_data() -> Path:
    """The folder named by NINFER_TEST_DATA; tests that need it are skipped, and say so, without it."""
    folder = os.environ.get("NINFER_TEST_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("NINFER_TEST_DATA does not name a folder")
    return Path(folder)
