"""What a committed resource transaction has become for the worker."""

from __future__ import annotations

from dataclasses import dataclass

from ninfer.contract import SequenceHandle
from ninfer.runtime.captures import PlannedCapture


@dataclass(frozen=True, slots=True)
class Adoption:
    """A materialized request: its lane, sequence, the prompt tokens that need no prefill, the captures to offer."""

    request: int
    lane: int
    sequence: SequenceHandle
    reused_tokens: int
    captures: tuple[PlannedCapture, ...] = ()


@dataclass(frozen=True, slots=True)
class Captured:
    """A capture has ended, with a checkpoint or without."""

    lane: int


@dataclass(frozen=True, slots=True)
class Demoted:
    """Histories are in host memory."""


Outcome = Adoption | Captured | Demoted
"""Of a committed transaction."""
