"""The one object other rooms hold: prompts in, output sessions out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ninfer.errors import InvalidRequest, NinferError
from ninfer.frontend.decoder import Decoder
from ninfer.frontend.envelope import Envelope
from ninfer.frontend.frontiers import CLOSE, Frontiers
from ninfer.frontend.prompt import PreparedPrompt, digest_chain, text_identity
from ninfer.frontend.render import THINK_CLOSE, THINK_OPEN, TURN_CLOSE, TURN_OPEN, RenderedChat, render_chat
from ninfer.frontend.resources import FrontendResources, broken, json_object
from ninfer.frontend.session import OutputProtocol, OutputSession
from ninfer.frontend.template import ChatTemplate
from ninfer.frontend.tokenizer import Tokenizer
from ninfer.frontend.vocabulary import Vocabulary
from ninfer.inputs import Chat, PromptInput, TextPrompt, TokenPrompt
from ninfer.options import RequestOptions, SamplingParams
from ninfer.results import Channel

_SHOWN_TAGS = (THINK_OPEN, THINK_CLOSE, "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_FALLBACK = SamplingParams(temperature=1.0, top_p=1.0, top_k=20, min_p=0.0, presence_penalty=0.0, frequency_penalty=0.0)


class Frontend:
    """Meaning of prompts and answers for one model. Immutable; every method may be called from any thread.

    vocab_size: size ``V`` of the public token domain; ids are ``0..V-1``. stop_ids: the ids that end an
    answer, those of generation_config.json and ``<|im_end|>``. close_tokens: the canonical close of the
    thinking, tokenised alone. defaults: the sampling generation_config.json recommends, every field set but
    the seed; where it is silent, temperature 1, top_p 1, top_k 20. ``do_sample: false`` is temperature 0, and
    top_k above 64 becomes 64.

    Raises ArtifactError, naming the file, for resources that cannot be honoured.
    """

    def __init__(self, resources: FrontendResources) -> None:
        self._tokenizer = Tokenizer(resources)
        self._template = ChatTemplate(resources.chat_template, _special_tokens(self._tokenizer.config))
        self._frontiers = Frontiers.of(self._tokenizer)
        vocabulary = self._tokenizer.vocabulary
        generation = json_object(resources.generation_config, "generation_config.json")
        self.vocab_size: int = vocabulary.size
        self.stop_ids: tuple[int, ...] = _stop_ids(generation, self._tokenizer.config, vocabulary)
        self.defaults: SamplingParams = _sampling_defaults(generation)
        self.close_tokens: tuple[int, ...] = tuple(self._tokenizer.encode(CLOSE))
        if self.decode(self.close_tokens) != CLOSE or set(self.close_tokens).intersection(self.stop_ids):
            raise broken("tokenizer.json", f"cannot spell the close of the thinking, {CLOSE!r}")
        hidden = {t.id for t in vocabulary.added.values() if t.special and t.content not in _SHOWN_TAGS}
        self._protocol = OutputProtocol(
            tokenizer=self._tokenizer,
            shown=tuple(b"" if i in hidden else data for i, data in enumerate(vocabulary.bytes)),
            stop_ids=frozenset(self.stop_ids),
            close_tokens=self.close_tokens,
            frontiers=self._frontiers,
            replays_thinking=_replays_thinking(self._template),
        )

    def prepare(self, prompt: PromptInput) -> PreparedPrompt:
        """Render and tokenize a prompt. Raises InvalidRequest (or ToolContractError) naming the place at
        fault.
        """
        started = time.perf_counter()
        if isinstance(prompt, str):
            prompt = Chat([{"role": "user", "content": prompt}])
        if isinstance(prompt, Chat):
            return self._prepare_chat(prompt, started)
        if isinstance(prompt, TextPrompt):
            ids, field = self._tokenizer.encode(_encodable(prompt.text)), "text"
        elif isinstance(prompt, TokenPrompt):
            ids, field = _checked_ids(prompt.ids, self.vocab_size), "ids"
        else:
            raise InvalidRequest(
                f"expected str, Chat, TextPrompt or TokenPrompt, got {type(prompt).__name__}", field="prompt"
            )
        if not len(ids):
            raise InvalidRequest("the prompt is empty", field=field)
        return self._finish(ids, started, boundaries=(len(ids),))

    def output_session(self, prompt: PreparedPrompt, options: RequestOptions, *, max_tokens: int) -> OutputSession:
        """The session that reads this request's output. ``max_tokens`` >= 1: its output budget, forced tokens
        included.

        Raises InvalidRequest for stop ids outside the vocabulary.
        """
        for i, token in enumerate(options.stop_token_ids):
            if token >= self.vocab_size:
                raise InvalidRequest(
                    f"expected an id below {self.vocab_size}, got {token}", field=f"stop_token_ids[{i}]"
                )
        if max_tokens < 1:
            raise InvalidRequest(f"expected >= 1, got {max_tokens}", field="max_tokens")
        return OutputSession(self._protocol, prompt, options, max_tokens)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids, control tokens included; bytes that are not UTF-8 show as U+FFFD."""
        return self._tokenizer.decode(ids)

    def token_bytes(self, id: int) -> bytes:
        """The UTF-8 bytes one token stands for; they may be part of a character."""
        return self._tokenizer.vocabulary.bytes[id]

    def _prepare_chat(self, chat: Chat, started: float) -> PreparedPrompt:
        rendered = render_chat(self._template, chat, self._tokenizer.openers)
        if rendered.continuation and rendered.tools:
            probe = Decoder(Envelope(rendered.tools), (), False, False)
            if not probe.resume(rendered.continuation):
                field = f"messages[{len(list(chat.messages)) - 1}].content"
                raise InvalidRequest("text that holds a complete tool call cannot be continued", field=field)
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
            tokens,
            started,
            start_channel=_start_channel(rendered),
            tools=rendered.tools,
            continuation=rendered.continuation.encode(),
            cache_markers=tuple(sorted({count for count in markers if count})),
            boundaries=tuple(sorted({count for count in (*ends, len(tokens)) if count})),
            rewrite=(counts[-1], rendered.rewrite[1]),
            chat=True,
        )

    def _finish(self, ids: Any, started: float, **known: Any) -> PreparedPrompt:
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
        text = template.render(turns, None, {"add_generation_prompt": True})
    except NinferError:
        return False
    return f"{TURN_OPEN}assistant\n{THINK_OPEN}\nr{CLOSE}c{TURN_CLOSE}" in text


# -- resources -----------------------------------------------------------------------------------------------


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The token names a chat template may read, such as ``eos_token``."""
    names = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
    values = {name: config.get(name) for name in names}
    contents = {k: v.get("content") if isinstance(v, Mapping) else v for k, v in values.items()}
    return {name: content for name, content in contents.items() if isinstance(content, str)}


def _stop_ids(generation: Mapping[str, Any], config: Mapping[str, Any], vocabulary: Vocabulary) -> tuple[int, ...]:
    where = "generation_config.json: eos_token_id"
    listed = generation.get("eos_token_id")
    ids = listed if isinstance(listed, list) else [] if listed is None else [listed]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocabulary.size:
            raise broken(where, f"{token!r} is not a token id in 0..{vocabulary.size - 1}")
    names = [TURN_CLOSE] if ids else [TURN_CLOSE, _special_tokens(config).get("eos_token", "")]
    ids = [*ids, *(vocabulary.ids[name] for name in names if name in vocabulary.ids)]
    if not ids:
        raise broken(where, "no stop id")
    return tuple(dict.fromkeys(ids))


def _sampling_defaults(generation: Mapping[str, Any]) -> SamplingParams:
    names = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty")
    chosen = {name: generation[name] for name in names if generation.get(name) is not None}
    if isinstance(chosen.get("top_k"), int):
        chosen["top_k"] = min(chosen["top_k"], 64)
    if generation.get("do_sample") is False:
        chosen["temperature"] = 0.0
    try:
        return SamplingParams(**chosen).over(_FALLBACK)
    except InvalidRequest as error:
        raise broken(f"generation_config.json: {error.field}", error.reason) from None


# -- raw prompts ---------------------------------------------------------------------------------------------


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"lone surrogate at character {error.start}", field="text") from None
    return text


def _checked_ids(ids: Any, size: int) -> Any:
    if isinstance(ids, str | bytes | Mapping) or not isinstance(ids, Iterable):
        raise InvalidRequest(f"expected a sequence of token ids, got {type(ids).__name__}", field="ids")
    values = list(ids)
    for i, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise InvalidRequest(f"expected a token id, got {value!r}", field=f"ids[{i}]")
        if not 0 <= value < size:
            raise InvalidRequest(f"expected 0..{size - 1}, got {value}", field=f"ids[{i}]")
    return values
