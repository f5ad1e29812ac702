"""The arguments of a strict tool: which parameters stand in which order, and how the value of each is written.

A value that can only be a string is written raw, any other as JSON with ``, `` and ``: ``; a parameter that may be
either could not be read back, and is refused. Raw values never contain the text that ends them.
"""

from __future__ import annotations

from typing import Any, Literal

import attrs

from ninfer.constraints.assertions import affirmed
from ninfer.constraints.branches import Finite, Opaque, Textual, place
from ninfer.constraints.graph import Graph, Settled
from ninfer.constraints.ir import Auto, Lit, Node, alt
from ninfer.constraints.json_lang import Writer
from ninfer.constraints.limits import Work, placed
from ninfer.constraints.objects import Field, Fields
from ninfer.constraints.reduce import Reducer
from ninfer.constraints.schema import load
from ninfer.constraints.source import escape, read, text_of
from ninfer.errors import ConstraintError, ToolContractError

Encoding = Literal["raw", "json"]


@attrs.frozen
class Parameter:
    """One parameter of a strict tool. ``rule`` names the rule of its values, as written in the ``encoding``."""

    name: str
    required: bool
    encoding: Encoding
    rule: str


@attrs.frozen(eq=False)
class Parameters:
    """The parameters in generation order, and the rules of their values."""

    members: tuple[Parameter, ...]
    rules: dict[str, Node]


def strict_parameters(
    schema: Any, *, tool: str, closing: str, prefix: str = "", field: str = "tools", work: Work | None = None
) -> Parameters:
    """The parameters that a tool's JSON Schema declares.

    ``closing`` is the text that ends a raw value; ``prefix`` begins the name of every rule. The schema must reduce to
    one closed object. Raises ToolContractError, or the ConstraintError of the schema with ``field`` as its field.
    """
    try:
        reducer = Reducer(work or Work())
        graph = Graph(affirmed(load(read(text_of(schema)))), reducer)
        writer = Writer(graph, reducer.automata, "tool", prefix)
        branches = graph.live(graph.root)
        if len(branches) != 1 or not isinstance(branches[0], Fields):
            raise ToolContractError("strict arguments need a schema that is one kind of object", tool=tool, field=field)
        members = []
        for declared in _declared(branches[0], graph, tool, field):
            pointer = place(declared.claims) or f"/properties/{escape(declared.name)}"
            try:
                with placed(pointer):
                    members.append(_parameter(declared, writer, closing))
            except _Unwritable as reason:
                raise ToolContractError(str(reason), tool=tool, pointer=pointer, field=field) from None
        writer.write()
    except ConstraintError as error:
        raise error.within(field) from None
    return Parameters(tuple(members), writer.rules)


class _Unwritable(Exception):
    """Why a parameter cannot be written so that it is read back."""


def _declared(branch: Fields, graph: Graph, tool: str, field: str) -> list[Field]:
    """The members that have a value, of an object that allows no others and does not count them."""
    fields = [f for f in branch.fields if f.claims in graph.productive]
    required = sum(f.required for f in fields)
    if any(o.claims in graph.productive for o in branch.others):
        raise ToolContractError("strict arguments need 'additionalProperties': false", tool=tool, field=field)
    if branch.low > required or (branch.high is not None and branch.high < len(fields)):
        raise ToolContractError("strict arguments cannot be counted", tool=tool, field=field)
    for declared in fields:
        if declared.undeclared is not None:
            raise ToolContractError("a required name must be declared in 'properties'", tool=tool,
                                    pointer=declared.undeclared.pointer, field=field)  # fmt: skip
    return fields


def _parameter(declared: Field, writer: Writer, closing: str) -> Parameter:
    if not declared.name or set(declared.name) & set(">\n"):
        raise _Unwritable("the name cannot be written in a call: it is empty, or holds '>' or a line end")
    branches = writer.graph.live(declared.claims)
    strings = [_is_string(branch) for branch in branches]
    if all(strings):
        rule = writer.fresh()
        writer.rules[rule] = _raw(branches, writer, closing)
        return Parameter(declared.name, declared.required, "raw", rule)
    if any(s or s is None for s in strings):
        raise _Unwritable("ambiguous encoding: a value may be a string or something else")
    return Parameter(declared.name, declared.required, "json", writer.value(declared.claims).rule)


def _is_string(branch: Settled) -> bool | None:
    """Whether a branch holds only strings; None when it holds some."""
    if isinstance(branch, Finite):
        kinds = {value.kind == "string" for value in branch.values}
        return kinds.pop() if len(kinds) == 1 else None
    return isinstance(branch, Textual) or (isinstance(branch, Opaque) and branch.kind == "string")


def _raw(branches: list[Settled], writer: Writer, closing: str) -> Node:
    options: list[Node] = []
    for branch in branches:
        if isinstance(branch, Finite):
            for value in branch.values:
                if closing in value.value:
                    raise _Unwritable(f"a value contains {closing!r}, which ends it")
                options.append(Lit(value.value))
        elif isinstance(branch, Textual):
            options.append(Auto(writer.automata.product(branch, closing), "raw"))
        else:
            options += writer.branch(branch, ())
    if all(isinstance(o, Auto) and o.dfa.empty for o in options):
        raise _Unwritable(f"every value contains {closing!r}, which ends it")
    return alt(options)
