"""Lanes, the one open transaction and what is kept, over the scripted program."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from fakes.scripted_program import ScriptedProgram

from ninfer.context import TransactionKind
from ninfer.contract import RowDecision, UnitLicense
from ninfer.errors import InvariantError
from ninfer.options import CacheOptions
from ninfer.runtime.adoption import Adoption, Captured
from ninfer.runtime.choices import Planned
from ninfer.runtime.lanes import Keep, LaneState
from ninfer.runtime.settings import resolve

LICENCE = UnitLicense()


@pytest.fixture
def admit(request_of):
    def run(manager, number=1, tokens=5, **fields):
        planned = manager.plan(request_of(number, tokens, **fields), manager.free_lane())
        assert isinstance(planned, Planned), planned
        return manager.start(planned)

    return run


@pytest.fixture
def run_to_end(admit):
    """A whole request: admitted, prefilled with its captures, decoded, ended; returns its Adoption."""

    def run(manager, program, number, tokens, keep=Keep.ENDPOINT, **fields):
        adoption = admit(manager, number, tokens, **fields)
        assert isinstance(adoption, Adoption)
        captures = list(adoption.captures)
        sequence = adoption.sequence
        while True:
            left = program.prefill_remaining(sequence)
            if captures and captures[0].frontier == len(tokens) - left:
                planned = manager.plan_capture(adoption.lane, captures.pop(0))
                if isinstance(planned, Planned):
                    assert manager.start(planned) == Captured(adoption.lane)
            elif left:
                next_stop = captures[0].frontier if captures else len(tokens)
                program.prefill(sequence, next_stop - (len(tokens) - left))
            else:
                break
        if keep is Keep.ENDPOINT:
            for last in (False, True):
                batch = program.decode([sequence], [LICENCE], None) if last else first(program, sequence)
                program.wait(batch)
                program.commit(batch, [RowDecision(1, terminal=last)])
        manager.mark_terminal(adoption.lane, keep)
        manager.settle_terminal(adoption.lane)
        return adoption

    return run


def first(program, sequence):
    return program.finalize_prefill([sequence], None)


def roomy(**fields) -> ScriptedProgram:
    return ScriptedProgram(lanes=2, pages=999, page=4, context=400, **fields)


# -- lanes and transactions ----------------------------------------------------------------------------------------


def test_a_lane_goes_round(manager_of, admit):
    program = ScriptedProgram(lanes=2, polls=1)
    manager = manager_of(program)
    baseline = program.audit()
    assert admit(manager) == "started"
    assert manager.open
    assert manager.lane_states() == (LaneState.MATERIALIZING, LaneState.FREE)
    adoption = manager.progress()
    assert (adoption.request, adoption.lane, adoption.reused_tokens) == (1, 0, 0)
    assert manager.lane_states()[0] is LaneState.ACTIVE
    manager.mark_terminal(0, Keep.NOTHING)
    assert manager.lane_states()[0] is LaneState.TERMINAL_PENDING
    manager.settle_terminal(0)
    assert manager.lane_states() == (LaneState.FREE,) * 2
    assert program.audit() == baseline
    assert program.calls[-1] == "discard"


def test_without_copies_a_start_is_adopted_at_once(manager_of, admit):
    manager = manager_of(ScriptedProgram())
    assert admit(manager).lane == 0
    assert not manager.open


def test_a_stale_plan_leaves_no_trace(manager_of, admit):
    program = ScriptedProgram()
    program.stale_starts = 1
    manager = manager_of(program)
    before = (manager.lane_states(), manager.lane_version, manager.transaction_version, program.audit())
    assert admit(manager) == "refused"
    assert (manager.lane_states(), manager.lane_version, manager.transaction_version, program.audit()) == before


def test_abort_frees_the_lane(manager_of, admit):
    program = ScriptedProgram(polls=2)
    manager = manager_of(program)
    baseline = program.audit()
    admit(manager)
    manager.abort()
    assert not manager.open
    assert manager.lane_states() == (LaneState.FREE,) * 2
    assert program.audit() == baseline
    assert admit(manager, 2) == "started"


def test_a_failed_copy_is_reported_and_then_aborted(manager_of, admit):
    program = ScriptedProgram()
    program.fail_copies = 1
    manager = manager_of(program)
    baseline = program.audit()
    assert admit(manager) == "started"
    assert manager.progress() == "failed"
    manager.abort()
    assert program.audit() == baseline


def test_the_epoch_moves_with_lanes_and_transactions(manager_of, admit):
    manager = manager_of(ScriptedProgram(polls=1))
    seen = [(manager.lane_version, manager.transaction_version)]
    admit(manager)
    seen.append((manager.lane_version, manager.transaction_version))
    manager.progress()
    seen.append((manager.lane_version, manager.transaction_version))
    manager.mark_terminal(0, Keep.NOTHING)
    manager.settle_terminal(0)
    seen.append((manager.lane_version, manager.transaction_version))
    assert len(set(seen)) == 4


def test_no_second_transaction_and_no_settling_while_one_is_open(manager_of, admit, request_of):
    program = ScriptedProgram(lanes=3)
    manager = manager_of(program)
    admit(manager, 1)
    manager.mark_terminal(0, Keep.NOTHING)
    program.polls = 5
    planned = manager.plan(request_of(3), 2)
    admit(manager, 2)
    with pytest.raises(InvariantError, match="already open"):
        manager.start(planned)
    for call in (lambda: manager.settle_terminal(0), manager.release_all):
        with pytest.raises(InvariantError):
            call()


@pytest.mark.parametrize(
    "change",
    [
        {"transaction": 99},
        {"committed": False},
        {"kind": TransactionKind.CAPTURE},
        {"sequence": None},
        {"source": "consumed"},
    ],
)
def test_a_result_that_does_not_answer_the_ticket_is_not_adopted(manager_of, admit, change):
    program = ScriptedProgram(polls=1)
    manager = manager_of(program)
    admit(manager)
    commit = program.commit_transaction
    program.commit_transaction = lambda: dataclasses.replace(commit(), **change)
    with pytest.raises(InvariantError):
        manager.progress()
    assert manager.lane_states()[0] is LaneState.MATERIALIZING


@pytest.mark.parametrize("surviving", [frozenset(), frozenset((0, 1)), frozenset((0, 7))])
def test_an_owner_that_did_not_keep_what_it_was_promised_is_not_adopted(manager_of, run_to_end, admit, surviving):
    program = roomy()
    manager = manager_of(program)
    run_to_end(manager, program, 1, [1] * 40, rewrite=(8, "TURN_CLOSURE"))
    (kept,) = manager.catalogue
    program.pages = 16
    before = dict(kept.checkpoints)
    commit = program.commit_transaction

    def tampered():
        result = commit()
        assert result.owners, "the plan took something from the kept history"
        wrong = [dataclasses.replace(outcome, surviving=surviving) for outcome in result.owners]
        return dataclasses.replace(result, owners=tuple(wrong))

    program.commit_transaction = tampered
    with pytest.raises(InvariantError):
        admit(manager, 2, [2] * 44)
    assert kept.checkpoints == before


def test_calls_out_of_order_are_bugs(manager_of, admit):
    manager = manager_of(ScriptedProgram())
    for call in (manager.progress, manager.abort, lambda: manager.mark_terminal(0, Keep.ENDPOINT)):
        with pytest.raises(InvariantError):
            call()
    admit(manager)
    with pytest.raises(InvariantError):
        manager.settle_terminal(0)


# -- what is kept --------------------------------------------------------------------------------------------------


def test_a_conversation_goes_on_where_it_stopped(manager_of, run_to_end):
    program = roomy()
    manager = manager_of(program)
    first = run_to_end(manager, program, 1, [1] * 20, session="a")
    assert first.reused_tokens == 0
    (entry,) = manager.catalogue
    (history,) = (owner.tokens for owner in program.kept.owners.values())
    second = run_to_end(manager, program, 2, [*history, 5, 6, 7], session="a")
    assert second.reused_tokens == len(history) == 21
    assert manager.reuse.hits == {"session_endpoint": 1}
    assert len(manager.catalogue) == 1
    assert entry.owner not in program.kept.owners, "its own next request has taken the history over"


def test_another_conversation_copies_a_named_history(manager_of, run_to_end):
    program = roomy()
    manager = manager_of(program)
    run_to_end(manager, program, 1, [1] * 20, session="a")
    (entry,) = manager.catalogue
    for number, fields in enumerate([{"session": "b"}, {}, {"session": "a", "update_session": False}], 2):
        adoption = run_to_end(manager, program, number, [1] * 20 + [number], keep=Keep.NOTHING, **fields)
        assert adoption.reused_tokens == 20
        assert entry.owner in program.kept.owners


def test_the_later_request_keeps_the_name(manager_of, admit, request_of):
    program = roomy()
    manager = manager_of(program)
    early, late = request_of(1, [1] * 9, session="a"), request_of(2, [2] * 9, session="a")
    for request in (early, late):
        manager.enter(request)
    lanes = [manager.start(manager.plan(request, manager.free_lane())) for request in (early, late)]
    for adoption in lanes:
        for capture in adoption.captures:
            program.prefill(adoption.sequence, capture.frontier)
            manager.start(manager.plan_capture(adoption.lane, capture))
    for adoption in reversed(lanes):
        manager.mark_terminal(adoption.lane, Keep.CHECKPOINTS)
        manager.settle_terminal(adoption.lane)
    named = [entry for entry in manager.catalogue if entry.session == "a"]
    assert [entry.order for entry in named] == [2]
    assert len(manager.catalogue) == 2


def test_a_disabled_request_reads_and_leaves_nothing(manager_of, run_to_end):
    program = roomy()
    manager = manager_of(program)
    run_to_end(manager, program, 1, [1] * 20)
    before = (len(manager.catalogue), len(manager.catalogue.index), program.audit())
    adoption = run_to_end(manager, program, 2, [1] * 20, participation="disabled")
    assert adoption.reused_tokens == 0
    assert not adoption.captures
    assert (len(manager.catalogue), len(manager.catalogue.index), program.audit()) == before
    assert manager.reuse.misses == {"new": 1, "disabled": 1}


def test_a_cancelled_request_leaves_the_checkpoints_it_made(manager_of, run_to_end):
    program = roomy()
    manager = manager_of(program)
    run_to_end(manager, program, 1, [1] * 20, keep=Keep.CHECKPOINTS)
    again = run_to_end(manager, program, 2, [1] * 20 + [2] * 5)
    assert again.reused_tokens == 20
    assert manager.reuse.hits == {"response_replay": 1}


def test_the_rewrite_point_follows_the_conversation(manager_of, run_to_end):
    program = roomy()
    manager = manager_of(program)
    tokens = [1] * 10
    for number in range(1, 6):
        run_to_end(manager, program, number, tokens, session="a", rewrite=(len(tokens) - 2, "TURN_CLOSURE"))
        named = [entry for entry in manager.catalogue if entry.session == "a"]
        rewrites = [c.key.frontier for e in named for c in e.checkpoints.values() if "closure" in c.kind.value]
        assert rewrites == [len(tokens) - 2]
        tokens = tokens + [number] * 7


def test_branches_come_back_to_their_own_history(manager_of, run_to_end):
    program = roomy()
    manager = manager_of(program)
    stem = [3] * 30
    run_to_end(manager, program, 1, [*stem, 1, 1, 1, 1], rewrite=(30, "TURN_CLOSURE"))
    run_to_end(manager, program, 2, [*stem, 2, 2, 2, 2], rewrite=(30, "TURN_CLOSURE"))
    first = next(o for o in program.kept.owners.values() if o.tokens[30:34] == (1, 1, 1, 1))
    again = run_to_end(manager, program, 3, [*first.tokens, 8, 8], rewrite=(len(first.tokens), "TURN_CLOSURE"))
    assert again.reused_tokens == len(first.tokens), "the other branch did not take the first one's end"


def test_a_marked_prefix_is_shared_by_all(manager_of, run_to_end):
    program = roomy()
    manager = manager_of(program)
    system = [4] * 25
    run_to_end(manager, program, 1, [*system, *[1] * 40], markers=(25,), rewrite=(50, "TURN_CLOSURE"))
    for number, suffix in enumerate((40, 100, 3), 2):
        adoption = run_to_end(
            manager, program, number, [*system, *[number] * suffix], markers=(25,), rewrite=(26, "TURN_CLOSURE")
        )
        assert adoption.reused_tokens == 25
    assert manager.catalogue.count("shared") == 1
    assert manager.reuse.hits == {"shared_stable_prefix": 3}


def test_a_boundary_is_kept_while_there_is_room_and_later_on_demand(manager_of, run_to_end):
    program = roomy()
    manager = manager_of(program, max_shared_prefixes=1)
    a, b = [5] * 20, [6] * 20
    run_to_end(manager, program, 1, [*a, 1], boundaries=(20, 21))
    assert [e.checkpoints[0].key.frontier for e in manager.catalogue if not e.private] == [20]
    for _ in range(40):
        manager.catalogue.clock += 1
    run_to_end(manager, program, 2, [*b, 1], boundaries=(20, 21))
    assert manager.catalogue.count("shared") == 1, "nobody else has asked for it"
    run_to_end(manager, program, 3, [*b, 2], boundaries=(20, 21))
    held = {program.kept.owners[e.owner].tokens[0] for e in manager.catalogue if not e.private}
    assert held <= {5, 6}
    assert len(held) == 1


def test_new_conversations_always_find_a_place(manager_of, run_to_end):
    """Nothing that was ever kept, however valued, freezes the catalogue."""
    program = ScriptedProgram(lanes=1, pages=30, page=4, context=100)
    manager = manager_of(program, max_continuations=3, max_shared_prefixes=2, aging_window=2)
    run_to_end(manager, program, 1, [1] * 20, session="old", markers=(10,), rewrite=(18, "TURN_CLOSURE"))
    old = {entry.owner for entry in manager.catalogue}
    for number in range(2, 40):
        tokens = [2 + number] * 20
        run_to_end(manager, program, number, tokens, markers=(10,), rewrite=(18, "TURN_CLOSURE"))
        newest = max(e.order for e in manager.catalogue if e.private)
        assert newest == number, "the newest conversation is kept"
    assert not old & {entry.owner for entry in manager.catalogue}


def test_pressure_takes_no_more_than_it_needs(manager_of, run_to_end, admit):
    program = ScriptedProgram(lanes=2, pages=40, page=4, context=200)
    manager = manager_of(program)
    for number in range(1, 6):
        run_to_end(manager, program, number, [number] * 16)  # 5 pages each
    assert program.free_pages == 15
    admit(manager, 9, [9] * 60)  # 16 pages
    assert len(program.kept.owners) == 5, "one deeper checkpoint is enough"
    assert program.free_pages >= 0


def test_releasing_everything_gives_back_everything(manager_of, run_to_end):
    program = roomy()
    manager = manager_of(program)
    baseline = program.audit()
    for number in range(1, 5):
        run_to_end(manager, program, number, [number] * 30, session=f"s{number}", markers=(10,))
    assert manager.release_all() == 8
    assert program.audit() == baseline
    assert (len(manager.catalogue), len(manager.catalogue.index)) == (0, 0)
    assert manager.reuse.evictions == {"cleared": 8}
    assert len(manager.sessions) == 0


def test_digests_only_suggest(manager_of, run_to_end, monkeypatch):
    """With a digest that tells nothing apart, every answer stays the same."""
    import ninfer.runtime.shortlist as shortlist

    def story(manager, program):
        rng = np.random.default_rng(3)
        tokens: list[int] = []
        reused = []
        for number in range(1, 25):
            tokens = [*tokens[: int(rng.integers(0, len(tokens) + 1))], *rng.integers(1, 3, 6).tolist()]
            reused.append(run_to_end(manager, program, number, tokens[:60]).reused_tokens)
        return reused

    program = roomy()
    honest = story(manager_of(program, max_candidates=99), program)
    program = roomy()
    real = program.kept.summary

    def blind(handle, revision):
        summary = real(handle, revision)
        points = tuple(dataclasses.replace(p, key=dataclasses.replace(p.key, digest=b"")) for p in summary.checkpoints)
        return dataclasses.replace(summary, checkpoints=points)

    program.kept.summary = blind
    monkeypatch.setattr(shortlist, "digest_at", lambda *_: b"")
    assert story(manager_of(program, max_candidates=99), program) == honest
    assert max(honest) > 0


def test_a_small_request_does_not_cost_a_long_conversation_its_place(manager_of, run_to_end):
    """What is lost is weighed by what it would cost to read again, however old the long history is."""
    program = ScriptedProgram(lanes=1, pages=60, page=4, context=200)
    manager = manager_of(program)
    long = [1] * 150
    run_to_end(manager, program, 1, long)
    for number in range(2, 40):
        run_to_end(manager, program, number, [number] * 8)
        assert any(owner.tokens[:150] == tuple(long) for owner in program.kept.owners.values()), number
    assert manager.reuse.evictions["materialize"] > 10, "there was pressure"
    assert run_to_end(manager, program, 99, [*long, 2]).reused_tokens == 150


def test_what_no_longer_matches_its_conversation_goes_first(manager_of, run_to_end, admit):
    """The session has weight, but its request says itself that the history it left is not the one any more."""
    program = ScriptedProgram(lanes=1, pages=24, page=4, context=80)
    manager = manager_of(program)
    run_to_end(manager, program, 1, [1] * 30, session="a")
    run_to_end(manager, program, 2, [2] * 30)
    admit(manager, 3, [1, *[3] * 40], session="a")
    (left,) = program.kept.owners.values()
    assert left.tokens[0] == 2


@pytest.mark.parametrize("lanes", range(1, 9))
def test_the_default_catalogue_holds_what_one_request_may_publish(lanes):
    """Four markers and three boundaries."""
    assert resolve(CacheOptions(), lanes, "cpu").shared_prefixes >= 4 + 3
