"""What a tool's declaration promises about its arguments, once for the grammar that writes them and the parser."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import attrs

from ninfer.constraints.parameters import Parameter, Parameters, strict_parameters
from ninfer.errors import InvariantError
from ninfer.frontend.tools import argument_types, decode_argument, decode_json
from ninfer.inputs import Tool

VALUE_CLOSE = "\n</parameter>"
"""What ends a value, and cannot stand inside one."""


@attrs.frozen(eq=False)
class ToolContract:
    """One tool. types: JSON types of declared parameters, as hints. strict: its parameters, in the order and encoding
    in which they must be written; None where any are taken."""

    name: str
    types: Mapping[str, frozenset[str]]
    strict: Parameters | None = None

    @classmethod
    def lenient(cls, tool: Tool) -> ToolContract:
        """A contract that takes any arguments."""
        return cls(tool.name, argument_types(tool))

    @classmethod
    def of(cls, tool: Tool, index: int) -> ToolContract:
        """The contract a declaration asks for. Raises ToolContractError, ConstraintError with the tool as its field."""
        contract = cls.lenient(tool)
        if not tool.strict:
            return contract
        schema = json.dumps(tool.parameters, ensure_ascii=False)
        return attrs.evolve(contract, strict=_strict(schema, tool.name, index))

    def decode(self, key: str, text: str) -> Any:
        """An argument's value from its text."""
        if self.strict is None:
            return decode_argument(text, self.types.get(key, frozenset()))
        parameter = next((p for p in self.strict.members if p.name == key), None)
        try:
            return decode_as(parameter, text)
        except ValueError as error:
            raise InvariantError(f"a strict argument cannot be read: {error}") from None


def decode_as(parameter: Parameter | None, text: str) -> Any:
    """A strict value from its text. Raises ValueError."""
    if parameter is None:
        raise ValueError("undeclared")
    return text if parameter.encoding == "raw" else decode_json(text)


@lru_cache(maxsize=64)
def _strict(schema: str, tool: str, index: int) -> Parameters:
    return strict_parameters(
        schema, tool=tool, closing=VALUE_CLOSE, prefix=f"<tool{index}>", field=f"tools[{index}].parameters"
    )
