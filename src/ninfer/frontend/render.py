"""A conversation becomes one text, with the places in it that matter later.

The template is run, never imitated: where a place is asked for (the end of a turn, of a content part, of the
text to continue), the template is run again over values that carry a mark, a character that occurs nowhere
else, and the place is where the mark comes out. A mark that changes anything but its own presence proves
nothing and is dropped.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from ninfer.errors import InvalidRequest
from ninfer.frontend.envelope import Envelope, RawCall, Scan
from ninfer.frontend.messages import Turn, read_messages
from ninfer.frontend.plain import map_strings, plain, plain_text
from ninfer.frontend.protocol import RESULT_CLOSE, TURN_CLOSE, TURN_OPEN
from ninfer.frontend.template import ChatTemplate, to_json
from ninfer.frontend.tool_contract import ToolContract
from ninfer.frontend.tools import Declaration, read_tools
from ninfer.inputs import Chat, Tool

MAX_MARKERS = 4

_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
_RESERVED = frozenset([
    "messages", "tools", "documents", "add_generation_prompt", "enable_thinking", "preserve_thinking",
    "reasoning_effort",
])  # fmt: skip


@attrs.frozen(kw_only=True)
class RenderedChat:
    """Places are character offsets into ``text``.

    literal: offsets at which no added token may start. markers: where callers asked for reuse, ascending.
    tools_end: after the last tool declaration; system_end: after the leading system turn; None where there is
    none. opener: where the turn to be generated begins. rewrite: start of the first turn that a later user
    message may change, and whether that is the generated turn alone. continuation: the text to go on with.
    """

    text: str
    tools: tuple[Tool, ...]
    literal: frozenset[int]
    markers: tuple[int, ...]
    tools_end: int | None
    system_end: int | None
    opener: int
    rewrite: tuple[int, str]
    continuation: str


@attrs.frozen
class _Conversation:
    """Everything the template is run over. ``guard``, ``mark``, ``mark_end``: characters that occur in none of it."""

    template: ChatTemplate
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    variables: Mapping[str, Any]
    guard: str
    mark: str
    mark_end: str

    def run(self, messages: list[dict[str, Any]]) -> str:
        return self.template.render(messages, self.tools or None, self.variables)

    def run_with(self, index: int, message: dict[str, Any]) -> str:
        """The rendering with one message replaced."""
        return self.run([*self.messages[:index], message, *self.messages[index + 1 :]])


def render_chat(template: ChatTemplate, chat: Chat, openers: frozenset[str]) -> RenderedChat:
    """Run the template over a checked conversation. ``openers``: the characters added tokens begin with.

    Raises InvalidRequest, ToolContractError.
    """
    turns, declarations = read_messages(chat.messages), read_tools(chat.tools)
    talk = _conversation(template, turns, declarations, _variables(chat, template))
    if chat.escape_special:
        talk = _guarded(talk, openers)
    if chat.continue_final:
        guarded, continuation = _continued(talk)
        _refuse_finished_call(continuation, declarations, f"messages[{len(turns) - 1}].content")
    else:
        guarded, continuation = talk.run(talk.messages), ""
    text, literal = _unguard(guarded, talk.guard)
    tool_ends = _tool_ends(text, declarations)
    opener = max(0, text.rfind(TURN_OPEN, 0, len(text) - len(continuation)))
    return RenderedChat(
        text=text,
        tools=tuple(declaration.tool for declaration in declarations),
        literal=literal,
        markers=_markers(talk, guarded, text, turns, [d.tool.cache_marker for d in declarations], tool_ends),
        tools_end=tool_ends[-1] if tool_ends else None,
        system_end=_turn_end(text, 0) if text.startswith(f"{TURN_OPEN}system\n") else None,
        opener=opener,
        rewrite=_rewrite(talk, text, opener, answered=chat.continue_final),
        continuation=continuation,
    )


def _conversation(
    template: ChatTemplate, turns: Sequence[Turn], declarations: Sequence[Declaration], variables: dict[str, Any]
) -> _Conversation:
    messages, tools = [turn.value for turn in turns], [declaration.value for declaration in declarations]
    used = "\0".join((template.source, to_json([messages, tools, variables])))
    unused = [character for character in _NONCHARACTERS if character not in used]
    if len(unused) < 3:
        raise InvalidRequest("the conversation uses too many noncharacters (U+FDD0..U+FDEF)", field="messages")
    return _Conversation(template, messages, tools, variables, *unused[:3])


def _variables(chat: Chat, template: ChatTemplate) -> dict[str, Any]:
    """What the chat says to the template. Raises InvalidRequest for what the template would not read."""
    if not isinstance(chat.template_args, Mapping):
        raise InvalidRequest(f"expected a mapping, got {type(chat.template_args).__name__}", field="template_args")
    variables: dict[str, Any] = plain(chat.template_args, "template_args")
    if taken := sorted(_RESERVED.intersection(variables)):
        raise InvalidRequest("has a field of its own", field=f"template_args.{taken[0]}")
    for field in ("continue_final", "escape_special"):
        if not isinstance(getattr(chat, field), bool):
            raise InvalidRequest(f"expected a bool, got {getattr(chat, field)!r}", field=field)
    for name, value in (("enable_thinking", chat.thinking), ("preserve_thinking", chat.preserve_thinking)):
        if value is not None and not isinstance(value, bool):
            field = "thinking" if name == "enable_thinking" else name
            raise InvalidRequest(f"expected True, False or None, got {value!r}", field=field)
        if value is not None:
            variables[name] = value
    if chat.reasoning_effort is not None:
        variables["reasoning_effort"] = plain_text(chat.reasoning_effort, "reasoning_effort")
    for name in variables:
        if name != "enable_thinking" and not template.reads(name):
            field = f"template_args.{name}" if name in chat.template_args else name
            raise InvalidRequest(f"the model's chat template does not read {name}", field=field)
    if chat.continue_final:
        if chat.thinking:
            raise InvalidRequest("an answer cannot be continued inside its thinking", field="thinking")
        variables["enable_thinking"] = False
    return {**variables, "add_generation_prompt": not chat.continue_final}


# -- escaping ------------------------------------------------------------------------------------------------


def _guarded(talk: _Conversation, openers: frozenset[str]) -> _Conversation:
    """The conversation with a guard after every character an added token could begin with."""
    if any(character.isalnum() or character == "_" for character in openers):
        raise InvalidRequest("this vocabulary has added tokens spelled like words", field="escape_special")
    starts = re.compile("[" + re.escape("".join(sorted(openers))) + "]" if openers else r"(?!)")

    def change(value: str) -> str:
        return starts.sub(lambda match: match.group() + talk.guard, value)

    return attrs.evolve(
        talk,
        messages=map_strings(talk.messages, change),
        tools=map_strings(talk.tools, change),
        variables=map_strings(dict(talk.variables), change),
    )


def _unguard(guarded: str, guard: str) -> tuple[str, frozenset[int]]:
    """The text without guards, and the offsets of the characters they stood behind."""
    pieces = guarded.split(guard)
    offsets, length = [], 0
    for piece in pieces[:-1]:
        length += len(piece)
        offsets.append(length - 1)
    return "".join(pieces), frozenset(offsets)


# -- marks ---------------------------------------------------------------------------------------------------


def _continued(talk: _Conversation) -> tuple[str, str]:
    """The rendering cut after the final assistant text, and that text; proves that the template kept it."""
    index = len(talk.messages) - 1
    field = f"messages[{index}]"
    message = talk.messages[-1]
    if message["role"] != "assistant":
        raise InvalidRequest("only a final assistant message can be continued", field=f"{field}.role")
    for key in ("tool_calls", "reasoning_content"):
        if message.get(key):
            raise InvalidRequest("a message to be continued is plain text", field=f"{field}.{key}")
    content = message["content"]
    if not isinstance(content, str):
        content = "".join(part["text"] for part in content or [])
    clean = talk.run(talk.messages)
    marked = talk.run_with(index, {**message, "content": talk.mark + content + talk.mark_end})
    before, _, rest = marked.partition(talk.mark)
    region, closed, after = rest.partition(talk.mark_end)
    whole = closed and region == content and before + region + after == clean and after.startswith(TURN_CLOSE)
    if not whole:
        raise InvalidRequest(
            "cannot be continued: the chat template changes it (outer white space, thinking tags)",
            field=f"{field}.content",
        )
    return before + region, content.replace(talk.guard, "")


def _refuse_finished_call(continuation: str, declarations: Sequence[Declaration], field: str) -> None:
    """A complete call would be published again with the answer."""
    if declarations:
        settled, _ = Envelope([ToolContract.lenient(declaration.tool) for declaration in declarations]).feed(
            Scan(), continuation
        )
        if any(isinstance(item, RawCall) for item in settled):
            raise InvalidRequest("text that holds a complete tool call cannot be continued", field=field)


def _markers(
    talk: _Conversation,
    guarded: str,
    text: str,
    turns: Sequence[Turn],
    marked_tools: Sequence[bool],
    tool_ends: Sequence[int],
) -> tuple[int, ...]:
    """Where the caller's cache markers lie. A marker on text the template leaves out has no place."""
    found: list[int | None] = []
    for i, marked in enumerate(marked_tools):
        if marked:
            found.append(tool_ends[i] if i < len(tool_ends) else None)
    for i, turn in enumerate(turns):
        for part in turn.marked_parts:
            found.append(_marked_place(talk, guarded, i, _mark_part(talk.messages[i], part, talk.mark)))
        if turn.marked:
            place = _marked_place(talk, guarded, i, _mark_end(talk.messages[i], talk.mark))
            closing = RESULT_CLOSE if turn.value["role"] == "tool" else TURN_CLOSE
            found.append(None if place is None else _turn_end(text, place, closing))
    if len(found) > MAX_MARKERS:
        raise InvalidRequest(f"{len(found)} cache markers, at most {MAX_MARKERS}", field="messages")
    return tuple(sorted({place for place in found if place is not None}))


def _marked_place(talk: _Conversation, guarded: str, index: int, message: dict[str, Any] | None) -> int | None:
    """Where the mark in ``message`` comes out, if nothing else changes."""
    if message is None:
        return None
    before, _, after = talk.run_with(index, message).partition(talk.mark)
    # Continuing cuts the text, so a rendering may go on where the text in use ends.
    kept = (before + after).startswith(guarded) and len(before) <= len(guarded)
    return len(before.replace(talk.guard, "")) if kept else None


def _after_text(value: str, mark: str) -> str:
    """The mark right after the last character that is not white space, where trimming cannot reach it."""
    kept = value.rstrip()
    return kept + mark + value[len(kept) :]


def _mark_part(message: dict[str, Any], part: int, mark: str) -> dict[str, Any] | None:
    """The message with a mark at the end of what its parts up to ``part`` say; None if they say nothing."""
    content = message["content"]
    for i in range(part, -1, -1):
        if content[i]["text"].strip():
            changed = {**content[i], "text": _after_text(content[i]["text"], mark)}
            return {**message, "content": [*content[:i], changed, *content[i + 1 :]]}
    return None


def _mark_end(message: dict[str, Any], mark: str) -> dict[str, Any] | None:
    """The message with a mark in the last thing it says."""
    if calls := message.get("tool_calls"):
        function = {**calls[-1]["function"], "name": calls[-1]["function"]["name"] + mark}
        return {**message, "tool_calls": [*calls[:-1], {**calls[-1], "function": function}]}
    if isinstance(message["content"], list):
        return _mark_part(message, len(message["content"]) - 1, mark)
    for key in ("content", "reasoning_content"):
        if (message.get(key) or "").strip():
            return {**message, key: _after_text(message[key], mark)}
    return None


# -- structure -----------------------------------------------------------------------------------------------


def _turn_end(text: str, start: int, closing: str = TURN_CLOSE) -> int | None:
    """Behind the first ``closing`` after ``start``, with the end of turn and newline that follow it directly."""
    place = text.find(closing, start)
    if place < 0:
        return None
    place += len(closing)
    if closing != TURN_CLOSE and text.startswith(TURN_CLOSE, place):
        place += len(TURN_CLOSE)
    return place + 1 if text.startswith("\n", place) and text.endswith(TURN_CLOSE, 0, place) else place


def _tool_ends(text: str, declarations: Sequence[Declaration]) -> list[int]:
    """Where each declaration ends in the prompt, in order, as far as they are printed as JSON."""
    ends, place = [], 0
    for declaration in declarations:
        printed = to_json(declaration.value)
        place = text.find(printed, place)
        if place < 0:
            break
        place += len(printed)
        ends.append(place)
    return ends


def _rewrite(talk: _Conversation, text: str, opener: int, *, answered: bool) -> tuple[int, str]:
    """The last turn start that an answer followed by a new user message leaves untouched."""
    answer = [] if answered else [{"role": "assistant", "content": "x", "reasoning_content": "x"}]
    try:
        later, _ = _unguard(talk.run([*talk.messages, *answer, {"role": "user", "content": "x"}]), talk.guard)
    except InvalidRequest:
        return opener, "RESPONSE_REPLAY"
    # Equality of prefixes is monotone in their length.
    common = bisect.bisect_left(range(1, len(text) + 1), True, key=lambda n: not later.startswith(text[:n]))
    if common == len(text):
        return opener, "RESPONSE_REPLAY"
    return max(0, text.rfind(TURN_OPEN, 0, min(common, opener) + len(TURN_OPEN))), "TURN_CLOSURE"
