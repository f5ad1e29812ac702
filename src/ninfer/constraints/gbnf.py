"""GBNF text to Grammar IR, or InvalidGrammar with line and column.

Rules ``name ::= body``, each at the start of a line; literals, character classes, groups, ``* + ? {m} {m,} {m,n}``,
recursion of any kind, ``Token(id, ...)``, ``ExcludeToken(id, ...)`` and one trailing ``(= ...)`` annotation a rule. The
annotation describes what may follow the rule; the language is the bodies alone, so it is checked and dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ninfer.constraints.chars import Ranges, complement, normalise, union
from ninfer.constraints.ir import Class, Grammar, Lit, Node, NotTok, Ref, Rep, Tok, alt, optional, seq
from ninfer.constraints.limits import MAX_COPIES, MAX_GRAMMAR_NESTING, MAX_GRAMMAR_REPEAT, Work
from ninfer.constraints.prune import productive
from ninfer.errors import ConstraintLimit, InvalidGrammar, UnsatisfiableSchema

_ESCAPES = {
    "n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "e": "\x1b", '"': '"',
    "'": "'", "\\": "\\", "/": "/", "?": "?",
}  # fmt: skip
_CLASS_ESCAPES = {c: c for c in "^$.*+()[]{}|-"} | _ESCAPES
_NAME_START = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz_-.")
_NAME = _NAME_START | frozenset("0123456789")
_CALLS = frozenset({"Token", "ExcludeToken"})
_REFUSED = frozenset({"TagDispatch", "TokenTagDispatch", "Regex", "Substring"})


def parse(text: str, work: Work | None = None, *, is_text_token: Callable[[int], bool] | None = None) -> Grammar:
    """Parse a grammar whose entry is ``root``.

    ``is_text_token`` says which ids ``Token`` and ``ExcludeToken`` may name; without it any id >= 0 is taken. Raises
    InvalidGrammar, or UnsatisfiableSchema when ``root`` has no finite derivation.
    """
    grammar = _Parser(text, is_text_token).grammar()
    if "root" not in productive(grammar, work or Work()):
        raise UnsatisfiableSchema("the grammar's root has no finite text")
    return grammar


@dataclass(slots=True)
class _Group:
    """Alternatives being read: those that are complete, and the parts of the current one."""

    start: int
    options: list[Node] = field(default_factory=list)
    parts: list[Node] = field(default_factory=list)
    begun: int = 0
    """Where the current alternative begins."""
    copies: int = 1
    """How often the most repeated part is written out."""


class _Parser:
    def __init__(self, text: str, is_text_token: Callable[[int], bool] | None) -> None:
        self.text = text
        self.at = 0
        self.rules: dict[str, Node] = {}
        self.is_text_token = is_text_token
        self.references: list[tuple[str, int]] = []

    def error(self, message: str, at: int | None = None) -> InvalidGrammar:
        line, column = self.position(self.at if at is None else at)
        return InvalidGrammar(message, line=line, column=column)

    def position(self, at: int) -> tuple[int, int]:
        """Line and column, from 1."""
        return self.text.count("\n", 0, at) + 1, at - self.text.rfind("\n", 0, at)

    def peek(self) -> str:
        return self.text[self.at] if self.at < len(self.text) else ""

    def space(self, *, lines: bool) -> None:
        """Skip blanks and comments, and line ends where ``lines``."""
        while char := self.peek():
            if char == "#":
                while self.peek() not in ("", "\n"):
                    self.at += 1
            elif char in " \t\r" or (char == "\n" and lines):
                self.at += 1
            else:
                return

    def grammar(self) -> Grammar:
        for at, char in enumerate(self.text):
            if char == "\0":
                raise self.error("a NUL character", at)
            if 0xD800 <= ord(char) < 0xE000:
                raise self.error("a surrogate is not a character", at)
        self.space(lines=True)
        while self.peek():
            start = self.at
            if start and self.text[start - 1] != "\n":
                raise self.error(f"unexpected {self.peek()!r}")
            name = self.name()
            self.space(lines=False)
            if self.peek() == "[":
                raise self.error("rule options are not supported")
            if not self.text.startswith("::=", self.at):
                raise self.error("expected '::='")
            if name in self.rules:
                raise self.error(f"rule {name!r} is defined twice", start)
            self.at += 3
            self.rules[name] = self.body(closing="")
            self.annotation()
            self.space(lines=True)
        if "root" not in self.rules:
            raise InvalidGrammar("there is no rule 'root'", line=1, column=1)
        for name, at in self.references:
            if name not in self.rules:
                raise self.error(f"rule {name!r} is not defined", at)
        return Grammar(self.rules, free_form=True)

    def name(self) -> str:
        start = self.at
        if self.peek() not in _NAME_START or not self.peek():
            raise self.error("expected a rule name")
        while self.peek() and self.peek() in _NAME:
            self.at += 1
        return self.text[start : self.at]

    def next_rule(self) -> bool:
        """Whether a rule definition begins here: a name at the start of a line, then ``::=``."""
        if self.at and self.text[self.at - 1] != "\n":
            return False
        end = self.at
        while end < len(self.text) and self.text[end] in _NAME:
            end += 1
        rest = self.text[end : end + 200].lstrip(" \t")
        return end > self.at and rest.startswith(("::=", "["))

    def body(self, *, closing: str) -> Node:
        """Alternatives up to the end of the rule, or to the ``)`` that closes an annotation."""
        self.space(lines=True)
        stack = [_Group(self.at, begun=self.at)]
        while True:
            group, char = stack[-1], self.peek()
            ends = not char or char == ")" or self.text.startswith("(=", self.at)
            if ends or char == "|" or (len(stack) == 1 and not closing and self.next_rule()):
                if not group.parts:
                    raise self.error('an alternative is empty; write "" for the empty text', group.begun)
                group.options.append(seq(*group.parts))
                group.parts = []
                if char == "|":
                    self.at += 1
                    self.space(lines=True)
                    group.begun = self.at
                    continue
                if len(stack) == 1:
                    return alt(group.options)
                if char != ")":
                    raise self.error("unbalanced '('", group.start)
                self.at += 1
                stack.pop()
                node, copies = self.shallow(alt(group.options), len(stack)), group.copies
            elif char == "(":
                start = self.at
                self.at += 1
                self.space(lines=True)
                if self.peek() != ")":
                    if len(stack) > MAX_GRAMMAR_NESTING:
                        raise self.error("groups are nested too deeply", start)
                    stack.append(_Group(start, begun=self.at))
                    continue
                self.at += 1
                node, copies = seq(), 1
            else:
                node, copies = self.element(), 1
            self.space(lines=False)
            at = self.at
            node, times = self.repeated(node)
            copies *= times
            if copies > MAX_COPIES:
                line, column = self.position(at)
                raise ConstraintLimit(f"repetitions multiply to more than {MAX_COPIES} copies", limit="copies",
                                      line=line, column=column)  # fmt: skip
            stack[-1].copies = max(stack[-1].copies, copies)
            stack[-1].parts.append(node)
            self.space(lines=True)

    def shallow(self, node: Node, depth: int) -> Node:
        """A group, as a rule of its own every so often, so that no body is deep. User names hold no parenthesis."""
        if depth % 32:
            return node
        name = f"({len(self.rules)}"
        self.rules[name] = node
        return Ref(name)

    def annotation(self) -> None:
        """Parse and drop ``(= ...)``."""
        if self.text.startswith("(=", self.at):
            at = self.at
            self.at += 2
            self.body(closing=")")
            if self.peek() != ")":
                raise self.error("unbalanced '(='", at)
            self.at += 1
            self.space(lines=True)
            if self.peek() and not self.next_rule():
                raise self.error("'(= ...)' must end its rule", at)

    def repeated(self, node: Node) -> tuple[Node, int]:
        """The node with the quantifier that follows, if one does, and how often that writes it out."""
        at, char, times = self.at, self.peek(), 1
        if char == "*":
            self.at += 1
            node = Rep(node, 0, None)
        elif char == "+":
            self.at += 1
            node = Rep(node, 1, None)
        elif char == "?":
            self.at += 1
            node = optional(node)
        elif char == "{":
            self.at += 1
            low = self.number()
            high: int | None = low
            if self.peek() == ",":
                self.at += 1
                self.space(lines=False)
                high = None if self.peek() == "}" else self.number()
            if self.peek() != "}":
                raise self.error("expected '}'")
            self.at += 1
            if high is not None and high < low:
                raise self.error("the counts are reversed", at)
            node, times = Rep(node, low, high), max(1, low if high is None else high)
        else:
            return node, 1
        self.space(lines=False)
        if self.peek() and self.peek() in "*+?{":
            raise self.error("a quantifier follows a quantifier")
        return node, times

    def number(self) -> int:
        self.space(lines=False)
        start = self.at
        while "0" <= self.peek() <= "9":
            self.at += 1
        digits = self.text[start : self.at]
        if not digits:
            raise self.error("expected a number")
        value = int(digits) if len(digits) < 10 else MAX_GRAMMAR_REPEAT + 1
        if value > MAX_GRAMMAR_REPEAT:
            raise self.error(f"a count above {MAX_GRAMMAR_REPEAT}", start)
        self.space(lines=False)
        return value

    def element(self) -> Node:
        start, char = self.at, self.peek()
        if char == '"':
            return self.literal()
        if char == "[":
            return self.character_class()
        if char in _NAME_START:
            name = self.name()
            if self.peek() == "(" and not self.text.startswith("(=", self.at):
                return self.call(name, start)
            if name in _CALLS | _REFUSED:
                raise self.error(f"{name} is reserved", start)
            self.references.append((name, start))
            return Ref(name)
        raise self.error(f"unexpected {char!r}")

    def call(self, name: str, start: int) -> Node:
        if name not in _CALLS:
            raise self.error(f"{name}(...) is not supported", start)
        self.at += 1
        ids = []
        while True:
            self.space(lines=True)
            at = self.at
            while "0" <= self.peek() <= "9":
                self.at += 1
            digits = self.text[at : self.at]
            if not digits or len(digits) > 9:
                raise self.error("expected a token id", at)
            if self.is_text_token is not None and not self.is_text_token(int(digits)):
                raise self.error(f"{digits} is not an ordinary text token", at)
            ids.append(int(digits))
            self.space(lines=True)
            if self.peek() == ")":
                self.at += 1
                return (Tok if name == "Token" else NotTok)(tuple(ids))
            if self.peek() != ",":
                raise self.error("expected ',' or ')'")
            self.at += 1

    def literal(self) -> Node:
        start = self.at
        self.at += 1
        out = []
        while self.peek() != '"':
            if self.peek() in ("", "\n"):
                raise self.error("unterminated literal", start)
            out.append(self.character(_ESCAPES))
        self.at += 1
        return Lit("".join(out)) if out else seq()

    def character_class(self) -> Node:
        start = self.at
        self.at += 1
        negated = self.peek() == "^"
        self.at += negated
        items: list[Ranges] = []
        while self.peek() != "]":
            if self.peek() in ("", "\n"):
                raise self.error("unterminated class", start)
            at = self.at
            low = ord(self.character(_CLASS_ESCAPES))
            high = low
            if self.peek() == "-" and self.text[self.at + 1 : self.at + 2] not in ("", "]"):
                self.at += 1
                high = ord(self.character(_CLASS_ESCAPES))
                if high < low:
                    raise self.error("the range is reversed", at)
            items.append(normalise([(low, high + 1)]))
        self.at += 1
        if not items and not negated:
            raise self.error("an empty class", start)
        ranges = union(*items)
        return Class(complement(ranges) if negated else ranges)

    def character(self, escapes: dict[str, str]) -> str:
        start, char = self.at, self.peek()
        self.at += 1
        if char != "\\":
            return char
        kind = self.peek()
        self.at += 1
        digits = {"x": 2, "u": 4, "U": 8}.get(kind)
        if digits is None:
            if not kind or kind not in escapes:
                raise self.error(f"the escape \\{kind} is not supported", start)
            return escapes[kind]
        code = self.text[self.at : self.at + digits]
        if len(code) < digits or any(c not in "0123456789abcdefABCDEF" for c in code):
            raise self.error(f"expected {digits} hexadecimal digits", start)
        self.at += digits
        value = int(code, 16)
        if value > 0x10FFFF or 0xD800 <= value < 0xE000:
            raise self.error("not a Unicode scalar value", start)
        return chr(value)
