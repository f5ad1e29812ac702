"""Products of few columns: how stored rows are shared out among the blocks of a launch (``kernels/stream.cuh``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

COLUMNS = 16
"""Up to so many columns, they stay in shared memory while the weights stream by."""

MAX_JOBS, MAX_SEGMENTS = 4, 20
"""Formats and segments of a launch."""

WARPS, FEW_WARPS = 4, 3
"""Of a block, as powers of two: the second where a warp would have few chunks."""

STAGES, MOST_STAGES = 3, 6
"""Chunks of a warp in shared memory: one is multiplied while the others are on their way. The most where warps are few:
what is on its way before the columns are asked for delays them."""

CHUNK_COLUMNS = (64, 64, 256, 256, 256, 128, 256, 128)
CHUNK_BYTES = (2048, 4096, 2176, 2688, 3200, 2176, 2304, 2048)
"""Of 16 rows, by format."""

CODED = range(2, 6)
"""Formats of integer codes, which meet few columns in fixed point (``kernels/codes.cuh``)."""

BESIDE = 76 << 10
"""Shared memory that a block with few warps leaves free if it can: for one of a small kernel before or after it."""

_FEW = 6
"""Chunks of a warp that are few."""

_SHARING, _PART = 30.0, 2.0
"""What it costs to add up a tile that blocks share, and each of its parts, in chunks a block could have read."""


@dataclass(frozen=True, slots=True)
class Job:
    """Tiles of 16 rows of one format: ``slices`` times ``blocks`` blocks, each with ``slice`` columns of K."""

    format: int
    tiles: int
    slices: int
    slice: int
    blocks: int
    whole: bool  # blocks take whole tiles
    parts: int  # blocks that share a tile, at most
    shared: int
    run: int  # chunks of a block, at most

    @property
    def launched(self) -> int:
        """Its blocks."""
        return self.slices * self.blocks

    def room(self, warps: int, stages: int) -> int:
        """Shared memory of a block of as many warps, a power of two, and chunks of each."""
        return self.shared + (stages - STAGES) * (CHUNK_BYTES[self.format] << warps)

    def words(self, K: int, segment: int, end: int, ticket: int, block: int) -> tuple[int, ...]:
        """A ``Job`` of ``kernels/products.cuh``."""
        width = CHUNK_COLUMNS[self.format]
        chunks, last = -(-self.slice // width), -(-(K - self.slice * (self.slices - 1)) // width)
        length, longer = divmod(self.tiles if self.whole else self.tiles * chunks, self.blocks)
        return (
            self.format, width, CHUNK_BYTES[self.format], segment, end, self.tiles, ticket, block,
            self.blocks, self.slices, self.slice, chunks, last, int(self.whole), length, longer,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    jobs: tuple[Job, ...]
    warps: int  # of a block, as a power of two
    stages: int


def plan(
    sizes: Sequence[tuple[int, int]],
    columns: int,
    K: int,
    blocks: int,
    limit: int,
    normed: int = 0,
    adds: bool = False,
    most: int = WARPS,
) -> Plan | None:
    """Share out ``blocks`` blocks among (format, tiles) each; None where the columns do not fit into shared memory.
    normed: K where blocks norm the columns themselves. adds: the product is added to what is there. most: warps of a
    block, as a power of two."""
    for warps in range(most, 0, -1):
        jobs = _jobs(sizes, columns, K, blocks, limit, 1 << warps, normed, adds)
        if jobs is None:
            continue
        if warps > FEW_WARPS and all(job.run < _FEW << warps for job in jobs):
            continue
        most_stages = STAGES if warps > FEW_WARPS else MOST_STAGES
        rooms = {s: max(job.room(warps, s) for job in jobs) for s in range(most_stages, STAGES - 1, -1)}
        leaving, fitting = ([s for s, room in rooms.items() if room <= left] for left in (limit - BESIDE, limit))
        return Plan(jobs, warps, (leaving or fitting)[0])
    return None


def _jobs(
    sizes: Sequence[tuple[int, int]], columns: int, K: int, blocks: int, room: int, warps: int, normed: int, adds: bool
) -> tuple[Job, ...] | None:
    """A job for each of ``sizes``, whose blocks are in proportion to its bytes."""
    nbytes = [tiles * -(-K // CHUNK_COLUMNS[f]) * CHUNK_BYTES[f] for f, tiles in sizes]
    jobs: list[Job] = []
    for i, (format, tiles) in enumerate(sizes):  # the smallest first
        most = blocks - sum(job.launched for job in jobs) - (len(sizes) - 1 - i)
        own = most if i + 1 == len(sizes) else max(1, min(most, -(-blocks * nbytes[i] // sum(nbytes))))
        job = _job(format, tiles, columns, K, own, room, warps, normed, adds)
        if job is None:
            return None
        jobs.append(job)
    return tuple(jobs)


def _job(
    format: int, tiles: int, columns: int, K: int, blocks: int, room: int, warps: int, normed: int, adds: bool
) -> Job | None:
    """The shortest of all ways to cut K and the tiles."""
    best: tuple[float, Job] | None = None
    width = CHUNK_COLUMNS[format]
    for slices in range(1, min(blocks, 16, -(-K // 512)) + 1):
        slice = K if slices == 1 else -(-K // slices // 256) * 256
        if slice * (slices - 1) >= K:
            continue
        if columns > 1 and 2 * normed > warps * CHUNK_BYTES[format]:
            continue  # no place for the norm
        shared = shared_bytes(format, columns, slice, warps, normed, adds)
        if shared > room:
            continue
        each, chunks = blocks // slices, -(-slice // width)
        for whole in (True, False) if slices == 1 else (True,):
            used = min(each, tiles if whole else max(1, tiles * chunks // warps))
            run = -(-tiles // used) * chunks if whole else -(-tiles * chunks // used)
            parts = slices if whole else -(-(chunks - 1) // max(1, tiles * chunks // used)) + 1
            # the columns come from the second-level cache, before anything else can happen
            time = run + columns * slice / CHUNK_BYTES[format]
            time += (_SHARING * max(1.0, tiles / used / warps) + _PART * parts) * (parts > 1)
            if best is None or time < best[0]:
                best = time, Job(format, tiles, slices, slice, used, whole, parts, shared, run)
    return best and best[1]


def shared_bytes(format: int, columns: int, slice: int, warps: int, normed: int = 0, adds: bool = False) -> int:
    """Shared memory of a block: columns, their powers of two, and what each warp has on its way and to add up. Of one
    column, what it is before it is made ready, with the ``normed`` elements of its norm; of several, what is known of
    the tiles that are finished last, and what products are added to there (their norm is where chunks come later)."""
    eights, width = 1 + (columns > 8), CHUNK_COLUMNS[format]
    size = -(-slice // width) * width
    x = _padded(columns * (2 * size + (128 if format in CODED else 80)))
    powers = _padded(size // 16 * columns) if format in CODED else 0
    if columns == 1:
        more = _padded(4 * max(size, normed) if normed else 2 * size)
    else:
        more = warps * (64 + (256 * eights if adds else 0))
    return x + powers + more + warps * (512 * eights + STAGES * CHUNK_BYTES[format])


def _padded(nbytes: int) -> int:
    return -(-nbytes // 128) * 128
