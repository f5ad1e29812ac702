"""The options of ``ninfer run`` that say what is asked, and the request they make. Files are read here, once."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from ninfer.errors import ConstraintError, InvalidRequest
from ninfer.inputs import Chat, PromptInput, TextPrompt
from ninfer.options import RequestOptions, SamplingParams


@attrs.frozen
class Request:
    """What one run asks. ``messages`` is the conversation so far; ``raw`` replaces it with plain text to go on with."""

    messages: tuple[dict[str, Any], ...]
    raw: str | None
    chat: dict[str, Any]
    options: RequestOptions

    def prompt(self) -> PromptInput:
        """The engine's input."""
        return Chat(self.messages, **self.chat) if self.raw is None else TextPrompt(self.raw)


def add_options(p: argparse.ArgumentParser) -> None:
    """Declare the options that :func:`read_request` reads."""
    g = p.add_argument_group("prompt")
    g.add_argument("--prompt", "-p", metavar="TEXT", help="the user message, after those of --messages")
    g.add_argument("--system", metavar="TEXT", help="the system message, before all others")
    g.add_argument(
        "--messages", metavar="FILE", help="a JSON array of messages in the OpenAI shape; - reads standard input"
    )
    g.add_argument(
        "--continue", dest="continue_final", action="store_true", help="go on with the last, assistant, message"
    )
    g.add_argument("--raw", action="store_true", help="continue the prompt as plain text, without the chat template")
    g.add_argument("--tools-file", metavar="FILE", help="a JSON array of tools in the OpenAI shape")
    g.add_argument("--tool-choice", metavar="CHOICE", help="auto, none, required, or the name of the one tool to call")
    g.add_argument(
        "--escape-special", action="store_true", help="text of the prompt cannot spell the model's control tokens"
    )
    g = p.add_argument_group("thinking")
    g.add_argument(
        "--thinking", action=argparse.BooleanOptionalAction, help="think before answering; default: the model's"
    )
    g.add_argument("--thinking-budget", type=int, metavar="N", help="tokens of thinking before it is closed")
    g.add_argument(
        "--preserve-thinking",
        action="store_true",
        default=None,
        help="keep the thinking of earlier turns in the prompt; refused where the chat template cannot",
    )
    g.add_argument(
        "--reasoning-effort", metavar="LEVEL", help="for chat templates that know levels of it; refused by others"
    )
    g = p.add_argument_group("sampling", "defaults are the model's own")
    g.add_argument("--max-tokens", type=int, metavar="N", help="output budget, tokens; thinking counts")
    g.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    g.add_argument("--top-p", type=float, metavar="P", help="smallest set of tokens that holds this share, (0, 1]")
    g.add_argument("--top-k", type=int, metavar="K", help="most likely tokens, 1..64, or 0 for the whole vocabulary")
    g.add_argument("--min-p", type=float, metavar="P", help="least share of the likeliest token's probability, [0, 1]")
    g.add_argument(
        "--presence-penalty", type=float, metavar="X", help="off the logit of every token generated before, [-2, 2]"
    )
    g.add_argument(
        "--frequency-penalty", type=float, metavar="X", help="the same, for each time it was generated, [-2, 2]"
    )
    g.add_argument("--seed", type=int, metavar="N", help="makes sampling repeatable")
    g.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end at this text; repeatable")
    g.add_argument("--timeout", type=float, metavar="S", help="seconds for each answer")
    form = p.add_argument_group("output form", "one at most; a complete answer is in it").add_mutually_exclusive_group()
    form.add_argument("--json-object", action="store_true", help="a JSON object")
    form.add_argument("--json-schema-file", metavar="FILE", help="JSON that satisfies this JSON Schema")
    form.add_argument("--grammar-file", metavar="FILE", help="text in the language of this GBNF grammar")
    form.add_argument("--regex", metavar="PATTERN", help="text that this regular expression matches as a whole")
    form.add_argument("--choice", action="append", metavar="TEXT", help="one of these texts; repeatable")


def read_request(arguments: argparse.Namespace, *, chat: bool) -> Request:
    """Check everything that can be checked without a model. chat: turns follow, so no prompt is read or needed.

    Errors: InvalidRequest naming the option, file or place; OSError.
    """
    options = RequestOptions(
        max_tokens=arguments.max_tokens,
        sampling=SamplingParams(**{name: getattr(arguments, name) for name in attrs.fields_dict(SamplingParams)}),
        stop=tuple(arguments.stop),
        thinking_budget=arguments.thinking_budget,
        constraint=_constraint(arguments),
        tool_choice=arguments.tool_choice or "auto",
        timeout=arguments.timeout,
    )
    if arguments.raw:
        for name in ("system", "messages", "continue_final", "tools_file", "tool_choice", "thinking",
                     "thinking_budget", "preserve_thinking", "reasoning_effort", "escape_special"):  # fmt: skip
            if getattr(arguments, name) not in (None, False):
                flag = "continue" if name == "continue_final" else name.replace("_", "-")
                raise InvalidRequest(f"plain text has no use for --{flag}", field="--raw")
        if chat:
            raise InvalidRequest("plain text is no chat", field="--raw")
        return Request((), _standard_input() if arguments.prompt is None else arguments.prompt, {}, options)
    if chat and arguments.continue_final:
        raise InvalidRequest("a chat goes on by itself", field="--continue")
    settings = {
        "tools": _objects(arguments.tools_file) if arguments.tools_file is not None else (),
        "thinking": arguments.thinking,
        "preserve_thinking": arguments.preserve_thinking,
        "reasoning_effort": arguments.reasoning_effort,
        "continue_final": arguments.continue_final,
        "escape_special": arguments.escape_special,
    }
    return Request(tuple(_messages(arguments, chat)), None, settings, options)


def _messages(arguments: argparse.Namespace, chat: bool) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": arguments.system}] if arguments.system is not None else []
    if arguments.messages is not None:
        messages += _objects(arguments.messages)
    prompt = arguments.prompt
    if prompt is None and arguments.messages is None and not chat:
        prompt = _standard_input()
    if prompt is not None:
        messages.append({"role": "user", "content": prompt})
    return messages


def _constraint(arguments: argparse.Namespace) -> Any:
    """The constraint the options ask for, checked, or None."""
    from ninfer.constraints import OutputConstraint

    forms: dict[str, Callable[[Any], OutputConstraint]] = {
        "json_object": lambda _: OutputConstraint.json_object(),
        "json_schema_file": lambda path: OutputConstraint.json_schema(Path(path).read_bytes()),
        "grammar_file": lambda path: OutputConstraint.grammar(_utf8(Path(path).read_bytes(), path)),
        "regex": OutputConstraint.regex,
        "choice": OutputConstraint.choice,
    }
    for name, form in forms.items():
        value = getattr(arguments, name)
        if value not in (None, False):
            try:
                constraint = form(value)
                constraint.check()
            except ConstraintError as error:
                raise error.within(str(value) if name.endswith("_file") else f"--{name}") from None
            return constraint
    return None


def _objects(path: str) -> list[dict[str, Any]]:
    """A file with a JSON array of objects; what they must hold is the engine's to say."""
    text = _standard_input() if path == "-" else _utf8(Path(path).read_bytes(), path)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"line {error.lineno} column {error.colno}: {error.msg}", field=path) from None
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(str(error), field=path) from None
    if not isinstance(value, list):
        raise InvalidRequest(f"expected a JSON array, got {type(value).__name__}", field=path)
    for i, item in enumerate(value):
        if not isinstance(item, dict):
            raise InvalidRequest(f"expected an object, got {type(item).__name__}", field=f"{path}[{i}]")
    return value


def _standard_input() -> str:
    try:
        return sys.stdin.read() if sys.stdin is not None else ""
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"not UTF-8 at byte {error.start}", field="standard input") from None


def _utf8(data: bytes, path: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"not UTF-8 at byte {error.start}", field=path) from None
