"""The choice of a target, against every target there is."""

from __future__ import annotations

import random

import pytest
from fakes.symbolic_planning import PAGE, Point, SymbolicSession, World, all_targets
from hypothesis import given
from hypothesis import strategies as st

from ninfer.context import CheckpointRef, Target
from ninfer.contract import Handle
from ninfer.errors import InvariantError
from ninfer.runtime.costs import GENERIC, CostModel, PrefillRate, TransferRate
from ninfer.runtime.planner import plan
from ninfer.runtime.question import PlannerBudget, Question, Value
from ninfer.runtime.retention import ONE, RETENTIONS, Retention, weight

UNLIMITED = PlannerBudget(targets=1 << 20, assessments=1 << 20, most_ns=1 << 60, least_ns=1 << 60)
NOTHING = PlannerBudget(targets=0, assessments=0, most_ns=0, least_ns=0)


def frozen() -> int:
    return 0


@st.composite
def worlds(draw, most: int = 3):
    """Up to ``most`` owners with common leading pages, replicas anywhere, tight capacity, and a request."""
    number = itertools_count()
    pages: dict[int, list[bool]] = {}
    owners: dict[Handle, dict[int, Point]] = {}
    trunk = [next(number) for _ in range(draw(st.integers(0, 3)))]
    has_host = draw(st.booleans())
    for p in trunk:
        pages[p] = place(draw, has_host)
    for i in range(draw(st.integers(0, most))):
        kind = draw(st.sampled_from(["continuation", "shared"]))
        own = [next(number) for _ in range(draw(st.integers(1, 4)))]
        for p in own:
            pages[p] = place(draw, has_host)
        history = trunk[: draw(st.integers(0, len(trunk)))] + own
        frontiers = sorted(draw(st.sets(st.integers(1, PAGE * len(history)), min_size=1, max_size=2)))
        points = {}
        for q, f in enumerate(frontiers[-1:] if kind == "shared" else frontiers):
            device, host = place(draw, has_host)
            points[q] = Point(f, tuple(history[: -(-f // PAGE)]), device, host)
        used = {p for point in points.values() for p in point.pages}
        owners[Handle(kind, i, 1)] = {q: point for q, point in points.items() if set(point.pages) <= used}
    alive = {p for points in owners.values() for point in points.values() for p in point.pages}
    pages = {p: where for p, where in pages.items() if p in alive}
    held = sum(where[0] for where in pages.values())
    images = sum(p.device for points in owners.values() for p in points.values())
    need = draw(st.integers(1, 8))
    world = World(
        device=(max(held, need) + draw(st.integers(0, 3)), max(images, 1) + draw(st.integers(0, 1))),
        host=(sum(w[1] for w in pages.values()) + 4, 5) if has_host else (0, 0),
        pages=pages,
        owners=owners,
    )
    prompt = PAGE * need
    session = SymbolicSession(world, prompt, need, [])
    refs = [CheckpointRef(o, q) for o, points in owners.items() for q, p in points.items() if p.frontier < prompt]
    refs = [r for r in refs if len(owners[r.owner][r.checkpoint].pages) <= need][: draw(st.integers(0, 3))]
    session.candidates = [
        *[session.candidate(r, r.owner.kind == "continuation" and draw(st.booleans())) for r in refs],
        session.candidate(None),
    ]
    values = {
        owner: Value(
            retention := draw(st.sampled_from(RETENTIONS)),
            {q: weight(retention, draw(st.integers(0, 200)), 32) for q in points},
            {q: draw(st.integers(0, 1)) for q in points},
            draw(st.integers(0, 9)),
        )
        for owner, points in owners.items()
    }
    short = {"continuation": 1} if any(o.kind == "continuation" for o in owners) and draw(st.booleans()) else {}
    return session, Question(session.candidates, values, slots_short=short)


def itertools_count():
    return iter(range(1 << 20))


def place(draw, has_host: bool) -> list[bool]:
    return draw(st.sampled_from([[True, False], [False, True], [True, True]])) if has_host else [True, False]


def price(session, question, target, costs=GENERIC) -> tuple[int, bool]:
    """J of a target and whether it is possible, straight from the definitions."""
    answer = session.assess(target)
    loss, short = 0, dict(question.slots_short)
    for v, (owner, level) in enumerate(zip(session.victims(target.candidate), target.levels)):
        lost = [
            worth * max(0, costs.recovery_ns(answer.recovery[ref]) - costs.recovery_ns(session.recovery(owner)[q]))
            for q, worth in question.values[owner].weights.items()
            for ref in [CheckpointRef(owner, q)]
            if level
        ]
        loss += max(lost, default=0)
        if session.ladder(target.candidate, v)[level].evicted and owner.kind in short:
            short[owner.kind] -= 1
    place = answer.source == "move" or all(n <= 0 for n in short.values())
    return ONE * costs.price(answer.work) + loss, answer.feasible and place


@given(worlds())
def test_an_unlimited_search_finds_the_best_target_there_is(case):
    session, question = case
    prices = {target: price(session, question, target) for target in all_targets(session)}
    possible = [j for j, fits in prices.values() if fits]
    outcome = plan(session, question, GENERIC, UNLIMITED, frozen)
    if outcome.target is None:
        assert not possible
        assert outcome.shortages
    else:
        assert prices[outcome.target] == (min(possible), True)
        assert outcome.cost == min(possible)


@given(worlds())
def test_without_a_search_nothing_possible_is_missed_and_nothing_is_given_up_needlessly(case):
    session, question = case
    prices = {target: price(session, question, target) for target in all_targets(session)}
    root = len(session.candidates) - 1
    outcome = plan(session, question, GENERIC, NOTHING, frozen)
    roots = [fits for target, (_, fits) in prices.items() if target.candidate == root]
    assert (outcome.target is None) <= (not any(roots))
    if outcome.target is not None:
        cost, fits = prices[outcome.target]
        assert fits
        for v, level in enumerate(outcome.target.levels):
            for lower in range(level):
                levels = list(outcome.target.levels)
                levels[v] = lower
                other, possible = prices[Target(outcome.target.candidate, tuple(levels))]
                assert not possible or other > cost, "a victim gave up more than it had to"
        assert outcome.diagnostics.searched == 0


@given(worlds())
def test_losses_grow_and_the_bound_holds_along_every_ladder(case):
    session, question = case
    for target in all_targets(session):
        candidate = session.candidates[target.candidate]
        least = ONE * (GENERIC.transfers_ns(candidate.min_restore) + GENERIC.prefill_ns(candidate.prefill))
        cost, _ = price(session, question, target)
        now = ONE * GENERIC.price(session.assess(target).work)
        for v, level in enumerate(target.levels):
            if level + 1 < len(session.ladder(target.candidate, v)):
                levels = list(target.levels)
                levels[v] += 1
                child = Target(target.candidate, tuple(levels))
                child_cost, _ = price(session, question, child)
                child_now = ONE * GENERIC.price(session.assess(child).work)
                assert child_cost - child_now >= cost - now
                assert least + (cost - now) <= child_cost


@given(worlds(), st.randoms(use_true_random=False))
def test_the_choice_does_not_depend_on_the_order_of_mappings(case, shuffle: random.Random):
    session, question = case
    again = list(question.values.items())
    shuffle.shuffle(again)
    other = Question(question.candidates, dict(again), slots_short=question.slots_short)
    assert plan(session, question, GENERIC, UNLIMITED, frozen) == plan(session, other, GENERIC, UNLIMITED, frozen)


@given(worlds(), st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_prices_never_make_a_target_possible(case, token, byte):
    session, question = case
    rate = TransferRate(byte % 1000, byte % 77, byte)
    odd = CostModel({"d2h": rate, "h2d": rate, "d2d": rate}, PrefillRate(token % 999, token, token % 5))
    chosen = [plan(session, question, costs, NOTHING, frozen).target for costs in (GENERIC, odd)]
    assert (chosen[0] is None) == (chosen[1] is None)


@given(worlds(), st.integers(0, 40), st.integers(0, 40))
def test_budgets_end_the_search_and_never_the_plan(case, targets, assessments):
    session, question = case
    budget = PlannerBudget(targets, assessments, 1 << 60, 1 << 60)
    best = plan(session, question, GENERIC, UNLIMITED, frozen)
    outcome = plan(session, question, GENERIC, budget, frozen)
    assert (outcome.target is None) == (best.target is None)
    assert outcome.diagnostics.searched <= assessments
    assert outcome.diagnostics.stored <= max(targets, len(session.candidates))
    assert outcome.cost >= best.cost
    zero = plan(session, question, GENERIC, NOTHING, frozen)
    assert outcome.cost <= zero.cost


def test_a_request_that_fits_disturbs_nobody_and_asks_once():
    session, question = roomy()
    outcome = plan(session, question, GENERIC, UNLIMITED, frozen)
    assert outcome.target == Target(0, (0,) * 11)
    assert outcome.diagnostics.stop == "no_pressure"
    assert outcome.diagnostics.chosen_reuse == outcome.diagnostics.offered_reuse == 2 * PAGE
    assert session.assessed == 1


def test_time_is_looked_at_between_assessments():
    session, question = roomy(device=26)
    ticks = iter(range(0, 1 << 40, 1_000_000))
    outcome = plan(session, question, GENERIC, PlannerBudget(most_ns=3_000_000), lambda: next(ticks))
    assert outcome.target is not None
    assert outcome.diagnostics.stop == "time_budget"
    assert outcome.diagnostics.searched <= 4


def roomy(device: int = 99):
    owners = {Handle("continuation", i, 1): {0: Point(2 * PAGE, (2 * i, 2 * i + 1))} for i in range(12)}
    pages = {p: [True, False] for p in range(24)}
    world = World((device, 99), (0, 0), pages, owners)
    session = SymbolicSession(world, 8 * PAGE, 8, [])
    session.candidates = [session.candidate(CheckpointRef(Handle("continuation", 3, 1), 0)), session.candidate(None)]
    values = {o: Value(Retention.RECENT_PRIVATE, {0: 1024}, {0: 0}, 0) for o in owners}
    return session, Question(session.candidates, values)


def test_a_source_among_its_own_victims_is_a_bug():
    """What a request starts from can never be asked to give something up for it."""
    owner = Handle("continuation", 0, 1)
    world = World((4, 2), (0, 0), {0: [True, False]}, {owner: {0: Point(PAGE, (0,))}})

    class Broken(SymbolicSession):
        def victims(self, candidate: int) -> tuple[Handle, ...]:
            return (owner,)

    session = Broken(world, 2 * PAGE, 2, [])
    session.candidates = [session.candidate(CheckpointRef(owner, 0)), session.candidate(None)]
    values = {owner: Value(Retention.LIVE_SESSION, {0: 1}, {}, 0)}
    with pytest.raises(InvariantError, match="its own victims"):
        plan(session, Question(session.candidates, values), GENERIC, NOTHING, frozen)
