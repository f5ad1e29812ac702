"""The token domain as constraints see it: what text each id is, and which ids are not text."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import cached_property

import attrs
import numpy as np
import numpy.typing as npt

from ninfer.constraints.insides import ContentIndex
from ninfer.constraints.tokentrie import TokenTrie
from ninfer.constraints.xgrammar import Compiler

_ENTRY_BYTES = 128
"""What the core keeps of a token besides its bytes, as measured."""


@attrs.frozen(eq=False)
class TokenClasses:
    """Every id of the domain ``0..V-1`` belongs to one class.

    data: the bytes each id stands for; a token may hold part of a character. text: bool [V], ids matched by their
    bytes. phase: ids of envelope markers, legal only where a grammar names them. stop: ids that end an answer. All
    other ids are never legal under a constraint.
    """

    data: Sequence[bytes]
    text: npt.NDArray[np.bool_]
    phase: Mapping[int, bytes]
    stop: tuple[int, ...]

    @property
    def reserved(self) -> tuple[int, ...]:
        """Phase and stop ids, ascending."""
        return tuple(sorted({*self.phase, *self.stop}))

    def is_text(self, token: int) -> bool:
        return 0 <= token < len(self.data) and bool(self.text[token])


class TokenIndex:
    """One vocabulary, and what is built over it when a constrained request first needs it. Safe from any thread.

    cache_bytes: what may be kept of masks shared between grammars. size: V. words: uint32 words of a mask.
    """

    def __init__(self, classes: TokenClasses, cache_bytes: int = 1 << 26) -> None:
        self.classes = classes
        self.size = len(classes.data)
        self.words = (self.size + 31) // 32
        self._cache_bytes = cache_bytes
        self._lock = threading.Lock()
        self._compiler: Compiler | None = None
        self._contents: ContentIndex | None = None

    @cached_property
    def usable(self) -> npt.NDArray[np.bool_]:
        """bool [V]: ids that some grammar may accept."""
        usable = self.classes.text.copy()
        usable[list(self.classes.reserved)] = True
        return usable

    @property
    def nbytes(self) -> int:
        """About what is held, bytes: nothing before it is used."""
        compiler = 0 if self._compiler is None else sum(map(len, self.classes.data)) + _ENTRY_BYTES * self.size
        contents = 0 if self._contents is None else self._contents.nbytes
        return compiler + contents

    def compiler(self) -> Compiler:
        """The compiler of grammar text."""
        with self._lock:
            if self._compiler is None:
                self._compiler = Compiler(_spelled(self.classes), self.classes.stop, self._cache_bytes)
            return self._compiler

    def contents(self) -> ContentIndex:
        """What the strings of our own grammars read."""
        with self._lock:
            if self._contents is None:
                self._contents = ContentIndex(TokenTrie(self.classes.data, self.classes.text), self._cache_bytes)
            return self._contents


def _spelled(classes: TokenClasses) -> list[bytes]:
    """What each id is matched as. A byte 0xFF begins no text, so only its id can name a reserved token."""
    spelled = [data if text else b"" for data, text in zip(classes.data, classes.text.tolist())]
    for token in classes.reserved:
        spelled[token] = b"\xff%d" % token
    return spelled
