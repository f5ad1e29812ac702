"""``ninfer run``: one answer, or a chat."""

from __future__ import annotations

import argparse
import sys
from inspect import cleandoc
from typing import Any

from ninfer.gateway.cli import EXIT_CODES
from ninfer.gateway.cli.chat import HELP, chat
from ninfer.gateway.cli.engine import add_engine_options, engine_options
from ninfer.gateway.cli.request import Request, add_options, read_request
from ninfer.gateway.cli.screen import Screen, is_terminal

_EXAMPLES = """\
examples:
  ninfer run model.ninfer                                  a chat
  ninfer run model.ninfer -p "What is 17 + 25?"            one answer
  cat letter.txt | ninfer run model.ninfer --system "Sum this up in one sentence."
  ninfer run model.ninfer -p "Ada is 36." --json-schema-file person.json > ada.json
  ninfer run model.ninfer --messages chat.json --tools-file tools.json

"""


def add_commands(commands: Any) -> None:
    p = commands.add_parser(
        "run",
        help="answer a prompt, or chat",
        description=cleandoc(run.__doc__ or ""),
        epilog=f"{_EXAMPLES}{HELP}\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("artifact", metavar="ARTIFACT", help="path of the .ninfer entry file")
    p.add_argument("--chat", "-i", action="store_true", help="chat, also with a first prompt or not at a terminal")
    p.add_argument("--quiet", "-q", action="store_true", help="no thinking, progress or statistics")
    add_options(p)
    g = p.add_argument_group("engine")
    g.add_argument("--max-context", type=int, metavar="N", help="tokens of the whole conversation")
    add_engine_options(g)
    p.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Answer one prompt, or chat when no prompt is given at a terminal.

    The answer goes to standard output; thinking, statistics and prompts go to standard error. Tool calls are printed
    as one JSON object a line. Without a prompt and away from a terminal, standard input is the prompt.
    """
    from ninfer.engine import Engine

    asked = arguments.prompt is not None or arguments.messages is not None or arguments.raw
    talk = arguments.chat or (not asked and is_terminal(sys.stdin))
    request = read_request(arguments, chat=talk)
    progress = False if arguments.quiet else None
    options = engine_options(arguments, max_concurrency=1, max_context=arguments.max_context, progress=progress)
    screen = Screen(arguments.quiet)
    with Engine(arguments.artifact, options) as engine:
        return chat(engine, request, screen) if talk else _answer(engine, request, screen)


def _answer(engine: Any, request: Request, screen: Screen) -> int:
    with engine.submit(request.prompt(), request.options) as handle:
        result = screen.follow(handle)
    if result.finish_reason == "cancelled":
        return 130
    return 3 if result.constraint is not None and not result.constraint.complete else 0
