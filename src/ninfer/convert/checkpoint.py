"""Reading a safetensors checkpoint: which tensors it has, and rows of one of them as they are needed.

A safetensors file is an 8-byte little-endian header length, a JSON header (name -> dtype, shape, data_offsets
relative to the end of the header), then the data. Rows are read into fresh arrays rather than mapped, so a file that
is cut short while it is read is an error and not a crash, and the resident memory is what was asked for.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from ninfer.convert.hf_config import read_json
from ninfer.errors import ConversionError

INDEX = "model.safetensors.index.json"
_HEADER_LIMIT = 100_000_000
_WORDS = {
    "BF16": "<u2",
    "F16": "<f2",
    "F32": "<f4",
    "F8_E4M3": "u1",
    "U8": "u1",
}
_SIZES = {"F64": 8, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "BOOL": 1, "F8_E5M2": 1}


@attrs.frozen
class TensorInfo:
    """One tensor of a checkpoint. ``offset``: of its first byte in ``file``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str = ""
    offset: int = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _word_bytes(self.dtype)


def _word_bytes(dtype: str) -> int:
    return np.dtype(_WORDS[dtype]).itemsize if dtype in _WORDS else _SIZES.get(dtype, 0)


class Checkpoint:
    """The tensors of a folder of safetensors files. Use as a context manager: it holds the files open.

    companions: further folders; the names of their tensors begin with their key.

    ``tensors`` maps names to :class:`TensorInfo`. Headers are read and checked at once, data only by :meth:`rows`.
    Raises ConversionError naming the file or tensor.
    """

    def __init__(self, folder: Path, companions: Mapping[str, Path] | None = None) -> None:
        self.tensors: dict[str, TensorInfo] = {}
        self._files: dict[str, int] = {}
        try:
            for prefix, place in {"": folder, **(companions or {})}.items():
                self._open_folder(place, prefix)
        except BaseException:
            self.close()
            raise

    def _open_folder(self, folder: Path, prefix: str) -> None:
        listed = _listed(folder)
        for file in sorted(set(listed.values())) or _unlisted(folder):
            self._open(folder, file, prefix)
        for name, file in listed.items():
            if prefix + name not in self.tensors or self.tensors[prefix + name].file != prefix + file:
                raise ConversionError(f"listed in {INDEX} but absent from {file}", tensor=prefix + name)

    def _open(self, folder: Path, file: str, prefix: str) -> None:
        try:
            descriptor = self._files[prefix + file] = os.open(folder / file, os.O_RDONLY)
        except OSError as error:
            raise ConversionError(error.strerror or "cannot be opened", tensor=prefix + file) from None
        for found in _header(descriptor, file):
            info = attrs.evolve(found, name=prefix + found.name, file=prefix + file)
            if info.name in self.tensors:
                raise ConversionError(f"present in both {self.tensors[info.name].file} and {file}", tensor=info.name)
            self.tensors[info.name] = info

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def rows(self, info: TensorInfo, first: int, last: int, columns: int) -> npt.NDArray[Any]:
        """Rows ``[first, last)`` of a tensor seen as ``[elements / columns, columns]``; stored words.

        BF16 comes as uint16, F8_E4M3 and U8 as uint8, F16 and F32 as floats.
        """
        out = np.empty((last - first, columns), _WORDS[info.dtype])
        target = memoryview(out.data).cast("B")
        offset = info.offset + first * columns * out.itemsize
        while len(target):
            count = os.preadv(self._files[info.file], [target[: 1 << 30]], offset)
            if count == 0:
                raise ConversionError(f"{info.file} ended while it was read", tensor=info.name)
            target, offset = target[count:], offset + count
        return out


def _listed(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, from the index of a sharded checkpoint; empty when there is no index."""
    if not (folder / INDEX).exists():
        return {}
    weights = read_json(folder, INDEX).get("weight_map")
    if not isinstance(weights, dict) or not weights:
        raise ConversionError("weight_map: expected a non-empty object", tensor=INDEX)
    for name, file in weights.items():
        if not isinstance(file, str) or os.path.basename(file) != file or file in ("", ".", ".."):
            raise ConversionError(f"weight_map.{name}: {file!r} is not a file name", tensor=INDEX)
    return weights


def _unlisted(folder: Path) -> list[str]:
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    if not files:
        raise ConversionError("no safetensors files in the checkpoint folder", tensor=INDEX)
    return files


def _header(descriptor: int, file: str) -> list[TensorInfo]:
    """The tensors a file declares, each checked to lie inside it."""
    size = os.fstat(descriptor).st_size
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if size < 8 or length > min(size - 8, _HEADER_LIMIT):
        raise ConversionError("not a safetensors file (cut short, or a Git LFS pointer?)", tensor=file)
    try:
        members = json.loads(os.pread(descriptor, length, 8), object_pairs_hook=_unique)
        return [
            _tensor(name, member, file, 8 + length, size) for name, member in members.items() if name != "__metadata__"
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConversionError(f"malformed safetensors header: {error}", tensor=file) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("duplicate names")
    return found


def _tensor(name: str, member: Mapping[str, Any], file: str, data: int, size: int) -> TensorInfo:
    shape = tuple(member["shape"])
    if not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"shape of {name}")
    begin, end = member["data_offsets"]
    info = TensorInfo(name, member["dtype"], shape, file, data + begin)
    if begin < 0 or data + end > size:
        raise ConversionError(f"{file} is cut short", tensor=name)
    if _word_bytes(info.dtype) and end - begin != info.nbytes:
        raise ConversionError(f"{end - begin} bytes do not hold {info.dtype} {list(shape)}", tensor=name)
    return info
