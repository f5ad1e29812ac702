"""Which target to take: a source for a request, and what every retained history must give up for it.

A target is a candidate and one level of each victim's ladder, 0 unchanged .. last evicted. Program answers what a
target costs and whether it is possible at all; this module only chooses. It has no state and changes nothing: with the
same answers and a clock that stands still it makes the same choice.

The choice minimises J = 256 * (nanoseconds until the request can go on) + (expected nanoseconds of work lost later,
weighted in 1/256). What must be found is found without a search: the candidates as they stand, then everything
released and given back one by one as far as possible. A best-first search may improve on that within a budget.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ninfer.context import PlanningSession
from ninfer.runtime.costs import CostModel
from ninfer.runtime.question import Diagnostics, Outcome, PlannerBudget, Question, StopReason
from ninfer.runtime.retention import ONE
from ninfer.runtime.search import Search


def plan(
    session: PlanningSession,
    question: Question,
    costs: CostModel,
    budget: PlannerBudget,
    clock: Callable[[], int],
) -> Outcome:
    """Choose a target. ``clock`` reads nanoseconds."""
    began = clock()
    search = Search(session, question, costs)
    best, settled = search.identities()
    stop: StopReason = "no_pressure"
    maximal = False
    if not settled:
        best, maximal = search.mandatory(best)
        if best is not None:
            best, stop = search.improve(best, budget, clock)
            best = search.readmit(best)
    candidates = question.candidates
    facts = Diagnostics(
        stop,
        offered_reuse=max((c.reused_tokens for c in candidates), default=0),
        candidates=len(candidates),
        assessments=len(search.seen),
        searched=search.searched,
        stored=search.stored,
        elapsed_ns=clock() - began,
    )
    if best is None:
        return Outcome(None, replace(facts, stop="blocked"), search.shortages())
    chosen = replace(
        facts,
        now_ns=best.now,
        future_loss_ns=best.loss // ONE,
        chosen_reuse=candidates[best.target.candidate].reused_tokens,
        maximal=maximal and all(search.at_last_level(best.target)),
    )
    return Outcome(best.target, chosen, cost=best.cost)
