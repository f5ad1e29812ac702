"""The directory of an artifact: what its JSON says, as frozen values. Offsets are bytes of the payload."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import attrs

Policy = Literal["A16Only", "AllowA8", "AllowA4"]
POLICIES = ("A16Only", "AllowA8", "AllowA4")
"""Activation precisions a use permits: 16-bit only; also 8-bit; also 8- and 4-bit."""
DIVISOR_ROLE = "activation_input_divisor"


@attrs.frozen
class FileEntry:
    """One file of the set; ``path`` is None for the entry file, else the name of a sibling."""

    path: str | None
    payload_bytes: int


@attrs.frozen
class Proposal:
    """The optimised draft head of ``text``: the full vocabulary, or ``rows`` of it selected by an id map."""

    domain: Literal["full", "indexed"]
    rows: int | None = None


@attrs.frozen
class Component:
    """A part of the model used as a whole. ``resources``: role -> object id. ``config`` is the family's."""

    config: dict[str, Any]
    target: str | None = None
    resources: Mapping[str, str] = attrs.field(factory=dict)
    proposal: Proposal | None = None


@attrs.frozen
class TensorObject:
    """A stored tensor. ``shape`` is logical, without padding; ``nbytes`` includes padding and scales."""

    id: str
    shape: tuple[int, ...]
    format: str
    layout: str
    offset: int
    nbytes: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@attrs.frozen
class ResourceObject:
    """Stored file contents."""

    id: str
    encoding: str
    offset: int
    nbytes: int


@attrs.frozen
class Part:
    """Elements ``[begin, end)`` of a tensor object, in C order of its logical shape."""

    object: str
    begin: int
    end: int


@attrs.frozen
class Binding:
    """Where a parameter's elements lie, in order. ``whole``: one complete object of the parameter's shape."""

    parts: tuple[Part, ...]
    whole: bool

    @property
    def elements(self) -> int:
        return sum(part.end - part.begin for part in self.parts)


@attrs.frozen
class Use:
    """A projection parameter applied at an input site. ``auxiliaries``: role -> Binding."""

    parameter: str
    input: str
    activation_policy: Policy | None = None
    auxiliaries: Mapping[str, Binding] = attrs.field(factory=dict)


@attrs.frozen
class Directory:
    """Everything an artifact says about its payload. ``uses`` is keyed by (parameter, input).

    ``artifact_id``: 32 hex digits tying the files of one set together; empty for a directory not yet written.
    """

    components: dict[str, Component]
    objects: dict[str, TensorObject | ResourceObject]
    bindings: Mapping[str, Binding]
    uses: Mapping[tuple[str, str], Use]
    files: tuple[FileEntry, ...]
    metadata: dict[str, Any] = attrs.field(factory=dict)
    provenance: dict[str, Any] = attrs.field(factory=dict)
    artifact_id: str = ""

    @property
    def payload_bytes(self) -> int:
        return sum(entry.payload_bytes for entry in self.files)


def to_json(directory: Directory) -> dict[str, Any]:
    """The directory as the JSON object that describes it."""
    return {
        "components": {name: _component(c) for name, c in directory.components.items()},
        "objects": [_object(o) for o in directory.objects.values()],
        "bindings": {name: _binding(b) for name, b in directory.bindings.items()},
        "uses": [_use(u) for u in directory.uses.values()],
        "metadata": directory.metadata,
        "provenance": directory.provenance,
        "files": [{"path": f.path, "payload_bytes": f.payload_bytes} for f in directory.files],
    }


def _component(c: Component) -> dict[str, Any]:
    record: dict[str, Any] = {"config": c.config}
    if c.target is not None:
        record["target"] = c.target
    if c.resources:
        record["resources"] = dict(c.resources)
    if c.proposal is not None:
        record["proposal"] = {k: v for k, v in attrs.asdict(c.proposal).items() if v is not None}
    return record


def _object(o: TensorObject | ResourceObject) -> dict[str, Any]:
    span = {"offset": o.offset, "bytes": o.nbytes}
    if isinstance(o, ResourceObject):
        return {"id": o.id, "encoding": o.encoding, **span, "kind": "resource"}
    return {
        "id": o.id,
        "shape": list(o.shape),
        "format": o.format,
        "layout": o.layout,
        **span,
        "kind": "tensor",
    }


def _binding(b: Binding) -> dict[str, Any]:
    if b.whole:
        return {"object": b.parts[0].object}
    return {"parts": [{"object": p.object, "range": [p.begin, p.end]} for p in b.parts]}


def _use(u: Use) -> dict[str, Any]:
    record: dict[str, Any] = {"parameter": u.parameter, "input": u.input}
    if u.activation_policy is not None:
        record["activation_policy"] = u.activation_policy
    if u.auxiliaries:
        record["auxiliaries"] = {role: _binding(b) for role, b in u.auxiliaries.items()}
    return record
