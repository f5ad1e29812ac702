"""How broad the choice is that a parser of a free-form grammar faces at one position.

Where many parts may be left out one after the other, all that may come behind them is possible at once, and each of it
is tried against every token that fits its first character. A first mask of such a grammar would not end.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from ninfer.constraints.ir import Alt, Auto, Class, Grammar, Lit, Node, Ref, Rep, Seq
from ninfer.constraints.limits import MAX_BREADTH, Work
from ninfer.errors import ConstraintLimit

_Start = tuple[int, Set[str]]
"""Of the ways into a node: ASCII characters, each way counted, and the rules that are called."""
_NOTHING: _Start = (0, frozenset())


def check_breadth(grammar: Grammar, work: Work) -> None:
    """Raises ConstraintLimit where more than MAX_BREADTH characters may come next, each way to them counted."""
    empty = _nullable(grammar, work)
    positions: list[_Start] = []
    starts = {name: _start(body, empty, positions, work) for name, body in grammar.rules.items()}
    for breadth, rules in [*positions, *starts.values()]:
        work.spend(1 + len(rules))
        if breadth + sum(starts[rule][0] for rule in rules) > MAX_BREADTH:
            raise ConstraintLimit(
                f"more than {MAX_BREADTH} characters may come next, counting every way to them", limit="breadth"
            )


def _nullable(grammar: Grammar, work: Work) -> set[str]:
    """The rules that may derive the empty text."""
    empty: set[str] = set()
    while more := {n for n, body in grammar.rules.items() if n not in empty and _may_be_empty(body, empty, work)}:
        empty |= more
    return empty


def _may_be_empty(node: Node, empty: Set[str], work: Work) -> bool:
    work.spend(1)
    if isinstance(node, Seq):
        return all(_may_be_empty(part, empty, work) for part in node.parts)
    if isinstance(node, Alt):
        return any(_may_be_empty(option, empty, work) for option in node.options)
    if isinstance(node, Rep):
        return node.low == 0 or _may_be_empty(node.item, empty, work)
    if isinstance(node, Ref):
        return node.rule in empty
    return (isinstance(node, Lit) and not node.text) or (isinstance(node, Auto) and bool(node.dfa.accept[:1] == b"\1"))


def _start(node: Node, empty: Set[str], positions: list[_Start], work: Work) -> _Start:
    """The ways into a node; those into its later parts go to ``positions``."""
    work.spend(3)
    if isinstance(node, Class):
        return sum(max(0, min(high, 0x80) - low) for low, high in node.ranges) or 1, frozenset()
    if isinstance(node, Ref):
        return 0, {node.rule}
    if isinstance(node, Alt):
        return _together(_start(option, empty, positions, work) for option in node.options)
    if isinstance(node, Rep):
        breadth, rules = _start(node.item, empty, positions, work)
        again = node.low if node.high is None else node.high
        return breadth * (again if again > 1 and _may_be_empty(node.item, empty, work) else 1), rules
    if isinstance(node, Seq):
        start = _NOTHING
        for part in reversed(node.parts):
            here = _start(part, empty, positions, work)
            start = _together((here, start)) if _may_be_empty(part, empty, work) else here
            positions.append(start)
        return start
    return 1, frozenset()


def _together(starts: Iterable[_Start]) -> _Start:
    found = list(starts)
    return sum(breadth for breadth, _ in found), frozenset().union(*(rules for _, rules in found))
