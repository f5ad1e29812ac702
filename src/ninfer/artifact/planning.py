"""What will be stored becomes a directory: parameters packed into parents, parents placed in the payload."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from ninfer.artifact.directory import (
    Binding,
    Component,
    Directory,
    FileEntry,
    Part,
    ResourceObject,
    TensorObject,
    Use,
)
from ninfer.artifact.formats import RAW_ENCODING, format_of
from ninfer.artifact.layouts import TENSOR_ALIGNMENT, align_up, geometry
from ninfer.errors import ArtifactError

Shape = tuple[int, ...]


@attrs.frozen
class TensorSpec:
    """A tensor object to be stored."""

    id: str
    format: str
    shape: Shape


@attrs.frozen
class ResourceSpec:
    """A resource of ``nbytes`` bytes to be stored."""

    id: str
    nbytes: int


def pack_members(
    object_id: str, format: str, members: Sequence[tuple[str, Shape]]
) -> tuple[TensorSpec, dict[str, Binding]]:
    """One parent holding (name, shape) members in order, and each member's binding in it.

    Matrices with equal columns stack by rows; vectors concatenate; a single quantised member of another rank
    becomes ``[prod(leading), last]``. A member alone in a parent of its own shape is bound whole.
    """
    shapes = [shape for _, shape in members]
    if len(shapes) == 1:
        shape = shapes[0]
        if format_of(format).kind != "direct" and len(shape) != 2:
            shape = (math.prod(shape[:-1]), *shape[-1:])
    elif all(len(s) == 2 and s[1] == shapes[0][1] for s in shapes):
        shape = (sum(s[0] for s in shapes), shapes[0][1])
    elif shapes and all(len(s) == 1 for s in shapes):
        shape = (sum(s[0] for s in shapes),)
    else:
        raise ArtifactError(f"members of shapes {shapes} do not stack", where=f"objects[{object_id!r}].shape")
    bindings, cursor = {}, 0
    for name, member in members:
        end = cursor + math.prod(member)
        bindings[name] = Binding((Part(object_id, cursor, end),), whole=len(members) == 1 and member == shape)
        cursor = end
    return TensorSpec(object_id, format, shape), bindings


def plan_directory(
    *,
    components: Mapping[str, Component],
    objects: Iterable[TensorSpec | ResourceSpec],
    bindings: Mapping[str, Binding],
    uses: Iterable[Use] = (),
    metadata: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> Directory:
    """A directory with ``objects`` placed in the given order, tensors at multiples of 256, in a single file.

    Raises ArtifactError for a format or shape that cannot be stored; everything else is checked when written.
    """
    placed: dict[str, TensorObject | ResourceObject] = {}
    cursor = 0
    for i, spec in enumerate(objects):
        if spec.id in placed:
            raise ArtifactError(f"used twice: {spec.id!r}", where=f"objects[{i}].id")
        if isinstance(spec, ResourceSpec):
            placed[spec.id] = ResourceObject(spec.id, RAW_ENCODING, cursor, spec.nbytes)
            cursor += spec.nbytes
            continue
        try:
            g = geometry(spec.format, None, spec.shape)
        except ArtifactError as error:
            raise ArtifactError(error.reason, where=f"objects[{i}].{error.where}") from None
        offset = align_up(cursor, TENSOR_ALIGNMENT)
        placed[spec.id] = TensorObject(spec.id, tuple(spec.shape), spec.format, g.layout, offset, g.nbytes)
        cursor = offset + g.nbytes
    return Directory(
        components=dict(components),
        objects=placed,
        bindings=dict(bindings),
        uses={(use.parameter, use.input): use for use in uses},
        files=(FileEntry(None, cursor),),
        metadata=dict(metadata or {}),
        provenance=dict(provenance or {}),
    )
