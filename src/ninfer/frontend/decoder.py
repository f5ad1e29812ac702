"""Bytes of an answer become text in channels, and tool calls. One small value, copied to try tokens out."""

from __future__ import annotations

import attrs

from ninfer.frontend.envelope import SPACE, Envelope, RawCall, Scan, partial_match
from ninfer.frontend.protocol import CALL_OPEN, THINK_CLOSE
from ninfer.frontend.tokenizer import decode_utf8
from ninfer.results import Channel

_NOTHING = Scan()

Piece = tuple[Channel, str] | RawCall


@attrs.define
class Decoder:
    """The reading state of one answer. All fields are immutable values, so a shallow copy is a fork.

    thinking: the answer is inside its thinking. It leaves at the first ``</think>``, wherever tokens end; the
    newlines directly around it belong to neither channel. stops: strings that end the answer; they are looked
    for in free content (not in calls) and, with ``stop_in_thinking``, in the thinking. stopped: the one that was
    found, or empty; the text before it has been released and nothing follows. Only text that could still become
    part of a marker is held back. exact: the close is canonical, so exactly one newline before it and two behind
    it are not the answer's own.
    """

    envelope: Envelope | None
    stops: tuple[str, ...]
    stop_in_thinking: bool
    thinking: bool
    exact: bool = False
    either: bool = False
    """The content is calls or something else entirely; its first character decides."""
    called: bool = False
    """A call has begun."""
    stopped: str = ""
    _bytes: bytes = attrs.field(default=b"", init=False)
    _close: str = attrs.field(default="", init=False)
    """Thinking that may be the beginning of the close."""
    _leading: int | None = attrs.field(default=0, init=False)
    """Newlines right behind the close that are still to be dropped; None: all of them."""
    _scan: Scan = attrs.field(default=_NOTHING, init=False)
    _stop: str = attrs.field(default="", init=False)
    """Text that may be the beginning of a stop string."""
    _muted: int = attrs.field(default=0, init=False)
    """Characters at the front of the held text that were part of the prompt."""
    _space: str = attrs.field(default="", init=False)
    """White space that is dropped if a call follows it."""
    _after_call: bool = attrs.field(default=False, init=False)

    @property
    def plain(self) -> bool:
        """What is read now only adds text: it can end nothing, begin no call and, while it has no ``<`` in it, leave
        no thinking."""
        if self.thinking:
            return not (self.stops and self.stop_in_thinking) and "<" not in self._close
        return not self.stops and self.envelope is None and not self.either

    def resume(self, prefix: str) -> None:
        """Start behind ``prefix`` of the same content: a call begun there is read on, its text not released."""
        if prefix and self.either:
            self.either = False
            if not CALL_OPEN.startswith(prefix[0]):
                self.envelope = None
        if self.envelope is not None:
            _, self._scan = self.envelope.feed(self._scan, prefix)
            self.called = self._scan.inside
            self._muted = len(self._scan.held)

    def feed(self, data: bytes) -> list[Piece]:
        """Everything that these bytes release, in order."""
        text, self._bytes = decode_utf8(self._bytes, data)
        return self._route(text) if text else []

    def finish(self, *, complete: bool) -> list[Piece]:
        """Everything still held. ``complete``: the model ended the answer itself."""
        text, self._bytes = decode_utf8(self._bytes, b"", final=True)
        pieces = [] if self.stopped else self._route(text)
        if self.thinking and not self.stopped:
            rest, self._close = self._close, ""
            pieces += self._release("thinking", rest)
        elif self.envelope is not None and not self.stopped:
            scan, self._scan = self._scan, Scan()
            pieces += self._content(self.envelope.flush(scan, complete=complete))
        if not self.stopped:
            pieces += self._unhold("thinking" if self.thinking else "content")
        if self._space and not self._after_call:
            pieces.append(("content", self._space))
        self._space = ""
        return pieces

    def _route(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        if self.thinking:
            joined = self._close + text
            end = joined.find(THINK_CLOSE)
            if end < 0:
                body = self._stripped(joined[: len(joined) - partial_match(joined, THINK_CLOSE)])
                self._close = joined[len(body) :]
                return self._release("thinking", body)
            pieces += self._release("thinking", self._stripped(joined[:end]))
            if self.stopped:
                return pieces
            pieces += self._unhold("thinking")
            self.thinking, self._close, self._leading = False, "", 2 if self.exact else None
            text = joined[end + len(THINK_CLOSE) :]
        if self._leading != 0:
            text = self._without_leading(text)
        if not text:
            return pieces
        if self.either:
            self.either = False
            if not CALL_OPEN.startswith(text[0]):
                self.envelope = None
        if self.envelope is None:
            return pieces + self._release("content", text)
        out, self._scan = self.envelope.feed(self._scan, text)
        self.called |= self._scan.inside or any(isinstance(item, RawCall) for item in out)
        return pieces + self._content(out)

    def _stripped(self, thinking: str) -> str:
        """Without the newlines that would belong to a close right behind it."""
        return thinking.removesuffix("\n") if self.exact else thinking.rstrip("\n")

    def _without_leading(self, text: str) -> str:
        rest = text.lstrip("\n")
        if self._leading is None:
            self._leading = 0 if rest else None
            return rest
        dropped = min(self._leading, len(text) - len(rest))
        self._leading = 0 if rest else self._leading - dropped
        return text[dropped:]

    def _content(self, out: list[str | RawCall]) -> list[Piece]:
        pieces: list[Piece] = []
        for item in out:
            if isinstance(item, RawCall):
                pieces += [*self._unhold("content"), item]
                self._muted, self._space, self._after_call = 0, "", True
                continue
            muted = min(self._muted, len(item))
            self._muted -= muted
            pieces += self._release("content", item[muted:])
            if self.stopped:
                break
        return pieces

    def _release(self, channel: Channel, text: str) -> list[Piece]:
        """Pass text on, up to the stop string that ends first; hold a suffix that could begin one."""
        if not self.stops or (channel == "thinking" and not self.stop_in_thinking):
            return self._show(channel, text)
        joined = self._stop + text
        found = [(at + len(stop), at, stop) for stop in self.stops if (at := joined.find(stop)) >= 0]
        if found:
            _, at, self.stopped = min(found)
            self._stop = ""
            return self._show(channel, joined[:at])
        ready = len(joined) - max(partial_match(joined, stop) for stop in self.stops)
        self._stop = joined[ready:]
        return self._show(channel, joined[:ready])

    def _unhold(self, channel: Channel) -> list[Piece]:
        text, self._stop = self._stop, ""
        return self._show(channel, text)

    def _show(self, channel: Channel, text: str) -> list[Piece]:
        if channel == "content" and self.envelope is not None:
            joined = self._space + text
            text = joined.rstrip(SPACE)
            self._space = joined[len(text) :]
            self._after_call = self._after_call and not text
        return [(channel, text)] if text else []
