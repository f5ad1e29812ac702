"""``oneOf``: the proof that its alternatives exclude one another, without which it is refused.

Two alternatives exclude each other when no pair of their branches has a value in common: other types, other values,
bounds or lengths that do not meet, or a required member (or item) that no value satisfies on both sides.
"""

from __future__ import annotations

from ninfer.constraints.branches import Branch, Claims, Finite, Keyed, Listed, Typed, both
from ninfer.constraints.reduce import Branches, Reducer
from ninfer.constraints.schema import Schema
from ninfer.errors import UnsupportedSchema

Alternatives = list[tuple[int, Typed]]
"""Branches of one type, each with the index of its alternative."""


def check_exclusive(reducer: Reducer) -> None:
    """Prove it for every ``oneOf`` that the reducer has met. Raises UnsupportedSchema naming two alternatives."""
    while reducer.alternatives:
        schema, parts = reducer.alternatives.pop()
        overlap = _finite_overlap(parts, reducer)
        for typed in _by_kind(parts).values():
            overlap = overlap or _typed_overlap(typed, reducer)
        if overlap:
            _refuse(schema, *sorted(overlap))


def _refuse(schema: Schema, i: int, j: int) -> None:
    alternatives = schema.keywords["oneOf"]
    raise UnsupportedSchema(
        "the alternatives of 'oneOf' could not be proven to exclude one another; use 'anyOf' where any may hold",
        pointer=schema.at("oneOf"), keyword="oneOf", related=(alternatives[i].pointer, alternatives[j].pointer),
    )  # fmt: skip


def _by_kind(parts: list[Branches]) -> dict[str, Alternatives]:
    found: dict[str, Alternatives] = {}
    for index, branches in enumerate(parts):
        for branch in branches:
            if not isinstance(branch, Finite):
                found.setdefault(branch.kind, []).append((index, branch))
    return found


def _finite_overlap(parts: list[Branches], reducer: Reducer) -> tuple[int, int] | None:
    """Two alternatives of which one lists a value that the other lists or allows."""
    owner: dict[str, int] = {}
    typed = _by_kind(parts)
    for index, branches in enumerate(parts):
        for value in (v for b in branches if isinstance(b, Finite) for v in b.values):
            first = owner.setdefault(reducer.candidates.key(value), index)
            if first != index:
                return first, index
            for other, branch in typed.get(value.kind, ()):
                if other != index and reducer.candidates.member(value, branch):
                    return other, index
    return None


def _typed_overlap(alternatives: Alternatives, reducer: Reducer) -> tuple[int, int] | None:
    """Two alternatives of one type that may share a value. A discriminator tells all apart at once."""
    if _discriminated(alternatives, reducer):
        return None
    for at, (i, a) in enumerate(alternatives):
        for j, b in alternatives[:at]:
            reducer.work.spend(50)
            if i != j and not _disjoint(a, b, reducer):
                return j, i
    return None


def _discriminated(alternatives: Alternatives, reducer: Reducer) -> bool:
    """Whether a member that all require has, in each alternative, its own finite set of values."""
    if not all(isinstance(branch, Keyed) for _, branch in alternatives):
        return False
    objects = [(index, branch) for index, branch in alternatives if isinstance(branch, Keyed)]
    return any(_tells_apart(name, objects, reducer) for name, _ in objects[0][1].required)


def _tells_apart(name: str, objects: list[tuple[int, Keyed]], reducer: Reducer) -> bool:
    owner: dict[str, int] = {}
    for index, branch in objects:
        if all(name != required for required, _ in branch.required):
            return False
        for values in reducer.reduce(_about(branch, name, reducer)):
            if not isinstance(values, Finite):
                return False
            if any(owner.setdefault(reducer.candidates.key(v), index) != index for v in values.values):
                return False
    return True


def _disjoint(a: Typed, b: Typed, reducer: Reducer) -> bool:
    """Whether no value belongs to both, as far as their assertions and required members or items tell."""
    shared: Branch | None = reducer.pair(a, b)
    if shared is None or reducer.vacant(shared):
        return True
    if isinstance(shared, Keyed):
        return any(not reducer.reduce(_about(shared, name, reducer)) for name, _ in shared.required)
    if isinstance(shared, Listed):
        return any(not reducer.reduce(shared.item(i)) for i in range(min(shared.low, len(shared.prefix) + 1)))
    return False


def _about(branch: Keyed, name: str, reducer: Reducer) -> Claims:
    return both(*(reducer.candidates.about(names, name) for names in branch.names))
