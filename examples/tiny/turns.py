"""One question with its answer: what every task of the corpus returns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    """A user text, the one right answer, and the reasoning that leads to it.

    The answer is the same whether or not the reasoning is shown. ``system`` is a system text the question relies on;
    such a turn opens a conversation of its own.
    """

    user: str
    answer: str
    thought: str = ""
    system: str = ""
