"""Grammar IR: the one form every constraint becomes, before it is recognised or emitted.

A grammar is a set of named rules over Unicode scalar values. Automata stand for what context-free text cannot express
compactly; tokens stand for ids that have no text of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from ninfer.constraints.automata import Dfa
from ninfer.constraints.chars import Ranges, normalise

Spelling = Literal["raw", "json"]
"""How an automaton's characters are written: as they are, or as the inside of a canonical JSON string."""


@dataclass(frozen=True, slots=True)
class Lit:
    """Exactly this text."""

    text: str


@dataclass(frozen=True, slots=True)
class Class:
    """One character of a set."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Seq:
    """Parts in order; no parts is the empty text."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Alt:
    """Any one of the options; no options is the empty language."""

    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Rep:
    """``low`` to ``high`` copies; ``high`` None is unbounded."""

    item: Node
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Ref:
    """The language of a rule."""

    rule: str


@dataclass(frozen=True, slots=True)
class Tok:
    """Exactly one of these token ids."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NotTok:
    """One ordinary text token other than these ids."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Auto:
    """The spelled texts of an automaton, without quotes."""

    dfa: Dfa
    spelling: Spelling


@dataclass(frozen=True, slots=True)
class Counted:
    """``low`` to ``high`` characters inside a JSON string, without the quotes; every escape counts once."""

    low: int
    high: int | None


Node = Lit | Class | Seq | Alt | Rep | Ref | Tok | NotTok | Auto | Counted

EMPTY = Seq(())
NOTHING = Alt(())


@dataclass(slots=True)
class Grammar:
    """Named rules and where to begin. free_form: a caller wrote them one by one, so that they may be ambiguous,
    left-recursive, and have broad classes anywhere."""

    rules: dict[str, Node] = field(default_factory=dict)
    root: str = "root"
    free_form: bool = False


def seq(*parts: Node | str) -> Node:
    """A sequence, flattened, with adjacent literals joined."""
    flat: list[Node] = []
    for part in parts:
        node = Lit(part) if isinstance(part, str) else part
        for piece in node.parts if isinstance(node, Seq) else (node,):
            if isinstance(piece, Lit) and not piece.text:
                continue
            if isinstance(piece, Lit) and flat and isinstance(flat[-1], Lit):
                flat[-1] = Lit(flat[-1].text + piece.text)
            else:
                flat.append(piece)
    if any(node == NOTHING for node in flat if not isinstance(node, Auto)):
        return NOTHING
    return flat[0] if len(flat) == 1 else Seq(tuple(flat))


def alt(options: Iterable[Node | str]) -> Node:
    """A union, flattened, without duplicates, in order."""
    flat: dict[Node, None] = {}
    for option in options:
        node = Lit(option) if isinstance(option, str) else option
        for piece in node.options if isinstance(node, Alt) else (node,):
            flat[piece] = None
    if not flat:
        return NOTHING
    return next(iter(flat)) if len(flat) == 1 else Alt(tuple(flat))


def optional(node: Node | str) -> Node:
    return alt((node, EMPTY))


# What a canonical JSON string must escape, and how each is written after the backslash.
SHORT_ESCAPES = {0x22: '"', 0x5C: "\\", 0x08: "b", 0x0C: "f", 0x0A: "n", 0x0D: "r", 0x09: "t"}
ESCAPED: dict[int, str] = {
    code: SHORT_ESCAPES.get(code, f"u{code:04x}") for code in (*range(0x20), 0x22, 0x5C)
}  # fmt: skip
DIRECT: Ranges = normalise([(0x20, 0x22), (0x23, 0x5C), (0x5D, 0x110000)])
"""Characters a canonical JSON string writes as themselves."""


def json_spelled(text: str) -> str:
    """The canonical JSON spelling of a string's inside."""
    return "".join("\\" + ESCAPED[ord(c)] if ord(c) in ESCAPED else c for c in text)
