"""Parameters by name over a source: an object is checked when first used, and shared while anyone holds it."""

from __future__ import annotations

import math
import weakref
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from ninfer.artifact.decoding import decode_elements
from ninfer.artifact.directory import Binding, Directory, ResourceObject, TensorObject
from ninfer.artifact.formats import RAW_ENCODING
from ninfer.artifact.layouts import TENSOR_ALIGNMENT, Bytes, Geometry, geometry
from ninfer.artifact.source import ArtifactSource
from ninfer.errors import ArtifactError


@attrs.frozen(eq=False)
class EncodedTensor:
    """A stored tensor: its geometry and its complete bytes, a read-only uint8 array."""

    id: str
    geometry: Geometry
    data: Bytes

    @property
    def format(self) -> str:
        return self.geometry.format.name

    @property
    def layout(self) -> str:
        return self.geometry.layout

    @property
    def shape(self) -> tuple[int, ...]:
        return self.geometry.shape


class Artifact:
    """What an artifact holds, by parameter name. Raises ArtifactError naming source and place."""

    def __init__(self, source: ArtifactSource) -> None:
        self.source = source
        self._parents: weakref.WeakValueDictionary[str, EncodedTensor] = weakref.WeakValueDictionary()

    @property
    def directory(self) -> Directory:
        return self.source.directory

    def has(self, name: str) -> bool:
        """Whether a parameter is bound."""
        return name in self.directory.bindings

    def binding(self, name: str) -> Binding:
        """The binding of a parameter."""
        try:
            return self.directory.bindings[name]
        except KeyError:
            raise self._error("no such parameter", f"bindings[{name!r}]") from None

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Require that a parameter can have ``shape``: a whole object's own, or parts of as many elements."""
        binding, where = self.binding(name), f"bindings[{name!r}]"
        if binding.whole:
            actual = self._tensor(binding.parts[0].object).shape
            if actual != tuple(shape):
                raise self._error(f"shape {list(actual)}, {list(shape)} expected", where)
        elif binding.elements != (expected := math.prod(shape)):
            raise self._error(f"{binding.elements} elements, {expected} of {list(shape)} expected", where)

    def parts(self, name: str) -> list[tuple[EncodedTensor, int, int]]:
        """The (parent, first element, end element) a parameter consists of, in order."""
        return [(self.parent(p.object), p.begin, p.end) for p in self.binding(name).parts]

    def geometry(self, object_id: str) -> Geometry:
        """How an object is stored, checked against its record; reads no payload."""
        record, where = self._tensor(object_id), f"objects[{object_id!r}]"
        try:
            planned = geometry(record.format, record.layout, record.shape)
        except ArtifactError as error:
            raise self._error(error.reason, f"{where}.{error.where}") from None
        if planned.nbytes != record.nbytes:
            raise self._error(
                f"{record.nbytes}, {planned.nbytes} expected for {record.format} {list(record.shape)}",
                f"{where}.bytes",
            )
        if record.offset % TENSOR_ALIGNMENT:
            raise self._error(f"{record.offset} is not a multiple of {TENSOR_ALIGNMENT}", f"{where}.offset")
        return planned

    def parent(self, object_id: str) -> EncodedTensor:
        """A tensor object. Its format, layout, shape, size and alignment are checked here, on first use."""
        tensor = self._parents.get(object_id)
        if tensor is None:
            planned, record = self.geometry(object_id), self._tensor(object_id)
            tensor = EncodedTensor(object_id, planned, self.source.view(record.offset, record.nbytes))
            self._parents[object_id] = tensor
        return tensor

    def decode(self, name: str | Binding, shape: tuple[int, ...] | None = None) -> npt.NDArray[Any]:
        """A parameter's values: float32 (int32 where stored so), in ``shape``.

        Without a shape: the object's for a whole binding, flat otherwise. Parts may come from several
        objects.
        """
        binding = name if isinstance(name, Binding) else self.binding(name)
        if isinstance(name, str) and shape is not None:
            self.check(name, shape)
        parents = [(self.parent(p.object), p.begin, p.end) for p in binding.parts]
        pieces = [decode_elements(parent.geometry, parent.data, begin, end) for parent, begin, end in parents]
        values = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        if shape is None:
            shape = parents[0][0].shape if binding.whole else values.shape
        return values.reshape(shape)

    def resource(self, component: str, role: str) -> bytes:
        """The bytes of a component's resource, e.g. ``("text", "tokenizer.json")``."""
        where = f"components[{component!r}].resources[{role!r}]"
        record = self.directory.components.get(component)
        if record is None or role not in record.resources:
            raise self._error("no such resource", where)
        stored = self.directory.objects[record.resources[role]]
        assert isinstance(stored, ResourceObject)
        if stored.encoding != RAW_ENCODING:
            raise self._error(f"unknown encoding {stored.encoding!r}", f"objects[{stored.id!r}].encoding")
        return self.source.read(stored.offset, stored.nbytes)

    def _tensor(self, object_id: str) -> TensorObject:
        record = self.directory.objects.get(object_id)
        if not isinstance(record, TensorObject):
            raise self._error("no such tensor", f"objects[{object_id!r}]")
        return record

    def _error(self, message: str, where: str) -> ArtifactError:
        return ArtifactError(message, path=self.source.name, where=where)
