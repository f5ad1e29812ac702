"""Grammar IR to the text XGrammar compiles: the same language, in the shapes whose masks are cheap.

A mask costs by the parser states it looks at. A repeated group over broad classes is the worst shape, a rule that calls
itself last the best, so repetitions become right recursion where a class is broad, and an automaton becomes one rule
per state. Rules have generated names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ninfer.constraints.automata import Dfa
from ninfer.constraints.chars import END, SURROGATES, Ranges
from ninfer.constraints.ir import Alt, Class, Counted, Grammar, Lit, Node, NotTok, Ref, Rep, Seq, Tok
from ninfer.constraints.limits import MAX_EMITTED_BYTES
from ninfer.errors import ConstraintLimit, InvariantError

_BROAD = 64
"""ASCII characters from which a class counts as broad."""


def emit(grammar: Grammar, reserved: Sequence[int] = ()) -> str:
    """The grammar's text, with entry ``root``. ``reserved``: ids that ``NotTok`` must never admit.

    Every rule must have finite text. Raises ConstraintLimit above MAX_EMITTED_BYTES.
    """
    return _Emitter(grammar, reserved).text()


class _Emitter:
    def __init__(self, grammar: Grammar, reserved: Sequence[int]) -> None:
        self.grammar = grammar
        self.reserved = reserved
        self.names: dict[str, str] = {}
        self.waiting: list[str] = []
        self.automata: dict[int, str] = {}
        self.loops: dict[Node, str] = {}
        self.lines: list[str] = []
        self.size = 0

    def text(self) -> str:
        self.rule("root", self.reference(self.grammar.root))
        while self.waiting:
            name = self.waiting.pop()
            self.rule(self.names[name], self.node(self.grammar.rules[name], top=True))
        return "".join(self.lines)

    def rule(self, name: str, body: str) -> None:
        line = f"{name} ::= {body}\n"
        self.size += len(line)
        if self.size > MAX_EMITTED_BYTES:
            raise ConstraintLimit(f"the grammar takes more than {MAX_EMITTED_BYTES} bytes", limit="emitted")
        self.lines.append(line)

    def reference(self, rule: str) -> str:
        if rule not in self.names:
            self.names[rule] = f"r{len(self.names)}"
            self.waiting.append(rule)
        return self.names[rule]

    def node(self, node: Node, *, top: bool = False) -> str:
        """The expression of a node; ``top``: it stands alone, so that alternatives need no parentheses."""
        if isinstance(node, Lit):
            return f'"{"".join(map(_char, node.text))}"'
        if isinstance(node, Class):
            return char_class(node.ranges)
        if isinstance(node, Seq):
            return " ".join(map(self.node, node.parts)) or '""'
        if isinstance(node, Alt):
            options = " | ".join(map(self.node, node.options)) or "[]"
            return options if top else f"({options})"
        if isinstance(node, Rep):
            return self.repetition(node)
        if isinstance(node, Ref):
            return self.reference(node.rule)
        if isinstance(node, Tok):
            return f"Token({', '.join(map(str, node.ids))})"
        if isinstance(node, NotTok):
            return f"ExcludeToken({', '.join(map(str, sorted({*node.ids, *self.reserved})))})"
        if isinstance(node, Counted) or node.spelling != "raw":
            raise InvariantError("the insides of JSON strings are not emitted")
        return self.automaton(node.dfa)

    def repetition(self, node: Rep) -> str:
        item = node.item
        if node.high == 0:
            return '""'
        if node.high is None and _is_broad_group(item):
            copies = [self.node(item)] * node.low
            return " ".join([*copies, self.loop(item)])
        body = self.node(item)
        if isinstance(item, Seq | Rep | Lit):
            body = f"({body})"
        if node.high is None:
            count = "*" if node.low == 0 else "+" if node.low == 1 else f"{{{node.low},}}"
        else:
            count = f"{{{node.low},{node.high}}}"
        return body + count

    def loop(self, item: Node) -> str:
        """A rule for any number of copies of an item."""
        if item not in self.loops:
            name = self.loops[item] = f"l{len(self.loops)}"
            options = item.options if isinstance(item, Alt) else (item,)
            self.rule(name, " | ".join(['""', *(f"{self.node(option)} {name}" for option in options)]))
        return self.loops[item]

    def automaton(self, dfa: Dfa) -> str:
        """Right-linear rules, one per state."""
        if dfa.empty:
            return "[]"
        if id(dfa) not in self.automata:
            prefix = self.automata[id(dfa)] = f"d{len(self.automata)}"
            for state in range(len(dfa.trans)):
                self.rule(f"{prefix}_{state}", " | ".join(_edges(dfa, state, prefix)))
        return f"{self.automata[id(dfa)]}_0"


def _edges(dfa: Dfa, state: int, prefix: str) -> Iterable[str]:
    if dfa.accept[state]:
        yield '""'
    for target, ranges in dfa.edges(state):
        yield f"{char_class(ranges)} {prefix}_{target}"


def _is_broad_group(node: Node) -> bool:
    """Whether a repeated group reads a broad class and something else."""
    if isinstance(node, Seq):
        return any(isinstance(part, Class) and _is_broad(part.ranges) for part in node.parts)
    if isinstance(node, Alt):
        return any((isinstance(o, Class) and _is_broad(o.ranges)) or _is_broad_group(o) for o in node.options)
    return False


def _is_broad(ranges: Ranges) -> bool:
    return sum(max(0, min(high, 0x80) - low) for low, high in ranges) > _BROAD


def char_class(ranges: Ranges) -> str:
    """A class, as a complement where that is shorter. A complement names the surrogates, or it would admit them."""
    if not ranges:
        return "[]"
    outside = []
    at = 0
    for low, high in [*ranges, (END, END)]:
        if at < low:
            outside.append((at, low))
        at = high
    if len(outside) <= len(ranges):
        covered = any(low <= SURROGATES[0] and SURROGATES[1] <= high for low, high in outside)
        pieces = outside if covered else [*outside, SURROGATES]
        return "[^" + "".join(map(_range, pieces)) + "]"
    return "[" + "".join(map(_range, ranges)) + "]"


def _range(ends: tuple[int, int]) -> str:
    low, high = ends[0], ends[1] - 1
    return _char(chr(low)) if low == high else f"{_char(chr(low))}-{_char(chr(high))}"


def _char(char: str) -> str:
    """A character of a literal or class."""
    return char if char.isascii() and (char.isalnum() or char in " _") else f"\\U{ord(char):08X}"
