"""Schemas as unions of branches: intersections distributed, references followed only where a value is reached.

Every list of claims has one reduction, computed once; claims about members and items stay lists of claims until asked
for, so a recursive schema reduces to a finite graph.
"""

from __future__ import annotations

from collections.abc import Iterable

from ninfer.constraints.assertions import ANYTHING
from ninfer.constraints.branches import Branch, Claim, Claims, Finite, Keyed, Listed, Names, Textual, Typed, both, met
from ninfer.constraints.candidates import Candidates
from ninfer.constraints.denials import absent, denied
from ninfer.constraints.limits import MAX_INTERSECTIONS, Work
from ninfer.constraints.literals import key
from ninfer.constraints.schema import Schema
from ninfer.constraints.source import Json
from ninfer.constraints.strings import Automata
from ninfer.errors import ConstraintLimit, UnsupportedSchema

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
        self._exclusive: list[tuple[Schema, list[Branches]]] = []

    def reduce(self, claims: Claims) -> Branches:
        """Branches whose union is the values that satisfy all claims, without those that have no value by their own
        assertions."""
        found = self._reduced.get(claims)
        if found is None:
            branches = _ANYTHING
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
                self.work.spend(20)
                branch = self._met(x, y)
                if branch is not None:
                    met_branches[branch] = None
        return tuple(met_branches)

    def _met(self, x: Branch, y: Branch) -> Branch | None:
        if isinstance(x, Finite):
            values = x.values
            if isinstance(y, Finite):
                known = {key(v) for v in y.values}
                self.work.spend(len(values) + len(known))
                values = tuple(v for v in values if key(v) in known)
            else:
                values = tuple(v for v in values if self.candidates.member(v, y))
            return Finite(values) if values else None
        return self._met(y, x) if isinstance(y, Finite) else met(x, y)

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
            self._exclusive.append((schema, parts))
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
            self._exclusive.append((schema, [self._expanded[Claim(part)] for part in given["oneOf"]]))
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

    # -- oneOf

    def check_exclusive(self) -> None:
        """Prove that the alternatives of every ``oneOf`` met so far exclude one another, or refuse it."""
        while self._exclusive:
            schema, parts = self._exclusive.pop()
            by_kind: dict[str, list[tuple[int, Typed]]] = {}
            owner: dict[str, int] = {}
            for index, branches in enumerate(parts):
                for branch in branches:
                    if not isinstance(branch, Finite):
                        by_kind.setdefault(branch.kind, []).append((index, branch))
                        continue
                    for value in branch.values:
                        if owner.setdefault(key(value), index) != index:
                            self._overlap(schema, owner[key(value)], index)
            for index, branches in enumerate(parts):
                for branch in branches:
                    if isinstance(branch, Finite):
                        for value in branch.values:
                            for other, typed in by_kind.get(value.kind, ()):
                                if other != index and self.candidates.member(value, typed):
                                    self._overlap(schema, min(other, index), max(other, index))
            for alternatives in by_kind.values():
                self._check_typed(schema, alternatives)

    def _check_typed(self, schema: Schema, alternatives: list[tuple[int, Typed]]) -> None:
        """Alternatives of one type: a discriminator tells all apart at once, or each pair must exclude itself."""
        if all(isinstance(branch, Keyed) for _, branch in alternatives) and self._discriminated(alternatives):
            return
        for at, (i, a) in enumerate(alternatives):
            for j, b in alternatives[:at]:
                self.work.spend(50)
                if i != j and not self._disjoint(a, b):
                    self._overlap(schema, j, i)

    def _discriminated(self, alternatives: list[tuple[int, Typed]]) -> bool:
        """Whether a member required by all has, in each, its own finite set of values."""
        objects = [branch for _, branch in alternatives if isinstance(branch, Keyed)]
        for name, _ in objects[0].required:
            owner: dict[str, int] = {}
            for index, branch in alternatives:
                assert isinstance(branch, Keyed)
                values = self.reduce(self._about(branch, name)) if name in dict(branch.required) else _ANYTHING
                if not all(isinstance(v, Finite) for v in values):
                    break
                keys = {key(v) for finite in values if isinstance(finite, Finite) for v in finite.values}
                if any(owner.setdefault(k, index) != index for k in keys):
                    break
            else:
                return True
        return False

    def _disjoint(self, a: Typed, b: Typed) -> bool:
        """Whether no value belongs to both, as far as their assertions and required members or items tell."""
        both_hold = self._met(a, b)
        if both_hold is None or self.vacant(both_hold):
            return True
        if isinstance(both_hold, Keyed):
            return any(not self.reduce(self._about(both_hold, name)) for name, _ in both_hold.required)
        if isinstance(both_hold, Listed):
            positions = min(both_hold.low, len(both_hold.prefix) + 1)
            return any(not self.reduce(both_hold.item(i)) for i in range(positions))
        return False

    def _about(self, branch: Keyed, name: str) -> Claims:
        return both(*(self.candidates.about(names, name) for names in branch.names))

    def _overlap(self, schema: Schema, i: int, j: int) -> None:
        parts = schema.keywords["oneOf"]
        raise UnsupportedSchema(
            "the alternatives of 'oneOf' could not be proven to exclude one another; use 'anyOf' where any may hold",
            pointer=schema.at("oneOf"), keyword="oneOf", related=(parts[i].pointer, parts[j].pointer),
        )  # fmt: skip


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
