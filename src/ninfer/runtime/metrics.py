"""Counters of one engine: the worker counts, anybody may take a snapshot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import attrs

from ninfer.contract import ProgramPort
from ninfer.errors import ConstraintDeadEnd
from ninfer.results import GenerationResult
from ninfer.runtime.catalogue import Catalogue
from ninfer.runtime.resources import ResourceManager
from ninfer.runtime.reuse import ContextStats, Reuse


@attrs.frozen(kw_only=True)
class EngineStats:
    """A snapshot of an engine's counters, which start at zero with it, and of its gauges.

    waiting, active, outstanding: requests queued, holding a lane, and occupying a slot (waiting, active or unread).
    accepted: requests that entered the queue. finished: requests by finish_reason. prompt_tokens, cached_tokens: of
    admitted requests. completion_tokens: committed. prefill_units, control_units, decode_rounds: model units by kind.
    decode_rows: rows summed over decode rounds. decode_drafts: drafts verified in them, so that
    ``1 + decode_drafts / decode_rows`` is the mean width of a row. decode_ns: nanoseconds of the boundaries that ran
    decode rounds; less
    ``memory["decode_device_ns"]`` it is what the engine itself costs. constraints: of finished requests, ``requests``
    that had one, ``complete`` and ``dead_ends`` among them, ``masks`` and ``mask_h2d_bytes``; of compiled languages
    ``entries`` and ``retained_bytes`` now, ``hits``, ``builds``, ``waits``, ``abandoned`` (builds that nobody waited
    for any more) and ``evictions``; outside their budget
    ``index_bytes`` of the vocabulary's index, ``matchers`` in use and the ``matcher_tokens`` they have read. memory:
    occupancy reported by the model's stores, each entry named with its unit. context: what is kept of finished
    requests. gaps: rows and nanoseconds between two decode rounds of as many, from the results of one to the launch of
    the next, for the latest rounds of those that ``memory["decode_gaps"]`` counts. All three as of the last admission
    or end of a request.
    """

    waiting: int
    active: int
    outstanding: int
    accepted: int
    finished: Mapping[str, int]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    prefill_units: int
    control_units: int
    decode_rounds: int
    decode_rows: int
    decode_drafts: int
    decode_ns: int
    constraints: Mapping[str, int]
    memory: Mapping[str, int]
    context: ContextStats
    gaps: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class Metrics:
    """What the worker counts. Plain integers: reading them from another thread is safe, their sum a moment apart."""

    accepted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    prefill_units: int = 0
    control_units: int = 0
    decode_rounds: int = 0
    decode_rows: int = 0
    decode_drafts: int = 0
    decode_ns: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    constraints: Counter[str] = field(default_factory=Counter)
    memory: Mapping[str, int] = field(default_factory=dict)
    context: ContextStats = field(default_factory=lambda: Reuse().snapshot(Catalogue(0, 0, 1), 0))
    gaps: tuple[tuple[int, int], ...] = ()

    def observe(self, program: ProgramPort, resources: ResourceManager) -> None:
        """Look at what is held now."""
        self.memory, self.context, self.gaps = program.stats(), resources.stats(), program.gaps()

    def settle(self, result: GenerationResult) -> None:
        """Count a request that has ended, however it ended."""
        self.finished[result.finish_reason] += 1
        report = result.constraint
        if report is not None:
            self.constraints += {
                "requests": 1,
                "complete": report.complete,
                "dead_ends": isinstance(result.error, ConstraintDeadEnd),
                "masks": report.masks,
                "mask_h2d_bytes": report.mask_h2d_bytes,
            }

    def snapshot(self, *, waiting: int, active: int, outstanding: int) -> EngineStats:
        return EngineStats(
            waiting=waiting,
            active=active,
            outstanding=outstanding,
            accepted=self.accepted,
            finished=dict(self.finished),
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            completion_tokens=self.completion_tokens,
            prefill_units=self.prefill_units,
            control_units=self.control_units,
            decode_rounds=self.decode_rounds,
            decode_rows=self.decode_rows,
            decode_drafts=self.decode_drafts,
            decode_ns=self.decode_ns,
            constraints=dict(self.constraints),
            memory=dict(self.memory),
            context=self.context,
            gaps=self.gaps,
        )
