"""The outcome of a preview: what its tokens would make of an answer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cache
from typing import Any, TypeVar

import attrs

from ninfer.frontend.decoder import Decoder, Piece
from ninfer.frontend.envelope import RawCall
from ninfer.frontend.prompt import PreparedPrompt
from ninfer.results import Delta, FinishReason, StopReason, TokenLogprob, ToolCall, ToolCallEvent

T = TypeVar("T")
Ending = tuple[FinishReason, StopReason | None]
Scored = tuple[int, TokenLogprob | None]
"""A token, with its score where the request asked for one."""


@attrs.frozen
class Preview:
    """What committing the previewed tokens would do.

    accepted: how many are kept, 1..len(tokens). terminal: the end they bring, or None. boundaries: offsets in
    (0, accepted] at which a later prompt that contains this answer has the same tokens up to there, and a
    frontier.
    """

    accepted: int
    terminal: Ending | None = None
    boundaries: tuple[int, ...] = ()


ALL = tuple(Preview(n) for n in range(16))
"""All of so many tokens, and nothing else."""


@attrs.define
class Count:
    """Budget and boundary bookkeeping of the output so far; copied for each preview."""

    produced: int = 0
    thinking: int = 0
    calls: int = 0
    close_at: int | None = None
    """Index of the generated ``</think>`` whose canonical form is still being checked."""
    ending: Ending | None = None


@attrs.define
class Round:
    """The outcome of a preview: the state to be, and what it adds."""

    decoder: Decoder
    count: Count
    tokens: list[int] = attrs.field(factory=list)
    logprobs: list[TokenLogprob] = attrs.field(factory=list)
    unsaid: list[Scored] = attrs.field(factory=list)
    """Tokens since the last event."""
    events: list[Delta | ToolCallEvent] = attrs.field(factory=list)
    boundaries: list[int] = attrs.field(factory=list)

    def say(self, pieces: Sequence[Piece], prompt: PreparedPrompt) -> None:
        """Turn released pieces into events. Each token goes with the first event after it."""
        for piece in pieces:
            since, self.unsaid = self.unsaid, []
            if isinstance(piece, RawCall):
                self.events.append(ToolCallEvent(self.count.calls, _tool_call(self.count.calls, piece, prompt)))
                self.count.calls += 1
                continue
            channel, text = piece
            tokens = tuple(token for token, _ in since)
            scores = tuple(score for _, score in since if score is not None)
            last = self.events[-1] if self.events else None
            if isinstance(last, Delta) and last.channel == channel:
                text, tokens, scores = last.text + text, last.token_ids + tokens, last.logprobs + scores
                self.events.pop()
            self.events.append(Delta(channel, text, tokens, scores))


def fork(decoder: Decoder, count: Count, unsaid: Sequence[Scored]) -> Round:
    """What the next tokens are tried out on; they change nothing of what is given."""
    return Round(_twin(decoder), _twin(count), unsaid=list(unsaid))


def _tool_call(index: int, call: RawCall, prompt: PreparedPrompt) -> ToolCall:
    """Its id tells calls of one answer, and answers to different prompts, apart."""
    written = json.dumps(call.arguments, ensure_ascii=False, separators=(",", ":"))
    seed = repr((index, call.name, written)).encode()
    key = prompt.digest.chain[-1] + prompt.tokens[-64:].tobytes()
    digest = hashlib.blake2b(seed + key, digest_size=12).hexdigest()
    return ToolCall(id=f"call_{digest}", name=call.name, arguments=call.arguments, arguments_json=written)


def _twin(value: T) -> T:
    """A shallow copy of a value of a slotted attrs class, several times as fast as ``copy.copy``."""
    kind: Any = type(value)
    twin: T = object.__new__(kind)
    for name in _names(kind):
        setattr(twin, name, getattr(value, name))
    return twin


@cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in attrs.fields(kind))
