"""Histories that are kept and continued: a start from a checkpoint answers as one from nothing does."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from fakes.program_driver import (
    GREEDY,
    Masks,
    admit,
    first,
    make_request,
    mask_words,
    plan_start,
    prefill,
    run,
    seal,
    step,
    ticket,
)
from fakes.symbolic import Oracle, SymbolicDevice, SymbolicModel

from ninfer.context import (
    CaptureOffer,
    CaptureSkip,
    CheckpointKind,
    CheckpointRef,
    OwnerSummary,
    ResourcePlan,
    Shortage,
    StartStatus,
    TransactionStatus,
)
from ninfer.contract import RowDecision
from ninfer.errors import DeviceError, InvalidRequest, InvariantError, StaleHandle
from ninfer.program import ExplicitKV, KVCodec, Program, Retention, Shape, open_program

SHAPE = Shape(rows=2, context=512, chunk=64, control=6, codec=KVCodec.FP32, vocabulary=37, spare=2)
HOST = Retention(host_states=4, host_kv_bytes=32 * 512, superblock=8 * 512)
rng = np.random.default_rng(3)
WORDS = rng.integers(0, 37, 400).tolist()
REPLAY, CLOSURE, ANCHOR = CheckpointKind.RESPONSE_REPLAY, CheckpointKind.TURN_CLOSURE, CheckpointKind.LONG_ANCHOR


def program(retention: Retention | None = HOST, tokens: int = 1024, shape: Shape = SHAPE) -> Program:
    return open_program(SymbolicDevice(delayed=True), SymbolicModel(), shape, ExplicitKV(tokens), retention)


def ask(tokens, output: int = 8, sampling=GREEDY, **how):
    """A request whose rotary axes count tokens, as those of generated text do."""
    request = make_request(tokens, output, sampling, **how)
    positions = np.broadcast_to(np.arange(len(tokens), dtype=np.int32), (3, len(tokens)))
    return dataclasses.replace(request, identity=dataclasses.replace(request.identity, positions=positions))


def device_of(p: Program) -> SymbolicDevice:
    return p._units.device


def generate(p: Program, s, request, n: int) -> list[int]:
    """Prefill what is left and sample n tokens; each must be what the ledger alone says."""
    oracle = Oracle(request)
    prefill(p, s, 64)
    tokens = [t for (t,) in first(p, [s])]
    while len(tokens) < n:
        tokens += [t for (t,) in step(p, [s])]
    assert tokens == oracle.generate(n)
    return tokens


def end(p: Program, s) -> None:
    """End a row as a control plane does: with its last decision."""
    p._sequences.get(s).phase = type(p._sequences.get(s).phase).ENDED


def converse(p: Program, tokens, output: int = 8, ref=None, lane: int = 0, **how) -> tuple[list[int], OwnerSummary]:
    """One request from start to finish: its tokens and what it leaves."""
    request = ask(tokens, output, id=len(tokens))
    s = admit(p, request, lane, ref, **how)
    produced = generate(p, s, request, output)
    end(p, s)
    retained = p.finish(s).retained
    assert retained is not None
    return produced, retained


def capture(p: Program, s, private=None, shared=False, replace=frozenset(), levels=None):
    frontier = p._sequences.get(s).frontier
    session = p.open_capture(s, CaptureOffer(frontier, private, shared, frozenset(replace)), list(levels or {}))
    assert not isinstance(session, CaptureSkip), session
    return run(p, seal(session, levels or {}))


@pytest.mark.parametrize("consume", [True, False])
@pytest.mark.parametrize("n", [5, 63, 64, 65, 129, 200])
def test_an_endpoint_continues_exactly(n: int, consume: bool) -> None:
    p = program()
    start = p.audit()
    answer, kept = converse(p, WORDS[:n])
    (endpoint,) = kept.checkpoints
    assert (endpoint.kind, endpoint.key.frontier) == (CheckpointKind.SESSION_ENDPOINT, n + 7)
    assert endpoint.on_device
    follow = [*WORDS[:n], *answer, *WORDS[300:330]]
    request = ask(follow, 6)
    s = admit(p, request, 1, endpoint.ref, consume=consume)
    assert p.prefill_remaining(s) == len(follow) - (n + 7)
    generate(p, s, request, 6)
    p.discard(s)
    if consume:
        with pytest.raises(StaleHandle):
            p.summary(kept.owner)
    else:
        p.release_inactive(kept.owner)
    assert p.audit() == start


def test_an_exact_hit_samples_from_the_stored_hidden_under_its_own_mask() -> None:
    p = program()
    request = ask(WORDS[:70], 4)
    s = admit(p, request, 0)
    prefill(p, s, 64)
    capture(p, s, shared=True)
    (owner,) = [h for h, _ in p.store.histories.live()]
    ref = CheckpointRef(owner, 0)
    generate(p, s, request, 4)
    p.discard(s)
    for legal in (None, {4, 9}, {30}):
        again = admit(p, request, 0, ref)
        assert p.prefill_remaining(again) == 0
        assert p.unsettled
        mask = None if legal is None else mask_words(legal, 2)
        ((token,),) = first(p, [again], None if legal is None else Masks({0: legal}))
        assert token == Oracle(request).draw(mask)
        if legal is None:
            oracle = Oracle(request)
            oracle.accept([token])
            assert step(p, [again]) == [(oracle.draw(),)]
            assert not p.unsettled
        p.discard(again)
    p.release_inactive(owner)


@pytest.mark.parametrize("frontier", [64, 70, 10])
def test_a_shared_prefix_serves_many_rows_at_once(frontier: int) -> None:
    p = program()
    start = p.audit()
    request = ask(WORDS[:150], 4)
    s = admit(p, request, 0)
    while 150 - p.prefill_remaining(s) < frontier:
        p.prefill(s, min(64, frontier + p.prefill_remaining(s) - 150))
    published = capture(p, s, shared=True).published
    assert published is not None
    ref = published.checkpoints[0].ref
    generate(p, s, request, 4)
    other = ask([*WORDS[:frontier], *WORDS[200:260]], 4)
    t = admit(p, other, 1, ref)
    assert p.audit()["pages.main.allocated"] == 3 + 2 * (frontier % 64 > 0)
    generate(p, t, other, 4)
    assert ref.owner in [h for h, _ in p.store.histories.live()]
    p.discard(s)
    p.discard(t)
    p.release_inactive(ref.owner)
    assert p.audit() == start


def test_a_row_keeps_its_checkpoints_and_they_follow_a_move() -> None:
    p = program(shape=dataclasses.replace(SHAPE, spare=4))
    request = ask(WORDS[:150], 8)
    s = admit(p, request, 0)
    p.prefill(s, 64)
    p.prefill(s, 36)
    first_id = capture(p, s, private=ANCHOR).captured
    prefill(p, s, 64)
    second_id = capture(p, s, private=REPLAY).captured
    answer = generate(p, s, request, 8)
    end(p, s)
    kept = p.finish(s).retained
    assert kept is not None
    assert [(c.ref.checkpoint, c.key.frontier) for c in kept.checkpoints] == [
        (first_id, 100),
        (second_id, 150),
        (2, 157),
    ]
    follow = ask([*WORDS[:150], *answer, 1, 2, 3], 4)
    t = admit(p, follow, 0, kept.checkpoints[2].ref)
    record = p._sequences.get(t)
    assert [c.frontier for c in record.checkpoints.values()] == [100, 150]
    generate(p, t, follow, 4)
    end(p, t)
    again = p.finish(t).retained
    assert again is not None
    assert len(again.checkpoints) == 3
    replay = ask(WORDS[:150], 8, dataclasses.replace(GREEDY, temperature=1.0, seed=9))
    u = admit(p, replay, 1, again.checkpoints[1].ref, consume=False)
    generate(p, u, replay, 8)


def test_the_replaced_checkpoint_gives_its_slot_to_the_new_one() -> None:
    p = program(None, 512, dataclasses.replace(SHAPE, rows=1, spare=1))
    s = admit(p, ask(WORDS[:150], 4), 0)
    p.prefill(s, 50)
    one = capture(p, s, private=REPLAY).captured
    p.prefill(s, 50)
    session = p.open_capture(s, CaptureOffer(100, REPLAY, False), [])
    assert seal(session, {}) == (Shortage("state", 1),)
    two = capture(p, s, private=REPLAY, replace={one}).captured
    assert list(p._sequences.get(s).checkpoints) == [two]
    assert p.open_capture(s, CaptureOffer(100, REPLAY, False), []) is CaptureSkip.NOT_STABLE
    generate(p, s, ask(WORDS[:150], 4), 4)
    p.discard(s)


def test_without_a_device_slot_a_capture_goes_to_the_host() -> None:
    p = program(shape=dataclasses.replace(SHAPE, spare=0))
    request = ask(WORDS[:100], 4)
    s = admit(p, request, 0)
    p.prefill(s, 40)
    device_of(p).copy_queue.hold = True
    session = p.open_capture(s, CaptureOffer(40, REPLAY, False), [])
    plan = seal(session, {})
    assert isinstance(plan, ResourcePlan)
    assert p.start(plan, ticket(plan)) is StartStatus.STARTED
    assert p.poll() is TransactionStatus.RUNNING
    with pytest.raises(InvariantError):
        p.prefill(s, 10)
    device_of(p).copy_queue.hold = False
    assert p.poll() is TransactionStatus.READY
    assert p.commit_transaction().transfers.d2h_bytes == 16
    generate(p, s, request, 4)
    end(p, s)
    kept = p.finish(s).retained
    assert kept is not None
    replay, endpoint = kept.checkpoints
    assert (replay.on_device, replay.on_host, endpoint.on_device) == (False, False, True)
    again = admit(p, request, 1, replay.ref)
    assert p.prefill_remaining(again) == 60
    generate(p, again, request, 4)


def test_a_demoted_history_comes_back_exactly() -> None:
    p = program()
    start = p.audit()
    answer, kept = converse(p, WORDS[:150])
    levels = p.open_demotion([kept.owner]).ladder(0, 0)
    assert levels[0].kept == levels[-2].kept
    assert levels[-1].evicted
    assert 2 <= len(levels) <= 8
    session = p.open_demotion([kept.owner])
    result = run(p, seal(session, {kept.owner: len(levels) - 2}))
    assert result.owners[0].surviving == levels[0].kept
    summary = result.owners[0].summary
    assert summary is not None
    assert (summary.device_bytes, summary.checkpoints[0].on_host) == (0, True)
    assert result.transfers.d2h_bytes == summary.host_bytes == 3 * 512 + 16
    assert p.audit()["pages.main.allocated"] == p.audit()["state_slots"] == 0
    follow = ask([*WORDS[:150], *answer, 5], 4)
    for consume in (False, True):
        s = admit(p, follow, 0, kept.checkpoints[0].ref, consume=consume)
        generate(p, s, follow, 4)
        p.discard(s)
    assert p.audit() == start


def test_pressure_takes_what_it_needs_and_says_so() -> None:
    p = program(None, tokens=576)
    _, kept = converse(p, WORDS[:300])
    big = ask(WORDS[:400], 60)
    assert plan_start(p, big, 0) == (Shortage("pages.main", 4),)
    plan = plan_start(p, big, 0, levels={kept.owner: -1})
    assert plan.manifest == {kept.owner: frozenset({0})}
    result = run(p, plan)
    assert result.owners[0].evicted
    with pytest.raises(StaleHandle):
        p.summary(kept.owner)
    assert p.inspect(kept.checkpoints[0].ref, big, True) is None


def test_two_owners_share_pages_until_the_last_one_goes() -> None:
    p = program(None, tokens=1024)
    s = admit(p, ask(WORDS[:320], 4), 0)
    prefill(p, s, 64)
    published = capture(p, s, shared=True).published
    generate(p, s, ask(WORDS[:320], 4), 4)
    end(p, s)
    kept = p.finish(s).retained
    used = p.audit()["pages.main.allocated"]
    p.release_inactive(kept.owner)
    assert p.audit()["pages.main.allocated"] == used - 1
    p.release_inactive(published.owner)
    assert p.audit()["pages.main.allocated"] == 0


IDENTITY = ("token_types", "tokens", "positions")


@pytest.mark.parametrize("change", [*IDENTITY, "mode", "execution_frontiers"])
def test_one_difference_before_the_frontier_is_a_miss_and_one_behind_it_is_none(change: str) -> None:
    p = program()
    answer, kept = converse(p, WORDS[:100])
    ref = kept.checkpoints[0].ref
    tokens = [*WORDS[:100], *answer, 5, 6]
    assert p.inspect(ref, ask(tokens), True).reused_tokens == 107
    for place, hit in ((106, False), (108, True)):
        identity = ask(tokens).identity
        if change in IDENTITY:
            array = getattr(identity, change).copy()
            array[..., place] += 1
            identity = dataclasses.replace(identity, **{change: array})
        elif change == "mode":
            identity = dataclasses.replace(identity, mode="other")
            hit = False
        else:
            identity = dataclasses.replace(identity, execution_frontiers=(place,))
        request = dataclasses.replace(ask(tokens), identity=identity)
        assert (p.inspect(ref, request, True) is not None) == hit


def test_boundaries_of_the_output_are_part_of_the_identity() -> None:
    p = program()
    request = ask(WORDS[:50], 10, frontiers=(20,))
    s = admit(p, request, 0)
    prefill(p, s, 64)
    first(p, [s])
    batch = p.control(s, [1, 2, 3, 4])
    p.commit(batch, [RowDecision(4, terminal=True, boundaries=(2,))])
    tokens = p._sequences.get(s).ledger[:55].tolist()
    kept = p.finish(s).retained
    ref = kept.checkpoints[0].ref
    assert p.inspect(ref, ask([*tokens, 1], frontiers=(20, 53)), True) is not None
    for frontiers in ((20,), (53,), (20, 52, 53), (20, 52)):
        assert p.inspect(ref, ask([*tokens, 1], frontiers=frontiers), True) is None


def test_a_row_that_ended_badly_leaves_its_captures_and_no_endpoint() -> None:
    p = program()
    request = ask(WORDS[:100], 4)
    s = admit(p, request, 0)
    p.prefill(s, 64)
    capture(p, s, private=REPLAY)
    prefill(p, s, 64)
    first(p, [s])
    device_of(p).faults["launch"] = 0
    with pytest.raises(DeviceError):
        step(p, [s])
    kept = p.finish(s).retained
    assert [c.key.frontier for c in kept.checkpoints] == [64]
    again = admit(p, request, 1, kept.checkpoints[0].ref)
    generate(p, again, request, 4)


def test_a_request_that_ends_before_it_writes_gives_the_source_back() -> None:
    p = program()
    s = admit(p, ask(WORDS[:70], 4), 0)
    prefill(p, s, 64)
    published = capture(p, s, shared=True).published
    p.discard(s)
    before = p.audit()
    t = admit(p, ask(WORDS[:70], 4), 1, published.checkpoints[0].ref)
    batch = p.finalize_prefill([t], None)
    p.wait(batch)
    p.commit(batch, [RowDecision(1, terminal=True)])
    assert p.finish(t).retained is None
    assert p.audit() == before


def test_backfill_needs_room_for_the_head_beside_everybody_who_stays() -> None:
    p = program(None, tokens=512, shape=dataclasses.replace(SHAPE, rows=3))
    s = admit(p, ask(WORDS[:200], 57), 0)
    head = ask(WORDS[:300], 85)
    assert not p.prove_backfill(head, [], None)
    assert p.prove_backfill(head, [s], ask(WORDS[:60], 69))
    assert not p.prove_backfill(head, [s], ask(WORDS[:60], 70))


def test_a_host_tier_larger_than_the_machine_is_refused() -> None:
    for retention in (Retention(host_kv_bytes=1 << 60), Retention(host_kv_bytes=100)):
        with pytest.raises(InvalidRequest, match="host_kv_bytes"):
            program(retention)


@pytest.mark.parametrize("consume", [True, False])
@pytest.mark.parametrize("n", [5, 64, 200])
def test_a_companion_resumes_with_what_it_had_seen(n: int, consume: bool) -> None:
    """Its pages and the window in the state image belong to the history, also where another row goes on with a copy."""
    model = SymbolicModel(drafting="block")
    shape = dataclasses.replace(SHAPE, window=2)
    p = open_program(SymbolicDevice(delayed=True), model, shape, ExplicitKV(1024), HOST)
    answer, kept = converse(p, WORDS[:n])
    follow = [*WORDS[:n], *answer, *WORDS[300:310]]
    request = ask(follow, 6)
    s = admit(p, request, 1, kept.checkpoints[0].ref, consume=consume)
    tokens = generate(p, s, request, 6)
    oracle = Oracle(request)
    oracle.accept(tokens)
    p._units.drain()  # the last round drafts beside what the host does
    assert model.seen[-2:] == oracle.context()
    p.discard(s)
    p.close()


def test_what_a_start_leaves_behind_makes_room_for_its_state() -> None:
    """One slot, held by the end of the very history that a start comes from earlier in. The end goes first, and is all
    that is lost when the start is aborted."""
    p = program(tokens=512, shape=dataclasses.replace(SHAPE, rows=1, spare=0))
    start = p.audit()
    request = ask(WORDS[:100], 4)
    s = admit(p, request, 0)
    p.prefill(s, 40)
    capture(p, s, REPLAY)
    answer = generate(p, s, request, 4)
    end(p, s)
    kept = p.finish(s).retained
    assert kept is not None
    replay, endpoint = kept.checkpoints
    assert (replay.on_device, endpoint.on_device, p.audit()["state_slots"]) == (False, True, 1)
    assert plan_start(p, request, 0, replay.ref, consume=False) == (Shortage("state", 1),)
    plan = plan_start(p, request, 0, replay.ref)
    assert isinstance(plan, ResourcePlan)
    assert plan.manifest == {kept.owner: frozenset({endpoint.ref.checkpoint})}
    device_of(p).copy_queue.hold = True
    assert p.start(plan, ticket(plan)) is StartStatus.STARTED
    assert p.poll() is TransactionStatus.RUNNING
    p.audit()
    device_of(p).copy_queue.hold = False
    (outcome,) = p.abort_transaction().owners
    assert outcome.surviving == {replay.ref.checkpoint}
    assert p.audit()["state_slots"] == 0
    again = run(p, plan_start(p, request, 0, replay.ref))
    assert (again.source, again.owners, again.reused_tokens) == ("consumed", (), 40)
    assert generate(p, again.sequence, request, 4) == answer
    p.discard(again.sequence)
    assert p.audit() == start
