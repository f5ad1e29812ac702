"""What the planner is asked and what it answers: plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ninfer.context import Candidate, Shortage, Target
from ninfer.contract import Handle
from ninfer.runtime.retention import Retention

StopReason = Literal[
    "no_pressure", "blocked", "exhausted", "bound", "target_budget", "assessment_budget", "time_budget"
]


@dataclass(frozen=True, slots=True)
class PlannerBudget:
    """Of the optional search alone. targets: stored. assessments: made. Its time, nanoseconds, is ``1/fraction`` of
    what the request is predicted to wait by the best plan so far, but within ``least_ns..most_ns``."""

    targets: int = 4096
    assessments: int = 512
    most_ns: int = 50_000_000
    least_ns: int = 500_000
    fraction: int = 20


DEFAULT_BUDGET = PlannerBudget()


@dataclass(frozen=True, slots=True)
class Value:
    """What a retained owner is worth. weights, hits: of its checkpoints. retention, last_use: of all of it. placed: it
    has a place in the catalogue, which its end would free; what a paused request left has none."""

    retention: Retention
    weights: Mapping[int, int]
    hits: Mapping[int, int]
    last_use: int
    placed: bool = True


@dataclass(frozen=True, slots=True)
class Question:
    """What is planned for.

    candidates: possible sources, the last of them the root. losses: of each candidate, 1/256 nanoseconds that taking it
    loses in its own source. preferred: index of the session's own candidate. slots_short: catalogue entries, by kind of
    owner, that must be evicted before the outcome has a place; a moved source brings a private place along.
    """

    candidates: Sequence[Candidate]
    values: Mapping[Handle, Value]
    losses: Sequence[int] = ()
    preferred: int | None = None
    slots_short: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Diagnostics:
    """Of one plan. Predictions are nanoseconds; reuse is in tokens."""

    stop: StopReason
    now_ns: int = 0
    future_loss_ns: int = 0
    offered_reuse: int = 0
    chosen_reuse: int = 0
    candidates: int = 0
    assessments: int = 0
    searched: int = 0
    stored: int = 0
    maximal: bool = False
    elapsed_ns: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """``target`` is None when even the root with everything released does not fit now; ``shortages`` then say why."""

    target: Target | None
    diagnostics: Diagnostics
    shortages: tuple[Shortage, ...] = ()
    cost: int = 0
    """J of the target."""
