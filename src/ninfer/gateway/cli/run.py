"""``ninfer run``: one prompt, streamed."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ninfer.inputs import Chat
from ninfer.options import EngineOptions, SamplingParams
from ninfer.results import Delta, GenerationResult, ToolCallEvent


def add_commands(commands: Any) -> None:
    p = commands.add_parser("run", help="answer one prompt", description=run.__doc__)
    p.add_argument("artifact", help="path of the .ninfer entry file")
    p.add_argument("--prompt", "-p", help="the user message; standard input when absent")
    p.add_argument("--system", help="system message")
    p.add_argument("--thinking", action=argparse.BooleanOptionalAction, default=None, help="think before answering")
    p.add_argument("--max-tokens", type=int, default=None, metavar="N", help="output budget, tokens")
    p.add_argument("--temperature", type=float, default=None, metavar="T", help="0 is greedy")
    p.add_argument("--top-p", type=float, default=None, metavar="P")
    p.add_argument("--top-k", type=int, default=None, metavar="K", help="1..64, or 0 for the whole vocabulary")
    p.add_argument("--min-p", type=float, default=None, metavar="P")
    p.add_argument("--seed", type=int, default=None)
    p.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end at this text; repeatable")
    form = p.add_mutually_exclusive_group()
    form.add_argument("--json-object", action="store_true", help="answer with a JSON object")
    form.add_argument("--json-schema-file", metavar="PATH", help="answer with JSON that satisfies this schema")
    form.add_argument("--grammar-file", metavar="PATH", help="answer in the language of this GBNF grammar")
    form.add_argument("--regex", metavar="PATTERN", help="answer with text that matches as a whole")
    form.add_argument("--choice", action="append", metavar="TEXT", help="answer with one of these texts; repeatable")
    p.add_argument("--device", default="auto", help="auto, cpu or cuda:N")
    p.add_argument("--max-context", type=int, default=None, metavar="N", help="tokens of one sequence")
    p.add_argument("--quiet", "-q", action="store_true", help="no thinking, progress or statistics")
    p.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Answer one prompt: the answer on standard output, thinking and statistics on standard error."""
    from ninfer.engine import Engine

    text = arguments.prompt if arguments.prompt is not None else sys.stdin.read()
    messages = [{"role": "system", "content": arguments.system}] if arguments.system else []
    messages.append({"role": "user", "content": text})
    options = EngineOptions(
        device=arguments.device,
        max_concurrency=1,
        max_context=arguments.max_context,
        progress=False if arguments.quiet else None,
    )
    sampling = SamplingParams(
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        min_p=arguments.min_p,
        seed=arguments.seed,
    )
    note = _Notes(arguments.quiet)
    constraint = _constraint(arguments)
    with Engine(arguments.artifact, options) as engine:
        chat = Chat(messages, thinking=arguments.thinking)
        with engine.submit(
            chat,
            max_tokens=arguments.max_tokens,
            sampling=sampling,
            stop=tuple(arguments.stop),
            constraint=constraint,
        ) as handle:
            for event in handle:
                if isinstance(event, Delta) and event.channel == "thinking":
                    note.thinking(event.text)
                elif isinstance(event, Delta):
                    note.end_thinking()
                    print(event.text, end="", flush=True)
                elif isinstance(event, ToolCallEvent):
                    print(f"{event.call.name}({event.call.arguments_json})", flush=True)
                elif isinstance(event, GenerationResult):
                    note.end_thinking()
                    print(flush=True)
                    note.line(event.statistics())
            handle.result()
    return 0


def _constraint(arguments: argparse.Namespace) -> Any:
    """The constraint the flags ask for, or None. Files are read here."""
    from ninfer.constraints import OutputConstraint

    if arguments.json_object:
        return OutputConstraint.json_object()
    if arguments.json_schema_file is not None:
        return OutputConstraint.json_schema(Path(arguments.json_schema_file).read_bytes())
    if arguments.grammar_file is not None:
        return OutputConstraint.grammar(Path(arguments.grammar_file).read_text("utf-8"))
    if arguments.regex is not None:
        return OutputConstraint.regex(arguments.regex)
    return OutputConstraint.choice(arguments.choice) if arguments.choice else None


class _Notes:
    """What goes to standard error, dimmed where that is a terminal."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        self.open = False
        self.dim, self.plain = ("\033[2m", "\033[0m") if sys.stderr.isatty() else ("", "")

    def thinking(self, text: str) -> None:
        if not self.quiet:
            print(f"{self.dim}{text}{self.plain}", end="", file=sys.stderr, flush=True)
            self.open = True

    def end_thinking(self) -> None:
        if self.open:
            print(file=sys.stderr, flush=True)
            self.open = False

    def line(self, text: str) -> None:
        if not self.quiet:
            print(f"{self.dim}{text}{self.plain}", file=sys.stderr, flush=True)
