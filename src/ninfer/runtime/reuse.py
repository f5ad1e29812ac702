"""What the context cache did for an engine's requests, counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import attrs

from ninfer.context import CheckpointKind, TransferStats
from ninfer.runtime.catalogue import Catalogue
from ninfer.runtime.question import Diagnostics


@attrs.frozen(kw_only=True)
class ContextStats:
    """A snapshot of the context cache: what it holds now, and counters since the engine started.

    entries: retained histories by kind ("continuation", "shared"). sessions: names with a history or a live request.
    tiers: checkpoints that can be started from on the device, and those in host memory alone. hits: admissions by kind
    of the checkpoint they started from. misses: admissions from nothing, by reason: "new" (no such prefix), "mismatch"
    (its digests only), "pressure" (kept, but not worth what it would have cost), "disabled". reused_tokens: prompt
    tokens not read again. captures: checkpoints made, by kind. skips: checkpoints not made, by reason. evictions:
    histories gone, by reason: "materialize" and "capture" (something new needed their room), "cleared". degraded:
    histories that had to give up part of what they held or to move to host memory. bytes: copied, by direction.
    planning_ns: nanoseconds of choosing what to start from, in all and at most; assessments: targets it looked at.
    """

    entries: Mapping[str, int]
    sessions: int
    tiers: Mapping[str, int]
    hits: Mapping[str, int]
    misses: Mapping[str, int]
    reused_tokens: int
    captures: Mapping[str, int]
    skips: Mapping[str, int]
    evictions: Mapping[str, int]
    degraded: int
    bytes: Mapping[str, int]
    planning_ns: Mapping[str, int]
    assessments: int


@dataclass(slots=True)
class Reuse:
    """What the worker counts."""

    reused_tokens: int = 0
    degraded: int = 0
    assessments: int = 0
    plan_ns: int = 0
    longest_plan_ns: int = 0
    hits: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    captures: Counter[str] = field(default_factory=Counter)
    skips: Counter[str] = field(default_factory=Counter)
    evictions: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)

    def hit(self, kind: CheckpointKind, tokens: int) -> None:
        """A request starts ``tokens`` deep."""
        self.hits[kind.value] += 1
        self.reused_tokens += tokens

    def planned(self, diagnostics: Diagnostics) -> None:
        """A plan was made and carried out."""
        self.assessments += diagnostics.assessments
        self.plan_ns += diagnostics.elapsed_ns
        self.longest_plan_ns = max(self.longest_plan_ns, diagnostics.elapsed_ns)

    def copied(self, transfers: TransferStats) -> None:
        self.bytes += {"d2h": transfers.d2h_bytes, "h2d": transfers.h2d_bytes, "d2d": transfers.d2d_bytes}

    def snapshot(self, catalogue: Catalogue, sessions: int) -> ContextStats:
        """Everything now. Called by the worker."""
        points = [point for entry in catalogue for point in entry.checkpoints.values()]
        on_device = sum(point.on_device for point in points)
        return ContextStats(
            entries={kind: catalogue.count(kind) for kind in catalogue.capacity},
            sessions=sessions,
            tiers={"device": on_device, "host": len(points) - on_device},
            hits=dict(self.hits),
            misses=dict(self.misses),
            reused_tokens=self.reused_tokens,
            captures=dict(self.captures),
            skips=dict(self.skips),
            evictions=dict(self.evictions),
            degraded=self.degraded,
            bytes=dict(self.bytes),
            planning_ns={"total": self.plan_ns, "longest": self.longest_plan_ns},
            assessments=self.assessments,
        )
