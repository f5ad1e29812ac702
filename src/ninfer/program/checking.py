"""What a unit's frame tells the device to follow, checked before it goes there: kernels trust these indices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from ninfer.errors import InvariantError


@dataclass(frozen=True, slots=True)
class Bounds:
    """slots: of states. rows: of the block table, lanes. context: ordinals of a row. columns: tokens of a unit."""

    slots: int
    rows: int
    context: int
    columns: int


def check_frame(fields: Mapping[str, npt.NDArray[Any]], bounds: Bounds) -> None:
    """Raises InvariantError for an index that leaves what it points into."""
    limits = {"read": bounds.slots, "write": bounds.slots, "table": bounds.rows, "lanes": bounds.rows}
    if "draft_table" in fields:
        limits["draft_table"] = bounds.rows
    for name, limit in limits.items():
        if fields[name].min() < 0 or fields[name].max() >= limit:
            raise InvariantError(f"{name} {fields[name].tolist()} leaves 0..{limit - 1}")
    start, width = fields["start"], fields["width"]
    if start.min() < 0 or width.min() < 0 or width.max() > bounds.columns or (start + width).max() > bounds.context:
        raise InvariantError(f"columns {start.tolist()} + {width.tolist()} leave 0..{bounds.context - 1}")
    for name in ("tokens", "wide_tokens", "blocks", "draft_blocks"):
        if name in fields and fields[name].min() < 0:
            raise InvariantError(f"{name} below 0")
