"""Artifacts that exist nowhere: deterministic random weights of any shapes and formats, made when viewed.

For benchmarks, and for tests that need an artifact without a checkpoint. Codes are uniform over the legal
ones, scales are chosen so that decoded values have the wanted mean and standard deviation.
"""

from __future__ import annotations

import bisect
import math
import weakref
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from ninfer.artifact.directory import Binding, Component, TensorObject, Use
from ninfer.artifact.encoding import encode
from ninfer.artifact.formats import E2M1, E4M3, f32_to_bf16, format_of
from ninfer.artifact.layouts import Bytes, Geometry, geometry, plane_view
from ninfer.artifact.planning import ResourceSpec, Shape, TensorSpec, pack_members, plan_directory
from ninfer.errors import ArtifactError

_BLOCK = 1 << 20  # direct elements generated at once


@attrs.frozen(eq=False)
class RandomTensor:
    """One object: ``members`` are its parameters, (name, shape) in row order, as ``pack_members`` takes them.

    Values have ``mean`` (direct formats only) and standard deviation ``std``, by default 1 / sqrt(last
    dimension). ``values`` replaces them by given numbers of the object's shape. int32 without ``values``
    counts from zero.
    """

    format: str
    members: tuple[tuple[str, Shape], ...]
    mean: float = 0.0
    std: float | None = None
    values: npt.NDArray[Any] | None = None


class SyntheticSource:
    """An :class:`ArtifactSource` of random tensors; the same arguments give the same bytes.

    components: their ``resources`` are filled in from ``resources``, (component, role) -> bytes. An object's
    bytes are made when first viewed, in whatever order, and freed with the last view of them. Object ids are
    ``weight/000000`` onwards, in the order of ``tensors``. alike: objects of one format, shape and statistics hold the
    same bytes, so that a large model is made in seconds. Raises ArtifactError for shapes that do not fit
    their format and for a ``mean`` that the format cannot have.
    """

    def __init__(
        self,
        tensors: Iterable[RandomTensor],
        *,
        components: Mapping[str, Component],
        resources: Mapping[tuple[str, str], bytes] | None = None,
        uses: Iterable[Use] = (),
        metadata: Mapping[str, Any] | None = None,
        seed: int = 0,
        alike: bool = False,
        name: str = "synthetic.ninfer",
    ) -> None:
        self.name = name
        self._seed = seed
        self._tensors: dict[str, RandomTensor] = {}
        self._fixed: dict[str, bytes] = {}
        self._live: MutableMapping[str, Bytes] = {} if alike else weakref.WeakValueDictionary()
        specs: list[TensorSpec | ResourceSpec] = []
        roles: dict[str, dict[str, str]] = {component: {} for component in components}
        for (component, role), data in (resources or {}).items():
            object_id = f"resource/{component}/{role}"
            roles[component][role] = object_id
            self._fixed[object_id] = data
            specs.append(ResourceSpec(object_id, len(data)))
        bindings: dict[str, Binding] = {}
        for i, tensor in enumerate(tensors):
            if tensor.mean and format_of(tensor.format).kind != "direct":
                raise ArtifactError("only direct formats have a mean", where=f"tensors[{i}].mean")
            spec, bound = pack_members(f"weight/{i:06d}", tensor.format, tensor.members)
            self._tensors[spec.id] = tensor
            specs.append(spec)
            bindings.update(bound)
        self.directory = plan_directory(
            components={c: attrs.evolve(v, resources=roles[c]) for c, v in components.items()},
            objects=specs,
            bindings=bindings,
            uses=uses,
            metadata=metadata,
        )
        self._originals: dict[str, str] = {}
        if alike:
            first: dict[Any, str] = {}
            for object_id, tensor in self._tensors.items():
                shapes = tuple(shape for _, shape in tensor.members)
                key = object_id if tensor.values is not None else (tensor.format, shapes, tensor.mean, tensor.std)
                self._originals[object_id] = first.setdefault(key, object_id)
        self._objects = list(self.directory.objects.values())
        self._offsets = [o.offset for o in self._objects]

    def read(self, offset: int, nbytes: int) -> bytes:
        """A copy of payload bytes ``[offset, offset + nbytes)``."""
        return self.view(offset, nbytes).tobytes()

    def view(self, offset: int, nbytes: int) -> Bytes:
        """The same bytes as a read-only array; a range within one object shares memory with its other views."""
        end = offset + nbytes
        if offset < 0 or nbytes < 0 or end > self.directory.payload_bytes:
            raise ArtifactError(f"range {offset} + {nbytes} leaves the payload", path=self.name)
        first = max(0, bisect.bisect_right(self._offsets, offset) - 1)
        touched = self._objects[first : bisect.bisect_left(self._offsets, end, first)]
        if len(touched) == 1 and end <= touched[0].offset + touched[0].nbytes:
            return self._bytes(touched[0].id)[offset - touched[0].offset : end - touched[0].offset]
        joined = np.zeros(nbytes, np.uint8)
        for o in touched:
            if offset >= o.offset + o.nbytes:  # the range begins in the gap behind it
                continue
            low, high = max(offset, o.offset), min(end, o.offset + o.nbytes)
            joined[low - offset : high - offset] = self._bytes(o.id)[low - o.offset : high - o.offset]
        joined.flags.writeable = False
        return joined

    def original(self, object_id: str) -> str:
        return self._originals.get(object_id, object_id)

    def close(self) -> None:
        """Nothing to release; views stay valid."""

    def _bytes(self, object_id: str) -> Bytes:
        object_id = self.original(object_id)
        data = self._live.get(object_id)
        if data is None:
            record = self.directory.objects[object_id]
            if isinstance(record, TensorObject):
                data = self._random(record, self._tensors[object_id])
            else:
                data = np.frombuffer(self._fixed[object_id], np.uint8).copy()
            data.flags.writeable = False
            self._live[object_id] = data
        return data

    def _random(self, record: TensorObject, tensor: RandomTensor) -> Bytes:
        if tensor.values is not None:
            return encode(record.format, tensor.values.reshape(record.shape))
        g = geometry(record.format, record.layout, record.shape)
        if record.format == "int32":
            return encode("int32", np.arange(g.elements).reshape(record.shape))
        std = tensor.std if tensor.std is not None else 1 / math.sqrt(record.shape[-1] if record.shape else 1)
        key = [self._seed, int(record.id.rpartition("/")[2])]
        rng = np.random.Generator(np.random.SFC64(key))
        if g.format.kind == "direct":
            return _direct(g, rng, tensor.mean, std)
        return _GENERATE[g.format.kind](g, rng, std)


def _random_bytes(rng: np.random.Generator, nbytes: int) -> Bytes:
    return rng.integers(0, 2**64, -(-nbytes // 8), dtype=np.uint64).view(np.uint8)[:nbytes]


def _direct(g: Geometry, rng: np.random.Generator, mean: float, std: float) -> Bytes:
    data = np.empty(g.nbytes, np.uint8)
    words = data.view(g.format.word)
    for begin in range(0, g.elements, _BLOCK):
        values = rng.random(min(_BLOCK, g.elements - begin), dtype=np.float32)
        values -= 0.5
        values *= std * math.sqrt(12)
        values += mean
        piece = f32_to_bf16(values) if g.format.name == "bf16" else values
        words[begin : begin + piece.size] = piece
    return data


def _grouped(g: Geometry, rng: np.random.Generator, std: float) -> Bytes:
    assert g.scales is not None
    f = g.format
    data = _random_bytes(rng, g.nbytes).copy()
    if f.bits == 8:
        np.putmask(data, data == 0x80, 0)
    scale = std / math.sqrt((2.0 ** (2 * f.bits) - 1) / 12)
    used = -(-g.columns // f.group)  # groups with a logical column
    scales = plane_view(data, g.scales, None, "<f2")
    scales[:] = scale * rng.uniform(0.75, 1.25, (1, g.groups))
    scales[:, used:] = 0
    lanes = np.zeros(g.groups * f.group, np.uint8)
    lanes[: g.columns] = (1 << f.bits) - 1
    for plane, bits, shift in ((g.codes, 8 if f.bits == 8 else 4, 0), (g.high, f.bits - 4, 4)):
        if plane is not None and g.columns % 128:
            stream = np.unpackbits(lanes[:, None] >> np.uint8(shift), axis=1, count=bits, bitorder="little")
            plane_view(data, plane)[:] &= np.packbits(stream.reshape(-1), bitorder="little")
    _clear_gaps(g, data)
    return data


def _row(g: Geometry, rng: np.random.Generator, std: float) -> Bytes:
    assert g.scales is not None
    data = _random_bytes(rng, g.nbytes).copy()
    np.putmask(data, data & 0x7F == 0x7F, 0)
    scale = std / float(np.nanstd(E4M3))
    plane_view(data, g.scales, None, "<u2")[:] = f32_to_bf16(
        (scale * rng.uniform(0.75, 1.25, (g.rows, 1))).astype(np.float32)
    )
    _clear_gaps(g, data)
    return data


def _block(g: Geometry, rng: np.random.Generator, std: float) -> Bytes:
    assert g.scales is not None
    assert g.divisor is not None
    data = _random_bytes(rng, g.nbytes).copy()
    scales = plane_view(data, g.scales)
    scales[:] = scales % 15 + 0x70  # 128 .. 448
    size = math.sqrt(float((E2M1**2).mean() * (E4M3[0x70:0x7F] ** 2).mean()))
    plane_view(data, g.divisor, None, "<f4")[:] = size / std
    _clear_gaps(g, data)
    return data


_GENERATE = {"grouped": _grouped, "row": _row, "block": _block}


def _clear_gaps(g: Geometry, data: Bytes) -> None:
    end = 0
    for plane in g.planes():
        data[end : plane.offset] = 0
        end = plane.offset + plane.nbytes
