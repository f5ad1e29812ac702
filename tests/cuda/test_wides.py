"""How products of many columns share out their rows: every chunk has one block, and who shares a tile agrees on it."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from ninfer._cuda import wides
from ninfer._cuda.shares import CHUNK_COLUMNS

FORMATS = st.integers(0, len(CHUNK_COLUMNS) - 1)


def runs(length: int, longer: int, i: int) -> int:
    return i * length + min(i, longer)


def check(job: wides.Job, K: int, warps: int) -> int:
    """Go through the chunks of all blocks as ``Work`` of ``kernels/wide.cuh`` does. The most chunks of a block."""
    *_, tiles, _, _, blocks, parts, _, chunks, _, whole, length, longer = job.words(K, 0, 1, 0, 0)
    assert chunks == -(-K // CHUNK_COLUMNS[job.format])
    assert job.groups == -(-tiles // warps)
    seen: dict[int, list[tuple[int, int]]] = defaultdict(list)  # of a group: blocks, and how many chunks they have
    most = 0
    for block in range(blocks):
        tile, part = divmod(block, parts) if parts else (0, block)
        begin, end = (tile * chunks + runs(length, longer, part + i) for i in range(2))
        assert begin <= end
        assert (end - 1) // chunks - begin // chunks < 2, "a run is of two tiles at most"
        for group in range(begin // chunks, -(-end // chunks)):
            own = min(end, (group + 1) * chunks) - max(begin, group * chunks)
            seen[whole * blocks + group].append((block, own))
        for group in range(block * whole, (block + 1) * whole):
            seen[group].append((block, chunks))
        total = end - begin + whole * chunks
        assert total > 0, "a block without work waits for nobody"
        most = max(most, total)
    assert sorted(seen) == list(range(job.groups))
    for group, who in seen.items():
        assert sum(own for _, own in who) == chunks, group
        first = who[0][0]
        assert [block for block, _ in who] == list(range(first, first + len(who))), "parts lie side by side"
        assert len(who) <= 255
        assert not parts or (first == (group - whole * blocks) * parts and len(who) == parts)
    return most


@given(
    st.lists(st.tuples(FORMATS, st.integers(1, 900)), min_size=1, max_size=4),
    st.integers(17, 128),
    st.integers(1, 300).map(lambda i: 64 * i),
    st.integers(1, 150),
    st.integers(60, 227),
)
def test_every_chunk_has_one_block(sizes: list[tuple[int, int]], columns: int, K: int, blocks: int, limit: int) -> None:
    plan = wides.plan(tuple(sizes), columns, K, blocks, limit << 10)
    assert plan.warps % 4 == 0, "products take four warps at once"
    assert plan.columns in (32, 64, 128)
    assert [(job.format, job.tiles) for job in plan.jobs] == sizes
    assert sum(job.launched for job in plan.jobs) <= max(blocks, len(sizes))
    for job in plan.jobs:
        assert job.shared <= limit << 10
        check(job, K, plan.warps)


def test_one_of_many_blocks_takes_little_longer_than_the_others() -> None:
    """27B q4-mixed, 64 columns, 132 multiprocessors."""

    def longest(sizes: tuple[tuple[int, int], ...], K: int) -> tuple[wides.Plan, list[int]]:
        plan = wides.plan(sizes, 64, K, 132, 225 << 10)
        return plan, [check(job, K, plan.warps) for job in plan.jobs]

    gate_up, most = longest(((2, 2176),), 5120)
    assert (gate_up.jobs[0].whole, most) == (1, [21]), "136 groups of 20 chunks: one each, and the rest shared by all"
    down, most = longest(((3, 320),), 17408)
    assert (down.jobs[0].parts, most) == (6, [12]), "20 groups of 68 chunks, six blocks each"
    inputs, most = longest(((0, 6), (2, 256), (3, 768)), 5120)
    assert [job.parts for job in inputs.jobs[1:]] == [2, 2], "64 groups, two blocks each"
    assert most[1:] == [10, 10]
    assert most[0] * 64 <= 2 * 10 * 256
