"""What crosses between host and device in a unit: one packed block up, one down. Everything that differs from one
request to the next travels in it, so the work that reads it can be recorded once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ninfer.contract import Buffer, Device
from ninfer.ops import Rows, SampleOut, SampleRows
from ninfer.program.scope import Field, Scopes, align, extent, field_offsets

ALTERNATIVES = 20
"""Most log-probability alternatives of one token."""

_NUMPY = {"i32": np.int32, "u32": np.uint32, "f32": np.float32, "i64": np.int64}


def input_fields(rows: int, columns: int, blocks: int) -> dict[str, Field]:
    """The block that goes up. Short fields first, one entry per row; then the block table; then the tokens and
    positions of a unit with one row of many columns. A decode round sends the prefix it needs."""
    return {
        "start": Field((rows,), "i32"),
        "width": Field((rows,), "i32"),
        "read": Field((rows,), "i32"),
        "write": Field((rows,), "i32"),
        "table": Field((rows,), "i32"),
        "tokens": Field((rows,), "i32"),
        "positions": Field((3 * rows,), "i32"),
        "lanes": Field((rows,), "i32"),
        "last": Field((1,), "i32"),
        "accepted": Field((1,), "i32"),
        "real": Field((5 * rows,), "f32"),
        "whole": Field((4 * rows,), "i32"),
        "seed": Field((2 * rows,), "u32"),
        "index": Field((rows,), "i64"),
        "purpose": Field((rows,), "i32"),
        "blocks": Field((rows, blocks), "i32"),
        "wide_tokens": Field((columns,), "i32"),
        "wide_positions": Field((3 * columns,), "i32"),
    }


def output_fields(rows: int) -> dict[str, Field]:
    """The block that comes down; alternatives last, because few rounds want them."""
    return {
        "token": Field((rows,), "i32"),
        "logprob": Field((rows,), "f32"),
        "alt_ids": Field((rows, ALTERNATIVES), "i32"),
        "alt_logprobs": Field((rows, ALTERNATIVES), "f32"),
    }


def end_of(fields: Mapping[str, Field], name: str) -> int:
    """Bytes of the block up to and including a field."""
    offsets, _ = field_offsets(tuple(fields.values()))
    at = dict(zip(fields, offsets, strict=True))[name]
    return at + align(extent(fields[name].shape, fields[name].dtype))


class HostBlock:
    """A packed block in host memory and typed views of its fields."""

    def __init__(self, device: Device, fields: Mapping[str, Field]) -> None:
        offsets, nbytes = field_offsets(tuple(fields.values()))
        self.bytes = device.host((nbytes,), "u8")
        self.fields: dict[str, npt.NDArray[Any]] = {
            name: self.bytes[at : at + extent(f.shape, f.dtype)].view(_NUMPY[f.dtype]).reshape(f.shape)
            for (name, f), at in zip(fields.items(), offsets, strict=True)
        }


class HostRows:
    """The short fields of an input block as arrays of ``B`` rows."""

    __slots__ = (
        "index", "lanes", "positions", "purpose", "read", "real", "seed", "start", "table", "tokens", "whole",
        "width", "write",
    )  # fmt: skip

    def __init__(self, block: HostBlock, B: int) -> None:
        f = block.fields
        self.start, self.width, self.read, self.write = f["start"][:B], f["width"][:B], f["read"][:B], f["write"][:B]
        self.table, self.tokens, self.lanes = f["table"][:B], f["tokens"][:B], f["lanes"][:B]
        self.positions = f["positions"][: 3 * B].reshape(3, B)
        self.real = f["real"][: 5 * B].reshape(B, 5)
        self.whole = f["whole"][: 4 * B].reshape(B, 4)
        self.seed = f["seed"][: 2 * B].reshape(B, 2)
        self.index, self.purpose = f["index"][:B], f["purpose"][:B]


class InputFrame:
    """A block on its way up. The device may own it until ``event`` is done. table_version: the block table it has."""

    def __init__(self, device: Device, fields: Mapping[str, Field], rows: int) -> None:
        self.block = HostBlock(device, fields)
        self.event = device.event()
        self.table_version = -1
        self._rows = [HostRows(self.block, B) for B in range(1, rows + 1)]

    def rows(self, B: int) -> HostRows:
        return self._rows[B - 1]


@dataclass(frozen=True, slots=True)
class DeviceFrame:
    """A packed block on the device and its fields."""

    bytes: Buffer
    fields: Mapping[str, Buffer]

    @classmethod
    def place(cls, scope: Scopes, fields: Mapping[str, Field]) -> DeviceFrame:
        block, views = scope.packed("frames", tuple(fields.values()))
        return cls(block, dict(zip(fields, views, strict=True)))

    def rows(self, B: int) -> Rows:
        """``B`` rows of one column."""
        f = self.fields
        return Rows(
            B, 1, f["start"].head(B), f["width"].head(B), f["read"].head(B), f["write"].head(B), f["table"].head(B),
            f["tokens"].head(B), f["positions"].head(3, B),
        )  # fmt: skip

    def wide_rows(self, W: int) -> Rows:
        """One row of ``W`` columns."""
        f = self.fields
        return Rows(
            1, W, f["start"].head(1), f["width"].head(1), f["read"].head(1), f["write"].head(1), f["table"].head(1),
            f["wide_tokens"].head(W), f["wide_positions"].head(3, W),
        )  # fmt: skip

    def sample_rows(self, B: int) -> SampleRows:
        f = self.fields
        return SampleRows(
            B, 1, f["real"].head(B, 5), f["whole"].head(B, 4), f["seed"].head(B, 2), f["index"].head(B, 1),
            f["purpose"].head(B, 1),
        )  # fmt: skip

    def sample_out(self, B: int) -> SampleOut:
        f = self.fields
        return SampleOut(
            f["token"].head(B, 1), f["logprob"].head(B, 1), f["alt_ids"].head(B, 1, ALTERNATIVES),
            f["alt_logprobs"].head(B, 1, ALTERNATIVES),
        )  # fmt: skip
