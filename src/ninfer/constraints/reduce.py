"""Schemas as unions of branches: intersections distributed, references followed only where a value is reached.

Every list of claims has one reduction, computed once; claims about members and items stay lists of claims until asked
for, so a recursive schema reduces to a finite graph.
"""

from __future__ import annotations

from collections.abc import Iterable

from ninfer.constraints.assertions import ANYTHING
from ninfer.constraints.branches import Branch, Claim, Claims, Finite, Keyed, Listed, Names, Textual, met, place
from ninfer.constraints.candidates import Candidates
from ninfer.constraints.denials import absent, denied
from ninfer.constraints.limits import MAX_INTERSECTIONS, Work, placed
from ninfer.constraints.schema import Schema
from ninfer.constraints.source import Json
from ninfer.constraints.strings import Automata
from ninfer.errors import ConstraintLimit

Branches = tuple[Branch, ...]
_ANYTHING: Branches = tuple(ANYTHING.values())


class Reducer:
    """The reductions of one compilation."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.automata = Automata(work)
        self.candidates = Candidates(self.automata, work)
        self.intersections = 0
        self._expanded: dict[Claim, Branches] = {}
        self._reduced: dict[Claims, Branches] = {(): _ANYTHING}
        self.alternatives: list[tuple[Schema, list[Branches]]] = []
        """Every ``oneOf`` expanded so far, with the branches of each alternative."""

    def reduce(self, claims: Claims) -> Branches:
        """Branches whose union is the values that satisfy all claims, without those that have no value by their own
        assertions."""
        found = self._reduced.get(claims)
        if found is None:
            branches = _ANYTHING
            with placed(place(claims), work=False):
                for claim in claims:
                    branches = self.meet(branches, self.expand(claim))
            found = self._reduced[claims] = tuple(b for b in branches if not self.vacant(b))
        return found

    def vacant(self, branch: Branch) -> bool:
        """Whether a branch's own assertions leave no value, whatever stands inside."""
        if isinstance(branch, Textual):
            return self.automata.empty(branch)
        return isinstance(branch, Finite) and not branch.values

    # -- intersections

    def meet(self, a: Branches, b: Branches) -> Branches:
        """The branches of the values in both unions, in the order of the first."""
        if a is _ANYTHING:
            return b
        if b is _ANYTHING:
            return a
        met_branches: dict[Branch, None] = {}
        for x in a:
            for y in b:
                self.intersections += 1
                if self.intersections > MAX_INTERSECTIONS:
                    raise ConstraintLimit(f"more than {MAX_INTERSECTIONS} intersections", limit="intersections")
                self.work.spend(20 + _weight(x) + _weight(y))
                branch = self.pair(x, y)
                if branch is not None:
                    met_branches[branch] = None
        return tuple(met_branches)

    def pair(self, x: Branch, y: Branch) -> Branch | None:
        """The values of two branches; None when their assertions leave none."""
        if isinstance(x, Finite):
            values = x.values
            if isinstance(y, Finite):
                known = {self.candidates.key(v) for v in y.values}
                values = tuple(v for v in values if self.candidates.key(v) in known)
            else:
                values = tuple(v for v in values if self.candidates.member(v, y))
            return Finite(values) if values else None
        return self.pair(y, x) if isinstance(y, Finite) else met(x, y)

    # -- the keywords that apply schemas to the same value

    def expand(self, claim: Claim) -> Branches:
        """The branches of one claim. What a schema applies to the same value is expanded before it, without recursion;
        the schema graph has no loop of such applications."""
        stack = [claim]
        while stack:
            top = stack[-1]
            if top in self._expanded:
                stack.pop()
                continue
            missing = [c for c in _applied(top) if c not in self._expanded]
            if missing:
                stack.extend(reversed(missing))
            else:
                self.work.spend(10)
                self._expanded[top] = self._affirmed(top.schema) if top.holds else self._denied(top.schema)
        return self._expanded[claim]

    def _union(self, claims: Iterable[Claim]) -> Branches:
        return tuple(dict.fromkeys(b for c in claims for b in self._expanded[c]))

    def _affirmed(self, schema: Schema) -> Branches:
        given = schema.keywords
        for keyword in ("const", "enum"):
            if keyword in given:
                values = [v for v in given[keyword].values() if self.candidates.valid(v, (Claim(schema),))]
                return (Finite(tuple(values)),) if values else ()
        branches = tuple(self.candidates.own(schema).values())
        if branches == _ANYTHING:
            branches = _ANYTHING  # the very object, so that intersections with it cost nothing
        for keyword, value in given.items():
            if keyword == "allOf":
                for part in value:
                    branches = self.meet(branches, self._expanded[Claim(part)])
            elif keyword == "anyOf":
                branches = self.meet(branches, self._union(map(Claim, value)))
            elif keyword == "$ref":
                branches = self.meet(branches, self._expanded[Claim(value)])
            elif keyword == "not":
                branches = self.meet(branches, self._expanded[Claim(value, False)])
            elif keyword == "if":
                branches = self.meet(branches, self._conditional(schema, True))
            elif keyword == "dependentRequired":
                for name, others in value.items():
                    branches = self.meet(branches, _dependent(name, others))
        if "oneOf" in given:
            parts = [self.meet(branches, self._expanded[Claim(part)]) for part in given["oneOf"]]
            self.alternatives.append((schema, parts))
            branches = tuple(dict.fromkeys(b for part in parts for b in part))
        return branches

    def _denied(self, schema: Schema) -> Branches:
        given = schema.keywords
        branches = list(denied(schema))
        for keyword, value in given.items():
            if keyword == "allOf":
                branches += self._union(Claim(part, False) for part in value)
            elif keyword in ("anyOf", "oneOf"):
                none = _ANYTHING
                for part in value:
                    none = self.meet(none, self._expanded[Claim(part, False)])
                branches += none
            elif keyword == "$ref":
                branches += self._expanded[Claim(value, False)]
            elif keyword == "not":
                branches += self._expanded[Claim(value)]
            elif keyword == "if":
                branches += self._conditional(schema, False)
        if "oneOf" in given:  # with exclusive alternatives only a value of none violates it
            self.alternatives.append((schema, [self._expanded[Claim(part)] for part in given["oneOf"]]))
        return tuple(dict.fromkeys(branches))

    def _conditional(self, schema: Schema, holds: bool) -> Branches:
        """``if`` with ``then``, or without it with ``else``; both denied unless ``holds``."""
        branches: list[Branch] = []
        for keyword, condition in (("then", True), ("else", False)):
            result = self._expanded[Claim(schema.keywords["if"], condition)]
            if keyword in schema.keywords:
                result = self.meet(result, self._expanded[Claim(schema.keywords[keyword], holds)])
            elif not holds:
                result = ()
            branches += result
        return tuple(dict.fromkeys(branches))


def _weight(branch: Branch) -> int:
    """How many parts an intersection looks at."""
    if isinstance(branch, Finite):
        return len(branch.values)
    if isinstance(branch, Listed):
        return 4 * len(branch.prefix)
    if isinstance(branch, Keyed):
        return len(branch.names) + len(branch.required)
    return len(branch.texts) + len(branch.banned) if isinstance(branch, Textual) else 0


def _applied(claim: Claim) -> Iterable[Claim]:
    """The claims about the same value that a claim is made of."""
    given, holds = claim.schema.keywords, claim.holds
    if holds and ("const" in given or "enum" in given):
        return
    for keyword, value in given.items():
        if keyword in ("allOf", "anyOf", "oneOf"):
            yield from (Claim(part, holds) for part in value)
            if keyword == "oneOf" and not holds:
                yield from map(Claim, value)
        elif keyword == "$ref" or (keyword in ("then", "else") and "if" in given):
            yield Claim(value, holds)
        elif keyword == "not":
            yield Claim(value, not holds)
        elif keyword == "if":
            yield Claim(value)
            yield Claim(value, False)


def _dependent(name: str, others: dict[str, Json]) -> Branches:
    """Anything but an object with the member ``name`` and without one of the others. It declares all of them."""
    if not others:
        return _ANYTHING
    declared = Names(dict.fromkeys((name, *others), ()), (), ())
    together = Keyed((declared,), ((name, next(iter(others.values()))), *others.items()))
    return (*(b for b in _ANYTHING if not isinstance(b, Keyed)), absent(name), together)
