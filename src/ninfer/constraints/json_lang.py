"""JSON texts as a Grammar: one rule for each reachable reduction, in one of two spellings.

Everything that repeats is right recursive or counted, objects take two rules a member ("nothing written yet" and
"something written"), and rules are shared by what they describe, so a grammar is linear in the schema's graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from ninfer.constraints.assertions import affirmed
from ninfer.constraints.branches import Claims, Finite, Listed, Numeric, Opaque, Textual, place
from ninfer.constraints.containers import array, members
from ninfer.constraints.graph import Graph, Settled
from ninfer.constraints.ir import NOTHING, Grammar, Node, Ref, alt, seq
from ninfer.constraints.limits import Work, placed
from ninfer.constraints.literals import Separators, separators, spell
from ninfer.constraints.multiples import multiples
from ninfer.constraints.numbers import integer, number
from ninfer.constraints.objects import Fields
from ninfer.constraints.reduce import Reducer
from ninfer.constraints.schema import load
from ninfer.constraints.source import read
from ninfer.constraints.strings import Automata
from ninfer.errors import UnsupportedSchema


class Writer:
    """Writes rules for the reductions of a graph, each when it is first referred to."""

    def __init__(self, graph: Graph, automata: Automata, spelling: Separators, prefix: str = "") -> None:
        self.graph = graph
        self.automata = automata
        self.work = automata.work
        self.spelling = spelling
        self.prefix = prefix
        self.comma, self.colon = separators(spelling)
        self.rules: dict[str, Node] = {}
        self._names: dict[Hashable, str] = {}
        self._pending: list[Claims] = []

    def grammar(self) -> Grammar:
        """The language of the graph's root."""
        root = self.value(self.graph.root)
        self.write()
        return Grammar(self.rules, root.rule)

    def write(self) -> None:
        """Write every rule referred to so far, and those they refer to."""
        while self._pending:
            claims = self._pending.pop()
            with placed(place(claims), work=False):
                options = [node for branch in self.graph.live(claims) for node in self.branch(branch, claims)]
            self.rules[self._names[claims]] = alt(options)

    def value(self, claims: Claims) -> Ref:
        """The values that satisfy the claims."""
        name = self._names.get(claims)
        if name is None:
            name = self._names[claims] = f"{self.prefix}v{len(self._names)}"
            self._pending.append(claims)
        return Ref(name)

    def string(self, branch: Textual) -> Ref:
        """A string of a branch, with its quotes."""
        return self._shared(branch, lambda: seq('"', self.automata.inside(branch), '"'))

    def fresh(self) -> str:
        """A name for the rules of one object or array."""
        name = f"{self.prefix}c{len(self._names)}"
        self._names[object()] = name
        return name

    def _shared(self, what: Hashable, make: Callable[[], Node]) -> Ref:
        name = self._names.get(what)
        if name is None:
            body = make()
            name = self._names[what] = f"{self.prefix}s{len(self._names)}"
            self.rules[name] = body
        return Ref(name)

    def branch(self, branch: Settled, claims: Claims) -> list[Node]:
        """The texts of one branch of the claims, as alternatives."""
        self.work.spend(50)
        if isinstance(branch, Finite):
            self.work.spend(10 * len(branch.values))
            return [seq(spell(value, self.spelling)) for value in branch.values]
        if isinstance(branch, Numeric):
            return [self._shared(branch, lambda: self._number(branch, claims))]
        if isinstance(branch, Textual):
            return [self.string(branch)]
        if isinstance(branch, Listed):
            return [array(self, branch, claims)]
        if isinstance(branch, Fields):
            return [members(self, branch, claims)]
        assert isinstance(branch, Opaque)
        raise UnsupportedSchema(
            f"values that violate {branch.keyword!r} cannot be described to be generated",
            pointer=branch.claim.schema.at(branch.keyword), keyword=branch.keyword,
        )  # fmt: skip

    def _number(self, branch: Numeric, claims: Claims) -> Node:
        self.work.spend(600 if branch.integral else 6000)
        if not branch.integral:
            node = number(branch.bounds)
        elif branch.divisor > 1:
            node = multiples(branch.bounds, branch.divisor, self.work)
        else:
            node = integer(branch.bounds)
        if node == NOTHING:
            raise UnsupportedSchema(
                "the numbers inside the bounds cannot be written: an integer has 64 bits, another number 17 digits",
                pointer=place(claims),
            )  # fmt: skip
        return node


def schema_grammar(source: str, work: Work, spelling: Separators = "compact") -> Grammar:
    """The JSON texts that satisfy the JSON Schema of a source text.

    Raises InvalidSchema, UnsupportedSchema, UnsatisfiableSchema or ConstraintLimit.
    """
    reducer = Reducer(work)
    graph = Graph(affirmed(load(read(source))), reducer)
    return Writer(graph, reducer.automata, spelling).grammar()
