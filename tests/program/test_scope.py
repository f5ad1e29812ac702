"""One layout code, measured and built: same offsets, same components, same total."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.device import ITEM_BYTES
from ninfer.errors import InvariantError
from ninfer.program.scope import ALIGNMENT, ArenaScope, Field, MeasureScope, PlannedBuffer, Scopes, extent


@dataclass(frozen=True)
class Placed:
    shape: tuple[int, ...]
    dtype: str
    begin: int
    end: int


class PlacingArena:
    """An arena whose buffers say where they lie."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def buffer(self, offset: int, shape: tuple[int, ...], dtype: str) -> Placed:
        assert offset % ALIGNMENT == 0
        return Placed(shape, dtype, offset, offset + extent(shape, dtype))

    def close(self) -> None: ...


shapes = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)
fields = st.builds(Field, shapes, st.sampled_from(sorted(ITEM_BYTES)))
requests = st.lists(
    st.tuples(st.sampled_from(["kv", "state", "frames"]), st.one_of(fields, st.lists(fields, min_size=1, max_size=4))),
    min_size=1,
    max_size=12,
)


def lay_out(scope: Scopes, wanted) -> list:
    leaves = []
    for name, what in wanted:
        if isinstance(what, Field):
            leaves.append(scope.buffer(name, what.shape, what.dtype))
        else:
            leaves.extend(scope.packed(name, what)[1])
    return leaves


@given(requests)
def test_planned_equals_used(wanted) -> None:
    plan = MeasureScope()
    planned = lay_out(plan, wanted)
    built = ArenaScope(PlacingArena(plan.cursor.end))
    leaves = lay_out(built, wanted)
    assert [(b.shape, b.dtype) for b in leaves] == [(b.shape, b.dtype) for b in planned]
    assert built.cursor.components == plan.cursor.components
    assert built.cursor.end == plan.cursor.end == sum(plan.cursor.components.values())
    assert leaves[-1].end <= plan.cursor.end
    assert all(left.end <= right.begin for left, right in pairwise(leaves))


def test_a_layout_that_asks_for_more_than_planned_is_a_bug() -> None:
    scope = ArenaScope(PlacingArena(512))
    scope.buffer("kv", (100,), "f32")
    with pytest.raises(InvariantError, match="kv"):
        scope.buffer("kv", (1,), "u8")


def test_planned_buffers_have_shapes_and_no_bytes() -> None:
    b = PlannedBuffer((4, 6), "bf16")
    assert b.nbytes == 48
    assert b.head(3, 2) == PlannedBuffer((3, 2), "bf16")
    assert b.slice(1, 3) == PlannedBuffer((2, 6), "bf16")
    with pytest.raises(InvariantError):
        b.head(5, 5)
