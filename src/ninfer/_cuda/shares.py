"""Products of few columns: how stored rows are shared out among the blocks of a launch (``kernels/stream.cuh``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ninfer._cuda.matrix import NAMES

COLUMNS = 16
"""Up to so many columns, they stay in shared memory while the weights stream by."""

MAX_JOBS = 2
"""Formats of a launch; the second is bf16."""

MAX_WARPS, MIN_WARPS, STAGES = 16, 6, 3

CHUNK_COLUMNS = (64, 64, 256, 256, 256, 128, 256, 128)
CHUNK_BYTES = (2048, 4096, 2176, 2688, 3200, 2176, 2304, 2048)
"""Of 16 rows, by format."""

_BIASED = ("Q4", "Q5", "Q6")
_SHARING = 16.0
"""What it costs to add up a tile that blocks share, in chunks a block could have read meanwhile."""


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


@dataclass(frozen=True, slots=True)
class Plan:
    jobs: tuple[Job, ...]
    warps: int


def plan(sizes: Sequence[tuple[int, int]], columns: int, K: int, blocks: int, limit: int) -> Plan | None:
    """Share out ``blocks`` blocks among (format, tiles) each; None where the columns do not fit into shared memory."""
    for warps in range(MAX_WARPS, MIN_WARPS - 1, -2):
        jobs = _jobs(sizes, columns, K, blocks, limit, warps)
        if jobs is not None:
            return Plan(jobs, warps)
    return None


def _jobs(
    sizes: Sequence[tuple[int, int]], columns: int, K: int, blocks: int, room: int, warps: int
) -> tuple[Job, ...] | None:
    """A job for each of ``sizes``, whose blocks are in proportion to its bytes."""
    nbytes = [tiles * -(-K // CHUNK_COLUMNS[f]) * CHUNK_BYTES[f] for f, tiles in sizes]
    jobs: list[Job] = []
    for i in reversed(range(len(sizes))):  # bf16, the smaller one, first
        most = blocks - sum(job.slices * job.blocks for job in jobs) - i
        own = most if i == 0 else max(1, min(most, round(blocks * nbytes[i] / sum(nbytes))))
        job = _job(*sizes[i], columns, K, own, room, warps)
        if job is None:
            return None
        jobs.append(job)
    return tuple(reversed(jobs))


def _job(format: int, tiles: int, columns: int, K: int, blocks: int, room: int, warps: int) -> Job | None:
    """The shortest of all ways to cut K and the tiles."""
    best: tuple[float, Job] | None = None
    width = CHUNK_COLUMNS[format]
    for slices in range(1, min(blocks, 16, -(-K // 512)) + 1):
        slice = K if slices == 1 else -(-K // slices // 256) * 256
        if slice * (slices - 1) >= K:
            continue
        shared = shared_bytes(format, columns, slice, warps)
        if shared > room:
            continue
        each, chunks = blocks // slices, -(-slice // width)
        for whole in (True, False) if slices == 1 else (True,):
            used = min(each, tiles if whole else max(1, tiles * chunks // warps))
            run = -(-tiles // used) * chunks if whole else -(-tiles * chunks // used)
            parts = slices if whole else -(-(chunks - 1) // max(1, tiles * chunks // used)) + 1
            # the columns come from the second-level cache, before anything else can happen
            time = run + columns * slice / CHUNK_BYTES[format]
            time += _SHARING * max(1.0, tiles / used / warps) * (parts > 1)
            if best is None or time < best[0]:
                best = time, Job(format, tiles, slices, slice, used, whole, parts, shared)
    return best and best[1]


def shared_bytes(format: int, columns: int, slice: int, warps: int) -> int:
    """Shared memory of a block: columns, their sums, and what each warp has on its way and to add up."""
    eights, width = 1 + (columns > 8), CHUNK_COLUMNS[format]
    size = -(-slice // width) * width
    shift = -(-size // 64 * 8 * eights // 32) * 32 if NAMES[format] in _BIASED else 0
    x = -(-columns * (2 * size + 80) // 128) * 128
    return x + 4 * shift + warps * (512 * eights + STAGES * CHUNK_BYTES[format])
