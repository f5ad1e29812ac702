"""The outcome of a preview: what its tokens would make of an answer."""

from __future__ import annotations

import attrs

from ninfer.frontend.decoder import Decoder
from ninfer.results import Delta, FinishReason, StopReason, TokenLogprob, ToolCallEvent

Ending = tuple[FinishReason, StopReason | None]


@attrs.frozen
class Preview:
    """What committing the previewed tokens would do.

    accepted: how many are kept, 1..len(tokens). terminal: the end they bring, or None. boundaries: offsets in
    (0, accepted] at which a later prompt that contains this answer has the same tokens up to there, and a
    frontier.
    """

    accepted: int
    terminal: Ending | None
    boundaries: tuple[int, ...]


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
    unsaid: list[tuple[int, TokenLogprob | None]] = attrs.field(factory=list)
    """Tokens since the last event."""
    events: list[Delta | ToolCallEvent] = attrs.field(factory=list)
    boundaries: list[int] = attrs.field(factory=list)
