"""Grammars without rules and alternatives that lead nowhere, so that every viable prefix can be completed."""

from __future__ import annotations

from collections.abc import Iterator
from operator import is_

from ninfer.constraints.ir import EMPTY, NOTHING, Alt, Auto, Class, Grammar, Node, Ref, Rep, Seq, alt, seq
from ninfer.constraints.limits import MAX_COPIES, Work
from ninfer.errors import ConstraintLimit, UnsatisfiableSchema


def pruned(grammar: Grammar, work: Work) -> Grammar:
    """The same language without what cannot be completed or reached. Raises UnsatisfiableSchema when that is all."""
    done = productive(grammar, work)
    if grammar.root not in done:
        raise UnsatisfiableSchema("no text satisfies the constraint")
    rules: dict[str, Node] = {}
    pending = [grammar.root]
    while pending:
        name = pending.pop()
        if name not in rules:
            rules[name] = _kept(grammar.rules[name], done, 1, work)
            pending.extend(references(rules[name]))
    return Grammar(rules, grammar.root, grammar.free_form)


def productive(grammar: Grammar, work: Work) -> set[str]:
    """The rules that derive some finite text: the least fixpoint."""
    users: dict[str, list[str]] = {}
    size: dict[str, int] = {}
    for name, body in grammar.rules.items():
        used = list(references(body))
        size[name] = len(used) + 1
        for rule in set(used):
            users.setdefault(rule, []).append(name)
    done: set[str] = set()
    waiting = list(grammar.rules)
    while waiting:
        name = waiting.pop()
        work.spend(8 * size[name])
        if name not in done and _finite(grammar.rules[name], done):
            done.add(name)
            waiting.extend(users.get(name, ()))
    return done


def references(node: Node) -> Iterator[str]:
    """The rules a body names, with repetitions."""
    stack = [node]
    while stack:
        at = stack.pop()
        if isinstance(at, Ref):
            yield at.rule
        elif isinstance(at, Seq):
            stack.extend(at.parts)
        elif isinstance(at, Alt):
            stack.extend(at.options)
        elif isinstance(at, Rep):
            stack.append(at.item)


def _finite(node: Node, done: set[str]) -> bool:
    if isinstance(node, Ref):
        return node.rule in done
    if isinstance(node, Seq):
        return all(_finite(part, done) for part in node.parts)
    if isinstance(node, Alt):
        return any(_finite(option, done) for option in node.options)
    if isinstance(node, Rep):
        return node.low == 0 or _finite(node.item, done)
    if isinstance(node, Class):
        return bool(node.ranges)
    return not (isinstance(node, Auto) and node.dfa.empty)


def _kept(node: Node, done: set[str], copies: int, work: Work) -> Node:
    """The node without alternatives that cannot be completed; ``copies`` is how often repetitions write it out."""
    if copies > MAX_COPIES:
        raise ConstraintLimit(f"repetitions multiply to more than {MAX_COPIES} copies", limit="copies")
    work.spend(copies + 3)
    if isinstance(node, Seq):
        parts = [_kept(part, done, copies, work) for part in node.parts]
        return node if all(map(is_, parts, node.parts)) else seq(*parts)
    if isinstance(node, Alt):
        options = [o for option in node.options if (o := _kept(option, done, copies, work)) is not NOTHING]
        same = len(options) == len(node.options) and all(map(is_, options, node.options))
        return alt(options) if not same or not options else node
    if isinstance(node, Rep):
        times = max(1, node.low if node.high is None else node.high)
        item = _kept(node.item, done, copies * times, work)
        if item is NOTHING:
            return NOTHING if node.low else EMPTY
        return node if item is node.item else Rep(item, node.low, node.high)
    return node if _finite(node, done) else NOTHING
