"""The chat of ``ninfer run``: turns typed one after another, with everything said before as their context."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import attrs

from ninfer.errors import InvalidRequest, NinferError
from ninfer.gateway.cli.request import Request
from ninfer.gateway.cli.screen import Screen, is_terminal

HELP = """\
in a chat:
  /clear            forget what was said, keep the system message
  /retry            answer the last message again
  /thinking on|off  think before answering, or not
  /save FILE        write the conversation as JSON, as --messages reads it
  /help, /exit      Ctrl-D also ends the chat; Ctrl-C cancels an answer or a line
  A \\ at the end of a line goes on to the next. The model's tool calls are answered by hand.
"""


def chat(engine: Any, request: Request, screen: Screen) -> int:
    """Read turns from standard input until it ends. A turn that fails or is interrupted leaves no trace in the history.

    Errors of single turns are told and the chat goes on; EngineFailed and EngineClosed are raised.
    """
    talk = _Talk(engine, request, screen)
    if is_terminal(sys.stdin):
        try:
            import readline  # noqa: F401  (line editing and history of input())
        except ImportError:
            pass
        screen.note(f"{engine.model_name}. /help says what can be done.")
    if talk.messages and talk.messages[-1].get("role") in ("user", "tool"):
        talk.turn([talk.messages.pop()])
    while (line := _read("> ", screen)) is not None:
        if line.startswith("/"):
            if not talk.command(*line[1:].strip().partition(" ")[::2]):
                break
        elif line.strip():
            talk.turn([{"role": "user", "content": line}])
    return 0


class _Talk:
    """The conversation so far: every user message in it has its answer."""

    def __init__(self, engine: Any, request: Request, screen: Screen) -> None:
        self.engine, self.request, self.screen = engine, request, screen
        self.messages = list(request.messages)

    def turn(self, new: list[dict[str, Any]]) -> None:
        """Answer, and go on answering while the model calls tools."""
        said = [*self.messages, *new]
        try:
            while True:
                asked = attrs.evolve(self.request, messages=tuple(said))
                with self.engine.submit(asked.prompt(), asked.options) as handle:
                    result = self.screen.follow(handle)
                if result.text or result.tool_calls:
                    said.append(result.message)
                elif result.finish_reason == "cancelled":
                    return
                results = [self._tool_result(call) for call in result.tool_calls]
                if not results:
                    self.messages = said
                    return
                if None in results:
                    return
                said += [message for message in results if message is not None]
        except KeyboardInterrupt:
            self.screen.note("")
        except NinferError as error:
            if not self.engine.available:
                raise
            self.screen.tell(f"ninfer: {error}")

    def _tool_result(self, call: Any) -> dict[str, Any] | None:
        content = _read(f"result of {call.name}> ", self.screen)
        return None if content is None else {"role": "tool", "tool_call_id": call.id, "content": content}

    def command(self, name: str, argument: str) -> bool:
        """Obey a line that begins with a slash. False ends the chat."""
        if name in ("exit", "quit"):
            return False
        if name == "clear":
            self.messages = [m for m in self.messages[:1] if m.get("role") == "system"]
        elif name == "retry":
            self._retry()
        elif name == "thinking" and argument in ("on", "off"):
            self.request = attrs.evolve(self.request, chat={**self.request.chat, "thinking": argument == "on"})
        elif name == "save" and argument:
            self._save(Path(argument).expanduser())
        else:
            self.screen.tell(HELP.rstrip())
        return True

    def _retry(self) -> None:
        asked = [i for i, message in enumerate(self.messages) if message.get("role") == "user"]
        if not asked:
            self.screen.tell("nothing was asked yet")
            return
        kept = self.messages
        self.messages = kept[: asked[-1]]
        self.turn([kept[asked[-1]]])
        if len(self.messages) == asked[-1]:  # the new answer did not come
            self.messages = kept

    def _save(self, path: Path) -> None:
        try:
            path.write_text(json.dumps(self.messages, indent=2, ensure_ascii=False) + "\n", "utf-8")
        except OSError as error:
            self.screen.tell(f"ninfer: {path}: {error.strerror}")


def _read(prompt: str, screen: Screen) -> str | None:
    """A line, or several joined by trailing backslashes; None at the end of input. Ctrl-C starts the line again."""
    lines: list[str] = []
    while True:
        try:
            line = _line("... " if lines else prompt)
        except EOFError:
            return "\n".join(lines) if lines else None
        except KeyboardInterrupt:
            screen.note("")
            lines = []
            continue
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"not UTF-8 at byte {error.start} of a line", field="standard input") from None
        if not line.endswith("\\"):
            return "\n".join([*lines, line])
        lines.append(line[:-1])


def _line(prompt: str) -> str:
    """One line. The prompt is shown only to somebody who types, and never goes where an answer is kept."""
    if is_terminal(sys.stdin) and is_terminal(sys.stdout):
        return input(prompt)
    if is_terminal(sys.stdin):
        print(prompt, end="", file=sys.stderr, flush=True)
    return input()
