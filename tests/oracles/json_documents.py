"""Independent views of JSON languages: how a value may be written, whether it is valid, texts drawn from a grammar."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from random import Random
from typing import Any

import jsonschema

from ninfer.constraints.ir import (
    ESCAPED,
    Alt,
    Auto,
    Class,
    Counted,
    Grammar,
    Lit,
    Node,
    Ref,
    Rep,
    Seq,
)


def compact(value: Any) -> str:
    """The spelling of generated JSON."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def orders(value: Any) -> Iterator[Any]:
    """The value with its members in every order, integral floats as integers."""
    if isinstance(value, dict):
        for members in itertools.permutations(value.items()):
            for values in itertools.product(*(list(orders(v)) for _, v in members)):
                yield {name: v for (name, _), v in zip(members, values)}
    elif isinstance(value, list):
        for values in itertools.product(*(list(orders(v)) for v in value)):
            yield list(values)
    elif isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        yield int(value)
    else:
        yield value


def validator(schema: Any) -> Any:
    """A jsonschema validator of the dialect the schema names."""
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    return kind(schema)


def sample(grammar: Grammar, random: Random, size: int = 60) -> str:
    """A text of the grammar; once ``size`` choices were made the shortest way out is taken."""
    return next(samples(grammar, random, size))


def samples(grammar: Grammar, random: Random, size: int = 60) -> Iterator[str]:
    """Texts of the grammar without end."""
    heights = _heights(grammar)
    while True:
        yield _sample(grammar, heights, random, size)


def _sample(grammar: Grammar, heights: dict[str, int], random: Random, size: int) -> str:
    out: list[str] = []
    left = size
    stack: list[Node] = [Ref(grammar.root)]
    while stack:
        node = stack.pop()
        left -= 1
        if isinstance(node, Lit):
            out.append(node.text)
        elif isinstance(node, Class):
            out.append(_character(node.ranges, random))
        elif isinstance(node, Seq):
            stack.extend(reversed(node.parts))
        elif isinstance(node, Ref):
            stack.append(grammar.rules[node.rule])
        elif isinstance(node, Alt):
            options = node.options
            if left < 0:
                options = (min(options, key=lambda n: _height(n, heights)),)
            stack.append(random.choice(options))
        elif isinstance(node, Rep):
            more = 3 if left > 0 else 0
            high = node.low + more if node.high is None else min(node.high, node.low + more)
            stack.extend([node.item] * random.randint(node.low, high))
        elif isinstance(node, Counted):
            high = node.low + 3 if node.high is None else min(node.high, node.low + 3)
            out += [_json(_character(((0, 0xD800), (0xE000, 0x110000)), random))
                    for _ in range(random.randint(node.low, high))]  # fmt: skip
        else:
            assert isinstance(node, Auto)
            text = _walk(node.dfa, random)
            out.append("".join(map(_json, text)) if node.spelling == "json" else text)
    return "".join(out)


def _json(char: str) -> str:
    return "\\" + ESCAPED[ord(char)] if ord(char) in ESCAPED else char


def _character(ranges: Any, random: Random) -> str:
    low, high = random.choice(ranges)
    return chr(random.choice((low, high - 1, random.randrange(low, high), min(max(0x61, low), high - 1))))


def _walk(dfa: Any, random: Random) -> str:
    distance = {s: 0 for s in range(len(dfa.trans)) if dfa.accept[s]}
    while len(distance) < len(dfa.trans):
        for state in range(len(dfa.trans)):
            known = [distance[t] for t, _ in dfa.edges(state) if t in distance]
            if state not in distance and known:
                distance[state] = 1 + min(known)
    text, state, left = "", 0, random.randrange(8)
    while not (dfa.accept[state] and (left <= 0 or not dfa.edges(state))):
        left -= 1
        edges = dfa.edges(state)
        if left < 0:
            edges = [min(edges, key=lambda e: distance[e[0]])]
        state, ranges = random.choice(edges)
        text += _character(ranges, random)
    return text


def _heights(grammar: Grammar) -> dict[str, int]:
    """How deep the shallowest derivation of each rule is."""
    heights: dict[str, int] = {}
    changed = True
    while changed:
        changed = False
        for name, body in grammar.rules.items():
            height = 1 + _height(body, heights)
            if height < heights.get(name, 1 << 20):
                heights[name] = height
                changed = True
    return heights


def _height(node: Node, heights: dict[str, int]) -> int:
    if isinstance(node, Ref):
        return heights.get(node.rule, 1 << 20)
    if isinstance(node, Seq):
        return max((_height(p, heights) for p in node.parts), default=0)
    if isinstance(node, Alt):
        return min((_height(o, heights) for o in node.options), default=1 << 20)
    if isinstance(node, Rep):
        return _height(node.item, heights) if node.low else 0
    return 0
