"""What an answer means, token by token: previewed, then committed or discarded. Owned by one request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import repeat
from typing import Any, Literal

import attrs
import numpy as np

from ninfer.constraints.service import Opened
from ninfer.errors import InvariantError
from ninfer.frontend.constrain import AnswerPlan
from ninfer.frontend.decoder import Decoder
from ninfer.frontend.envelope import Envelope
from ninfer.frontend.frontiers import Frontiers
from ninfer.frontend.prompt import PreparedPrompt
from ninfer.frontend.protocol import CANONICAL_CLOSE, THINK_OPEN
from ninfer.frontend.rounds import ALL, Count, Preview, Round, Scored, fork
from ninfer.frontend.tokenizer import Tokenizer
from ninfer.options import RequestOptions
from ninfer.results import (
    Channel,
    ConstraintReport,
    Delta,
    FinishReason,
    TokenLogprob,
    ToolCall,
    ToolCallEvent,
)

Unread = tuple[Sequence[int], Sequence[TokenLogprob] | None]
"""Tokens that can only add text, and their scores where the request asked for them."""


@attrs.frozen
class OutputProtocol:
    """What all sessions of one frontend share.

    shown: bytes each token shows, empty for control tokens. replays_thinking: the chat template renders an
    earlier answer's thinking as this module expects it, so that positions behind it can be reached again.
    """

    tokenizer: Tokenizer
    shown: Sequence[bytes]
    stop_ids: frozenset[int]
    close_tokens: tuple[int, ...]
    frontiers: Frontiers
    replays_thinking: bool


class OutputSession:
    """One request's output. Created on the caller's thread, then used by the engine's worker alone.

    ``preview`` or ``preview_control`` reads provisional tokens and says how many are accepted; everything
    that can fail fails there. ``commit`` makes them part of the answer; ``discard`` forgets them. ``finish`` ends
    an answer that no preview ended. Calls out of this order raise InvariantError. ``tell`` gives the events of
    what has been committed; tokens that can only add text become text there, while the device works.

    While ``control`` is not empty, exactly those tokens come next, through ``preview_control``: the thinking
    budget is used up and the canonical close is due. ``licence()`` is how many tokens may come before that.
    ``matcher``: the state of the request's constraint, which previews, commits and discards with the session;
    None without one. ``opened``: it and how it was made.

    ``text``, ``thinking``, ``tool_calls``, ``token_ids``, ``logprobs`` and ``thinking_tokens`` (tokens that
    began inside the thinking, forced ones included) describe what is committed.
    """

    def __init__(
        self,
        protocol: OutputProtocol,
        prompt: PreparedPrompt,
        options: RequestOptions,
        max_tokens: int,
        plan: AnswerPlan,
        opened: Opened | None,
    ) -> None:
        self._opened = opened
        self.matcher = opened.matcher if opened else None
        self._protocol = protocol
        self._prompt = prompt
        self._max_tokens = max_tokens
        self._stop_ids = frozenset(options.stop_token_ids) | (frozenset() if options.ignore_eos else protocol.stop_ids)
        self._budget = _thinking_budget(options, max_tokens, len(protocol.close_tokens))
        self._decoder = Decoder(
            envelope=Envelope(plan.contracts, exact=opened is not None) if plan.contracts else None,
            stops=options.stop,
            stop_in_thinking=options.thinking_stop,
            thinking=prompt.start_channel == "thinking",
            exact=opened is not None,
            either=plan.either,
        )
        self._decoder.resume(prompt.continuation.decode())
        self._plain = self._decoder.plain
        self._count = Count()
        self._ready: Round | None = None
        self._round: Round | Unread | None = None
        self._finished = False
        self._said: dict[Channel, list[str]] = {"thinking": [], "content": []}
        self._calls: list[ToolCall] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._unread: list[Unread] = []
        self._unsaid: list[Scored] = []
        self._untold: list[Delta | ToolCallEvent] = []

    # -- committed facts -------------------------------------------------------------------------------------

    @property
    def text(self) -> str:
        self._catch_up()
        return "".join(self._said["content"])

    @property
    def thinking(self) -> str:
        self._catch_up()
        return "".join(self._said["thinking"])

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return tuple(self._calls)

    @property
    def token_ids(self) -> tuple[int, ...]:
        self._catch_up()
        return tuple(self._tokens)

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        self._catch_up()
        return tuple(self._logprobs)

    @property
    def thinking_tokens(self) -> int:
        return self._count.thinking

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer."""
        return self._decoder.stopped or None

    @property
    def constraint(self) -> ConstraintReport | None:
        """What became of the constraint so far; None without one."""
        opened, matcher = self._opened, self.matcher
        if opened is None or matcher is None:
            return None
        return ConstraintReport(
            kind=opened.kind,
            branch=self._branch(),
            complete=matcher.complete,
            terminated=matcher.terminated,
            cache=opened.cache,
            masks=matcher.masks,
            mask_h2d_bytes=matcher.masks * matcher.nbytes,
            mask_seconds=matcher.mask_seconds,
            matcher_seconds=matcher.matcher_seconds,
        )

    def _branch(self) -> Literal["undecided", "content", "tools"]:
        if self._decoder.called:
            return "tools"
        return "content" if self._prompt.continuation or self.text else "undecided"

    @property
    def parsed(self) -> Any:
        """The JSON value of the whole text, when a JSON constraint is complete."""
        opened, matcher = self._opened, self.matcher
        if opened is None or matcher is None or not matcher.complete or not opened.kind.startswith("json"):
            return None
        if self._branch() == "tools":
            return None
        return json.loads(self._prompt.continuation.decode() + self.text)

    @property
    def constraint_seconds(self) -> float | None:
        """How long the constraint took to prepare."""
        return self._opened.seconds if self._opened else None

    @property
    def control(self) -> tuple[int, ...]:
        if self._left() != 0:
            return ()
        return self._protocol.close_tokens[: self._max_tokens - self._count.produced]

    def licence(self) -> int | None:
        """Tokens that may be produced before a forced close is due; None: no such limit. Not during a preview."""
        if self._round is not None:
            raise InvariantError("licence() during a preview")
        return self._left()

    def _left(self) -> int | None:
        if self._budget is None or not self._decoder.thinking or self._count.ending is not None:
            return None
        return self._budget - self._count.thinking

    # -- transaction -----------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Do what the next preview or the end begins with, while the device works."""
        if self._round is None and not self._plain:
            self._ready = self._fork()

    def preview(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] | None = None) -> Preview:
        """Read sampled tokens. ``logprobs``: one for each, if the request asked for them.

        The accepted prefix ends at a stop id, at the token that completes a stop string, or at the output
        budget.
        """
        if logprobs is not None and len(logprobs) != len(tokens):
            raise InvariantError(f"{len(logprobs)} logprobs for {len(tokens)} tokens")
        if self._only_text(tokens):
            if self.matcher is not None:
                self.matcher.preview(tokens)
            self._round = tuple(tokens), logprobs
            return ALL[len(tokens)]
        self._check_open(tokens)
        if self.control:
            raise InvariantError("sampled tokens while a forced close is due")
        work = self._fork()
        for i, token in enumerate(tokens):
            if self._budget is not None and work.decoder.thinking and work.count.thinking >= self._budget:
                raise InvariantError("the tokens pass the thinking budget")
            self._read(work, int(token), logprobs[i] if logprobs else None, stop=token in self._stop_ids)
            if work.count.ending is not None:
                break
        return self._close_round(work)

    def preview_control(self, tokens: Sequence[int]) -> Preview:
        """Read the forced tokens; they must be ``control``. They stop nothing and count as output."""
        self._check_open(tokens)
        if tuple(tokens) != self.control:
            raise InvariantError("forced tokens are not the ones that are due")
        work = self._fork()
        for token in tokens:
            self._read(work, int(token), None, stop=False)
        return self._close_round(work, forced=True)

    def commit(self) -> None:
        """Make the preview part of the answer."""
        work = self._round
        if work is None:
            raise InvariantError("commit without a preview")
        if self.matcher is not None:
            self.matcher.commit()
        self._round = None
        if isinstance(work, Round):
            self._adopt(work)
            return
        n = len(work[0])
        self._count.produced += n
        if self._decoder.thinking:
            self._count.thinking += n
        self._unread.append(work)

    def tell(self) -> list[Delta | ToolCallEvent]:
        """The events of what has been committed since the last call, in order."""
        self._catch_up()
        told, self._untold = self._untold, []
        return told

    def discard(self) -> None:
        """Forget the preview; everything is as before it."""
        if self._round is None:
            raise InvariantError("discard without a preview")
        if self.matcher is not None:
            self.matcher.discard()
        self._round = None

    def finish(self, reason: FinishReason) -> None:
        """End the answer and release what is held back. A committed preview that ended it has released everything."""
        if self._round is not None or self._finished:
            raise InvariantError("finish during a preview, or twice")
        self._finished = True
        if self._count.ending is None:
            work = self._fork()
            work.count.ending = (reason, None)
            work.say(work.decoder.finish(complete=reason in ("stop", "tool_calls")), self._prompt)
            self._adopt(work)

    # -- reading ---------------------------------------------------------------------------------------------

    def _check_open(self, tokens: Sequence[int]) -> None:
        if self._round is not None:
            raise InvariantError("a preview is open")
        if self._finished or self._count.ending is not None:
            raise InvariantError("the answer has ended")
        if not len(tokens) or not all(0 <= token < len(self._protocol.shown) for token in tokens):
            raise InvariantError(f"cannot preview tokens {list(tokens)!r}")

    def _only_text(self, tokens: Sequence[int]) -> bool:
        """Whether the tokens can do nothing but add text. The decoder then need not have read them to go on."""
        count, n, shown = self._count, len(tokens), self._protocol.shown
        if not self._plain or self._round is not None or self._finished or count.close_at is not None:
            return False
        if not 0 < n < min(self._max_tokens - count.produced, len(ALL)):
            return False
        thinking = self._decoder.thinking
        if thinking and self._budget is not None and count.thinking + n > self._budget:
            return False
        for token in tokens:
            if not 0 <= token < len(shown) or token in self._stop_ids or (thinking and b"<" in shown[token]):
                return False
        return True

    def _catch_up(self) -> None:
        """Read the committed tokens that only add text."""
        if not self._unread:
            return
        work = Round(self._decoder, self._count, unsaid=self._unsaid)
        for tokens, logprobs in self._unread:
            work.tokens += tokens
            work.logprobs += logprobs or ()
            for token, logprob in zip(tokens, logprobs or repeat(None)):
                work.unsaid.append((token, logprob))
                work.say(work.decoder.feed(self._protocol.shown[token]), self._prompt)
        self._unread = []
        self._adopt(work)

    def _fork(self) -> Round:
        self._catch_up()
        ready, self._ready = self._ready, None
        return ready or fork(self._decoder, self._count, self._unsaid)

    def _read(self, work: Round, token: int, logprob: TokenLogprob | None, *, stop: bool) -> None:
        """Take one token in: its text, its place in the budgets, the end it may bring."""
        count, decoder = work.count, work.decoder
        was_thinking = decoder.thinking
        work.tokens.append(token)
        work.unsaid.append((token, logprob))
        if logprob is not None:
            work.logprobs.append(logprob)
        count.produced += 1
        count.thinking += was_thinking
        if stop:
            count.ending = ("stop", "eos" if token in self._protocol.stop_ids else "stop_token")
        else:
            work.say(decoder.feed(self._protocol.shown[token]), self._prompt)
            if decoder.stopped:
                count.ending = ("stop", "stop_string")
            self._watch_close(work, token, closed=was_thinking and not decoder.thinking)
        if count.ending is None and count.produced >= self._max_tokens:
            count.ending = ("length", "max_tokens")

    def _close_round(self, work: Round, *, forced: bool = False) -> Preview:
        count = work.count
        if count.ending is not None:
            natural = count.ending[0] == "stop"
            work.say(work.decoder.finish(complete=natural), self._prompt)
            if natural:
                why = "stop_string" if work.decoder.stopped else count.ending[1]
                count.ending = ("tool_calls" if count.calls else "stop", why)
        if self.matcher is not None and forced:
            tail = b"".join(self._protocol.shown[token] for token in self._tokens[-3:])
            self.matcher.preview_control(work.tokens, tail)
        elif self.matcher is not None:
            self.matcher.preview(work.tokens)
        self._round = work
        return Preview(len(work.tokens), count.ending, tuple(work.boundaries))

    # -- reconstruction --------------------------------------------------------------------------------------

    def _watch_close(self, work: Round, token: int, *, closed: bool) -> None:
        """Report the position behind the canonical close, if a later prompt reaches it with these very tokens."""
        count, frontiers = work.count, self._protocol.frontiers
        if closed and token == frontiers.think_close and self._protocol.replays_thinking:
            count.close_at = count.produced - 1
        if count.close_at is None or count.produced < count.close_at + 1 + len(frontiers.tail):
            return
        generated = [*self._tokens, *work.tokens]
        if frontiers.closes(generated, count.close_at) and self._renders_alike(work, generated):
            work.boundaries.append(len(work.tokens))
        count.close_at = None

    def _renders_alike(self, work: Round, generated: list[int]) -> bool:
        """Whether the history's text of this thinking, encoded, is what the prompt and the model spelled."""
        opening = np.flatnonzero(self._prompt.tokens == self._protocol.frontiers.think_open)
        if not opening.size or not self._protocol.frontiers.opens_turn(self._prompt.tokens, int(opening[-1])):
            return False
        said = [event.text for event in work.events if isinstance(event, Delta) and event.channel == "thinking"]
        thinking = "".join([*self._said["thinking"], *said]).strip()
        spelled = [*self._prompt.tokens[opening[-1] :].tolist(), *generated]
        return self._protocol.tokenizer.encode(f"{THINK_OPEN}\n{thinking}{CANONICAL_CLOSE}") == spelled

    # -- committing ------------------------------------------------------------------------------------------

    def _adopt(self, work: Round) -> None:
        self._decoder, self._count, self._unsaid = work.decoder, work.count, work.unsaid
        self._plain = work.decoder.plain
        self._tokens += work.tokens
        self._logprobs += work.logprobs
        for event in work.events:
            if isinstance(event, Delta):
                self._said[event.channel].append(event.text)
            else:
                self._calls.append(event.call)
        self._untold += work.events


def _thinking_budget(options: RequestOptions, max_tokens: int, close: int) -> int | None:
    """Tokens of thinking before the close is forced. Room for the close is kept, where the output has any."""
    if options.thinking_budget is None:
        return None
    return min(options.thinking_budget, max_tokens - close if max_tokens >= close else max_tokens)
