"""The one place that touches XGrammar: its compiled core, loaded without what its Python package imports.

Importing the package brings torch and transformers into the process, and so does its dependency tvm_ffi where torch is
installed. The core needs neither. Constructor signatures of the core are private to the package, hence one exact
version and a self-test; if either does not hold, the package is imported the ordinary way.
"""

from __future__ import annotations

import importlib.abc
import importlib.metadata
import importlib.util
import re
import string
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from time import thread_time
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from ninfer.cancellation import checkpoint
from ninfer.constraints.limits import MAX_MASK_SECONDS
from ninfer.errors import ConstraintLimit, InvariantError

VERSION = "0.2.9"

_NAMESPACE = "xgrammar.tvm_ffi_binding"
_CLASSES = ("CompiledGrammar", "Grammar", "GrammarCompiler", "GrammarMatcher", "TokenizerInfo")
_FEW_ALIKE = 4
_LONGEST_PERIOD = 3
_REPETITIONS = (8, 16, 32)
_RAW = 0
"""Vocabulary type: a token is its bytes."""
_LOCATION = re.compile(r"^\[[\d:]+\] \S+:\d+: ")


class Compiler:
    """Compiles grammar text for one vocabulary. Masks are built when a state is first visited, and kept.

    tokens: what each id is matched as; an id with empty bytes is never legal. stop: ids that are legal exactly where
    the language may end. cache_bytes: what is kept of masks that several grammars share.
    """

    def __init__(self, tokens: Sequence[bytes], stop: Sequence[int], cache_bytes: int) -> None:
        core = _core()
        self._core = core
        self._size = len(tokens)
        info = core.TokenizerInfo(list(tokens), _RAW, len(tokens), list(stop), False)
        self._compiler = core.GrammarCompiler(info, 1, True, cache_bytes, True)

    def compile(self, text: str) -> CompiledGrammar:
        """Raises InvariantError for text the core refuses: what is emitted must be right."""
        try:
            handle = self._compiler.compile_grammar_from_strings(text, "root")
        except (RuntimeError, UnicodeDecodeError) as error:
            raise InvariantError(f"an emitted grammar was refused: {_LOCATION.sub('', str(error)).strip()}") from None
        return CompiledGrammar(self._core, handle, self._size)


class CompiledGrammar:
    """Shared by all matchers of a language."""

    def __init__(self, core: Any, handle: Any, size: int) -> None:
        self._core = core
        self._handle = handle
        self._size = size

    @property
    def nbytes(self) -> int:
        """Memory held, bytes; grows while new states are visited."""
        return int(self._handle.memory_size_bytes())

    def warm(self, seconds: float) -> None:
        """Build masks for about so long, of this thread's time: behind texts that grow by one character, but not
        beyond one whose mask was seen before.

        Raises ConstraintLimit for a language so ambiguous that masks take too long, which shows where text repeats.
        """
        begin = thread_time()
        words = np.zeros((self._size + 31) // 32, np.uint32)
        waiting, reached = deque([b""]), dict[bytes, bytes]()
        while waiting and thread_time() - begin < seconds:
            checkpoint()
            text = waiting.popleft()
            parser = self.parser()
            if text:
                parser.accept_bytes(text)
            _timed_fill(parser, words)
            if reached.setdefault(words.tobytes(), text) is text:
                waiting.extend(text + char for char in _next_characters(parser))
        for text in reached.values():
            for period in range(1, min(len(text), _LONGEST_PERIOD) + 1):
                checkpoint()
                if thread_time() - begin > 2 * seconds:
                    return
                parser, repeated = self.parser(), text[-period:]
                parser.accept_bytes(text)
                for times in _REPETITIONS:
                    if not all(parser.accept_bytes(repeated) for _ in range(times)):
                        break
                    _timed_fill(parser, words)

    def parser(self) -> Parser:
        """A parser at the start of the language."""
        return Parser(self._core.GrammarMatcher(self._handle, None, False, -1, None), self._size)


class Parser:
    """The parse of one output. Every successful ``accept`` or ``accept_bytes`` is one step that can be taken back."""

    def __init__(self, handle: Any, size: int) -> None:
        self._handle = handle
        self._last_word = np.uint32(0xFFFFFFFF >> (-size % 32))
        """The bits of a mask's last word that are ids; the core sets others too."""

    @property
    def complete(self) -> bool:
        """Whether what was accepted may be the whole text."""
        return bool(self._handle.is_completed())

    def accept(self, token: int) -> bool:
        """Take a token that is in the vocabulary; False, unchanged, when it is not legal."""
        return bool(self._handle.accept_token(token, False))

    def accept_bytes(self, data: bytes) -> bool:
        """Take text that is no token; False, unchanged, when it is not legal."""
        return bool(self._handle.accept_string(data, False))

    def rollback(self, steps: int) -> None:
        """Undo the last ``steps``."""
        if steps:
            self._handle.rollback(steps)

    def fill(self, words: npt.NDArray[np.uint32]) -> bool:
        """Write the legal next tokens into a contiguous row; whether there is one."""
        self._handle.fill_next_token_bitmask(words.view(np.int32), 0, False)
        words[-1] &= self._last_word
        return bool(words.any())


_ALIKE = (string.ascii_lowercase, string.ascii_uppercase, string.digits)
_SINGLE = (*string.punctuation, *string.whitespace, "é", "中")


def _timed_fill(parser: Parser, words: npt.NDArray[np.uint32]) -> None:
    """Build a mask. Raises ConstraintLimit when it takes long although its states have been seen."""
    for _ in range(2):
        begin = thread_time()
        parser.fill(words)
        if thread_time() - begin <= MAX_MASK_SECONDS:
            return
    raise ConstraintLimit(
        f"so ambiguous a grammar that finding the next tokens takes more than {MAX_MASK_SECONDS} s", limit="ambiguity"
    )


def _next_characters(parser: Parser) -> Iterator[bytes]:
    """Characters that may come next; of many letters or digits, one."""

    def legal(char: str) -> bool:
        taken = parser.accept_bytes(char.encode())
        parser.rollback(taken)
        return taken

    for alike in _ALIKE:
        some = [char for char in alike if legal(char)]
        yield from (char.encode() for char in (some if len(some) <= _FEW_ALIKE else some[:1]))
    yield from (char.encode() for char in _SINGLE if legal(char))


@cache
def _core() -> Any:
    """The core's classes."""
    with _LOADING:
        if importlib.metadata.version("xgrammar") == VERSION:
            core = _bare_core()
            if _works(core):
                return core
        return _packaged_core()


_LOADING = threading.Lock()


def _bare_core() -> Any:
    with _without_torch():
        import tvm_ffi
    loaded = sys.modules.get(f"{_NAMESPACE}._ffi_api")
    library: Any
    if loaded is None:
        spec = importlib.util.find_spec("xgrammar")
        assert spec is not None
        assert spec.origin is not None
        library = tvm_ffi.load_module(str(Path(spec.origin).with_name("libxgrammar_bindings.so")))
        kinds: dict[str, Any] = {
            name: tvm_ffi.register_object(f"{_NAMESPACE}.{name}")(type(name, (tvm_ffi.Object,), {"__slots__": ()}))
            for name in _CLASSES
        }
    else:
        library = loaded
        kinds = {name: getattr(loaded, name) for name in _CLASSES}
    return SimpleNamespace(**kinds, library=library)


def _packaged_core() -> Any:
    from xgrammar.tvm_ffi_binding import _ffi_api

    return SimpleNamespace(**{name: getattr(_ffi_api, name) for name in _CLASSES}, library=_ffi_api)


def _works(core: Any) -> bool:
    """Compile, fill, accept, roll back."""
    try:
        info = core.TokenizerInfo([b"a", b"b", b"\xff2"], _RAW, 3, [2], False)
        compiled = core.GrammarCompiler(info, 1, True, 1 << 20, True).compile_grammar_from_strings(
            'root ::= "ab"', "root"
        )
        parser = Parser(core.GrammarMatcher(compiled, None, False, -1, None), 3)
        words = np.zeros(1, np.uint32)
        seen = []
        for token in (0, 1):
            parser.fill(words)
            seen.append(int(words[0]))
            if not parser.accept(token):
                return False
        done = parser.complete
        parser.rollback(2)
        parser.fill(words)
    except (AttributeError, TypeError, RuntimeError):
        return False
    return done and [*seen, int(words[0])] == [1, 2, 1]


@contextmanager
def _without_torch() -> Iterator[None]:
    """In this thread, and as long as nothing has imported it, torch cannot be imported."""
    finder = _Hidden(threading.get_ident())
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Hidden(importlib.abc.MetaPathFinder):
    def __init__(self, thread: int) -> None:
        self._thread = thread

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == "torch" and threading.get_ident() == self._thread:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
