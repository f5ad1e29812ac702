"""What the worker knows of one request, from submit to the final result."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ninfer.contract import LimitReason, PreparedRequest, SequenceHandle
from ninfer.errors import NinferError
from ninfer.results import FinishReason, GenerationResult, SpeculationStats, StopReason, Timings, Usage
from ninfer.runtime.captures import PlannedCapture
from ninfer.runtime.pace import Fared
from ninfer.runtime.response import Response

if TYPE_CHECKING:
    from ninfer.frontend import OutputSession


class RequestState(enum.Enum):
    """Stable states, in the order a request passes through them."""

    WAITING = "waiting"
    MATERIALIZING = "materializing"
    PREFILL = "prefill"
    CAPTURE = "capture"
    """Inside its prompt, standing still while a checkpoint of it is made."""
    DECODE_READY = "decode_ready"
    CONTROL_READY = "control_ready"
    PAUSED = "paused"
    """Off its lane until somebody resumes it."""
    TERMINAL_PENDING = "terminal_pending"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Ending:
    """How a request ends. ``error`` is what ``result()`` will raise."""

    finish: FinishReason
    stop: StopReason | None = None
    error: NinferError | None = None

    @classmethod
    def limit(cls, reason: LimitReason) -> Ending:
        """The output is as long as it may be."""
        return cls("length", "max_tokens" if reason is LimitReason.OUTPUT_LIMIT else "context")

    @classmethod
    def failed(cls, error: NinferError) -> Ending:
        return cls("error", error=error)


CANCELLED = Ending("cancelled")


@dataclass(slots=True, eq=False)
class RequestRecord:
    """Owned by the worker once enqueued. Times are readings of the engine's clock, seconds."""

    request: PreparedRequest
    session: OutputSession
    response: Response
    submitted: float
    deadline: float = math.inf
    """When the whole request must be done."""
    queue_deadline: float = math.inf
    """When a waiting request must have got a lane."""
    prepare_seconds: float | None = None
    metadata: Mapping[str, Any] | None = None

    state: RequestState = RequestState.WAITING
    lane: int = -1
    """Its lane, once it is admitted."""
    sequence: SequenceHandle | None = None
    cached_tokens: int = 0
    captures: tuple[PlannedCapture, ...] = ()
    """Checkpoints still to be made, by frontier; prefill units end there."""
    produced: int = 0
    """Committed output tokens, forced ones included."""
    accepted: int = 0
    """Tokens that Program has committed and the session holds as a preview."""
    speculation: SpeculationStats | None = None
    fared: Fared | None = None
    """How its drafts have fared, where that decides how many there are."""
    verified: tuple[int, int] = (0, 0)
    """Drafts verified, and kept, in the round that ``accepted`` is of."""
    resumed: PreparedRequest | None = None
    """What is admitted instead of the request once it has been paused."""
    pauses: int = 0
    """How often it had to make room for an older request."""
    progressed: bool = False
    """Something was committed since it got its lane."""
    previewed: bool = False
    """The session holds a preview that is neither committed nor discarded."""
    ending: Ending | None = None
    spoiled: Ending | None = None
    """How it ends once the round that it is in has: a fault of the host met it when that had been launched."""
    queued: float | None = None
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    @property
    def id(self) -> int:
        return self.request.id

    @property
    def entering(self) -> PreparedRequest:
        """What admission is asked for."""
        return self.resumed or self.request

    @property
    def ready(self) -> RequestState:
        """What the row does next once its prompt has been read and its first token decided."""
        return RequestState.CONTROL_READY if self.session.control else RequestState.DECODE_READY

    @property
    def left(self) -> int:
        """Output tokens the request may still have. Bounded by its budget and by the context."""
        return self.request.effective_output - self.produced

    def result(self) -> GenerationResult:
        """The final result. Requires ``ending``; sets the error's ``partial`` to it."""
        ending, session = self.ending, self.session
        assert ending is not None
        tokens = session.token_ids
        result = GenerationResult(
            text=session.text,
            thinking=session.thinking,
            tool_calls=session.tool_calls,
            parsed=session.parsed,
            token_ids=tokens,
            logprobs=session.logprobs if self.request.sampling.logprobs >= 0 else None,
            finish_reason=ending.finish,
            stop_reason=ending.stop,
            stop_string=session.stop_string,
            usage=Usage(
                prompt_tokens=len(self.request.identity.tokens),
                cached_tokens=self.cached_tokens,
                completion_tokens=len(tokens),
                thinking_tokens=session.thinking_tokens,
            ),
            timings=self.timings(),
            speculation=self.speculation,
            constraint=session.constraint,
            error=ending.error,
            seed=self.request.sampling.seed,
            metadata=self.metadata,
        )
        if ending.error is not None:
            ending.error.partial = result
        return result

    def timings(self) -> Timings:
        """Phases that happened, seconds."""
        return Timings(
            prepare=self.prepare_seconds,
            constraint_prepare=self.session.constraint_seconds,
            queue=_span(self.queued, self.admitted),
            prefill=_span(self.admitted, self.first_token),
            decode=_span(self.first_token, self.last_token),
            ttft=_span(self.submitted, self.first_token),
        )


def _span(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else end - begin
