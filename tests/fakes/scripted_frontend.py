"""A frontend over 256 tokens whose text is ``"<id> "``. Sessions check the order in which they are called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from fakes.scripted_program import CALL, EOS, Faults

from ninfer.errors import InvalidRequest, InvariantError
from ninfer.frontend import PreparedPrompt, Preview
from ninfer.identity import PrefixIdentity, digest_chain
from ninfer.inputs import Chat, TextPrompt, TokenPrompt
from ninfer.options import RequestOptions, SamplingParams
from ninfer.results import Delta, TokenLogprob, ToolCall, ToolCallEvent

CLOSE = (1, 2)
"""Forced tokens that end thinking; 1 alone ends it when the model writes it."""


def text_of(token: int) -> str:
    return f"{token} "


class NoConstraints:
    @staticmethod
    def stats() -> dict[str, int]:
        return {}


class Session:
    matcher = constraint = parsed = constraint_seconds = None

    def __init__(self, prompt: PreparedPrompt, options: RequestOptions, max_tokens: int, faults: Faults) -> None:
        self._options, self._max, self._faults = options, max_tokens, faults
        room = max_tokens - len(CLOSE) if max_tokens >= len(CLOSE) else max_tokens
        budget = options.thinking_budget
        self._budget = None if budget is None else min(budget, room)
        self._chat = prompt.chat
        self._thinking = prompt.start_channel == "thinking"
        self._pending: tuple[tuple[int, ...], Sequence[TokenLogprob] | None] | None = None
        self._over = False
        self.violations: list[str] = []
        self.text = self.thinking = ""
        self.tool_calls: tuple[ToolCall, ...] = ()
        self.thinking_tokens = 0
        self.stop_string = None
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._untold: list = []

    def _rule(self, holds: bool, message: str) -> None:
        if not holds:
            self.violations.append(message)
            raise InvariantError(message)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(self._tokens)

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        return tuple(self._logprobs)

    @property
    def control(self) -> tuple[int, ...]:
        return CLOSE[: self._max - len(self._tokens)] if self.licence() == 0 else ()

    def licence(self) -> int | None:
        if not self._thinking or self._budget is None:
            return None
        return self._budget - self.thinking_tokens

    def prepare(self) -> None:
        self._rule(self._pending is None, "prepare during a preview")

    def preview(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] | None = None) -> Preview:
        self._faults.check("preview", "before")
        self._rule(not self._over and self._pending is None, "preview out of order")
        self._rule(not self.control, "sampling while forced tokens are due")
        left = self.licence()
        self._rule(left is None or len(tokens) <= left, "a round passed the thinking budget")
        terminal, accepted = None, 0
        for token in tokens:
            accepted += 1
            if token == EOS and not self._options.ignore_eos:
                terminal = ("stop", "eos")
            elif token in self._options.stop_token_ids:
                terminal = ("stop", "stop_token")
            elif self._chat and token == CALL:
                terminal = ("tool_calls", None)
            elif len(self._tokens) + accepted == self._max:
                terminal = ("length", "max_tokens")
            if terminal:
                break
        self._pending = (tuple(tokens[:accepted]), logprobs)
        return Preview(accepted, terminal, (accepted,) if terminal else ())

    def preview_control(self, tokens: Sequence[int]) -> Preview:
        self._faults.check("preview_control", "before")
        self._rule(not self._over and self._pending is None, "preview out of order")
        self._rule(tuple(tokens) == self.control, "not the forced tokens that are due")
        self._pending = (tuple(tokens), None)
        full = len(self._tokens) + len(tokens) == self._max
        return Preview(len(tokens), ("length", "max_tokens") if full else None, ())

    def commit(self) -> None:
        self._rule(self._pending is not None, "commit without a preview")
        assert self._pending is not None
        tokens, logprobs = self._pending
        self._pending = None
        self._faults.check("session.commit", "before")
        events = self._untold
        for i, token in enumerate(tokens):
            scores = tuple(logprobs[i : i + 1]) if logprobs else ()
            self._tokens.append(token)
            self._logprobs += scores
            if self._thinking:
                self.thinking_tokens += 1
                self._thinking = token != (CLOSE[-1] if tokens == CLOSE else CLOSE[0])
                shown = "" if token in CLOSE else text_of(token)
                self.thinking += shown
                events.append(Delta("thinking", shown, (token,), scores))
            elif self._chat and token == CALL:
                call = ToolCall(f"call_{len(self.tool_calls)}", "tool", {}, "{}")
                self.tool_calls += (call,)
                events.append(ToolCallEvent(len(self.tool_calls) - 1, call))
            else:
                shown = "" if token in (EOS, *CLOSE) else text_of(token)
                self.text += shown
                events.append(Delta("content", shown, (token,), scores))

    def tell(self) -> list:
        told, self._untold = self._untold, []
        return told

    def discard(self) -> None:
        self._rule(self._pending is not None, "discard without a preview")
        self._pending = None

    def finish(self, reason: str) -> None:
        self._rule(not self._over and self._pending is None, "finish out of order")
        self._over = True
        self._faults.check("session.finish", "before")


class ScriptedFrontend:
    """Text prompts are tokens ``ord``; the first one names the index of EOS. A chat's first message is its text; a chat
    with ``thinking=True`` starts in the thinking channel."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.constraints = NoConstraints()
        self.sessions: list[Session] = []
        self.stop_ids = (EOS,)
        self.vocab_size = 256
        self.close_tokens = CLOSE
        self.defaults = SamplingParams(
            temperature=0.7, top_p=0.9, top_k=20, min_p=0.0, presence_penalty=0.0, frequency_penalty=0.0
        )

    def prepare(self, value: str | Chat | TextPrompt | TokenPrompt) -> PreparedPrompt:
        chat, thinking = False, False
        if isinstance(value, TokenPrompt):
            ids = list(value.ids)
            if any(not isinstance(i, int) or not 0 <= i < 256 for i in ids):
                raise InvalidRequest("not a token", field="ids")
        else:
            if isinstance(value, Chat):
                chat, thinking = True, bool(value.thinking)
                first = value.messages[0]
                if not isinstance(first, Mapping) or not isinstance(first.get("content"), str):
                    raise InvalidRequest("no content", field="messages[0].content")
                text = first["content"]
            else:
                text = value if isinstance(value, str) else value.text
            ids = [ord(c) % 256 for c in text]
        tokens = np.array(ids, np.int32)
        n = len(tokens)
        identity = PrefixIdentity(tokens, np.zeros(n, np.uint8), np.zeros((3, n), np.int32))
        return PreparedPrompt(
            tokens=tokens,
            identity=identity,
            digest=digest_chain(identity),
            start_channel="thinking" if thinking else "content",
            boundaries=tuple(sorted({(n + 1) // 2, n})) if chat else (n,),
            rewrite=(n - 1, "TURN_CLOSURE") if chat and n > 1 else None,
            chat=chat,
            prepare_seconds=0.25,
        )

    def output_session(self, prompt: PreparedPrompt, options: RequestOptions, *, max_tokens: int) -> Session:
        self.faults.check("output_session", "before")
        for i, token in enumerate(options.stop_token_ids):
            if token >= self.vocab_size:
                raise InvalidRequest(f"{token} is not a token", field=f"stop_token_ids[{i}]")
        session = Session(prompt, options, max_tokens, self.faults)
        self.sessions.append(session)
        return session

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(text_of(i) for i in ids)
