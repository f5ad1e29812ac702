"""Products of columns with stored matrices: which kernel, how the work is cut, and its arguments."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from ninfer._cuda import shares, wides
from ninfer._cuda.area import OPERANDS, ROOM, TICKETS, Area
from ninfer._cuda.buffers import CudaBuffer
from ninfer._cuda.matrix import NAMES, CudaMatrix, CudaRows
from ninfer._cuda.panels import Left, Panels
from ninfer.errors import InvariantError

STORE_BF16, STORE_F32, ADD, SWIGLU = range(4)

COLUMNS = 128
"""Up to so many columns, weights are decoded inside the product; for more, into bf16 once and multiplied by cuBLAS."""

_BARE = 8
"""Up to so many columns, blocks that need them in bf16 norm and order them themselves."""

_SEGMENT, _JOB = 128, 128

Gemm = Callable[[int, int, str, int, int, int, int, int, bool], None]


def pack(*words: Any) -> bytes:
    """A kernel's arguments: buffers as addresses, ints, floats as double, bytes as they are; None is a null address."""
    return b"".join(map(_word, words))


def _word(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, float):
        return struct.pack("<d", value)
    return struct.pack("<q", 0 if value is None else value if isinstance(value, int) else value.ptr)


class Products:
    """``outs[i] = x W_i^T`` in its variants, over one device."""

    def __init__(self, device: Any, gemm: Gemm, area: Area) -> None:
        self._device = device
        self._gemm = gemm
        self._area = area
        self.panels = Panels(device, area)

    @property
    def room(self) -> CudaBuffer:
        return self._area.room

    @property
    def tickets(self) -> CudaBuffer:
        return self._area.tickets

    def __call__(
        self,
        result: int,
        outs: Sequence[CudaBuffer],
        x: CudaBuffer,
        norm: CudaBuffer | None,
        weights: Sequence[CudaMatrix],
        eps: float = 0.0,
        scale: CudaBuffer | None = None,
        scratch: CudaBuffer | None = None,
        next_norm: CudaBuffer | None = None,
    ) -> None:
        """``result`` says what becomes of the products. With SWIGLU, ``weights`` is (gate, up) and ``outs`` is one.
        next_norm: with ADD, what the next product norms ``outs`` with."""
        self._area.require()
        columns, K = x.shape
        for weight in weights:
            if weight.cols != K:
                raise InvariantError(f"x is {x.shape}, the weight has {weight.cols} columns")
        for out, weight in zip(outs, weights, strict=result != SWIGLU):
            short = result == STORE_F32 and out.shape[1] < weight.rows
            if out.shape[0] != columns or (out.shape[1] != weight.rows and not short):
                raise InvariantError(f"out is {out.shape}, not {(columns, weight.rows)}")
        if result == SWIGLU and weights[0].rows != weights[1].rows:
            raise InvariantError(f"gate has {weights[0].rows} rows, up {weights[1].rows}")
        steps = list(_swiglu_steps(outs[0], *weights) if result == SWIGLU else _steps(outs, weights))
        mixed = any(len({rows.format for rows, *_ in step}) > 1 for step in steps)
        if columns > COLUMNS or mixed:
            self._dense(result, steps, x, norm, eps, scale, scratch)
            return
        most = shares.MAX_SEGMENTS // (2 if result == SWIGLU else 1)
        if plain := [step for step in steps if not all(rows.vectors for rows, *_ in step)]:
            self._dense(result, plain, x, norm, eps, scale, scratch)
        for group in _groups([step for step in steps if step not in plain], most):
            if columns > shares.COLUMNS or not self._stream(result, group, x, norm, eps, scale):
                self._wides(result, group, x, norm, eps, scale, scratch, next_norm)

    # -- kernels

    def _stream(self, result: int, steps: list[Step], x: Any, norm: Any, eps: float, scale: Any) -> bool:
        """One launch for all formats; False where the columns do not fit a block's shared memory."""
        columns, K = x.shape
        height = 8 if result == SWIGLU else 16
        formats = _by_format(steps)
        tables = [_segments(own, height)[:2] for own in formats]
        sizes = [(own[0][0][0].format, tiles) for own, (_, tiles) in zip(formats, tables, strict=True)]
        coded = any(format in shares.CODED for format, _ in sizes)
        bare = K % 8 == 0 and (columns == 1 or (columns <= _BARE and not coded))
        module = f"stream_{1 if columns == 1 and bare else next(n for n in (4 if coded else 8, 8, 16) if columns <= n)}"
        symbol, warps = _kernel(module, [NAMES[format] for format, _ in sizes])
        normed, adds = K if bare and norm is not None else 0, result == ADD
        plan = self._plan(sizes, columns, K, normed, adds, warps)
        if normed and columns > 1 and (plan is None or any(job.slices > 1 for job in plan.jobs)):
            bare, plan = (
                False,
                self._plan(sizes, columns, K, 0, adds, warps),
            )  # a block has not the whole of its columns
        if plan is None:
            return False
        parts, eights = max(job.parts for job in plan.jobs), 1 + (columns > 8)
        tiles = sum(job.tiles for job in plan.jobs)
        if parts > 1 and (tiles > TICKETS or tiles * parts * 512 * eights > ROOM - OPERANDS):
            return False
        codes = sums = None
        if not bare:
            x, codes, sums = self._operands(x, norm, eps, [format for format, _ in sizes])
            norm = None
        columns_at = (x, norm, sums, codes, eps)
        words, blocks = self._words(result, plan, [table for table, _ in tables], columns_at, columns, K, scale, parts)
        shared = max(job.room(plan.warps, plan.stages) for job in plan.jobs)
        self._launch(module, symbol, blocks, 32 << plan.warps, words, shared)
        return True

    def _plan(
        self, sizes: list[tuple[int, int]], columns: int, K: int, normed: int, adds: bool, warps: int
    ) -> shares.Plan | None:
        limit = self._device.shared_limit - 2048
        return shares.plan(sizes, columns, K, self._device.multiprocessors, limit, normed, adds, warps)

    def _operands(self, x: Any, norm: Any, eps: float, formats: Sequence[int]) -> tuple[int, int, int]:
        """Columns made ready at the workspace's start, once for all launches: where those of bf16 are, those in fixed
        point, and their powers of two."""
        columns, K = x.shape
        padded = -(-K // 128) * 128
        nbytes = columns * padded * 2
        if 3 * nbytes > OPERANDS:
            raise InvariantError(f"{columns} columns of {K} exceed the workspace")
        coded = [format in shares.CODED for format in formats]
        plain, codes, sums = (self.room.ptr + i * nbytes for i in range(3))
        outs = (None if all(coded) else plain, codes if any(coded) else None, sums)
        self._launch("rows", "operands", columns, min(512, padded // 4), pack(x, norm, *outs, eps, K, padded), 0)
        return plain, codes, sums

    def _wides(
        self, result: int, steps: list[Step], x: Any, norm: Any, eps: float, scale: Any, scratch: Any, next_norm: Any
    ) -> None:
        """A launch for all formats and for as many columns as fit; matrices of fp32 are decoded whole."""
        height = 8 if result == SWIGLU else 16
        formats = _by_format(steps)
        for own in [own for own in formats if NAMES[own[0][0][0].format] == "FP32"]:
            formats.remove(own)
            self._dense(result, own, x, norm, eps, scale, scratch)
        if not formats:
            return
        columns, K = x.shape
        sizes = [(own[0][0][0].format, _segments(own, height)[1]) for own in formats]
        plan = wides.plan(tuple(sizes), columns, K, self._device.multiprocessors, self._device.shared_limit - 2048)
        partial = 2 * sum(job.blocks for job in plan.jobs) * plan.warps * 64 * plan.columns
        if sum(tiles for _, tiles in sizes) > TICKETS or partial > ROOM - OPERANDS:
            raise InvariantError(f"{sizes} tiles exceed the workspace")
        wanted = result == SWIGLU or (result == ADD and next_norm is not None)
        leaves = wanted and columns <= plan.columns and _in_tiles(formats, height)
        for begin in range(0, columns, plan.columns):
            end = min(columns, begin + plan.columns)
            parts = [
                [tuple((rows, out.slice(begin, end), first) for rows, out, first in step) for step in own]
                for own in formats
            ]
            tables = [_segments(own, height)[0] for own in parts]
            out = parts[0][0][0][1] if leaves else None
            some = scale and scale.slice(begin, end)
            self._wide(result, plan, tables, x.slice(begin, end), norm, eps, some, out, next_norm)

    def _wide(
        self, result: int, plan: wides.Plan, tables: list[bytes], x: Any, norm: Any, eps: float, scale: Any,
        leaves: CudaBuffer | None, next_norm: CudaBuffer | None,
    ) -> None:  # fmt: skip
        """leaves: the whole result, which the next product may take at once, with its norm."""
        columns, K = x.shape
        padded = -(-K // 256) * 256
        nbytes = 2 * padded * plan.columns
        if nbytes > OPERANDS:
            raise InvariantError(f"{columns} columns of {K} exceed the workspace")
        found = self.panels.find(x, norm, plan.columns)
        taken, squares = (found.at, found.squares) if found else (self.room.ptr, None)
        if found is None:
            width = padded if norm is not None else min(padded, 2048)
            words = pack(x, norm, taken, eps, K, padded, plan.columns, width)
            grid, shared = (columns, -(-padded // width)), 2 * width * (1 + (norm is not None))
            self._launch("rows", "panels", grid, min(512, width // 8), words, shared)
        left = self.panels.place(leaves, next_norm, plan.columns, taken, nbytes) if leaves else None
        columns_at = (taken, None, squares, None, eps)
        words, blocks = self._words(result, plan, tables, columns_at, columns, K, scale, 0, left)
        name = f"wide_{plan.columns}"
        self._launch(name, name, blocks, 32 * plan.warps, words, plan.jobs[0].shared)
        if left:
            self.panels.leave(left)

    def _words(
        self, result: int, plan: shares.Plan | wides.Plan, tables: list[bytes], columns_at: tuple[Any, ...],
        columns: int, K: int, scale: Any, parts: int, left: Left | None = None,
    ) -> tuple[bytes, int]:  # fmt: skip
        """A ``Stream`` of ``kernels/products.cuh``, and its blocks. columns_at: its first words."""
        jobs, segment, block, ticket = b"", 0, 0, 0
        planned: Sequence[shares.Job | wides.Job] = plan.jobs
        for job, table in zip(planned, tables, strict=True):
            end = segment + len(table) // _SEGMENT
            jobs += pack(*job.words(K, segment, end, ticket, block))
            segment, block, ticket = end, block + job.launched, ticket + job.tiles
        words = pack(
            *columns_at, columns, K, result, len(plan.jobs), plan.warps, plan.stages, scale,
            self.room.ptr + OPERANDS, parts, self.tickets,
            *((left.at, left.norm, left.squares) if left else (None,) * 3),
        )  # fmt: skip
        words += jobs.ljust(shares.MAX_JOBS * _JOB, b"\0")
        return words + b"".join(tables).ljust(shares.MAX_SEGMENTS * _SEGMENT, b"\0"), block

    def _launch(self, module: str, symbol: str, grid: Any, block: int, words: bytes, shared: int) -> None:
        function = self._device.function(module, symbol, shared)
        self._device.launch(function, grid, block, words, shared=shared, dependent=True)

    # -- cuBLAS

    def _dense(self, result: int, steps: list[Step], x: Any, norm: Any, eps: float, scale: Any, scratch: Any) -> None:
        columns, K = x.shape
        if norm is not None:
            u = CudaBuffer(scratch.head(columns * K * 2).ptr, x.shape, "bf16")
            self._launch("rows", "final_norm", columns, 256, pack(u, x, norm, None, eps, K, 0, K), 0)
            x = u
        for step in steps:
            height = step[0][0].rows
            # rows whose decoded form fits one half of the workspace, and their products the other
            most = max(1, ROOM // 2 // (len(step) * max(2 * K, 4 * columns)))
            most = most // 128 * 128 or most
            for begin in range(0, height, most):
                end = min(height, begin + most)
                self._dense_rows(result, [(r.part(begin, end), o, f + begin) for r, o, f in step], x, scale)

    def _dense_rows(self, result: int, parts: list[tuple[CudaRows, CudaBuffer, int]], x: Any, scale: Any) -> None:
        columns, K = x.shape
        products = self.room.ptr + ROOM // 2
        decoded = self.room.ptr
        for i, (rows, out, first) in enumerate(parts):
            weights = rows.words[0] + rows.first * 2 * K
            if rows.format != 0:
                weights = decoded + i * rows.rows * K * 2
                blocks = min(8 * self._device.multiprocessors, -(-rows.rows * K // 2048))
                segment = pack(*rows.words, 0, 0, 0, 0)
                self._launch("rows", "dense", blocks, 256, pack(weights, K, rows.first, rows.rows, segment), 0)
            if result == SWIGLU or (result == ADD and scale is not None):
                c, stride, kind = products + i * columns * rows.rows * 4, rows.rows, "f32"
            else:
                size = 4 if result == STORE_F32 else 2
                c, stride, kind = out.ptr + size * first, out.shape[1], "f32" if result == STORE_F32 else "bf16"
            self._gemm(c, stride, kind, weights, x.ptr, rows.rows, columns, K, kind == "bf16" and result == ADD)
        rows, out, first = parts[0]
        blocks = min(8 * self._device.multiprocessors, -(-columns * rows.rows // 1024))
        if result == SWIGLU:
            up = products + columns * rows.rows * 4
            words = pack(out, products, up, columns, rows.rows, first, out.shape[1])
            self._launch("rows", "product", blocks, 256, words, 0)
        elif result == ADD and scale is not None:
            words = pack(out, products, scale, columns, out.shape[1], first, rows.rows)
            self._launch("rows", "add", blocks, 256, words, 0)


Step = tuple[tuple[CudaRows, CudaBuffer, int], ...]
"""Rows that are worked on together (one, or gate and up), each with its out and first column there."""


def _steps(outs: Sequence[CudaBuffer], weights: Sequence[CudaMatrix]) -> Iterator[Step]:
    for out, weight in zip(outs, weights, strict=True):
        first = 0
        for rows in weight.parts:
            count = min(rows.rows, out.shape[1] - first)
            if count > 0:
                yield ((rows.part(0, count), out, first),)
            first += rows.rows


def _swiglu_steps(out: CudaBuffer, gate: CudaMatrix, up: CudaMatrix) -> Iterator[Step]:
    """Rows of gate and up that each lie in one segment."""
    edges: list[set[int]] = []
    for matrix in (gate, up):
        at, own = 0, {0}
        for rows in matrix.parts:
            at += rows.rows
            own.add(at)
        edges.append(own)
    bounds = sorted(edges[0] | edges[1])
    for begin, end in pairwise(bounds):
        yield tuple((_rows_at(m, begin, end), out, begin) for m in (gate, up))


def _rows_at(matrix: CudaMatrix, begin: int, end: int) -> CudaRows:
    at = 0
    for rows in matrix.parts:
        if begin < at + rows.rows:
            return rows.part(begin - at, end - at)
        at += rows.rows
    raise InvariantError(f"rows [{begin}, {end}) of a matrix of {matrix.rows}")


def _in_tiles(formats: list[list[Step]], height: int) -> bool:
    """Whether steps give the whole of one result, cut into tiles of ``height`` rows."""
    steps = [step[0] for own in formats for step in own]
    out = steps[0][1]
    whole = all(rows.rows % height == 0 and first % height == 0 for rows, _, first in steps)
    return whole and sum(rows.rows for rows, *_ in steps) == out.shape[1] and out.ptr % 16 == 0


_TOGETHER = {
    "stream_1_BF16_Q4_Q5": shares.FEW_WARPS, "stream_1_BF16_Q6": shares.FEW_WARPS, "stream_1_BF16_Q8": shares.WARPS,
    "stream_1_BF16_NVFP4": shares.FEW_WARPS, "stream_1_BF16_FP8": shares.WARPS,
    "stream_4_BF16_Q4_Q5": shares.WARPS, "stream_8_BF16_Q4_Q5": shares.WARPS, "stream_8_BF16_FP8": shares.WARPS,
}  # fmt: skip
"""Kernels for several formats, and the warps that their blocks have at most, as a power of two."""


def _kernel(module: str, formats: list[str]) -> tuple[str, int]:
    """The smallest kernel of a module for rows of these formats, and the warps of its blocks, at most."""
    if len(formats) == 1 and formats[0] != "FP32":
        return f"{module}_{formats[0]}", shares.WARPS
    wanted = {module, *formats}
    found = (name for name in _TOGETHER if wanted <= {name[: len(module)], *name[len(module) + 1 :].split("_")})
    name = next(found, module)
    return name, _TOGETHER.get(name, shares.WARPS)


def _by_format(steps: list[Step]) -> list[list[Step]]:
    """Steps of one format together, the fewest rows first."""
    formats = sorted({step[0][0].format for step in steps}, reverse=True)
    own = [[step for step in steps if step[0][0].format == format] for format in formats]
    return sorted(own, key=lambda steps: sum(step[0][0].rows for step in steps))


def _groups(steps: list[Step], most: int) -> Iterator[list[Step]]:
    """Steps a launch can take: so many, of few formats."""
    group: list[Step] = []
    for step in sorted(steps, key=lambda step: step[0][0].format):
        formats = {each[0][0].format for each in (*group, step)}
        if len(group) == most or len(formats) > shares.MAX_JOBS:
            yield group
            group = []
        group.append(step)
    if group:
        yield group


def _segments(steps: list[Step], tile_rows: int) -> tuple[bytes, int, int]:
    """(the kernels' segment table, tiles, stage bytes of a warp)."""
    table, tiles, stage = [], 0, 0
    for step in steps:
        for rows, out, first in step:
            table.append(pack(*rows.words, out, first, out.shape[1], tiles))
            stage = max(stage, rows.stage)
        tiles += -(-step[0][0].rows // tile_rows)
    return b"".join(table), tiles, stage
