"""Program with a drafting module or companion: whatever it drafts, every token is the one the request would have had
without it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from fakes.program_driver import GREEDY, Masks, accept_all, admit, first, make_request, mask_words, prefill
from fakes.symbolic import Oracle, SymbolicDevice, SymbolicModel, hashed_logits
from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer.contract import RowDecision, RowStatus, UnitLicense
from ninfer.errors import DeviceError, InvariantError
from ninfer.program import ExplicitKV, KVCodec, Shape, open_program
from ninfer.program.layout import pages

VOCABULARY, CONTEXT, CHUNK, CONTROL = 5, 192, 48, 4
WARM = dataclasses.replace(GREEDY, temperature=1.0, presence_penalty=1.5, frequency_penalty=0.4)
Guess = Callable[[int, int], int]


KINDS = [True, "block", "chain"]
"""Of SymbolicModel: the model's own module, and companions that draft blocks, each for itself or along a chain."""


def opened(
    window: int,
    guess: Guess | None = None,
    rows: int = 3,
    delayed: bool = True,
    kind: bool | str = True,
    adaptive: bool = False,
    proposed: tuple[int, ...] | None = None,
):
    model = SymbolicModel(VOCABULARY, drafting=kind, proposed=proposed)
    if guess is not None:
        model.guess = guess
    shape = Shape(rows, CONTEXT, CHUNK, CONTROL, KVCodec.FP32, VOCABULARY, window=window, adaptive=adaptive)
    device = SymbolicDevice(delayed)
    return open_program(device, model, shape, ExplicitKV(rows * CONTEXT)), device


def best(hidden: int) -> int:
    return int(np.argmax(hashed_logits(hidden, VOCABULARY)))


HIDDEN_OF = {best(h): h for h in range(1000, 0, -1)}
"""For each token, what the drafting module must put out to draft it."""


class Script:
    """A module that drafts what it is told: the next tokens of a request, or others."""

    def __init__(self, answer: list[int], right: bool) -> None:
        self.answer, self.right = answer, right

    def __call__(self, hidden: int, token: int) -> int:
        following = dict(zip(self.answer, self.answer[1:])).get(token, 0)
        return HIDDEN_OF[(following + (not self.right)) % VOCABULARY]


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(data=st.data(), window=st.integers(1, 5))
def test_tokens_do_not_depend_on_drafts(kind: bool | str, data: st.DataObject, window: int) -> None:
    """Rows of several kinds, in changing batches, with licences, forced tokens, masks, short commits and cancels. A
    companion has seen all that was decided, and nothing else."""
    adaptive, delayed = data.draw(st.booleans()), data.draw(st.booleans())
    proposed = data.draw(st.none() | st.permutations(range(VOCABULARY)).map(lambda ids: tuple(ids[:3])))
    program, device = opened(window, kind=kind, adaptive=adaptive, delayed=delayed, proposed=proposed)
    blocks = True  # one was drafted in every round
    seen = program._units.memory.model.seen
    start = program.audit()
    rows = []
    for lane in range(3):
        prompt = data.draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=100))
        output = data.draw(st.integers(1, min(60, CONTEXT - len(prompt) + 1)))
        sampling = dataclasses.replace(data.draw(st.sampled_from([GREEDY, WARM])), seed=lane << 31)
        request = make_request(prompt, output, sampling, lane, data.draw(st.sampled_from([(), (1,), (64,)])), lane)
        rows.append([Oracle(request, VOCABULARY), admit(program, request, lane), False])
        prefill(program, rows[-1][1], data.draw(st.integers(1, CHUNK)))
    for _ in range(data.draw(st.integers(1, 25))):
        live = [row for row in rows if len(row[0].ledger) - row[0].prompt < row[0].request.effective_output]
        if not live:
            break
        rooms = {id(row): row[0].request.effective_output - len(row[0].ledger) + row[0].prompt for row in live}
        row = data.draw(st.sampled_from(live))
        if data.draw(st.sampled_from([False] * 4 + [True])):
            size = min(CONTROL, rooms[id(row)])
            forced = data.draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=size))
            assert accept_all(program, program.control(row[1], forced)) == [tuple(forced)]
            row[0].accept(forced)
            row[2] = True
            continue
        batch_rows = [r for r in live if r[2] == row[2]]
        batch_rows = data.draw(st.lists(st.sampled_from(batch_rows), min_size=1, unique_by=id))
        legal = data.draw(
            st.dictionaries(
                st.integers(0, len(batch_rows) - 1), st.sets(st.integers(0, VOCABULARY - 1), min_size=1, max_size=3)
            )
        )
        sequences = [r[1] for r in batch_rows]
        if row[2]:
            most = [min(window, rooms[id(r)] - 1) for r in batch_rows]
            ahead = st.one_of(st.none(), st.integers(0, window)) if adaptive else st.none()
            licences = [UnitLicense(data.draw(st.integers(0, n)), data.draw(ahead)) for n in most]
            blocks = not adaptive or any(one.ahead != 0 for one in licences)
            batch = program.decode(sequences, licences, Masks(legal))
        else:
            ahead = data.draw(st.one_of(st.none(), st.integers(0, window))) if adaptive else None
            licences, blocks = [UnitLicense()] * len(batch_rows), ahead != 0
            batch = program.finalize_prefill(sequences, Masks(legal), ahead)
        decisions = []
        for i, (r, produced) in enumerate(zip(batch_rows, program.wait(batch))):
            assert 1 <= len(produced.tokens) <= 1 + licences[i].drafts
            assert produced.drafted <= licences[i].drafts
            for token in produced.tokens:
                mask = mask_words(legal[i], 1) if i in legal else None
                assert token == r[0].draw(mask)
                r[0].accept([token])
            r[2] = True
            decisions.append(RowDecision(len(produced.tokens)))
        program.commit(batch, decisions)
        program._batches._take_drafts()
        drafts = {draft for r in batch_rows for draft in program._sequences.get(r[1]).drafts}
        assert drafts <= set(range(VOCABULARY) if proposed is None else proposed)
        if kind is not True and blocks:
            assert seen == [h for r in batch_rows for h in r[0].context()]
            seen.clear()
        assert not seen
    for row in rows:
        program.discard(row[1])
    assert program.audit() == start
    program.close()
    assert device.held == 0


@pytest.mark.parametrize("right", [True, False])
def test_scripted_drafts_of_a_block(right: bool) -> None:
    """As below; a block's drafts are found by their column."""
    request = make_request([3, 1], 4, GREEDY)
    answer = Oracle(request, VOCABULARY).generate(4)
    offsets: dict[int, int] = {}

    def guess(context: int, anchor: int) -> int:
        column = offsets[context] if context in offsets else offsets.setdefault(context, len(offsets) + 1)
        return HIDDEN_OF[(answer[min(column, 3)] + (not right)) % VOCABULARY]

    program, _ = opened(3, guess, rows=1, kind="block")
    sequence = admit(program, request, 0)
    prefill(program, sequence, CHUNK)
    assert first(program, (sequence,)) == [(answer[0],)]
    (tokens,) = accept_all(program, program.decode((sequence,), (UnitLicense(2),), None))
    assert tokens == tuple(answer[1:4] if right else answer[1:2])
    program.discard(sequence)
    program.close()


@pytest.mark.parametrize("right", [True, False])
def test_scripted_drafts(right: bool) -> None:
    """A module that knows the answer has every draft kept, one that is always wrong has none; nothing else differs."""
    for seed in range(1000):  # the script finds its place by the last token, so none may come twice
        request = make_request([seed % VOCABULARY, seed // VOCABULARY, 3], 4, GREEDY, id=seed)
        answer = Oracle(request, VOCABULARY).generate(4)
        if len(set(answer)) == 4:
            break
    program, _ = opened(3, Script(answer, right), rows=1)
    sequence = admit(program, request, 0)
    prefill(program, sequence, CHUNK)
    assert first(program, (sequence,)) == [(answer[0],)]
    rounds = []
    while sum(map(len, rounds)) < 3:
        left = 3 - sum(map(len, rounds))
        rounds += accept_all(program, program.decode((sequence,), (UnitLicense(min(3, left - 1)),), None))
    assert [token for tokens in rounds for token in tokens] == answer[1:]
    assert [len(tokens) for tokens in rounds] == ([3] if right else [1, 1, 1])
    program.discard(sequence)
    program.close()


def started(program, lane: int = 0, output: int = 30, prompt=(1, 2, 3)):
    request = make_request(prompt, output, GREEDY, id=lane)
    sequence = admit(program, request, lane)
    prefill(program, sequence, CHUNK)
    oracle = Oracle(request, VOCABULARY)
    oracle.accept(first(program, (sequence,))[0])
    return oracle, sequence


def test_a_dead_end_counts_only_where_verification_reaches_it() -> None:
    """A row whose mask dies behind the last kept draft goes on; one that reaches it fails alone."""

    class DiesAfter(Masks):
        def fill(self, row, drafts, slots):
            filled = super().fill(row, drafts, slots)
            slots[1:] = 0
            return dataclasses.replace(filled, dead=(1 << len(slots)) - 2)

    outcomes = set()
    for lane in range(40):
        program, _ = opened(2, rows=2)
        oracle, sequence = started(program, 0, prompt=(1, 2, lane % VOCABULARY, lane // VOCABULARY))
        other, neighbour = started(program, 1, prompt=(4, lane % VOCABULARY))
        everything = set(range(VOCABULARY))
        licences = (UnitLicense(2), UnitLicense(2))
        batch = program.decode((sequence, neighbour), licences, DiesAfter({0: everything}))
        row, beside = program.wait(batch)
        assert beside.status is RowStatus.OK
        assert beside.tokens[0] == other.draw()
        outcomes.add(row.status)
        if row.status is RowStatus.OK:
            assert row.tokens == (oracle.draw(),)
        else:
            assert row.tokens == ()
        program.abort_pending(batch)
        program.discard(sequence)
        program.discard(neighbour)
        program.close()
    assert outcomes == {RowStatus.OK, RowStatus.CONSTRAINT_FAILED}


def test_a_shorter_commit_keeps_exactly_its_prefix() -> None:
    """A row that ends inside a round keeps a prefix; its history is that of the prefix alone."""
    program, _ = opened(3, rows=1)
    oracle, sequence = started(program)
    batch = program.decode((sequence,), (UnitLicense(3),), None)
    (row,) = program.wait(batch)
    program.commit(batch, [RowDecision(1, terminal=True)])
    oracle.accept(row.tokens[:1])
    facts = program.audit()
    assert facts["pending_rows"] == 0
    program.finish(sequence)
    program.close()


def test_a_fault_before_the_round_ran_ends_it() -> None:
    program, device = opened(2, rows=1)
    _, sequence = started(program)
    device.faults["launch"] = 0
    with pytest.raises(DeviceError):
        program.decode((sequence,), (UnitLicense(2),), None)
    program.discard(sequence)
    program.close()


@pytest.mark.parametrize(
    ("kind", "name"),
    [*((True, name) for name in ("upload", "accept", "draft", "draft_rows", "download")),
     *(("block", name) for name in ("accept", "begin", "append", "download"))],
)  # fmt: skip
def test_a_fault_inside_the_round_ends_it(kind: bool | str, name: str) -> None:
    program, device = opened(2, rows=1, kind=kind)
    _, sequence = started(program)
    program._units.drain()
    device.late_faults[name] = 0
    batch = program.decode((sequence,), (UnitLicense(2),), None)
    with pytest.raises(DeviceError):
        program.wait(batch)
    program.discard(sequence)
    program.close()


@pytest.mark.parametrize(
    ("kind", "name", "before"),
    [(True, "draft", 1), ("block", "block", 0), ("chain", "select", 0), (True, "download", 1)],
)
def test_a_fault_while_drafting_is_met_by_the_next_unit(kind: bool | str, name: str, before: int) -> None:
    """What was decided before is whole: it is waited for and taken in while the device drafts."""
    program, device = opened(2, rows=1, kind=kind)
    oracle, sequence = started(program)
    program._units.drain()
    device.late_faults[name] = before
    assert accept_all(program, program.decode((sequence,), (UnitLicense(0),), None)) == [(oracle.draw(None),)]
    with pytest.raises(DeviceError):
        program.decode((sequence,), (UnitLicense(2),), None)
    program.discard(sequence)
    program.close()


def test_what_was_decided_comes_before_what_is_drafted() -> None:
    program, device = opened(2, rows=1)
    _, sequence = started(program)
    batch = program.decode((sequence,), (UnitLicense(2),), None)
    program.wait(batch)
    assert device.finished < device.submitted, "drafts are not waited for"
    program.commit(batch, [RowDecision(1, terminal=True)])
    program.finish(sequence)
    program.close()


def test_a_mask_provider_that_fails_ends_the_round_without_a_trace() -> None:
    program, device = opened(2, rows=1)
    _, sequence = started(program)
    with pytest.raises(ZeroDivisionError):
        program.decode((sequence,), (UnitLicense(2),), Masks({0: {1}}, ZeroDivisionError()))
    assert device.finished == device.submitted
    program.discard(sequence)
    program.close()


def test_licences_are_bounded_by_the_window_and_the_output() -> None:
    program, _ = opened(2, rows=1)
    _, sequence = started(program, output=3)
    for drafts in (3, 2, -1):
        with pytest.raises(InvariantError):
            program.decode((sequence,), (UnitLicense(drafts),), None)
    accept_all(program, program.decode((sequence,), (UnitLicense(1),), None))
    program.discard(sequence)
    program.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt", [CONTEXT - 5, CONTEXT - 1, CONTEXT])
def test_drafting_stays_inside_the_context(prompt: int, kind: bool | str) -> None:
    """A request that fills the context to its last token, with a window that would reach beyond it."""
    program, _ = opened(4, rows=1, kind=kind)
    output = CONTEXT - prompt + 1
    request = make_request([i % VOCABULARY for i in range(prompt)], output, WARM)
    sequence, oracle = admit(program, request, 0), Oracle(request, VOCABULARY)
    prefill(program, sequence, CHUNK)
    tokens = list(first(program, (sequence,))[0])
    while len(tokens) < output:
        licence = UnitLicense(min(4, output - len(tokens) - 1))
        tokens += accept_all(program, program.decode((sequence,), (licence,), None))[0]
    assert tokens == oracle.generate(output)
    pool = "mtp" if kind is True else "draft_full"
    assert 0 < program.audit()[f"pages.{pool}.allocated"] <= pages(CONTEXT)
    program.discard(sequence)
    program.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("delayed", "window"), [(True, 3), (True, 5), (False, 3)])
def test_a_round_runs_the_narrowest_width_that_is_recorded(kind: bool | str, delayed: bool, window: int) -> None:
    """What a batch verifies and makes decides which recordings run: several on a device of its own, any on the host."""
    program, device = opened(window, rows=2, kind=kind, adaptive=True, delayed=delayed)
    rows = [started(program, lane, prompt=(1, 2, lane), output=120)[1] for lane in range(2)]
    ran: list[str] = []
    enqueue = device.enqueue
    device.enqueue = lambda name, step: (ran.append(name), enqueue(name, step))
    levels = [1, 2, 4, window + 1] if delayed else list(range(1, window + 2))
    for drafts, ahead in [(0, window), (1, 0), (0, 1), (1, window), (window, 2), (2, 0), (0, window)]:
        ran.clear()
        licences = [UnitLicense(drafts, ahead), UnitLicense(0, 0)]
        verified = min(drafts, len(program._sequences.get(rows[0]).drafts))
        batch = program.decode(rows, licences, None)
        width = next(level for level in levels if level > verified)
        made = next(level for level in (0, *(n - 1 for n in levels)) if level >= ahead) if kind is True else window
        produced = program.wait(batch)
        device.run_until(device.submitted)
        assert program._batches.pending.columns == (width if width > 1 else 0)
        assert ("accept" in ran) == (width > 1)
        assert ran.count("draft" if kind is True else "block") == (
            1 + max(0, made - 1) if kind is True else int(ahead > 0)
        )
        program.commit(batch, [RowDecision(len(row.tokens)) for row in produced])
        program._batches._take_drafts()
        assert {len(program._sequences.get(row).drafts) for row in rows} == {made if ahead else 0}
    for row in rows:
        program.discard(row)
    program.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("delayed", [True, False])
def test_rounds_without_drafts_leave_a_whole_history(kind: bool | str, delayed: bool) -> None:
    """What is drafted later is what would have been drafted had something been in every round."""
    found = []
    for between in (3, 0):
        program, device = opened(3, rows=2, kind=kind, adaptive=True, delayed=delayed)
        rows = [started(program, lane, prompt=(1, 2, lane), output=120)[1] for lane in range(2)]
        ran: list[str] = []
        enqueue = device.enqueue
        device.enqueue = lambda name, step, e=enqueue, ran=ran: (ran.append(name), e(name, step))
        for n in range(70):  # beyond a page
            ahead = 3 if n in (20, 69) else between
            batch = program.decode(rows, [UnitLicense(0, ahead)] * 2, None)
            program.commit(batch, [RowDecision(1)] * len(program.wait(batch)))
            program._batches._take_drafts()
            if ahead:
                found.append([program._sequences.get(row).drafts for row in rows])
        device.run_until(device.submitted)
        assert ran.count("draft_rows") == (0 if kind is not True else 70 if between else 2)
        for row in rows:
            program.discard(row)
        program.close()
    every, few = found[:70], found[70:]
    assert few == [every[20], every[69]]
    assert every[20] != every[69]


def test_without_speculation_that_adapts_every_round_has_the_one_recorded_width() -> None:
    program, device = opened(3, rows=2)
    _, sequence = started(program)
    graphs = len(device.graphs)
    batch = program.decode((sequence,), (UnitLicense(0),), None)
    assert program._batches.pending.columns == 4
    accept_all(program, batch)
    assert len(device.graphs) == graphs
    program.discard(sequence)
    program.close()
