"""Products of 17 to 128 columns: how stored rows are shared out among the blocks of a launch (``kernels/wide.cuh``)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from ninfer._cuda.shares import CHUNK_BYTES, CHUNK_COLUMNS, COLUMNS
from ninfer.errors import InvariantError

_CHUNK = (1.2, 1.2, 2.0, 2.5, 3.2, 1.6, 2.3, 1.4)
"""What a chunk takes a block of 16 warps with 64 columns, in microseconds on one H200, by format."""

_BESIDES, _SHARED = 3.0, 4.0
"""What a block that begins another tile, and one that adds up what it shares, take longer."""

_MOST_PARTS = 255
"""Blocks that may share a tile: they are counted in a byte."""


@dataclass(frozen=True, slots=True)
class Job:
    """Rows of one format, in ``tiles`` of 16, of which as many as a block has warps are a group, worked on together, K
    in chunks. A block has ``whole`` groups of its own, and its share of those that are left: a run of all their chunks,
    or, with ``parts``, one of so many parts of one of them."""

    format: int
    tiles: int
    groups: int
    blocks: int
    whole: int
    parts: int  # 0: runs
    shared: int

    @property
    def launched(self) -> int:
        """Its blocks."""
        return self.blocks

    def words(self, K: int, segment: int, end: int, ticket: int, block: int) -> tuple[int, ...]:
        """A ``Job`` of ``kernels/products.cuh``."""
        width = CHUNK_COLUMNS[self.format]
        chunks, left = -(-K // width), self.groups - self.whole * self.blocks
        length, longer = divmod(chunks, self.parts) if self.parts else divmod(left * chunks, self.blocks)
        return (
            self.format, width, CHUNK_BYTES[self.format], segment, end, self.tiles, ticket, block,
            self.blocks, self.parts, 0, chunks, 0, self.whole, length, longer,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """How ``columns`` columns at a time, a multiple of 32, meet all rows; ``warps`` of a block."""

    jobs: tuple[Job, ...]
    columns: int
    warps: int
    stages: int


def panel_columns(columns: int) -> int | None:
    """Of products of so many columns at once; None where they take no panels."""
    return next((n for n in (32, 64, 128) if columns <= n), None) if columns > COLUMNS else None


@lru_cache(1024)
def plan(sizes: tuple[tuple[int, int], ...], columns: int, K: int, blocks: int, limit: int) -> Plan:
    """Share out ``blocks`` blocks among (format, tiles) each, with the most columns, warps and stages that fit into
    ``limit`` bytes of shared memory."""
    for most in (128, 64, 32):
        if most >= 2 * columns and most > 32:
            continue
        for warps, stages in ((16, 3), (16, 2), (8, 3), (8, 2), (4, 2)):
            shared = max(128 + stages * (2 * CHUNK_COLUMNS[f] * most + warps * CHUNK_BYTES[f]) for f, _ in sizes)
            if shared <= limit and (most < 128 or warps <= 8):
                return Plan(_jobs(sizes, K, blocks, warps, shared), most, warps, stages)
    raise InvariantError(f"a block of {limit} bytes of shared memory")


def _jobs(sizes: tuple[tuple[int, int], ...], K: int, blocks: int, warps: int, shared: int) -> tuple[Job, ...]:
    """Such that the block that takes longest takes as little as can be."""
    groups = [-(-tiles // warps) for _, tiles in sizes]
    ways = [
        list(_ways(format, n, -(-K // CHUNK_COLUMNS[format]), max(1, blocks - len(sizes) + 1)))
        for (format, _), n in zip(sizes, groups, strict=True)
    ]

    def chosen(longest: float) -> list[tuple[float, int, int, int]] | None:
        """Of each format the way with the fewest blocks, or None where these are too many."""
        found = [next((way for way in own if way[0] <= longest), None) for own in ways]
        some = [way for way in found if way]
        return some if len(some) == len(sizes) and sum(way[1] for way in some) <= max(blocks, len(sizes)) else None

    best = next(way for time in sorted({way[0] for own in ways for way in own}) if (way := chosen(time)))
    for i, own in reversed(list(enumerate(ways))):  # what is over shortens others, large ones first
        room = max(blocks, len(sizes)) - sum(way[1] for way in best) + best[i][1]
        best[i] = min(way for way in own if way[1] <= room)
    return tuple(
        Job(format, tiles, n, used, whole, parts, shared)
        for (format, tiles), n, (_, used, whole, parts) in zip(sizes, groups, best, strict=True)
    )


def _ways(format: int, groups: int, chunks: int, blocks: int) -> Iterator[tuple[float, int, int, int]]:
    """Of as many blocks and fewer, the fewest first: how long the longest takes, blocks, groups of their own, parts."""
    for used in range(1, max(1, min(blocks, groups * chunks // 2)) + 1):
        whole, left = divmod(groups, used)
        if whole:
            run = -(-left * chunks // used)
            time = _CHUNK[format] * (whole * chunks + run) + _BESIDES * (whole - 1 + (left > 0)) + _SHARED * (left > 0)
            yield time, used, whole, 0
            continue
        run = -(-groups * chunks // used)
        if used % groups == 0 and used // groups <= min(chunks, _MOST_PARTS):
            yield _CHUNK[format] * run + _SHARED, used, 0, used // groups
        elif chunks // max(1, groups * chunks // used) + 2 <= _MOST_PARTS:
            yield _CHUNK[format] * run + _BESIDES + _SHARED, used, 0, 0
