"""Choices and regular expressions of the whole text as grammars."""

from __future__ import annotations

from collections.abc import Iterable

from ninfer.constraints.automata import Dfa
from ninfer.constraints.ir import Auto, Class, Grammar, Node, Rep, alt, seq
from ninfer.constraints.limits import Work
from ninfer.constraints.regex import Chars, Concat, Repeat, parse
from ninfer.constraints.regex import Node as Tree
from ninfer.errors import ConstraintLimit

_SMALL_STATES = 96
_SMALL_WORK = 500_000
"""What makes an automaton small: its masks can be made before the first answer."""


def choice(texts: Iterable[str]) -> Grammar:
    """Exactly these texts."""
    return Grammar({"root": alt(sorted(texts))})


def regular(pattern: str) -> Grammar:
    """The texts that match the whole pattern; anchors at its ends are redundant. One automaton, if it is small.

    Raises InvalidRegex, or ConstraintLimit for repetitions that multiply.
    """
    parsed = parse(pattern)
    try:
        work = Work(_SMALL_WORK)
        dfa = Dfa.from_regex(parsed, search=False, work=work).minimise(work)
    except ConstraintLimit:
        dfa = None
    if dfa is not None and len(dfa.trans) <= _SMALL_STATES:
        return Grammar({"root": Auto(dfa, "raw")})
    return Grammar({"root": alt(_node(alternative.body) for alternative in parsed)}, free_form=True)


def _node(tree: Tree) -> Node:
    if isinstance(tree, Chars):
        return Class(tree.ranges)
    if isinstance(tree, Concat):
        return seq(*map(_node, tree.parts))
    if isinstance(tree, Repeat):
        return Rep(_node(tree.item), tree.low, tree.high)
    return alt(map(_node, tree.options))
