"""What crosses between host and device in a unit: one packed block up, one down. Everything that differs from one
request to the next travels in it, so the work that reads it can be recorded once."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ninfer.device import Buffer, Device
from ninfer.ops import Drafts, Rows, SampleOut, SampleRows
from ninfer.program.scope import Field, Scopes, extent, field_offsets

ALTERNATIVES = 20
"""Most log-probability alternatives of one token."""

_NUMPY = {"i32": np.int32, "u32": np.uint32, "f32": np.float32, "i64": np.int64}


def input_fields(rows: int, window: int, columns: int, blocks: int) -> dict[str, Field]:
    """The block that goes up. Short fields first, one entry per row or per column of a round with ``window`` drafts;
    then the block tables; then the tokens and positions of a unit with one row of many columns, and one token more.
    A round sends the prefix it needs."""
    decided = rows * (window + 1)
    short = {
        "start": Field((rows,), "i32"),
        "width": Field((rows,), "i32"),
        "read": Field((rows,), "i32"),
        "write": Field((rows,), "i32"),
        "table": Field((rows,), "i32"),
        "tokens": Field((decided,), "i32"),
        "positions": Field((3 * decided,), "i32"),
        "lanes": Field((rows,), "i32"),
        "last": Field((rows,), "i32"),
        "kept": Field((rows,), "i32"),
        "accepted": Field((rows,), "i32"),
        "real": Field((5 * rows,), "f32"),
        "whole": Field((4 * rows,), "i32"),
        "seed": Field((2 * rows,), "u32"),
        "index": Field((decided,), "i64"),
        "purpose": Field((decided,), "i32"),
    }
    tables = {"blocks": Field((rows, blocks), "i32")}
    if window:
        short |= {
            "draft_table": Field((rows,), "i32"),
            "drafted": Field((rows,), "i32"),
            "drafts": Field((rows * window,), "i32"),
            "proposed": Field((rows * window,), "i32"),
        }
        tables |= {"draft_blocks": Field((rows, blocks), "i32")}
    wide = {"wide_tokens": Field((columns + 1,), "i32"), "wide_positions": Field((3 * columns,), "i32")}
    return short | tables | wide


def output_fields(rows: int, window: int) -> dict[str, Field]:
    """The block that comes down: what every round brings, alternatives, which few want, and last the drafts for the
    round after, which come by themselves."""
    decided = rows * (window + 1)
    accepted = {"accepted": Field((rows,), "i32")} if window else {}
    return accepted | {
        "token": Field((decided,), "i32"),
        "logprob": Field((decided,), "f32"),
        "alt_ids": Field((decided, ALTERNATIVES), "i32"),
        "alt_logprobs": Field((decided, ALTERNATIVES), "f32"),
        "drafts": Field((rows * window,), "i32"),
    }


def before(fields: Mapping[str, Field], name: str) -> int:
    """Bytes of the block before a field."""
    offsets, _ = field_offsets(tuple(fields.values()))
    return dict(zip(fields, offsets, strict=True))[name]


class HostBlock:
    """A packed block in host memory and typed views of its fields. numbers: those that are a row of integers, as views
    that give a few of them several times as fast as arrays."""

    def __init__(self, device: Device, fields: Mapping[str, Field]) -> None:
        offsets, nbytes = field_offsets(tuple(fields.values()))
        self.bytes = device.host((nbytes,), "u8")
        self.fields: dict[str, npt.NDArray[Any]] = {
            name: self.bytes[at : at + extent(f.shape, f.dtype)].view(_NUMPY[f.dtype]).reshape(f.shape)
            for (name, f), at in zip(fields.items(), offsets, strict=True)
        }
        self.numbers = {
            name: self.fields[name].data for name, f in fields.items() if len(f.shape) == 1 and f.dtype == "i32"
        }


class HostRows:
    """The short fields of an input block as arrays of ``B`` rows of ``W`` columns.

    firsts: start, and of the first column token, three positions and index, by row. Views, into which a number is
    stored several times as fast as into an array: this is what changes in every round.
    """

    __slots__ = (
        "accepted", "draft_table", "drafted", "drafts", "firsts", "index", "kept", "lanes", "last", "positions",
        "proposed", "purpose", "read", "real", "seed", "start", "table", "tokens", "whole", "width", "write",
    )  # fmt: skip

    def __init__(self, block: HostBlock, B: int, W: int, window: int) -> None:
        f = block.fields
        self.start, self.width, self.read, self.write = f["start"][:B], f["width"][:B], f["read"][:B], f["write"][:B]
        self.table, self.lanes = f["table"][:B], f["lanes"][:B]
        self.last, self.kept, self.accepted = f["last"][:B], f["kept"][:B], f["accepted"][:B]
        self.tokens = f["tokens"][: B * W].reshape(B, W)
        self.positions = f["positions"][: 3 * B * W].reshape(3, B, W)
        self.real = f["real"][: 5 * B].reshape(B, 5)
        self.whole = f["whole"][: 4 * B].reshape(B, 4)
        self.seed = f["seed"][: 2 * B].reshape(B, 2)
        self.index, self.purpose = f["index"][: B * W].reshape(B, W), f["purpose"][: B * W].reshape(B, W)
        first = (self.start, self.tokens[:, 0], *self.positions[:, :, 0], self.index[:, 0])
        self.firsts = tuple(array.data for array in first)
        if window:
            self.draft_table, self.drafted = f["draft_table"][:B], f["drafted"][:B]
            self.drafts, self.proposed = (f[name][: B * (W - 1)].reshape(B, W - 1) for name in ("drafts", "proposed"))


class InputFrame:
    """A block on its way up. The device may own it until ``event`` is done. version: of the block tables it has.
    members: whom its lasting fields describe, see ``filling.fill_decode``; constrained: those that have a mask."""

    def __init__(
        self, device: Device, fields: Mapping[str, Field], rows: int, widths: Collection[int], window: int
    ) -> None:
        self.block = HostBlock(device, fields)
        self.event = device.event()
        self.version = -1
        self.members: tuple[object, ...] = ()
        self.constrained: tuple[int, ...] = ()
        self._rows = {(B, W): HostRows(self.block, B, W, window) for W in widths for B in range(1, rows + 1)}

    def rows(self, B: int, W: int = 1) -> HostRows:
        return self._rows[B, W]


@dataclass(frozen=True, slots=True)
class DeviceFrame:
    """A packed block on the device and its fields."""

    bytes: Buffer
    fields: Mapping[str, Buffer]

    @classmethod
    def place(cls, scope: Scopes, fields: Mapping[str, Field]) -> DeviceFrame:
        block, views = scope.packed("frames", tuple(fields.values()))
        return cls(block, dict(zip(fields, views, strict=True)))

    def rows(self, B: int, W: int = 1) -> Rows:
        """``B`` rows of ``W`` columns."""
        f = self.fields
        return Rows(
            B, W, f["start"].head(B), f["width"].head(B), f["read"].head(B), f["write"].head(B), f["table"].head(B),
            f["tokens"].head(B * W), f["positions"].head(3, B * W),
        )  # fmt: skip

    def wide_rows(self, W: int) -> Rows:
        """One row of ``W`` columns."""
        f = self.fields
        return Rows(
            1, W, f["start"].head(1), f["width"].head(1), f["read"].head(1), f["write"].head(1), f["table"].head(1),
            f["wide_tokens"].head(W), f["wide_positions"].head(3, W),
        )  # fmt: skip

    def sample_rows(self, B: int, W: int, everything: bool) -> SampleRows:
        f = self.fields
        return SampleRows(
            B, W, f["real"].head(B, 5), f["whole"].head(B, 4), f["seed"].head(B, 2), f["index"].head(B, W),
            f["purpose"].head(B, W), everything,
        )  # fmt: skip

    def sample_out(self, B: int, W: int) -> SampleOut:
        f = self.fields
        return SampleOut(
            f["token"].head(B, W), f["logprob"].head(B, W), f["alt_ids"].head(B, W, ALTERNATIVES),
            f["alt_logprobs"].head(B, W, ALTERNATIVES),
        )  # fmt: skip

    def drafts(self, B: int, W: int) -> Drafts:
        """What the host says was drafted before a round of ``W`` columns."""
        f = self.fields
        return Drafts(f["drafted"].head(B), f["drafts"].head(B, W - 1))
