"""Amounts of work of a start, a recovery or a transition: what is executed and what is copied, without prices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Direction = Literal["d2h", "h2d", "d2d"]


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """Prompt tokens to execute. pairs: query-key pairs of full attention."""

    chunks: int = 0
    tokens: int = 0
    pairs: int = 0


@dataclass(frozen=True, slots=True)
class TransferBatch:
    """Copies in one direction. batches: waits for their end. ops: copy calls. bytes: payload."""

    direction: Direction
    batches: int
    ops: int
    bytes: int


@dataclass(frozen=True, slots=True)
class MachineWork:
    transfers: tuple[TransferBatch, ...]
    prefill: PrefillWork


@dataclass(frozen=True, slots=True)
class RecoveryRecipe:
    """One way to get back to a checkpoint's frontier."""

    restore: tuple[TransferBatch, ...]
    prefill: PrefillWork
