"""The directory's JSON becomes values, or an ArtifactError that names the place.

Format, layout and encoding names are not interpreted here, nor sizes against shapes: an artifact with a
format this library does not know still opens, and is refused only where that object is used.
"""

from __future__ import annotations

import math
import reprlib
from typing import Any, NoReturn

from ninfer.artifact.directory import (
    POLICIES,
    Binding,
    Component,
    Directory,
    FileEntry,
    Part,
    Proposal,
    ResourceObject,
    TensorObject,
    Use,
)
from ninfer.artifact.layouts import MAX_RANK, U64_MAX
from ninfer.errors import ArtifactError

_Objects = dict[str, TensorObject | ResourceObject]


def parse_directory(root: Any, *, entry_name: str, artifact_id: str) -> Directory:
    """Check a parsed JSON directory completely and return it as values."""
    _members(root, "directory", ("components", "objects", "bindings", "uses", "files"), ("metadata", "provenance"))
    files = _files(root["files"], entry_name)
    payload = sum(entry.payload_bytes for entry in files)
    if payload > U64_MAX:
        _refuse("payload exceeds 64 bits", "files")
    objects = _objects(root["objects"], payload)
    sizes = {o.id: o.elements for o in objects.values() if isinstance(o, TensorObject)}
    bindings = {}
    for name, value in _object(root["bindings"], "bindings").items():
        _identifier(name, "bindings")
        bindings[name] = _binding(value, f"bindings[{name!r}]", sizes, objects)
    metadata = _object(root.get("metadata", {}), "metadata")
    if "name" in metadata:
        _identifier(metadata["name"], "metadata.name")
    return Directory(
        components=_components(root["components"], objects),
        objects=objects,
        bindings=bindings,
        uses=_uses(root["uses"], bindings, sizes, objects),
        files=files,
        metadata=metadata,
        provenance=_object(root.get("provenance", {}), "provenance"),
        artifact_id=artifact_id,
    )


def _refuse(message: str, where: str) -> NoReturn:
    raise ArtifactError(message, where=where)


def _object(value: Any, where: str) -> dict[str, Any]:
    if type(value) is not dict:
        _refuse(f"expected an object, got {reprlib.repr(value)}", where)
    return value


def _array(value: Any, where: str, *, empty: bool = True) -> list[Any]:
    if type(value) is not list:
        _refuse(f"expected an array, got {reprlib.repr(value)}", where)
    if not value and not empty:
        _refuse("must not be empty", where)
    return value


def _members(value: Any, where: str, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> None:
    """Require an object with all of ``required`` and nothing beyond ``optional``."""
    _object(value, where)
    for name in required:
        if name not in value:
            _refuse(f"missing member {name!r}", where)
    if len(value) > len(required):
        for name in value:
            if name not in required and name not in optional:
                _refuse(f"unknown member {reprlib.repr(name)}", where)


def _identifier(value: Any, where: str) -> str:
    if type(value) is not str or not value or "\0" in value:
        _refuse(f"expected a non-empty string without U+0000, got {reprlib.repr(value)}", where)
    return value


def _integer(value: Any, where: str, low: int = 0) -> int:
    if type(value) is not int or not low <= value <= U64_MAX:
        _refuse(f"expected an integer {low}..2**64-1, got {reprlib.repr(value)}", where)
    return value


def _files(value: Any, entry_name: str) -> tuple[FileEntry, ...]:
    entries: list[FileEntry] = []
    names = {entry_name}
    for i, record in enumerate(_array(value, "files", empty=False)):
        where = f"files[{i}]"
        _members(record, where, ("path", "payload_bytes"))
        path = record["path"]
        if i == 0:
            if path is not None:
                _refuse(f"expected null, got {reprlib.repr(path)}", f"{where}.path")
        else:
            _identifier(path, f"{where}.path")
            if "/" in path or "\\" in path or path in (".", ".."):
                _refuse(f"not a sibling file name: {reprlib.repr(path)}", f"{where}.path")
            if path in names:
                _refuse(f"used twice: {reprlib.repr(path)}", f"{where}.path")
            names.add(path)
        entries.append(FileEntry(path, _integer(record["payload_bytes"], f"{where}.payload_bytes", 1)))
    return tuple(entries)


def _objects(value: Any, payload: int) -> _Objects:
    objects: _Objects = {}
    cursor = 0
    for i, record in enumerate(_array(value, "objects", empty=False)):
        where = f"objects[{i}]"
        kind = _object(record, where).get("kind")
        parsed: TensorObject | ResourceObject
        if kind == "tensor":
            _members(record, where, ("id", "kind", "shape", "format", "layout", "offset", "bytes"))
            parsed = TensorObject(
                _identifier(record["id"], f"{where}.id"),
                _shape(record["shape"], f"{where}.shape"),
                _identifier(record["format"], f"{where}.format"),
                _identifier(record["layout"], f"{where}.layout"),
                _integer(record["offset"], f"{where}.offset"),
                _integer(record["bytes"], f"{where}.bytes", 1),
            )
        elif kind == "resource":
            _members(record, where, ("id", "kind", "encoding", "offset", "bytes"))
            parsed = ResourceObject(
                _identifier(record["id"], f"{where}.id"),
                _identifier(record["encoding"], f"{where}.encoding"),
                _integer(record["offset"], f"{where}.offset"),
                _integer(record["bytes"], f"{where}.bytes", 1),
            )
        else:
            _refuse(f"expected 'tensor' or 'resource', got {reprlib.repr(kind)}", f"{where}.kind")
        if parsed.id in objects:
            _refuse(f"used twice: {reprlib.repr(parsed.id)}", f"{where}.id")
        if parsed.offset < cursor:
            _refuse(f"{parsed.offset} lies before the previous object's end {cursor}", f"{where}.offset")
        cursor = parsed.offset + parsed.nbytes
        if cursor > payload:
            _refuse(f"ends at {cursor}, beyond the payload's {payload} bytes", f"{where}.bytes")
        objects[parsed.id] = parsed
    return objects


def _shape(value: Any, where: str) -> tuple[int, ...]:
    if len(_array(value, where)) > MAX_RANK:
        _refuse(f"rank {len(value)} exceeds {MAX_RANK}", where)
    for axis, size in enumerate(value):
        _integer(size, f"{where}[{axis}]", 1)
    if math.prod(value) > U64_MAX:
        _refuse("element count exceeds 64 bits", where)
    return tuple(value)


def _components(value: Any, objects: _Objects) -> dict[str, Component]:
    components: dict[str, Component] = {}
    if "text" not in _object(value, "components"):
        _refuse("missing member 'text'", "components")
    for name, record in value.items():
        where = f"components[{name!r}]"
        _identifier(name, "components")
        _members(record, where, ("config",), ("target", "resources", "proposal"))
        target = record.get("target")
        if "target" in record and _identifier(target, f"{where}.target") not in value:
            _refuse(f"no such component: {reprlib.repr(target)}", f"{where}.target")
        resources = _object(record.get("resources", {}), f"{where}.resources")
        for role, object_id in resources.items():
            place = f"{where}.resources[{role!r}]"
            _identifier(role, f"{where}.resources")
            if not isinstance(objects.get(_identifier(object_id, place)), ResourceObject):
                _refuse(f"no such resource: {reprlib.repr(object_id)}", place)
        proposal = None
        if "proposal" in record:
            if name != "text":
                _refuse("only text may have a proposal", f"{where}.proposal")
            proposal = _proposal(record["proposal"], f"{where}.proposal")
        config = _object(record["config"], f"{where}.config")
        components[name] = Component(config, target, resources, proposal)
    return components


def _proposal(value: Any, where: str) -> Proposal:
    _members(value, where, ("domain",), ("rows",))
    if value["domain"] == "full" and "rows" not in value:
        return Proposal("full")
    if value["domain"] == "indexed" and "rows" in value:
        return Proposal("indexed", _integer(value["rows"], f"{where}.rows", 1))
    _refuse("expected domain 'full', or 'indexed' with rows", where)


def _binding(value: Any, where: str, sizes: dict[str, int], objects: _Objects) -> Binding:
    _object(value, where)
    if len(value) != 1:
        _refuse("expected exactly one of 'object' and 'parts'", where)
    if "object" in value:
        name = value["object"]
        return Binding((Part(name, 0, _elements(name, f"{where}.object", sizes, objects)),), True)
    if "parts" not in value:
        _refuse("expected exactly one of 'object' and 'parts'", where)
    parts = []
    for i, record in enumerate(_array(value["parts"], f"{where}.parts", empty=False)):
        place = f"{where}.parts[{i}]"
        _members(record, place, ("object", "range"))
        name, span = record["object"], record["range"]
        elements = _elements(name, f"{place}.object", sizes, objects)
        if type(span) is not list or len(span) != 2 or type(span[0]) is not int or type(span[1]) is not int:
            _refuse(f"expected two integers, got {reprlib.repr(span)}", f"{place}.range")
        if not 0 <= span[0] < span[1] <= elements:
            _refuse(f"{reprlib.repr(span)} is not within the object's {elements} elements", f"{place}.range")
        parts.append(Part(name, span[0], span[1]))
    return Binding(tuple(parts), False)


def _elements(name: Any, where: str, sizes: dict[str, int], objects: _Objects) -> int:
    elements = sizes.get(_identifier(name, where))
    if elements is None:
        what = "is a resource" if name in objects else "no such object"
        _refuse(f"{what}: {reprlib.repr(name)}", where)
    return elements


def _uses(
    value: Any, bindings: dict[str, Binding], sizes: dict[str, int], objects: _Objects
) -> dict[tuple[str, str], Use]:
    uses: dict[tuple[str, str], Use] = {}
    for i, record in enumerate(_array(value, "uses")):
        where = f"uses[{i}]"
        _members(record, where, ("parameter", "input"), ("activation_policy", "auxiliaries"))
        parameter = _identifier(record["parameter"], f"{where}.parameter")
        if parameter not in bindings:
            _refuse(f"not bound: {reprlib.repr(parameter)}", f"{where}.parameter")
        key = (parameter, _identifier(record["input"], f"{where}.input"))
        if key in uses:
            _refuse(f"used twice at this input: {reprlib.repr(parameter)}", where)
        policy = record.get("activation_policy")
        if "activation_policy" in record and policy not in POLICIES:
            _refuse(f"unknown policy {reprlib.repr(policy)}", f"{where}.activation_policy")
        auxiliaries = {}
        for role, binding in _object(record.get("auxiliaries", {}), f"{where}.auxiliaries").items():
            _identifier(role, f"{where}.auxiliaries")
            auxiliaries[role] = _binding(binding, f"{where}.auxiliaries[{role!r}]", sizes, objects)
        uses[key] = Use(*key, policy, auxiliaries)
    return uses
