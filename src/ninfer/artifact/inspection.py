"""What an artifact holds, counted: components, formats, bindings, files, and what nothing refers to."""

from __future__ import annotations

from collections import Counter
from typing import Any

import attrs

from ninfer.artifact.directory import Directory, TensorObject
from ninfer.artifact.source import ArtifactSource


@attrs.frozen
class ComponentCensus:
    """One component. ``objects`` and ``nbytes`` are what its bindings, uses and resources refer to."""

    name: str
    architecture: str | None
    target: str | None
    bindings: int
    uses: int
    objects: int
    nbytes: int
    resources: dict[str, int]


@attrs.frozen
class FormatCensus:
    """All tensors of one format: objects, logical elements, stored bytes."""

    format: str
    objects: int
    elements: int
    nbytes: int


@attrs.frozen
class Inspection:
    """The census of one artifact; ``str()`` is a page of text, ``to_dict()`` plain JSON values.

    ``files``: (name, payload bytes). ``gap_bytes``: payload outside every object. ``unreferenced``: objects
    that no binding, use or resource names. ``unowned``: bindings whose first path segment is no component.
    """

    name: str
    artifact_id: str
    metadata: dict[str, Any]
    provenance: dict[str, Any]
    components: tuple[ComponentCensus, ...]
    formats: tuple[FormatCensus, ...]
    bindings: int
    uses: int
    policies: dict[str, int]
    payload_bytes: int
    gap_bytes: int
    files: tuple[tuple[str, int], ...]
    unreferenced: tuple[str, ...]
    unowned: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The same as dicts, lists, strings and numbers."""
        return attrs.asdict(self, value_serializer=lambda _, __, v: list(v) if isinstance(v, tuple) else v)

    def __str__(self) -> str:
        title = self.metadata.get("name", self.name)
        lines = [f"{title}  ({self.name}, id {self.artifact_id or 'none'}, {_size(self.payload_bytes)} of payload)"]
        lines.append(f"\n{'component':12} {'bindings':>9} {'uses':>7} {'objects':>8} {'size':>10}  architecture")
        for c in self.components:
            about = f"{c.architecture or '-'}{f' on {c.target}' if c.target else ''}"
            lines.append(f"{c.name:12} {c.bindings:9} {c.uses:7} {c.objects:8} {_size(c.nbytes):>10}  {about}")
            lines += [f"{'':14}{role}  {_size(n)}" for role, n in c.resources.items()]
        lines.append(f"\n{'format':22} {'objects':>8} {'elements':>16} {'size':>10} {'bits/element':>13}")
        for f in self.formats:
            bits = f"{8 * f.nbytes / f.elements:13.3f}"
            lines.append(f"{f.format:22} {f.objects:8} {f.elements:16,} {_size(f.nbytes):>10} {bits}")
        policies = ", ".join(f"{count} {policy}" for policy, count in self.policies.items())
        lines.append(f"\n{self.bindings} bindings, {self.uses} uses{f' ({policies})' if policies else ''}")
        lines.append(f"files: {', '.join(f'{name} {_size(n)}' for name, n in self.files)}")
        if self.gap_bytes:
            lines.append(f"outside every object: {_size(self.gap_bytes)}")
        for what, names in (("objects nothing refers to", self.unreferenced), ("unowned bindings", self.unowned)):
            if names:
                shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
                lines.append(f"{len(names)} {what}: {shown}")
        return "\n".join(lines)


def inspect(source: ArtifactSource) -> Inspection:
    """Count what a directory says; reads no payload."""
    d = source.directory
    referenced = _references(d)
    formats: dict[str, list[int]] = {}
    for record in d.objects.values():
        if isinstance(record, TensorObject):
            census = formats.setdefault(record.format, [0, 0, 0])
            for i, amount in enumerate((1, record.elements, record.nbytes)):
                census[i] += amount
    bindings, uses = Counter(map(_owner, d.bindings)), Counter(_owner(use.parameter) for use in d.uses.values())
    owners = [*d.components, *(["proposal"] if d.components["text"].proposal else [])]
    components = []
    for name in owners:
        record_of = d.components.get(name)
        objects = referenced.get(name, set())
        architectures = record_of.config.get("architectures") if record_of else None
        components.append(
            ComponentCensus(
                name=name,
                architecture=str(architectures[0]) if isinstance(architectures, list) and architectures else None,
                target=record_of.target if record_of else "text",
                bindings=bindings[name],
                uses=uses[name],
                objects=len(objects),
                nbytes=sum(d.objects[o].nbytes for o in objects),
                resources={r: d.objects[o].nbytes for r, o in record_of.resources.items()} if record_of else {},
            )
        )
    used = set().union(*referenced.values())
    return Inspection(
        name=source.name,
        artifact_id=d.artifact_id,
        metadata=d.metadata,
        provenance=d.provenance,
        components=tuple(components),
        formats=tuple(FormatCensus(f, *numbers) for f, numbers in sorted(formats.items())),
        bindings=len(d.bindings),
        uses=len(d.uses),
        policies=dict(Counter(str(use.activation_policy) for use in d.uses.values())),
        payload_bytes=d.payload_bytes,
        gap_bytes=d.payload_bytes - sum(o.nbytes for o in d.objects.values()),
        files=tuple((entry.path or source.name, entry.payload_bytes) for entry in d.files),
        unreferenced=tuple(o for o in d.objects if o not in used),
        unowned=tuple(name for name in d.bindings if _owner(name) not in owners),
    )


def _owner(parameter: str) -> str:
    return parameter.partition("/")[0]


def _references(d: Directory) -> dict[str, set[str]]:
    """Owner -> ids of the objects it refers to."""
    referenced: dict[str, set[str]] = {name: set(c.resources.values()) for name, c in d.components.items()}
    for name, binding in d.bindings.items():
        referenced.setdefault(_owner(name), set()).update(part.object for part in binding.parts)
    for use in d.uses.values():
        for auxiliary in use.auxiliaries.values():
            referenced.setdefault(_owner(use.parameter), set()).update(part.object for part in auxiliary.parts)
    return referenced


def _size(nbytes: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes} B"
