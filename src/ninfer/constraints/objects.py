"""Objects settled: which members stand in which order, what further names may occur, and what each must satisfy."""

from __future__ import annotations

from dataclasses import dataclass

from ninfer.constraints.branches import Claims, Keyed, Text, Textual, both
from ninfer.constraints.candidates import Candidates
from ninfer.constraints.source import Json


@dataclass(frozen=True, slots=True)
class Field:
    """A declared member. ``undeclared`` is set where it is required but no schema declares it."""

    name: str
    claims: Claims
    required: bool
    undeclared: Json | None = None


@dataclass(frozen=True, slots=True)
class Others:
    """Members of further names."""

    names: Textual
    claims: Claims


@dataclass(frozen=True, slots=True)
class Fields:
    """A settled object: declared members in generation order, then others; ``low`` to ``high`` of all together."""

    fields: tuple[Field, ...]
    others: tuple[Others, ...]
    low: int
    high: int | None


def settle(branch: Keyed, candidates: Candidates) -> Fields:
    """Order the members of an object: those of the first schema as declared there, then new names as they appear."""
    places = dict(branch.required)
    declared = dict.fromkeys(name for names in branch.names for name in names.declared)
    fields = []
    for name in dict.fromkeys((*declared, *places)):
        claims = both(*(candidates.about(names, name) for names in branch.names))
        fields.append(Field(name, claims, name in places, None if name in declared else places[name]))
    return Fields(tuple(fields), _others(branch, frozenset(declared), candidates), branch.low, branch.high)


def _others(branch: Keyed, declared: frozenset[str], candidates: Candidates) -> tuple[Others, ...]:
    """The names that are not declared, cut by every pattern into those it matches and those it does not."""
    patterns = dict.fromkeys(text for names in branch.names for text, _ in names.patterns)
    regions: list[tuple[Text, ...]] = [()]
    for text in patterns:
        regions = [
            (*region, side)
            for region in regions
            for side in (text, ~text)
            if not candidates.automata.empty(Textual(texts=(*region, side), banned=declared))
        ]
    others = []
    for region in regions:
        claims: list[Claims] = []
        for names in branch.names:
            matched = [found for text, found in names.patterns if text in region]
            claims += matched or [names.others]
        merged = both(*claims)
        if not any(claim.hopeless for claim in merged):
            others.append(Others(Textual(texts=region, banned=declared), merged))
    return tuple(others)
