"""The one object other rooms hold: prompts in, output sessions out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ninfer.constraints.compose import PhaseMarker
from ninfer.constraints.service import ConstraintService
from ninfer.errors import InvalidRequest, NinferError
from ninfer.frontend.constrain import Markers, plan_answer
from ninfer.frontend.frontiers import Frontiers
from ninfer.frontend.generation import read_sampling, read_stop_ids, special_tokens
from ninfer.frontend.plain import plain_text
from ninfer.frontend.prompt import PreparedPrompt, text_identity
from ninfer.frontend.protocol import (
    CALL_CLOSE,
    CALL_OPEN,
    CANONICAL_CLOSE,
    RESULT_CLOSE,
    RESULT_OPEN,
    THINK_CLOSE,
    THINK_OPEN,
    TURN_CLOSE,
    TURN_OPEN,
)  # fmt: skip
from ninfer.frontend.render import RenderedChat, render_chat
from ninfer.frontend.resources import FrontendResources, broken, json_object
from ninfer.frontend.session import OutputProtocol, OutputSession
from ninfer.frontend.template import ChatTemplate
from ninfer.frontend.tokenizer import Tokenizer
from ninfer.frontend.vocabulary import token_classes
from ninfer.identity import digest_chain
from ninfer.inputs import Chat, PromptInput, TextPrompt, TokenPrompt
from ninfer.options import RequestOptions, SamplingParams
from ninfer.results import Channel

_SHOWN_TAGS = (THINK_OPEN, THINK_CLOSE, CALL_OPEN, CALL_CLOSE, RESULT_OPEN, RESULT_CLOSE)
"""Shown, and read, even where a vocabulary flags them as special."""


class Frontend:
    """Meaning of prompts and answers for one model. Immutable; every method may be called from any thread.

    vocab_size: size ``V`` of the public token domain; ids are ``0..V-1``. stop_ids: the ids that end an
    answer, those of generation_config.json and ``<|im_end|>``. close_tokens: the canonical close of the
    thinking, tokenised alone. defaults: the sampling generation_config.json recommends, every field set but
    the seed; where it is silent, temperature 1, top_p 1, top_k 20. ``do_sample: false`` is temperature 0, and
    top_k above 64 becomes 64. constraints: the compiled languages of this vocabulary.

    grammar_cache_bytes: what ``constraints`` may retain. timed: have it measure its work.

    Raises ArtifactError, naming the file, for resources that cannot be honoured.
    """

    def __init__(
        self, resources: FrontendResources, *, grammar_cache_bytes: int = 256 << 20, timed: bool = False
    ) -> None:
        self._tokenizer = Tokenizer(resources)
        self._template = ChatTemplate(resources.chat_template, special_tokens(self._tokenizer.config))
        self._frontiers = Frontiers.of(self._tokenizer)
        vocabulary = self._tokenizer.vocabulary
        generation = json_object(resources.generation_config, "generation_config.json")
        self.vocab_size: int = vocabulary.size
        self.stop_ids: tuple[int, ...] = read_stop_ids(generation, self._tokenizer.config, vocabulary)
        self.defaults: SamplingParams = read_sampling(generation)
        self.close_tokens: tuple[int, ...] = tuple(self._tokenizer.encode(CANONICAL_CLOSE))
        if self.decode(self.close_tokens) != CANONICAL_CLOSE or set(self.close_tokens).intersection(self.stop_ids):
            raise broken("tokenizer.json", f"cannot spell the close of the thinking, {CANONICAL_CLOSE!r}")
        classes = token_classes(vocabulary, self.stop_ids)
        self._is_text = classes.is_text
        self._markers = Markers(
            *(PhaseMarker(text, vocabulary.ids.get(text)) for text in (THINK_CLOSE, CALL_OPEN, CALL_CLOSE))
        )
        self.constraints = ConstraintService(classes, grammar_cache_bytes, timed=timed)
        hidden = {t.id for t in vocabulary.added.values() if t.special and t.content not in _SHOWN_TAGS}
        self._protocol = OutputProtocol(
            tokenizer=self._tokenizer,
            shown=vocabulary.bytes.without(hidden),
            stop_ids=frozenset(self.stop_ids),
            close_tokens=self.close_tokens,
            frontiers=self._frontiers,
            replays_thinking=_replays_thinking(self._template),
        )

    def prepare(self, prompt: PromptInput) -> PreparedPrompt:
        """Render and tokenize a prompt. Raises InvalidRequest (or ToolContractError) naming the place at fault."""
        started = time.perf_counter()
        if isinstance(prompt, str):
            prompt = Chat([{"role": "user", "content": prompt}])
        if isinstance(prompt, Chat):
            return self._prepare_chat(prompt, started)
        ids: Sequence[int]
        if isinstance(prompt, TextPrompt):
            ids, field = self._tokenizer.encode(plain_text(prompt.text, "text")), "text"
        elif isinstance(prompt, TokenPrompt):
            ids, field = _in_domain(prompt.ids, self.vocab_size, "ids"), "ids"
        else:
            raise InvalidRequest(
                f"expected str, Chat, TextPrompt or TokenPrompt, got {type(prompt).__name__}", field="prompt"
            )
        return self._finish(ids, field, started, boundaries=(len(ids),))

    def output_session(self, prompt: PreparedPrompt, options: RequestOptions, *, max_tokens: int) -> OutputSession:
        """The session that reads this request's output. ``max_tokens`` >= 1: its output budget, forced tokens
        included. Waits until its constraint is compiled, unless it is at hand.

        Raises InvalidRequest for stop ids outside the vocabulary, ConstraintError.
        """
        _in_domain(options.stop_token_ids, self.vocab_size, "stop_token_ids")
        if max_tokens < 1:
            raise InvalidRequest(f"expected >= 1, got {max_tokens}", field="max_tokens")
        plan = plan_answer(prompt, options, self._markers, self._is_text)
        opened = None if plan.language is None else self.constraints.open(plan.language, prompt.continuation)
        return OutputSession(self._protocol, prompt, options, max_tokens, plan, opened)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids, control tokens included; bytes that are not UTF-8 show as U+FFFD."""
        return self._tokenizer.decode(ids)

    def token_bytes(self, id: int) -> bytes:
        """The UTF-8 bytes one token stands for; they may be part of a character."""
        return self._tokenizer.vocabulary.bytes[id]

    def _prepare_chat(self, chat: Chat, started: float) -> PreparedPrompt:
        rendered = render_chat(self._template, chat, self._tokenizer.openers)
        channel = _start_channel(rendered)
        deaf = not self._template.reads("enable_thinking") and not chat.continue_final
        if deaf and chat.thinking is not None and chat.thinking != (channel == "thinking"):
            raise InvalidRequest("the model's chat template has no choice about thinking", field="thinking")
        if chat.escape_special:
            ids = self._tokenizer.encode_except(rendered.text, rendered.literal)
        else:
            ids = self._tokenizer.encode(rendered.text)
        tokens = np.array(ids, np.int32)
        structure = [end for end in (rendered.tools_end, rendered.system_end) if end is not None]
        places = [*rendered.markers, *structure, rendered.rewrite[0]]
        counts = self._tokenizer.tokens_within(tokens, [rendered.text[:place] for place in places])
        markers, ends = counts[: len(rendered.markers)], counts[len(rendered.markers) : -1]
        return self._finish(
            ids,
            "messages",
            started,
            start_channel=channel,
            tools=rendered.tools,
            continuation=rendered.continuation.encode(),
            cache_markers=tuple(sorted({count for count in markers if count})),
            boundaries=tuple(sorted({count for count in (*ends, len(tokens)) if count})),
            rewrite=(counts[-1], rendered.rewrite[1]) if counts[-1] else None,
            chat=True,
        )

    def _finish(self, ids: Any, field: str, started: float, **known: Any) -> PreparedPrompt:
        if not len(ids):
            raise InvalidRequest("the prompt has no tokens", field=field)
        tokens = np.array(ids, np.int32)
        identity = text_identity(tokens, self._frontiers.find(tokens))
        digest = digest_chain(identity)
        seconds = time.perf_counter() - started
        return PreparedPrompt(tokens=tokens, identity=identity, digest=digest, prepare_seconds=seconds, **known)


def _start_channel(rendered: RenderedChat) -> Channel:
    """Thinking if the generation opener leaves a ``<think>`` open."""
    opener = rendered.text[rendered.opener :]
    inside = opener.rfind(THINK_OPEN) > opener.rfind(THINK_CLOSE)
    return "thinking" if inside and not rendered.continuation else "content"


def _replays_thinking(template: ChatTemplate) -> bool:
    """Whether the template renders an earlier answer's thinking in the canonical form."""
    turns = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "c", "reasoning_content": "r"},
        {"role": "tool", "content": "t"},
    ]
    try:
        rendered = template.render(turns, None, {"add_generation_prompt": True})
    except NinferError:
        return False
    return f"{TURN_OPEN}assistant\n{THINK_OPEN}\nr{CANONICAL_CLOSE}c{TURN_CLOSE}" in rendered


def _in_domain(ids: Sequence[int], size: int, field: str) -> Sequence[int]:
    for i, token in enumerate(ids):
        if token >= size:
            raise InvalidRequest(f"expected an id below {size}, got {token}", field=f"{field}[{i}]")
    return ids
