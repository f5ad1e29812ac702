"""How products share out their rows: every chunk has one block, within the memory and the parts that were planned."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ninfer._cuda import shares

FORMATS = st.integers(0, len(shares.CHUNK_COLUMNS) - 1)
SIZES = {"K": st.integers(1, 300).map(lambda i: 64 * i), "blocks": st.integers(1, 150), "limit": st.integers(60, 227)}


def check(job: shares.Job, K: int) -> None:
    words = job.words(K, 0, 1, 0, 0)
    chunks, last, whole, length, longer = words[-5:]
    width = shares.CHUNK_COLUMNS[job.format]
    assert job.slice * (job.slices - 1) < K <= job.slice * job.slices
    assert (chunks - 1) * width < job.slice <= chunks * width
    assert 0 < last <= chunks
    assert job.slices == 1 or job.slice % width == 0
    quanta = job.tiles * (1 if whole else chunks)
    assert length * job.blocks + longer == quanta
    assert 0 <= longer < job.blocks
    begins = [i * length + min(i, longer) for i in range(job.blocks + 1)]
    if whole:
        assert job.parts == job.slices
        return
    assert job.slices == 1
    for first in range(0, quanta, chunks):
        meet = sum(a < first + chunks and b > first for a, b in pairwise(begins) if a < b)
        assert meet <= job.parts


@given(
    st.lists(st.tuples(FORMATS, st.integers(1, 900)), min_size=1, max_size=4),
    st.integers(1, 16),
    *SIZES.values(),
    st.booleans(),
    st.booleans(),
)
def test_few_columns(
    sizes: list[tuple[int, int]], columns: int, K: int, blocks: int, limit: int, norm: bool, adds: bool
) -> None:
    plan = shares.plan(sizes, columns, K, blocks, limit << 10, K if norm else 0, adds)
    assume(plan is not None)
    assert plan is not None
    assert [(job.format, job.tiles) for job in plan.jobs] == sizes
    assert sum(job.launched for job in plan.jobs) <= max(blocks, len(sizes))
    for job in plan.jobs:
        shared = shares.shared_bytes(job.format, columns, job.slice, 1 << plan.warps, K if norm else 0, adds)
        assert job.shared == shared <= job.room(plan.warps, plan.stages) <= limit << 10
        check(job, K)
        if norm and columns > 1:
            assert shares.CHUNK_BYTES[job.format] << plan.warps >= 2 * K, "the norm is in the last chunk of every warp"


def test_models_use_every_multiprocessor() -> None:
    """Gate and up of 27B, one column: whole tiles on 132 blocks of 16 warps, in one slice."""
    plan = shares.plan([(2, 2176)], 1, 5120, 132, 225 << 10)
    assert plan is not None
    (job,) = plan.jobs
    assert (plan.warps, job.blocks, job.slices, job.whole) == (4, 132, 1, True)


@pytest.mark.parametrize("columns", [1, 16])
def test_long_rows_are_cut_where_they_do_not_fit(columns: int) -> None:
    plan = shares.plan([(3, 320)], columns, 17408, 132, 225 << 10)
    assert plan is not None
    assert (plan.jobs[0].slices > 1) == (columns == 16)
