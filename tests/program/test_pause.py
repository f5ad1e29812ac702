"""Rows that are paused and admitted again, anywhere: every token is the one they would have had without the pause."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from fakes.program_driver import GREEDY, accept_all, admit, first, make_request, prefill
from fakes.symbolic import Oracle, SymbolicDevice, SymbolicModel
from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer.context import CheckpointRef
from ninfer.contract import Handle, PreparedRequest, RowDecision, UnitLicense
from ninfer.errors import InvariantError
from ninfer.program import ExplicitKV, KVCodec, Retention, Shape, open_program
from ninfer.program.outcomes import generated

VOCABULARY, CHUNK = 7, 48
WARM = dataclasses.replace(GREEDY, temperature=1.0, presence_penalty=1.5, frequency_penalty=0.4)


def opened(window: int = 0, rows: int = 2):
    shape = Shape(rows, 192, CHUNK, 4, KVCodec.FP32, VOCABULARY, spare=2, window=window)
    device = SymbolicDevice(delayed=True)
    model = SymbolicModel(VOCABULARY, drafting=window > 0)
    return open_program(device, model, shape, ExplicitKV(64 * 3 * rows), Retention(0, 2, 1 << 16, 1 << 14)), device


def decode(program, sequence: Handle, licence: int = 0) -> tuple[int, ...]:
    return accept_all(program, program.decode((sequence,), (UnitLicense(licence),), None))[0]


def again(program, request: PreparedRequest, retained, lane: int, how: str) -> Handle:
    """Admit a paused request from the deepest of what it left, or from nothing."""
    deepest = None if retained is None else max(retained.checkpoints, key=lambda c: c.key.frontier)
    if how == "root" or deepest is None:
        sequence = admit(program, request, lane)
        if retained is not None:
            program.release_inactive(retained.owner)
        return sequence
    ref = CheckpointRef(retained.owner, deepest.ref.checkpoint)
    sequence = admit(program, request, lane, ref, consume=how == "move")
    if how == "fork":
        program.release_inactive(retained.owner)
    return sequence


@settings(deadline=None)
@given(data=st.data(), window=st.sampled_from([0, 0, 3]))
def test_tokens_do_not_depend_on_pauses(data: st.DataObject, window: int) -> None:
    program, device = opened(window)
    start = program.audit()
    prompt = data.draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=100))
    output = data.draw(st.integers(2, 60))
    sampling = dataclasses.replace(data.draw(st.sampled_from([GREEDY, WARM])), seed=11)
    request = make_request(prompt, output, sampling, 5, data.draw(st.sampled_from([(), (1,), (64,)])))
    oracle, sequence, begun = Oracle(request, VOCABULARY), admit(program, request, 0), False
    while len(oracle.ledger) - oracle.prompt < output:
        what = data.draw(st.sampled_from(["unit", "unit", "unit", "pause", "force"]))
        left = output - (len(oracle.ledger) - oracle.prompt)
        if what == "pause":
            result = program.pause(sequence, snapshot=data.draw(st.booleans()))
            assert (result.request.resume is not None) == (begun or request.resume is not None)
            request = result.request
            if begun:
                assert [*request.identity.tokens, request.resume.anchor] == oracle.ledger
                assert generated(request).tolist() == oracle.ledger[oracle.prompt : -1]
            how = data.draw(st.sampled_from(["root", "move", "fork"]))
            sequence = again(program, request, result.retained, data.draw(st.integers(0, 1)), how)
        elif program.prefill_remaining(sequence):
            program.prefill(sequence, data.draw(st.integers(1, CHUNK)))
        elif what == "force":
            forced = data.draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=min(4, left)))
            assert accept_all(program, program.control(sequence, forced)) == [tuple(forced)]
            oracle.accept(forced)
            begun = True
        elif not begun:
            token = oracle.draw()
            assert first(program, (sequence,)) == [(token,)]
            oracle.accept([token])
            begun = True
        else:
            for token in decode(program, sequence, min(window, left - 1)):
                assert token == oracle.draw()
                oracle.accept([token])
    program.discard(sequence)
    assert program.audit() == start
    program.close()
    assert device.held == 0


@pytest.mark.parametrize("snapshot", [True, False])
def test_what_a_pause_keeps(snapshot: bool) -> None:
    """With a snapshot nothing is read again; without one everything is, and nothing is left behind."""
    program, _ = opened()
    request = make_request(range(1, 6), 20, GREEDY)
    sequence, oracle = admit(program, request, 0), Oracle(request, VOCABULARY)
    prefill(program, sequence, CHUNK)
    oracle.accept(first(program, (sequence,))[0])
    for _ in range(3):
        oracle.accept(decode(program, sequence))
    result = program.pause(sequence, snapshot=snapshot)
    assert result.point is snapshot
    assert (result.retained is not None) is snapshot
    assert result.request.effective_output == 20 - 4 + 1
    sequence = again(program, result.request, result.retained, 0, "move")
    assert program.prefill_remaining(sequence) == (0 if snapshot else len(oracle.ledger) - 1)
    prefill(program, sequence, CHUNK)
    assert decode(program, sequence) == (oracle.draw(),)
    program.discard(sequence)
    program.close()


def test_a_paused_request_needs_as_much_room_as_before() -> None:
    program, _ = opened()
    request = make_request([1] * 100, 50, GREEDY)
    before = program.store.profile.entitlement(100, 50)
    sequence = admit(program, request, 0)
    prefill(program, sequence, CHUNK)
    first(program, (sequence,))
    for _ in range(30):
        decode(program, sequence)
    again_ = program.pause(sequence, snapshot=False).request
    assert program.store.profile.entitlement(len(again_.identity.tokens), again_.effective_output) == before
    assert program.isolated_root_fits(again_) is None
    program.close()


def test_rows_that_ended_or_wait_for_a_commit_cannot_be_paused() -> None:
    program, _ = opened()
    request = make_request([1, 2, 3], 8, GREEDY)
    sequence = admit(program, request, 0)
    prefill(program, sequence, CHUNK)
    batch = program.finalize_prefill((sequence,), None)
    with pytest.raises(InvariantError, match="pending"):
        program.pause(sequence, snapshot=True)
    program.wait(batch)
    program.commit(batch, [RowDecision(1, terminal=True)])
    with pytest.raises(InvariantError, match="ended"):
        program.pause(sequence, snapshot=True)
    program.finish(sequence)
    program.close()


def test_counts_of_a_resumed_row_are_its_own() -> None:
    """The lane's former row leaves nothing, and what was generated before the pause counts once."""
    program, _ = opened()
    prompts = ([3, 1, 2], [2, 2, 1, 0])
    rows = []
    for lane, prompt in enumerate(prompts):
        request = make_request(prompt, 30, dataclasses.replace(WARM, seed=lane), id=lane)
        rows.append([Oracle(request, VOCABULARY), admit(program, request, lane)])
        prefill(program, rows[-1][1], CHUNK)
        rows[-1][0].accept(first(program, (rows[-1][1],))[0])
    for _ in range(6):
        for oracle, sequence in rows:
            oracle.accept(decode(program, sequence))
    paused = [program.pause(sequence, snapshot=True) for _, sequence in rows]
    for lane, (row, result) in enumerate(zip(rows, paused)):
        row[1] = again(program, result.request, result.retained, 1 - lane, "move")
    for _ in range(10):
        for oracle, sequence in rows:
            token = oracle.draw()
            assert decode(program, sequence) == (token,)
            oracle.accept([token])
    assert len({tuple(np.bincount(oracle.ledger, minlength=VOCABULARY)) for oracle, _ in rows}) == 2
    program.close()
