"""Values and Protocols that cross rooms. No behaviour beyond what a value owes its own consistency."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Literal, NamedTuple, NewType, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ninfer.context import ContextPort
from ninfer.errors import InvariantError, StaleHandle
from ninfer.identity import PrefixIdentity, PromptDigest

if TYPE_CHECKING:
    pass

RequestId = NewType("RequestId", int)

# -- handles -----------------------------------------------------------------------------------------------------

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Handle:
    """Names an object of one owner. A recycled index gets a larger generation, so old handles go stale."""

    kind: str
    index: int
    generation: int


SequenceHandle = Handle


class HandleTable(Generic[T]):
    """Slots addressed by Handle. Generations of one index strictly increase."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._items: list[T | None] = []
        self._generation: list[int] = []
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._items) - len(self._free)

    def insert(self, value: T) -> Handle:
        if self._free:
            index = self._free.pop()
        else:
            index = len(self._items)
            self._items.append(None)
            self._generation.append(0)
        self._items[index] = value
        self._generation[index] += 1
        return Handle(self.kind, index, self._generation[index])

    def try_get(self, handle: Handle) -> T | None:
        """The object, or None for a handle that is stale or of another kind."""
        i = handle.index
        if handle.kind != self.kind or not 0 <= i < len(self._items):
            return None
        return self._items[i] if self._generation[i] == handle.generation else None

    def get(self, handle: Handle) -> T:
        """The object. Raises StaleHandle."""
        i, items = handle.index, self._items
        if handle.kind == self.kind and 0 <= i < len(items) and self._generation[i] == handle.generation:
            value = items[i]
            if value is not None:
                return value
        raise StaleHandle(f"{handle} does not name a live {self.kind}")

    def remove(self, handle: Handle) -> T:
        """Forget the object and return it. Raises StaleHandle."""
        value = self.get(handle)
        self._items[handle.index] = None
        self._free.append(handle.index)
        return value

    def at(self, index: int) -> Handle | None:
        """The handle of the live entry at an index, if there is one."""
        return None if self._items[index] is None else Handle(self.kind, index, self._generation[index])

    def live(self) -> list[tuple[Handle, T]]:
        """All live entries in index order."""
        return [
            (Handle(self.kind, i, self._generation[i]), item) for i, item in enumerate(self._items) if item is not None
        ]


# -- prompts -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """Resolved sampling of one request: no field left to default. seed: 64-bit. named: the caller chose it, so that the
    answer can be repeated."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    logprobs: int = -1
    """Alternatives to report beside each token, 0..20, or -1 for no log-probabilities."""
    named: bool = False


class LimitReason(enum.Enum):
    """Why a request's output is bounded where it is."""

    OUTPUT_LIMIT = "max_tokens"
    CONTEXT_CAPACITY = "context"


@dataclass(frozen=True, slots=True)
class Resume:
    """Of a request that was paused while it decoded: ``identity`` goes up to the token before the ``anchor``, which is
    decided and not executed; the first ``prompt`` tokens are the prompt, what follows was generated."""

    anchor: int
    prompt: int


@dataclass(frozen=True, slots=True, eq=False)
class PreparedRequest:
    """What admission needs to know. ``effective_output`` is the output that fits the context, tokens.

    boundaries, markers, rewrite: where the prompt may leave checkpoints, see PreparedPrompt. participation:
    "read_write", or "disabled" to start from nothing and leave nothing. session, update_session: the conversation it
    belongs to, and whether what it leaves becomes that conversation's; for the control plane alone. resume: how it goes
    on after a pause; ``effective_output`` then counts from the anchor on.
    """

    id: RequestId
    ticket: int
    identity: PrefixIdentity
    digest: PromptDigest
    requested_output: int
    effective_output: int
    limit: LimitReason
    sampling: SamplingSpec
    boundaries: tuple[int, ...] = ()
    markers: tuple[int, ...] = ()
    rewrite: tuple[int, str] | None = None
    participation: Literal["read_write", "disabled"] = "read_write"
    session: str | None = None
    update_session: bool = True
    resume: Resume | None = None


def effective_output(prompt: int, requested: int, context: int) -> tuple[int, LimitReason]:
    """Output tokens a request can really have: the last token needs no KV, so context - prompt + 1 fit."""
    room = context - prompt + 1
    return (requested, LimitReason.OUTPUT_LIMIT) if requested <= room else (room, LimitReason.CONTEXT_CAPACITY)


# -- masks -------------------------------------------------------------------------------------------------------


class SlotStatus(enum.IntEnum):
    """State of one mask slot (row, position)."""

    UNCONSTRAINED = 0
    READY = 1
    DEAD_END = 2
    UNREACHABLE = 3


@dataclass(frozen=True, slots=True)
class RowMask:
    """What a provider filled for one row. Positions are 0..extent-1; dead ends are bits of ``dead``."""

    extent: int
    dead: int = 0
    unreachable_from: int | None = None


class MaskProvider(Protocol):
    """Legal-token masks of one batch, borrowed by Program for one unit call.

    A mask is ``ceil(V/32)`` uint32 words; bit ``id & 31`` of word ``id >> 5`` is 1 where the id is legal.
    """

    def constrained_rows(self) -> Sequence[int]:
        """Batch rows that have a constraint; an empty sequence makes Program skip masks altogether."""
        ...

    def fill(self, row: int, drafts: Sequence[int], slots: npt.NDArray[np.uint32]) -> RowMask:
        """Fill ``slots`` [1 + len(drafts), words] for the committed state and after each draft."""
        ...


# -- model transactions ------------------------------------------------------------------------------------------


class RowStatus(enum.Enum):
    OK = "ok"
    CONSTRAINT_FAILED = "constraint_failed"


@dataclass(frozen=True, slots=True)
class TokenScore:
    """Log-probability of a produced token and of its most likely alternatives, natural log."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class ProducedRow(NamedTuple):
    """One row of a batch: provisional tokens, in order. Failed rows have none."""

    sequence: SequenceHandle
    tokens: tuple[int, ...]
    status: RowStatus = RowStatus.OK
    scores: tuple[TokenScore, ...] | None = None
    drafted: int = 0


class PendingBatch:
    """One launched unit with a fixed membership. ``Program.wait`` brings its provisional rows; it is consumed whole,
    once, by ``Program.commit`` or ``Program.abort_pending``."""

    __slots__ = ("_rows", "kind", "sequences", "spent", "state")

    def __init__(
        self, kind: Literal["prefill", "decode", "control"], sequences: tuple[SequenceHandle, ...], state: object
    ) -> None:
        self.kind = kind
        self.sequences = sequences
        self.state = state
        self.spent = False
        self._rows: tuple[ProducedRow, ...] | None = None

    @property
    def waited(self) -> bool:
        """Whether the rows are here."""
        return self._rows is not None

    @property
    def rows(self) -> tuple[ProducedRow, ...]:
        """What each sequence produced. Raises InvariantError before the batch was waited for."""
        if self._rows is None:
            raise InvariantError("a PendingBatch was read before it was waited for")
        return self._rows

    def produce(self, rows: tuple[ProducedRow, ...]) -> None:
        """The rows have arrived."""
        self._rows = rows

    def consume(self) -> object:
        """Mark the batch spent and return Program's provisional state. Raises InvariantError on reuse."""
        if self.spent:
            raise InvariantError("a PendingBatch was used twice")
        self.spent = True
        return self.state


@dataclass(frozen=True, slots=True)
class RowDecision:
    """What Engine decided about one row.

    accepted: length of the committed prefix. terminal: the row ends. boundaries: offsets in (0, accepted] at which
    re-rendering the history reproduces the same tokens. cancelled rows accept 0 and end.
    """

    accepted: int
    terminal: bool = False
    cancelled: bool = False
    boundaries: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class UnitLicense:
    """What a row may do in one decode round. drafts: verified columns beyond the anchor. ahead: drafts wanted for the
    round after, by default all that one may have; more are made where another row wants more."""

    drafts: int = 0
    ahead: int | None = None


class ProgramPort(ContextPort, Protocol):
    """The physical plane as the control plane sees it. Called by the engine's worker thread alone.

    Expected outcomes are return values. Exceptions mean a refused request (before any mutation) or a failed engine.
    """

    # model units: each submits its work and returns; what it produced is known once the batch has been waited for
    def prefill_remaining(self, sequence: SequenceHandle) -> int:
        """Prompt tokens not yet executed. 0: ready for ``finalize_prefill``."""
        ...

    def prefill(self, sequence: SequenceHandle, chunk: int) -> None:
        """Execute up to ``chunk`` prompt tokens; committed at once."""
        ...

    def finalize_prefill(
        self, sequences: Sequence[SequenceHandle], masks: MaskProvider | None, ahead: int | None = None
    ) -> PendingBatch:
        """Launch the sampling of the first token of rows whose prompt is fully executed. ahead: drafts wanted for the
        round after, by default all that one may have."""
        ...

    def decode(
        self,
        sequences: Sequence[SequenceHandle],
        licences: Sequence[UnitLicense],
        masks: MaskProvider | None,
    ) -> PendingBatch:
        """Launch one round. ``masks`` are filled before this returns."""
        ...

    def control(self, sequence: SequenceHandle, tokens: Sequence[int]) -> PendingBatch:
        """Append forced tokens: no sampling, no random numbers."""
        ...

    def wait(self, batch: PendingBatch) -> tuple[ProducedRow, ...]:
        """The rows of the pending batch, once the device has produced them. Raises DeviceError when it could not; the
        batch is then spent and its rows must be discarded."""
        ...

    def commit(
        self, batch: PendingBatch, decisions: Sequence[RowDecision], follow: bool = False
    ) -> PendingBatch | None:
        """Make what was decided part of the sequences. follow: the next unit will be a decode round of the same rows
        without drafts, so it may be launched before anything else is done here. Returns it then, pending, and its masks
        are to be filled; None where it is to be asked for with ``decode``."""
        ...

    def fill(self, batch: PendingBatch, masks: MaskProvider) -> None:
        """Fill the masks of a round that a commit launched, while it runs; before it is waited for, where it has
        constrained rows."""
        ...

    def abort_pending(self, batch: PendingBatch) -> None:
        """Drop the batch. Every row of it must then be discarded."""
        ...

    # facts
    def audit(self) -> Mapping[str, int]:
        """Occupancy recomputed by walking objects: lanes, pages per pool, reservations, state slots, open work."""
        ...

    def stats(self) -> Mapping[str, int]: ...

    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Rows, and nanoseconds from the results of a decode round to the launch of the next one of as many, of the
        latest rounds, in order."""
        ...

    def count_anew(self) -> None:
        """Have the counters among ``stats`` start from zero. Requires that nothing is running."""
        ...

    def close(self) -> None: ...
