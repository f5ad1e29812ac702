"""ECMAScript regular expressions, the regular part: text to a syntax tree, or InvalidRegex with the offset.

No captures, no assertions other than ``^`` and ``$`` at the ends of the pattern or of a top-level alternative. Greedy
and lazy quantifiers describe the same language. Characters are Unicode scalar values; offsets count code points.
"""

from __future__ import annotations

from dataclasses import dataclass

from ninfer.constraints.chars import DIGIT, DOT, SPACE, WORD, Ranges, complement, normalise, single, union
from ninfer.constraints.limits import MAX_COPIES, MAX_REGEX_NESTING, MAX_REPEAT
from ninfer.errors import ConstraintLimit, InvalidRegex


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of a set."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Concat:
    """Parts in order; no parts is the empty text."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Union:
    """Any one of the options."""

    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """``low`` to ``high`` copies; ``high`` None is unbounded."""

    item: Node
    low: int
    high: int | None


Node = Chars | Concat | Union | Repeat


@dataclass(frozen=True, slots=True)
class Alternative:
    """A top-level alternative and whether it is anchored at the start and the end."""

    body: Node
    start: bool
    end: bool


Pattern = tuple[Alternative, ...]

_CONTROL = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}
_CLASS = {
    "d": DIGIT, "D": complement(DIGIT), "w": WORD, "W": complement(WORD), "s": SPACE, "S": complement(SPACE),
}  # fmt: skip
_PUNCTUATION = frozenset("^$\\.*+?()[]{}|/-")


def parse(pattern: str) -> Pattern:
    """Parse a pattern. Raises InvalidRegex, or ConstraintLimit for repetitions that multiply."""
    for offset, char in enumerate(pattern):
        if 0xD800 <= ord(char) < 0xE000:
            raise InvalidRegex("a surrogate is not a character", offset=offset)
    return _Parser(pattern).pattern()


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.depth = 0
        self.copies = 1
        """How often the most repeated part of the present group is written out."""

    def peek(self) -> str:
        return self.text[self.at] if self.at < len(self.text) else ""

    def take(self, char: str) -> bool:
        if self.peek() != char:
            return False
        self.at += 1
        return True

    def pattern(self) -> Pattern:
        alternatives = [self.alternative()]
        while self.take("|"):
            alternatives.append(self.alternative())
        if self.at < len(self.text):
            raise InvalidRegex("unbalanced ')'", offset=self.at)
        return tuple(alternatives)

    def alternative(self) -> Alternative:
        start = self.take("^")
        body = self.sequence(top=True)
        end = self.take("$")
        if end and self.peek() not in ("", "|"):
            raise InvalidRegex("'$' is only supported at the end of a top-level alternative", offset=self.at - 1)
        return Alternative(body, start, end)

    def sequence(self, *, top: bool = False) -> Node:
        parts: list[Node] = []
        while (char := self.peek()) and char not in "|)":
            if char == "$" and top:
                break
            parts.append(self.quantified())
        return parts[0] if len(parts) == 1 else Concat(tuple(parts))

    def quantified(self) -> Node:
        around, self.copies = self.copies, 1
        item = self.atom()
        at = self.at
        bounds = self.quantifier()
        if bounds is None:
            self.copies = max(self.copies, around)
            return item
        self.take("?")
        if self.peek() and self.peek() in "*+?{":
            raise InvalidRegex("a quantifier follows a quantifier", offset=self.at)
        low, high = bounds
        if high is not None and high < low:
            raise InvalidRegex("the counts are reversed", offset=at)
        if max(low, high or 0) > MAX_REPEAT:
            raise InvalidRegex(f"a count above {MAX_REPEAT}", offset=at)
        self.copies *= max(1, low if high is None else high)
        if self.copies > MAX_COPIES:
            raise ConstraintLimit(f"repetitions multiply to more than {MAX_COPIES} copies", limit="copies", offset=at)
        self.copies = max(self.copies, around)
        return Repeat(item, low, high)

    def quantifier(self) -> tuple[int, int | None] | None:
        if self.take("*"):
            return 0, None
        if self.take("+"):
            return 1, None
        if self.take("?"):
            return 0, 1
        if self.peek() != "{":
            return None
        start = self.at
        self.at += 1
        low = self.number()
        high: int | None = low
        if self.take(","):
            high = None if self.peek() == "}" else self.number()
        if low is None or not self.take("}"):
            raise InvalidRegex("'{' does not begin a count", offset=start)
        return low, high

    def number(self) -> int | None:
        start = self.at
        while "0" <= self.peek() <= "9":
            self.at += 1
        digits = self.text[start : self.at]
        # Anything longer is above every limit; int() of megabytes of digits would not end soon.
        return int(digits[:9]) if len(digits) <= 9 and digits else (10**9 if digits else None)

    def atom(self) -> Node:
        offset, char = self.at, self.peek()
        self.at += 1
        if char == ".":
            return Chars(DOT)
        if char == "(":
            return self.group(offset)
        if char == "[":
            return Chars(self.character_class(offset))
        if char == "\\":
            return Chars(self.escape(offset))
        if char in "^$":
            raise InvalidRegex(f"{char!r} is only supported at the ends of a top-level alternative", offset=offset)
        if char in "*+?":
            raise InvalidRegex("nothing to repeat", offset=offset)
        if char in "{}]":
            raise InvalidRegex(f"{char!r} must be escaped", offset=offset)
        return Chars(single(char))

    def group(self, offset: int) -> Node:
        if self.take("?") and not self.take(":"):
            if not self.take("<") or self.peek() in ("=", "!"):
                raise InvalidRegex("look-around and inline flags are not supported", offset=offset)
            name = self.at
            while self.peek() not in ("", ">"):
                self.at += 1
            if not self.text[name : self.at].isidentifier() or not self.take(">"):
                raise InvalidRegex("a group name is malformed", offset=offset)
        self.depth += 1
        if self.depth > MAX_REGEX_NESTING:
            raise InvalidRegex("groups are nested too deeply", offset=offset)
        options = [self.sequence()]
        while self.take("|"):
            options.append(self.sequence())
        if not self.take(")"):
            raise InvalidRegex("unbalanced '('", offset=offset)
        self.depth -= 1
        return options[0] if len(options) == 1 else Union(tuple(options))

    def character_class(self, offset: int) -> Ranges:
        negated = self.take("^")
        items: list[Ranges] = []
        while self.peek() != "]":
            if not self.peek():
                raise InvalidRegex("unbalanced '['", offset=offset)
            start = self.at
            low = self.class_item()
            if self.peek() == "-" and self.text[self.at + 1 : self.at + 2] not in ("", "]"):
                self.at += 1
                high = self.class_item()
                if _size(low) != 1 or _size(high) != 1:
                    raise InvalidRegex("a range needs single characters at its ends", offset=start)
                if low[0][0] > high[0][0]:
                    raise InvalidRegex("the range is reversed", offset=start)
                items.append(normalise([(low[0][0], high[0][1])]))
            else:
                items.append(low)
        self.at += 1
        if not items:
            raise InvalidRegex("an empty class", offset=offset)
        ranges = union(*items)
        ranges = complement(ranges) if negated else ranges
        if not ranges:
            raise InvalidRegex("a class without characters", offset=offset)
        return ranges

    def class_item(self) -> Ranges:
        offset, char = self.at, self.peek()
        self.at += 1
        return self.escape(offset) if char == "\\" else single(char)

    def escape(self, offset: int) -> Ranges:
        char = self.peek()
        self.at += 1
        if char in _CLASS:
            return _CLASS[char]
        if char in _CONTROL:
            return single(_CONTROL[char])
        if char == "0" and not self.peek().isdigit():
            return single("\0")
        if char == "c" and self.peek().isascii() and self.peek().isalpha():
            self.at += 1
            return single(chr(ord(self.text[self.at - 1]) % 32))
        if char == "x":
            return self.code_point(2, offset)
        if char == "u":
            return self.code_point(4, offset)
        if char and char in _PUNCTUATION:
            return single(char)
        raise InvalidRegex(f"the escape \\{char} is not supported", offset=offset)

    def code_point(self, digits: int, offset: int) -> Ranges:
        text = self.text[self.at : self.at + digits]
        if len(text) < digits or any(c not in "0123456789abcdefABCDEF" for c in text):
            raise InvalidRegex(f"expected {digits} hexadecimal digits", offset=offset)
        self.at += digits
        code = int(text, 16)
        if 0xD800 <= code < 0xE000:
            raise InvalidRegex("a surrogate is not a character", offset=offset)
        return normalise([(code, code + 1)])


def _size(ranges: Ranges) -> int:
    return sum(high - low for low, high in ranges)
