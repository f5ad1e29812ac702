"""Temporary: replaced by the contract."""
from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from ninfer.contract import Handle, RequestId, ResourcePlan, SequenceHandle, Shortage, TransactionKind


class CheckpointKind(enum.Enum):
    SESSION_ENDPOINT = "session_endpoint"
    TURN_CLOSURE = "turn_closure"
    RESPONSE_REPLAY = "response_replay"
    LONG_ANCHOR = "long_anchor"
    SHARED_STABLE_PREFIX = "shared_stable_prefix"


@dataclass(frozen=True, slots=True)
class CheckpointRef:
    owner: Handle
    checkpoint: int


@dataclass(frozen=True, slots=True)
class ShortlistKey:
    frontier: int
    mode: str
    digest: bytes


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    ref: CheckpointRef
    kind: CheckpointKind
    key: ShortlistKey
    on_device: bool
    on_host: bool


@dataclass(frozen=True, slots=True)
class OwnerSummary:
    owner: Handle
    checkpoints: tuple[CheckpointSummary, ...]
    device_bytes: int
    host_bytes: int
    revision: int


@dataclass(frozen=True, slots=True)
class PrefillWork:
    chunks: int = 0
    tokens: int = 0
    pairs: int = 0


@dataclass(frozen=True, slots=True)
class TransferBatch:
    direction: Literal["d2h", "h2d", "d2d"]
    batches: int
    ops: int
    bytes: int


@dataclass(frozen=True, slots=True)
class MachineWork:
    transfers: tuple[TransferBatch, ...]
    prefill: PrefillWork


@dataclass(frozen=True, slots=True)
class RecoveryRecipe:
    restore: tuple[TransferBatch, ...]
    prefill: PrefillWork


@dataclass(frozen=True, slots=True)
class Candidate:
    ref: CheckpointRef | None
    reused_tokens: int
    consume: bool
    prefill: PrefillWork
    min_restore: tuple[TransferBatch, ...]


@dataclass(frozen=True, slots=True)
class OwnerLevel:
    kept: frozenset[int]
    evicted: bool
    demoted: bool = False


class Target(NamedTuple):
    candidate: int
    levels: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Assessment:
    feasible: bool
    shortages: tuple[Shortage, ...]
    work: MachineWork
    recovery: Mapping[CheckpointRef, tuple[RecoveryRecipe, ...]]
    source_op: Literal["root", "move", "fork"]
    ready: bool


class PlanningSession(Protocol):
    revision: int

    def victims(self, candidate: int) -> tuple[Handle, ...]: ...
    def ladder(self, candidate: int, victim: int) -> tuple[OwnerLevel, ...]: ...
    def assess(self, target: Target) -> Assessment: ...
    def seal(self, target: Target) -> ResourcePlan: ...


class CaptureSkip(enum.Enum):
    NOT_STABLE = "not_stable"
    HELD = "held"
    NO_CAPACITY = "no_capacity"


@dataclass(frozen=True, slots=True)
class CaptureOffer:
    frontier: int
    private: CheckpointKind | None = None
    shared: bool = False
    replace: frozenset[int] = frozenset()
