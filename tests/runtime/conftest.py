"""Requests as a frontend would prepare them, and ResourceManagers over the scripted program."""

from __future__ import annotations

import numpy as np
import pytest
from fakes.scripted_program import ScriptedProgram

from ninfer.contract import LimitReason, PreparedRequest, RequestId, SamplingSpec
from ninfer.identity import PrefixIdentity, digest_chain
from ninfer.options import CacheOptions
from ninfer.runtime.costs import GENERIC
from ninfer.runtime.resources import ResourceManager
from ninfer.runtime.settings import resolve

SAMPLING = SamplingSpec(0.0, 1.0, 1, 0.0, 0.0, 0.0, 0)


def make_request(number: int = 1, tokens=5, *, output: int = 4, **fields) -> PreparedRequest:
    """``tokens``: a count of equal ones, or the tokens."""
    array = np.full(tokens, 9, np.int32) if isinstance(tokens, int) else np.array(tokens, np.int32)
    n = len(array)
    identity = PrefixIdentity(array, np.zeros(n, np.uint8), np.zeros((3, n), np.int32))
    return PreparedRequest(
        RequestId(number), number, identity, digest_chain(identity), output, output, LimitReason.OUTPUT_LIMIT,
        SAMPLING, **fields,
    )  # fmt: skip


def make_manager(program: ScriptedProgram, **cache) -> ResourceManager:
    settings = resolve(CacheOptions(**cache), program.lanes, "cpu")
    return ResourceManager(program, program.lanes, settings, GENERIC, clock=lambda: 0)


@pytest.fixture
def request_of():
    return make_request


@pytest.fixture
def manager_of():
    return make_manager
