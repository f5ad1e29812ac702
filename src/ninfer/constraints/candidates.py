"""Whether a given value satisfies a schema, decided keyword by keyword: how ``const`` and ``enum`` are filtered.

Written as generators that yield the questions they depend on, so that neither deep values nor deep schemas need stack.
"""

from __future__ import annotations

from collections.abc import Generator

from ninfer.constraints.assertions import own
from ninfer.constraints.branches import Branch, Claims, Finite, Keyed, Listed, Names, Numeric, Textual, Typed
from ninfer.constraints.limits import Work
from ninfer.constraints.literals import key
from ninfer.constraints.schema import Schema
from ninfer.constraints.source import Json
from ninfer.constraints.strings import Automata

Question = Generator["Question", bool, bool]


class Candidates:
    """Decides membership for one compilation; automata and work are shared with it."""

    def __init__(self, automata: Automata, work: Work) -> None:
        self.automata = automata
        self.work = work
        self._own: dict[Schema, dict[str, Branch]] = {}
        self._keys: dict[Json, str] = {}

    def key(self, value: Json) -> str:
        """What makes values equal, computed once for each."""
        found = self._keys.get(value)
        if found is None:
            found = self._keys[value] = key(value)
            self.work.spend(10 + len(found))
        return found

    def own(self, schema: Schema) -> dict[str, Branch]:
        """The schema's own assertions, by type."""
        found = self._own.get(schema)
        if found is None:
            self.work.spend(10)
            found = self._own[schema] = own(schema)
        return found

    def valid(self, value: Json, claims: Claims) -> bool:
        """Whether the value satisfies every claim."""
        return self._decide(self._all(value, claims))

    def member(self, value: Json, branch: Typed) -> bool:
        """Whether the value belongs to a branch."""
        return self._decide(self._member(value, branch))

    def _decide(self, question: Question) -> bool:
        stack, answer = [question], None
        while stack:
            self.work.spend(2)
            try:
                stack.append(stack[-1].send(answer))  # type: ignore[arg-type]
                answer = None
            except StopIteration as stop:
                stack.pop()
                answer = stop.value
        return bool(answer)

    def _all(self, value: Json, claims: Claims) -> Question:
        for claim in claims:
            if (yield self._schema(value, claim.schema)) != claim.holds:
                return False
        return True

    def _schema(self, value: Json, schema: Schema) -> Question:
        branch = self.own(schema).get(value.kind)
        if branch is None or (not isinstance(branch, Finite) and not (yield self._member(value, branch))):
            return False
        given = schema.keywords
        for keyword in ("const", "enum"):
            if keyword in given and self.key(value) not in given[keyword]:
                return False
        for part in given.get("allOf", ()):
            if not (yield self._schema(value, part)):
                return False
        for keyword, enough in (("anyOf", range(1, 1 << 30)), ("oneOf", range(1, 2))):
            if keyword in given:
                count = 0
                for part in given[keyword]:
                    count += yield self._schema(value, part)
                if count not in enough:
                    return False
        if "$ref" in given and not (yield self._schema(value, given["$ref"])):
            return False
        if "not" in given and (yield self._schema(value, given["not"])):
            return False
        if "if" in given:
            then = given.get("then" if (yield self._schema(value, given["if"])) else "else")
            if then is not None and not (yield self._schema(value, then)):
                return False
        if value.kind == "object":
            for name, names in given.get("dependentRequired", {}).items():
                if name in value.value and not names.keys() <= value.value.keys():
                    return False
        return True

    def _member(self, value: Json, branch: Typed) -> Question:
        if branch.kind != value.kind:
            return False
        if isinstance(branch, Numeric):
            number = value.value
            return branch.bounds.holds(number) and (
                not branch.integral or (number == number.to_integral_value() and int(number) % branch.divisor == 0)
            )
        if isinstance(branch, Textual):
            return self._text(value.value, branch)
        if isinstance(branch, Listed):
            return (yield self._items(value.value, branch))
        if isinstance(branch, Keyed):
            return (yield self._members(value.value, branch))
        if branch.inside is not None and not (yield self._member(value, branch.inside)):
            return False
        return (yield self._all(value, (branch.claim,)))

    def _text(self, text: str, branch: Textual) -> bool:
        self.work.spend(len(text) * (1 + len(branch.texts)))
        if len(text) < branch.low or (branch.high is not None and len(text) > branch.high) or text in branch.banned:
            return False
        return all(self.automata.matches(t, text) for t in branch.texts)

    def _items(self, items: tuple[Json, ...], branch: Listed) -> Question:
        if len(items) < branch.low or (branch.high is not None and len(items) > branch.high):
            return False
        if branch.unique and len({self.key(item) for item in items}) < len(items):
            return False
        for index, item in enumerate(items):
            if not (yield self._all(item, branch.item(index))):
                return False
        return True

    def _members(self, members: dict[str, Json], branch: Keyed) -> Question:
        if len(members) < branch.low or (branch.high is not None and len(members) > branch.high):
            return False
        if any(name not in members for name, _ in branch.required):
            return False
        for names in branch.names:
            for name, member in members.items():
                if not (yield self._all(member, self.about(names, name))):
                    return False
        return True

    def about(self, names: Names, name: str) -> Claims:
        """What one schema says about the member of a name."""
        self.work.spend(6 + len(names.patterns))
        matched = [claims for text, claims in names.patterns if self.automata.matches(text, name)]
        if name in names.declared:
            matched.insert(0, names.declared[name])
        return tuple(c for claims in matched for c in claims) if matched else names.others
