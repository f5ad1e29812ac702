"""Lanes and the one open transaction, over the scripted program."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from fakes.scripted_program import ScriptedProgram

from ninfer.contract import (
    LimitReason,
    PrefixIdentity,
    PreparedRequest,
    PromptDigest,
    RequestId,
    SamplingSpec,
    TransactionKind,
)
from ninfer.errors import InvariantError
from ninfer.runtime.resources import LaneState, ResourceManager

SAMPLING = SamplingSpec(0.0, 1.0, 1, 0.0, 0.0, 0.0, 0)


def request(number: int = 1, length: int = 5) -> PreparedRequest:
    tokens = np.full(length, 9, np.int32)
    identity = PrefixIdentity(tokens, np.zeros(length, np.uint8), np.zeros((3, length), np.int32))
    return PreparedRequest(
        RequestId(number), number, identity, PromptDigest(()), 4, 4, LimitReason.OUTPUT_LIMIT, SAMPLING
    )


def admit(manager: ResourceManager, number: int = 1):
    lane = manager.free_lane()
    return manager.start(manager.plan(request(number), lane))


def test_a_lane_goes_round():
    program = ScriptedProgram(lanes=2, polls=1)
    manager = ResourceManager(program, 2)
    baseline = program.audit()
    verdict = admit(manager)
    assert verdict.kind == "started"
    assert manager.open
    assert manager.lane_states() == (LaneState.MATERIALIZING, LaneState.FREE)
    adoption = manager.progress()
    assert (adoption.request, adoption.lane, adoption.reused_tokens) == (1, 0, 0)
    assert manager.lane_states()[0] is LaneState.ACTIVE
    manager.mark_terminal(0, retain=False)
    assert manager.lane_states()[0] is LaneState.TERMINAL_PENDING
    manager.settle_terminal(0)
    assert manager.lane_states() == (LaneState.FREE,) * 2
    assert program.audit() == baseline
    assert program.calls[-1] == "discard"


def test_without_copies_a_start_is_adopted_at_once():
    manager = ResourceManager(ScriptedProgram(), 2)
    verdict = admit(manager)
    assert verdict.kind == "ready"
    assert verdict.adoption.lane == 0
    assert not manager.open


def test_a_stale_plan_leaves_no_trace():
    program = ScriptedProgram()
    program.stale_starts = 1
    manager = ResourceManager(program, 2)
    before = (manager.lane_states(), manager.lane_version, manager.transaction_version, program.audit())
    assert admit(manager).kind == "blocked"
    assert (manager.lane_states(), manager.lane_version, manager.transaction_version, program.audit()) == before


def test_abort_frees_the_lane():
    program = ScriptedProgram(polls=2)
    manager = ResourceManager(program, 2)
    baseline = program.audit()
    admit(manager)
    manager.abort()
    assert not manager.open
    assert manager.lane_states() == (LaneState.FREE,) * 2
    assert program.audit() == baseline
    assert admit(manager, 2).kind == "started"


def test_the_epoch_moves_with_lanes_and_transactions():
    manager = ResourceManager(ScriptedProgram(polls=1), 2)
    seen = [(manager.lane_version, manager.transaction_version)]
    admit(manager)
    seen.append((manager.lane_version, manager.transaction_version))
    manager.progress()
    seen.append((manager.lane_version, manager.transaction_version))
    manager.mark_terminal(0, retain=False)
    manager.settle_terminal(0)
    seen.append((manager.lane_version, manager.transaction_version))
    assert len(set(seen)) == 4


def test_no_second_transaction_and_no_settling_while_one_is_open():
    program = ScriptedProgram(lanes=3)
    manager = ResourceManager(program, 3)
    admit(manager, 1)
    manager.mark_terminal(0, retain=False)
    program.polls = 5
    plan = manager.plan(request(3), 2)
    admit(manager, 2)
    with pytest.raises(InvariantError, match="already open"):
        manager.start(plan)
    with pytest.raises(InvariantError, match="settle"):
        manager.settle_terminal(0)


@pytest.mark.parametrize(
    "change",
    [
        {"transaction": 99},
        {"committed": False},
        {"kind": TransactionKind.CAPTURE},
        {"sequence": None},
    ],
)
def test_a_result_that_does_not_answer_the_ticket_is_not_adopted(change):
    program = ScriptedProgram(polls=1)
    manager = ResourceManager(program, 2)
    admit(manager)
    commit = program.commit_transaction
    program.commit_transaction = lambda: dataclasses.replace(commit(), **change)
    with pytest.raises(InvariantError):
        manager.progress()
    assert manager.lane_states()[0] is LaneState.MATERIALIZING


def test_calls_out_of_order_are_bugs():
    manager = ResourceManager(ScriptedProgram(), 2)
    for call in (manager.progress, manager.abort, lambda: manager.mark_terminal(0, True)):
        with pytest.raises(InvariantError):
            call()
    admit(manager)
    with pytest.raises(InvariantError):
        manager.settle_terminal(0)
