"""Where an answer goes: content and tool calls to standard output, thinking and notes to standard error."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from ninfer.handle import GenerationHandle
from ninfer.results import Delta, GenerationResult, ToolCallEvent

_CONTROLS = {c: 0x2400 + c for c in range(32) if chr(c) not in "\t\n"} | dict.fromkeys(range(127, 160), 0xFFFD)
"""What a terminal would obey, shown instead: an answer must not move the cursor or set a title."""


class Screen:
    """Prints one answer after another. quiet: nothing but the answers."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        self._open: IO[str] | None = None  # the stream with an unfinished line

    def follow(self, handle: GenerationHandle) -> GenerationResult:
        """Print a request's events as they come, to its end; Ctrl-C cancels it, a second one raises KeyboardInterrupt.

        Raises the request's typed error after what it had committed was printed.
        """
        empty = True
        with _cancelled_by_interrupt(handle):
            for event in handle:
                if isinstance(event, Delta) and event.channel == "thinking":
                    if not self.quiet:
                        self._piece(sys.stderr, event.text)
                elif isinstance(event, Delta):
                    self._piece(sys.stdout, event.text)
                    empty = False
                elif isinstance(event, ToolCallEvent):
                    self._end_line()
                    name = json.dumps(event.call.name, ensure_ascii=False)
                    _write(sys.stdout, f'{{"name": {name}, "arguments": {event.call.arguments_json}}}\n')
                    empty = False
        self._end_line()
        result = handle.result()
        if empty:
            _write(sys.stdout, "\n")
        self.note(result.statistics())
        return result

    def note(self, text: str) -> None:
        """A line on standard error, unless quiet."""
        if not self.quiet:
            self.tell(text)

    def tell(self, text: str) -> None:
        """A line on standard error, in any case."""
        _write(sys.stderr, text + "\n")

    def _piece(self, stream: IO[str], text: str) -> None:
        if self._open is not stream:
            self._end_line()
        _write(stream, text)
        self._open = stream

    def _end_line(self) -> None:
        if self._open is not None:
            _write(self._open, "\n")
        self._open = None


def is_terminal(stream: IO[str] | None) -> bool:
    """Whether somebody sees the stream, or types into it."""
    return stream is not None and stream.isatty()


def _write(stream: IO[str] | None, text: str) -> None:
    """Write at once; on a terminal harmless, and standard error in half intensity."""
    if stream is None:  # closed by whoever started the process
        return
    if is_terminal(stream):
        text = text.translate(_CONTROLS)
        if stream is sys.stderr and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb":
            text = f"\033[2m{text}\033[0m"
    stream.write(text)
    stream.flush()


@contextmanager
def _cancelled_by_interrupt(handle: GenerationHandle) -> Iterator[None]:
    """Ctrl-C asks for an early end instead of tearing the loop that reads events. Where it is ignored it stays so."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        yield
        return
    asked = False

    def interrupt(number: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        handle.cancel()

    previous = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
