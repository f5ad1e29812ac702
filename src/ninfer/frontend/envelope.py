"""Tool calls in the model's own envelope, found in free text as it arrives.

    <tool_call>\\n<function=NAME>\\n(<parameter=KEY>\\nVALUE\\n</parameter>\\n)*</function>\\n</tool_call>

White space between elements is free. A value that starts on its own line ends at the first
``\\n</parameter>``, so any text without that delimiter survives unchanged, tags and white space included; a
value that starts right behind its tag ends at the first ``</parameter>`` and loses one trailing newline. (One
exception: a value that begins with ``</parameter>`` and goes on with a tag of this envelope is an empty value.)
Parameters may come in any order; a repeated one keeps its first place and its last value. What breaks these
rules, or names an undeclared tool, is ordinary text.

What a grammar wrote (``exact``) has no other white space than shown and begins every value on its own line, without the
exception; breaking the rules there is a fault of ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs

from ninfer.errors import InvariantError
from ninfer.frontend.protocol import CALL_CLOSE, CALL_OPEN
from ninfer.frontend.tool_contract import ToolContract

_FUNCTION = "<function="
_FUNCTION_CLOSE = "</function>"
_PARAMETER = "<parameter="
_PARAMETER_CLOSE = "</parameter>"
SPACE = " \t\r\n"
_LONGEST_NAME = 256


@attrs.frozen
class RawCall:
    """A complete call: its name and its arguments, decoded."""

    name: str
    arguments: Mapping[str, Any]


@attrs.frozen
class _Progress:
    """A call read up to ``at``, an offset from its opening tag. ``scanned``: no value ends before it."""

    stage: Literal["function", "body", "value", "end", "done"] = "function"
    at: int = len(CALL_OPEN)
    name: str = ""
    parameters: tuple[tuple[str, str], ...] = ()
    key: str = ""
    scanned: int = 0


@attrs.frozen
class Scan:
    """Text seen but not settled: the beginning of an opening tag, or (``inside``) a call read as far as
    ``progress``.
    """

    held: str = ""
    inside: bool = False
    progress: _Progress = _Progress()


class Envelope:
    """The parser of one request's tools. Stateless: ``feed`` and ``flush`` map a Scan to the next."""

    def __init__(self, contracts: Sequence[ToolContract], *, exact: bool = False) -> None:
        self._contracts = {contract.name: contract for contract in contracts}
        self._exact = exact

    def feed(self, scan: Scan, text: str) -> tuple[list[str | RawCall], Scan]:
        """What ``text`` settles, in order: text that is certainly not part of a call, and complete calls."""
        out: list[str | RawCall] = []
        held, inside, progress = scan.held + text, scan.inside, scan.progress
        while True:
            if not inside:
                start = held.find(CALL_OPEN)
                ready = start if start >= 0 else len(held) - partial_match(held, CALL_OPEN)
                if ready:
                    out.append(held[:ready])
                    held = held[ready:]
                if start < 0:
                    return out, Scan(held)
                progress = _Progress()
            step = self._advance(held, progress, inline=False)
            if step is not None and step.stage != "done":
                return out, Scan(held, True, step)
            if step is None and self._exact:
                raise InvariantError("a constrained call cannot be read")
            used = len(CALL_OPEN) if step is None else step.at
            out.append(held[:used] if step is None else self._call(step))
            held, inside = held[used:], False

    def flush(self, scan: Scan, *, complete: bool) -> list[str | RawCall]:
        """What is left at the end. A call cut short by a limit (``complete`` False) is dropped, not shown."""
        out: list[str | RawCall] = []
        while scan.inside:
            step = None if self._exact else self._advance(scan.held, _Progress(), inline=True)
            if step is not None and step.stage == "done":
                out.append(self._call(step))
                used = step.at
            elif complete:
                out.append(CALL_OPEN)
                used = len(CALL_OPEN)
            else:
                return out
            more, scan = self.feed(Scan(), scan.held[used:])
            out += more
        return [*out, scan.held] if scan.held else out

    def _advance(self, text: str, progress: _Progress, *, inline: bool) -> _Progress | None:
        """Read on in a call that starts ``text``. None: not a call. ``inline``: every value ends at its first tag."""
        while progress.stage != "done":
            step = self._element(text, progress, inline)
            if step is None or (step.stage, step.at) == (progress.stage, progress.at):
                return step
            progress = step
        return progress

    def _element(self, text: str, progress: _Progress, inline: bool) -> _Progress | None:
        """One element further; the same place when more text is needed; None when the rules are broken."""
        if progress.stage == "value":
            return _value(text, progress, inline, self._exact)
        at = progress.at
        while at < len(text) and text[at] in SPACE:
            at += 1
        if progress.stage == "end":
            if text.startswith(CALL_CLOSE, at):
                return attrs.evolve(progress, stage="done", at=at + len(CALL_CLOSE))
            return _unless_impossible(text, at, progress, CALL_CLOSE)
        if progress.stage == "function":
            name, end = _name(text, at, _FUNCTION, self._exact)
            if end:
                return _Progress("body", end, name) if name in self._contracts else None
            return _unless_impossible(text, at, progress, _FUNCTION) if name is not None else None
        if text.startswith(_FUNCTION_CLOSE, at):
            return attrs.evolve(progress, stage="end", at=at + len(_FUNCTION_CLOSE))
        key, end = _name(text, at, _PARAMETER, self._exact)
        if end:
            return attrs.evolve(progress, stage="value", at=end, key=key, scanned=end) if key else None
        return _unless_impossible(text, at, progress, _PARAMETER, _FUNCTION_CLOSE) if key is not None else None

    def _call(self, progress: _Progress) -> RawCall:
        contract = self._contracts[progress.name]
        arguments = {key: contract.decode(key, raw) for key, raw in progress.parameters}
        return RawCall(progress.name, arguments)


def _value(text: str, progress: _Progress, inline: bool, exact: bool) -> _Progress | None:
    begin = progress.at
    if begin == len(text):
        return progress
    framed = text[begin] == "\n" and not inline
    at_once = _ends_at_once(text, begin + 1) if framed and not exact else False
    if at_once is None:
        return progress
    if framed and not at_once:
        begin, delimiter = begin + 1, "\n" + _PARAMETER_CLOSE
    else:
        delimiter = _PARAMETER_CLOSE
    end = text.find(delimiter, max(begin, progress.scanned))
    if end < 0:
        return attrs.evolve(progress, scanned=max(begin, len(text) - len(delimiter) + 1))
    raw = text[begin:end]
    if delimiter == _PARAMETER_CLOSE:
        raw = raw.removeprefix("\n").removesuffix("\n")
    parameters = (*progress.parameters, (progress.key, raw))
    return _Progress("body", end + len(delimiter), progress.name, parameters)


def _ends_at_once(text: str, at: int) -> bool | None:
    """Whether an empty value was written with one newline instead of two; None while that is open."""
    if not text.startswith(_PARAMETER_CLOSE, at):
        return None if _PARAMETER_CLOSE.startswith(text[at : at + len(_PARAMETER_CLOSE)]) else False
    rest = text[at + len(_PARAMETER_CLOSE) :].lstrip(SPACE)
    if rest.startswith((_PARAMETER, _FUNCTION_CLOSE)):
        return True
    return None if _PARAMETER.startswith(rest) or _FUNCTION_CLOSE.startswith(rest) else False


def _name(text: str, at: int, tag: str, exact: bool) -> tuple[str | None, int]:
    """The name in ``tag + name + ">"`` at ``at`` and where it ends; end 0 while unfinished; None when
    impossible.
    """
    if not text.startswith(tag, at):
        return "", 0
    begin = at + len(tag)
    longest = len(text) if exact else _LONGEST_NAME
    end = text.find(">", begin, begin + longest + 1)
    name = text[begin:end] if end >= 0 else text[begin : begin + longest + 1]
    if "\n" in name or (end < 0 and len(name) > longest):
        return None, 0
    return name, end + 1 if end >= 0 else 0


def _unless_impossible(text: str, at: int, progress: _Progress, *expected: str) -> _Progress | None:
    """``progress`` while what follows ``at`` may still become one of ``expected``."""
    rest = text[at : at + max(map(len, expected))]
    return progress if any(tag.startswith(rest) or rest.startswith(tag) for tag in expected) else None


def partial_match(text: str, marker: str) -> int:
    """Length of the longest suffix of ``text`` that is a proper prefix of ``marker``."""
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-size:]):
            return size
    return 0
