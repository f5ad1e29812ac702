"""Hypothesis profiles, checked indices, and the folder of public test files."""

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


@pytest.fixture(scope="session")
def test_data() -> Path:
    """The folder named by NINFER_TEST_DATA; tests that need it are skipped, and say so, without it."""
    folder = os.environ.get("NINFER_TEST_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("NINFER_TEST_DATA does not name a folder")
    return Path(folder)
