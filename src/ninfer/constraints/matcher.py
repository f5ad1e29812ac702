"""The grammar state of one output: what may come next, tokens tried out, tokens made part of it.

    IDLE     lookahead fills masks behind proposed tokens and always comes back
    IDLE     preview -> PREVIEW; commit or discard -> IDLE

Everything that can fail happens in ``preview``; ``commit`` only assigns.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from time import perf_counter
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ninfer.constraints.vocab import TokenIndex
from ninfer.contract import RowMask
from ninfer.errors import ConstraintError, ConstraintPrefix, InvariantError

Words = npt.NDArray[np.uint32]

_ALL_READY = {positions: RowMask(positions) for positions in range(1, 17)}


class Parser(Protocol):
    """One reading of a language. An ``accept`` or ``accept_bytes`` that returns True is one step for ``rollback``."""

    @property
    def complete(self) -> bool: ...

    def accept(self, token: int) -> bool: ...

    def accept_bytes(self, data: bytes) -> bool: ...

    def rollback(self, steps: int) -> None: ...

    def fill(self, words: Words) -> bool:
        """Write the legal next tokens, bits beyond the vocabulary zero; whether there is one."""
        ...


class Matcher:
    """Made by the thread that submits, used by the worker alone afterwards.

    ``complete`` and ``terminated`` describe the committed output: it may end here; a stop token was committed.
    ``steps``: committed tokens. ``masks``: positions filled so far. ``mask_seconds`` and ``matcher_seconds``: host
    time spent filling and reading; None unless ``timed``.
    """

    def __init__(self, parser: Parser, index: TokenIndex, *, timed: bool = False) -> None:
        self._parser = parser
        self._index = index
        self._stop = frozenset(index.classes.stop)
        self._usable = index.usable
        self._first: Words | None = None
        self._tentative = 0
        """Parser steps beyond the committed output."""
        self._preview: tuple[int, bool, bool] | None = None
        """Tokens, complete and terminated of the open preview."""
        self.complete = parser.complete
        self.terminated = False
        self.steps = 0
        self.masks = 0
        self.mask_seconds: float | None = 0.0 if timed else None
        self.matcher_seconds: float | None = 0.0 if timed else None

    @property
    def nbytes(self) -> int:
        """Bytes of one mask."""
        return 4 * self._index.words

    # -- start ---------------------------------------------------------------------------------------------------

    def start(self, prefix: bytes = b"") -> None:
        """Read the text that the output continues, and keep the first mask.

        Raises ConstraintPrefix for text the language has no use for, ConstraintError when no token can come first.
        """
        at = 0
        while at < len(prefix):
            for token, marker in self._index.classes.phase.items():
                if prefix.startswith(marker, at) and self._parser.accept(token):
                    at += len(marker)
                    break
            else:
                if not self._parser.accept_bytes(prefix[at : at + 1]):
                    raise ConstraintPrefix("the constraint cannot continue the given text", offset=at)
                at += 1
        self.complete = self._parser.complete
        first = np.zeros(self._index.words, np.uint32)
        if not self._fill(first):
            raise ConstraintError("no token of the vocabulary can come first", kind="dead_start")
        self._first = first

    # -- masks ---------------------------------------------------------------------------------------------------

    def lookahead(self, drafts: Sequence[int], slots: Words) -> RowMask:
        """Fill ``slots`` [1 + len(drafts), words]: legal tokens now, then behind each draft.

        Filling stops where nothing is legal, behind an illegal draft, and behind the end; slots not reached hold one
        stop id. The state is unchanged, also when this raises.
        """
        if self._preview is not None or self.terminated:
            raise InvariantError("a mask during a preview, or behind the end")
        positions = len(drafts) + 1
        dead, reached = 0, 0
        try:
            for i in range(positions):
                if not self._fill(slots[i]):
                    dead, reached = 1 << i, i
                    break
                reached = i + 1
                if i == len(drafts) or drafts[i] in self._stop or not self._takes(drafts[i], slots[i]):
                    break
        finally:
            self._undo()
        if reached == positions:
            return _ALL_READY.get(positions) or RowMask(positions)
        stop = self._index.classes.stop[0]
        slots[reached:positions] = 0
        slots[reached:positions, stop >> 5] = 1 << (stop & 31)
        unreachable = reached + (1 if dead else 0)
        return RowMask(positions, dead, unreachable if unreachable < positions else None)

    def _fill(self, words: Words) -> bool:
        """Write the mask of the present state; whether anything is legal."""
        self.masks += 1
        if self._first is not None and not self._tentative:
            words[:] = self._first
            return True
        if self.mask_seconds is None:
            return self._parser.fill(words)
        begin = perf_counter()
        some = self._parser.fill(words)
        self.mask_seconds += perf_counter() - begin
        return some

    def _takes(self, token: int, words: Words) -> bool:
        """Read a token if the mask allows it."""
        if not words[token >> 5] >> (token & 31) & 1:
            return False
        if not self._read(token):
            raise InvariantError(f"token {token} is in a mask and cannot be read")
        return True

    # -- transaction ---------------------------------------------------------------------------------------------

    def preview(self, tokens: Sequence[int]) -> None:
        """Read produced tokens tentatively. A stop id can only be the last. Raises InvariantError, unchanged."""
        self._try(tokens, b"")

    def preview_control(self, tokens: Sequence[int], tail: bytes) -> None:
        """Read forced tokens tentatively. ``tail``: the last bytes of the output; a character they leave unfinished
        is taken as finished, since no forced token could follow it."""
        self._try(tokens, rest_of_character(tail))

    def _try(self, tokens: Sequence[int], before: bytes) -> None:
        if self._preview is not None or self.terminated:
            raise InvariantError("a preview during a preview, or behind the end")
        terminated = False
        try:
            if before:
                self._tentative += self._parser.accept_bytes(before)
            for token in tokens:
                if terminated:
                    raise InvariantError("a token behind the end")
                if token in self._stop:
                    terminated = self._parser.complete
                    legal = terminated
                else:
                    legal = 0 <= token < self._index.size and bool(self._usable[token]) and self._read(token)
                if not legal:
                    raise InvariantError(f"token {token} was produced where the constraint forbids it")
        except BaseException:
            self._undo()
            raise
        self._preview = len(tokens), self._parser.complete, terminated

    def commit(self) -> None:
        """Make the previewed tokens part of the output."""
        if self._preview is None:
            raise InvariantError("commit without a preview")
        tokens, self.complete, self.terminated = self._preview
        self.steps += tokens
        self._preview = self._first = None
        self._tentative = 0

    def discard(self) -> None:
        """Forget the preview; everything is as before it."""
        if self._preview is None:
            raise InvariantError("discard without a preview")
        self._preview = None
        self._undo()

    def _read(self, token: int) -> bool:
        if self.matcher_seconds is None:
            taken = self._parser.accept(token)
        else:
            begin = perf_counter()
            taken = self._parser.accept(token)
            self.matcher_seconds += perf_counter() - begin
        self._tentative += taken
        return taken

    def _undo(self) -> None:
        steps, self._tentative = self._tentative, 0
        self._parser.rollback(steps)


def rest_of_character(tail: bytes) -> bytes:
    """Some bytes that finish the UTF-8 character in which ``tail`` ends; none where it ends between two."""
    _, used = codecs.utf_8_decode(tail, "replace", False)
    pending = tail[used:]
    for first in b"\x80\x90\xa0" if pending else b"":
        for more in range(3):
            rest = bytes([first]) + b"\x80" * more
            try:
                (pending + rest).decode()
            except UnicodeDecodeError:
                continue
            return rest
    return b""
