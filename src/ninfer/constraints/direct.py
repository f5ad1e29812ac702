"""Choices and regular expressions of the whole text as grammars."""

from __future__ import annotations

from collections.abc import Iterable

from ninfer.constraints.ir import Class, Grammar, Node, Rep, alt, seq
from ninfer.constraints.regex import Chars, Concat, Repeat, parse
from ninfer.constraints.regex import Node as Tree


def choice(texts: Iterable[str]) -> Grammar:
    """Exactly these texts."""
    return Grammar({"root": alt(sorted(texts))})


def regular(pattern: str) -> Grammar:
    """The texts that match the whole pattern; anchors at its ends are redundant. Raises InvalidRegex."""
    return Grammar({"root": alt(_node(alternative.body) for alternative in parse(pattern))})


def _node(tree: Tree) -> Node:
    if isinstance(tree, Chars):
        return Class(tree.ranges)
    if isinstance(tree, Concat):
        return seq(*map(_node, tree.parts))
    if isinstance(tree, Repeat):
        return Rep(_node(tree.item), tree.low, tree.high)
    return alt(map(_node, tree.options))
