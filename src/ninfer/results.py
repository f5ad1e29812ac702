"""What a request gives back: streamed events and the final result. Frozen values."""

from __future__ import annotations

import enum
import html
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any, Literal

import attrs

Channel = Literal["thinking", "content"]
FinishReason = Literal["stop", "length", "tool_calls", "cancelled", "error"]
StopReason = Literal["eos", "stop_token", "stop_string", "max_tokens", "context", "grammar"]


@attrs.frozen
class ToolCall:
    """A parsed call. ``arguments`` is the decoded object, ``arguments_json`` its compact JSON text."""

    id: str
    name: str
    arguments: Mapping[str, Any]
    arguments_json: str


@attrs.frozen
class TokenLogprob:
    """Log-probability of one emitted token, natural log, before truncation (top-k, top-p, min-p).

    It is of the penalised, masked distribution at temperature 1. ``top`` holds (token id, logprob) of the most
    likely alternatives, most likely first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@attrs.frozen
class GenerationStart:
    """The first event: admission has committed. ``cached_tokens`` of the prompt need no prefill."""

    prompt_tokens: int
    cached_tokens: int = 0


@attrs.frozen
class Delta:
    """Committed text. ``token_ids`` are the tokens whose commit released it; text may lag behind tokens.

    Tokens that show nothing come with the next delta; at the end of an answer (its stop id, a matched stop string) they
    are in the result alone. ``logprobs`` belong to ``token_ids``.
    """

    channel: Channel
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def tokens(self) -> int:
        """How many tokens stand behind this delta."""
        return len(self.token_ids)


@attrs.frozen
class ToolCallEvent:
    """One whole, committed call; ``index`` counts from 0 within the answer."""

    index: int
    call: ToolCall


@attrs.frozen
class Usage:
    """Token counts. ``completion_tokens`` includes thinking, forced control and stop tokens."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    thinking_tokens: int = 0


@attrs.frozen
class Timings:
    """Seconds. ``ttft`` runs from submit to the first committed token; None where the phase did not happen."""

    prepare: float | None = None
    constraint_prepare: float | None = None
    queue: float | None = None
    prefill: float | None = None
    decode: float | None = None
    ttft: float | None = None


class PauseOutcome(enum.Enum):
    """What became of a wish to pause a request."""

    SNAPSHOT = "snapshot"
    """It is paused and keeps its state: it goes on where it stands, unless others need that memory meanwhile."""
    REPLAY = "replay"
    """It is paused and has given its state up: it will read again what no checkpoint spares it."""
    ALREADY_FINISHED = "already_finished"
    CANCELLED = "cancelled"
    NOT_PAUSABLE = "not_pausable"
    """It waits for a lane."""


@attrs.frozen
class SpeculationStats:
    """Drafts of one request: rounds that verified any, drafts verified, drafts kept, and those kept by their place in a
    round."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: tuple[int, ...] = ()

    def plus(self, other: SpeculationStats) -> SpeculationStats:
        """Both together."""
        places = zip_longest(self.accepted_per_position, other.accepted_per_position, fillvalue=0)
        return SpeculationStats(
            self.rounds + other.rounds,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
            tuple(map(sum, places)),
        )

    def after(self, drafted: int, accepted: int) -> SpeculationStats:
        """With one round more."""
        return self.plus(SpeculationStats(1, drafted, accepted, (1,) * accepted + (0,) * (drafted - accepted)))


@attrs.frozen(kw_only=True)
class ConstraintReport:
    """What became of a constrained answer. State describes committed output; work that was undone is counted too.

    kind: what the constraint was made from, or "tools". branch: what the answer is, decided by its first byte.
    complete: the output, with the text it continued, may end here. terminated: the model ended it. cache: the compiled
    language was there, was made for this request, or was being made for another. masks: positions filled.
    mask_h2d_bytes: bytes sent to the device for them. mask_seconds and matcher_seconds: host time, inside other
    intervals, of filling masks and of reading tokens; None unless the engine was opened with ``phase_timings``.
    """

    kind: str
    branch: Literal["undecided", "content", "tools"] = "undecided"
    complete: bool = False
    terminated: bool = False
    cache: Literal["hit", "built", "waited"] = "hit"
    masks: int = 0
    mask_h2d_bytes: int = 0
    mask_seconds: float | None = None
    matcher_seconds: float | None = None


@attrs.frozen(kw_only=True)
class GenerationResult:
    """The last event of every request. ``str(result)`` is the text.

    text, thinking: the two channels, without stop strings and control tokens. tool_calls: complete calls, in order.
    parsed: the JSON value of a constrained answer, else None. token_ids: all output tokens, forced and stop tokens
    included. logprobs: one entry per sampled token if asked for; forced tokens have none. finish_reason: how it ended;
    stop_reason: what in particular; stop_string: the one that was matched. usage, timings, speculation, constraint:
    what it cost. error: set where ``result()`` raises. seed: what it was sampled with. index: the item's place in a
    batch, else None. metadata: the request's own. ``message`` is the assistant message to append to the history.
    """

    text: str = ""
    thinking: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    parsed: Any = None
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason = "stop"
    stop_reason: StopReason | None = None
    stop_string: str | None = None
    usage: Usage = Usage()
    timings: Timings = Timings()
    speculation: SpeculationStats | None = None
    constraint: ConstraintReport | None = None
    error: BaseException | None = None
    seed: int | None = None
    index: int | None = None
    metadata: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        return self.text

    @property
    def message(self) -> dict[str, Any]:
        """The assistant turn in the OpenAI shape, ready to append to ``Chat.messages``."""
        turn: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.thinking:
            turn["reasoning_content"] = self.thinking
        if self.tool_calls:
            turn["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": dict(call.arguments)},
                }
                for call in self.tool_calls
            ]
        return turn

    def _repr_markdown_(self) -> str:
        parts = []
        if self.thinking:
            folded = html.escape(self.thinking)
            parts.append(f"<details><summary>thinking</summary>\n\n<pre>{folded}</pre>\n\n</details>\n")
        parts.append(self.text)
        for call in self.tool_calls:
            parts.append(f"\n```json\n{call.name}({call.arguments_json})\n```")
        parts.append(f"\n\n<sub>{self.statistics()}</sub>")
        return "\n".join(parts)

    def statistics(self) -> str:
        """One line: tokens, seconds, tokens per second, how it ended."""
        u, t = self.usage, self.timings
        line = f"{u.prompt_tokens} prompt + {u.completion_tokens} completion tokens"
        if u.cached_tokens:
            line += f" ({u.cached_tokens} cached)"
        if t.ttft is not None:
            line += f", first token {t.ttft * 1e3:.0f} ms"
        if t.decode and u.completion_tokens > 1:
            line += f", {(u.completion_tokens - 1) / t.decode:.0f} tok/s"
        return line + f", {self.finish_reason}" + (f" ({self.stop_reason})" if self.stop_reason else "")


Event = GenerationStart | Delta | ToolCallEvent | GenerationResult
"""What a handle yields, in order; the last one is always a GenerationResult."""
