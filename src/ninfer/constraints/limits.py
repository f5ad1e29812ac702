"""Limits of constraint compilation, in one place, and the work budget one compilation shares."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ninfer.cancellation import checkpoint
from ninfer.errors import ConstraintLimit

MAX_REPEAT = 8192
"""Largest repetition count of a regex."""
MAX_REGEX_NESTING = 64
"""Nesting depth of a regex."""
MAX_NFA_STATES = 262_144
"""States a regex may expand to before determinisation."""
MAX_DFA_STATES = 65_536
"""States of any automaton, products included."""
MAX_STRING_LENGTH = 8192
"""Largest explicit length bound, characters, where an automaton product is needed."""
MAX_INTERSECTIONS = 16_384
"""Schema intersections of one reduction."""
MAX_DEPTH = 256
"""Nesting depth of candidate checks."""
MAX_GRAMMAR_REPEAT = 65_536
"""Largest repetition count of a grammar."""
MAX_COPIES = 262_144
"""Copies of one part that nested repetitions of a grammar or regex may multiply to."""
MAX_GRAMMAR_NESTING = 1000
"""Nesting depth of a grammar."""
MAX_OBJECT_STATES = 16_384
"""Members times counts an object with a bounded number of members is tracked through."""
MAX_UNIQUE_STATES = 4096
"""Sets of used values an array of unique items is tracked through."""
MAX_SOURCE_BYTES = 1 << 20
"""Bytes of schema, grammar or pattern text."""
MAX_EMITTED_BYTES = 32 << 20
"""Bytes of emitted grammar text."""
MAX_CHOICES = 10_000
"""Strings of a choice."""
MAX_WORK = 12_000_000
"""Elementary steps of one compilation, whatever does them, each about a quarter of a microsecond: a few seconds."""

MAX_BREADTH = 10_000
"""ASCII characters that may come next in a caller's own grammar, counted once for each way to them."""
MAX_MASK_SECONDS = 0.05
"""Processor time of one mask of a caller's own grammar, once its states are known."""


STRETCH = 4000
"""Steps, about a millisecond, after which a compilation lets other threads have the interpreter. They would wait
several times as long for it, each time they need it."""


@dataclass(slots=True)
class Work:
    """What one compilation may still spend. Every unbounded loop of the room draws on it."""

    left: int = MAX_WORK
    stretch: int = 0

    def spend(self, steps: int) -> None:
        """Raises ConstraintLimit when the budget is used up."""
        self.left -= steps
        if self.left < 0:
            raise ConstraintLimit("the constraint needs more work than one compilation may do", limit="work")
        self.stretch += steps
        if self.stretch > STRETCH:
            self.stretch = 0
            give_way()


def give_way() -> None:
    """Let a waiting thread have the interpreter. Raises what ends this thread's work, if nobody waits for it."""
    checkpoint()
    time.sleep(1e-4)


def check_states(count: int, limit: int = MAX_DFA_STATES) -> None:
    """Raises ConstraintLimit above the automaton size limit."""
    if count > limit:
        raise ConstraintLimit(f"a string automaton needs more than {limit} states", limit="states")


@contextmanager
def placed(pointer: str, *, work: bool = True) -> Iterator[None]:
    """Say where, in a ConstraintLimit raised inside that does not know. work: also when the work budget is used up, to
    which every place contributes."""
    try:
        yield
    except ConstraintLimit as error:
        if error.pointer is not None or error.line is not None or (error.limit == "work" and not work):
            raise
        raise ConstraintLimit(error.message, limit=error.limit, pointer=pointer, offset=error.offset) from None
