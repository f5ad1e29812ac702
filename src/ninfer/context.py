"""The context store as the control plane sees it: checkpoints, what planning may ask, and what a resource transition
did. What that takes is amounts of ``work``; prices and policy belong to whoever plans."""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from ninfer.work import MachineWork, PrefillWork, RecoveryRecipe, TransferBatch

if TYPE_CHECKING:
    from ninfer.contract import Handle, PreparedRequest, RequestId, SequenceHandle

# -- checkpoints -------------------------------------------------------------------------------------------------


class CheckpointKind(enum.Enum):
    """Why a checkpoint was made. Matching ignores it."""

    SESSION_ENDPOINT = "session_endpoint"
    """Where a finished request stopped executing."""
    TURN_CLOSURE = "turn_closure"
    """Before the part of the open turn that a later user message removes."""
    RESPONSE_REPLAY = "response_replay"
    """Before the answer, so that it can be generated again."""
    LONG_ANCHOR = "long_anchor"
    """Somewhere inside a long history."""
    SHARED_STABLE_PREFIX = "shared_stable_prefix"
    """A prefix of its own that any request may continue."""


@dataclass(frozen=True, slots=True)
class CheckpointRef:
    """A checkpoint of an owner: a handle of kind "continuation" or "shared", and an id that is unique in it."""

    owner: Handle
    checkpoint: int


@dataclass(frozen=True, slots=True)
class ShortlistKey:
    """Equal for equal prefixes; equality proves nothing. digest: 16 bytes, ``identity.digest_at`` the frontier."""

    frontier: int
    mode: str
    digest: bytes


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """on_device: it can start a request without a transfer. on_host: a copy of all of it is in host memory."""

    ref: CheckpointRef
    kind: CheckpointKind
    key: ShortlistKey
    on_device: bool
    on_host: bool


@dataclass(frozen=True, slots=True)
class OwnerSummary:
    """An inactive history at ``revision``. Bytes count what it references, shared pages in every owner: they are
    for display and are never compared with live state."""

    owner: Handle
    checkpoints: tuple[CheckpointSummary, ...]
    device_bytes: int
    host_bytes: int
    revision: int


# -- planning ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shortage:
    """An axis that lacks capacity and by how many of its units."""

    axis: str
    missing: int


@dataclass(frozen=True, slots=True)
class Infeasible:
    """A request that cannot run even alone."""

    shortages: tuple[Shortage, ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A start of a request: a checkpoint that matches its prompt exactly, or the root (``ref`` None).

    consume: the source's history becomes the request's own, and its deeper checkpoints go; else it is copied from.
    min_restore: copies from host memory that no plan can avoid.
    """

    ref: CheckpointRef | None
    reused_tokens: int
    consume: bool
    prefill: PrefillWork
    min_restore: tuple[TransferBatch, ...] = ()


@dataclass(frozen=True, slots=True)
class OwnerLevel:
    """One complete outcome of an inactive owner.

    kept: ids of surviving checkpoints; none: the owner goes. device_states: kept checkpoints whose state image may
    stay on the device. device_pages: leading pages, per pool, that may stay there. duplicates: host copies of what
    stays on the device are kept too.
    """

    kept: frozenset[int]
    device_states: frozenset[int]
    device_pages: tuple[int, ...]
    duplicates: bool

    @property
    def evicted(self) -> bool:
        return not self.kept


class Target(NamedTuple):
    """candidate: its index in the session. levels: of each of ``session.victims(candidate)``."""

    candidate: int
    levels: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Assessment:
    """What executing a target means.

    shortages: at the worst stage; none where it is feasible. recovery: for every checkpoint of every victim that is
    degraded, the ways back to it afterwards, the one from nothing last. ready: nothing is copied between host and
    device, so it commits at once.
    """

    shortages: tuple[Shortage, ...]
    work: MachineWork
    recovery: Mapping[CheckpointRef, tuple[RecoveryRecipe, ...]]
    source: Literal["root", "move", "fork", "capture", "none"]
    ready: bool

    @property
    def feasible(self) -> bool:
        return not self.shortages


class PlanningSession(Protocol):
    """Answers about one incoming request or capture at one revision. Pure; dropped at the end of the boundary."""

    revision: int

    def victims(self, candidate: int) -> tuple[Handle, ...]:
        """Owners that may be degraded for a candidate: never its source, none that an active row depends on."""
        ...

    def ladder(self, candidate: int, victim: int) -> tuple[OwnerLevel, ...]:
        """2..8 outcomes of ``victims(candidate)[victim]``: unchanged, each less than the one before, evicted."""
        ...

    def recovery(self, owner: Handle) -> Mapping[int, tuple[RecoveryRecipe, ...]]:
        """The ways back to each checkpoint of an owner as things are."""
        ...

    def assess(self, target: Target) -> Assessment: ...

    def seal(self, target: Target) -> ResourcePlan:
        """A plan for a feasible target. Raises InvariantError for any other."""
        ...


class CaptureSkip(enum.Enum):
    """Why a capture is not made. None of them is an error."""

    NOT_STABLE = "not_stable"
    """The row is not at that frontier, or its state is not settled."""
    HELD = "held"
    """The row holds that checkpoint already."""


@dataclass(frozen=True, slots=True)
class CaptureOffer:
    """A checkpoint of an active row at its committed frontier.

    private: kept with the row, and in the continuation it leaves. shared: published as an owner of its own.
    replace: private checkpoints of the row that the new one replaces.
    """

    frontier: int
    private: CheckpointKind | None
    shared: bool
    replace: frozenset[int] = frozenset()


# -- transitions -------------------------------------------------------------------------------------------------


class TransactionKind(enum.Enum):
    MATERIALIZE = "materialize"
    CAPTURE = "capture"
    DEMOTE = "demote"


class StartStatus(enum.Enum):
    STARTED = "started"
    STALE = "stale"
    INFEASIBLE = "infeasible"


class TransactionStatus(enum.Enum):
    IDLE = "idle"
    RUNNING = "running"
    READY = "ready"
    FAILED = "failed"
    """A copy did not happen. Only ``abort_transaction`` may follow."""


@dataclass(frozen=True, slots=True)
class ResourcePlan:
    """A sealed transition, bound to the revision it was planned at; started at most once.

    manifest: checkpoints that it deletes before it takes anything, by owner; every victim it touches has an entry, and
    so has a source of which part must make room.
    """

    id: int
    revision: int
    kind: TransactionKind
    request: RequestId | None
    lane: int | None
    target: Target
    manifest: Mapping[Handle, frozenset[int]]


@dataclass(frozen=True, slots=True)
class AdoptionTicket:
    """The ResourceManager's pre-reserved logical storage for a plan's outcome. claimed: the plan's manifest."""

    transaction: int
    lane: int | None
    claimed: Mapping[Handle, frozenset[int]]


@dataclass(frozen=True, slots=True)
class OwnerOutcome:
    """What became of a victim: its surviving checkpoints. An evicted one has none and no summary."""

    owner: Handle
    surviving: frozenset[int]
    summary: OwnerSummary | None

    @property
    def evicted(self) -> bool:
        return self.summary is None


@dataclass(frozen=True, slots=True)
class TransferStats:
    """Payload bytes that a transition copied."""

    d2h_bytes: int = 0
    h2d_bytes: int = 0
    d2d_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ResourceResult:
    """The absolute outcome of a committed or aborted transition.

    sequence: the materialized row. source: of a materialization. owners: those of the plan's manifest, without a source
    that was consumed. published: the shared prefix of a capture. captured: id of a capture's private checkpoint.
    """

    transaction: int
    kind: TransactionKind
    committed: bool
    revision_after: int
    sequence: SequenceHandle | None = None
    reused_tokens: int = 0
    source: Literal["none", "kept", "consumed"] = "none"
    owners: tuple[OwnerOutcome, ...] = ()
    published: OwnerSummary | None = None
    captured: int | None = None
    transfers: TransferStats = TransferStats()


@dataclass(frozen=True, slots=True)
class TerminalResult:
    """What became of a finished sequence: the continuation it left, or None after a release."""

    retained: OwnerSummary | None
    revision_after: int


@dataclass(frozen=True, slots=True)
class PauseResult:
    """What became of a paused row. request: what to admit again. retained: the history it left, or None. point: whether
    that history holds the place where the row stopped."""

    request: PreparedRequest
    retained: OwnerSummary | None
    point: bool
    revision_after: int


class ContextPort(Protocol):
    """Program's planning and resource transitions. Planning is pure; expected outcomes are return values."""

    @property
    def resource_revision(self) -> int: ...

    @property
    def unsettled(self) -> bool:
        """Whether an active row still reads an image that it does not own; no planned transition starts meanwhile."""
        ...

    def isolated_root_fits(self, request: PreparedRequest) -> Infeasible | None:
        """None when the request can run alone on an empty device."""
        ...

    def summary(self, owner: Handle) -> OwnerSummary:
        """Raises StaleHandle."""
        ...

    def inspect(self, ref: CheckpointRef | None, request: PreparedRequest, consume: bool) -> Candidate | None:
        """The start that a checkpoint (None: nothing) offers; None where it does not match or is gone."""
        ...

    def open_session(
        self, request: PreparedRequest, lane: int, candidates: Sequence[Candidate], victims: Sequence[Handle]
    ) -> PlanningSession:
        """Plan a start. Targets name ``candidates`` by index."""
        ...

    def open_capture(
        self, sequence: SequenceHandle, offer: CaptureOffer, victims: Sequence[Handle]
    ) -> PlanningSession | CaptureSkip:
        """Plan a capture; the session has the one candidate 0."""
        ...

    def open_demotion(self, victims: Sequence[Handle]) -> PlanningSession:
        """Plan a degradation of inactive owners for its own sake; the session has the one candidate 0."""
        ...

    def prove_backfill(
        self, head: PreparedRequest, donors: Collection[SequenceHandle], extra: PreparedRequest | None
    ) -> bool:
        """Whether the head could start from nothing once the donors have ended, with every inactive owner released
        and every other active row, and ``extra``, still holding its whole reservation."""
        ...

    def start(self, plan: ResourcePlan, ticket: AdoptionTicket) -> StartStatus: ...

    def poll(self) -> TransactionStatus:
        """Advance the open transition. Never blocks."""
        ...

    def commit_transaction(self) -> ResourceResult: ...

    def abort_transaction(self) -> ResourceResult: ...

    def finish(self, sequence: SequenceHandle, *, endpoint: bool = True) -> TerminalResult:
        """End a row and keep its checkpoints as a continuation, with one more where it stopped if ``endpoint``."""
        ...

    def pause(self, sequence: SequenceHandle, *, snapshot: bool) -> PauseResult:
        """Take a row that has not ended off its lane. It keeps its checkpoints, with ``snapshot`` also the place where
        it stands, if its state there is whole."""
        ...

    def discard(self, sequence: SequenceHandle) -> TerminalResult:
        """End a row and keep nothing."""
        ...

    def release_inactive(self, owner: Handle) -> int:
        """Delete an inactive owner; the revision afterwards."""
        ...

    def audit_digest(self) -> int:
        """A hash of every counter; equal before and after a pure call."""
        ...
