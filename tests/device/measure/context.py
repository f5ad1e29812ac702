"""The context store on a GPU: copies of 8,192 tokens and a state image of the 27B geometry to host memory and back,
beside one plain copy of as many bytes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

from ninfer.contract import Device
from ninfer.program.layout import PAGE, KVCodec, KVGeometry, PoolKind, build_pool_layouts
from ninfer.program.stores.host import HostArena
from ninfer.program.transfers import Transfers

from .stage import Rows, Stage, opened

PAGES = 8192 // PAGE
STATE = (((48, 128, 128), "f32", 48), ((3, 10240), "bf16", 48), ((5120,), "bf16", 1))
"""Recurrent state, convolution inputs and continuation hidden: shape of a slot, element type, layers."""


def copies(device: Device) -> Rows:
    """Rows of a table: what moves, and for each direction how fast beside one copy of the same bytes."""
    layouts = build_pool_layouts(KVGeometry(16, 4, 256), KVCodec.BF16)
    room = device.arena(3 << 30)
    at, planes, images = 0, [], []
    for plane in layouts[0].planes:
        planes.append(room.buffer(at, plane.shape(PAGES), plane.dtype))
        at += -(-planes[-1].nbytes // 256) * 256
    for shape, dtype, layers in STATE:
        for _ in range(layers):
            images.append(room.buffer(at, (1, *shape), dtype))
            at += -(-images[-1].nbytes // 256) * 256
    arena = HostArena(layouts, 1 << 30)
    transfers = Transfers(device, {PoolKind.MAIN: planes}, images, arena)
    moves = [(page, arena.allocate(PoolKind.MAIN)) for page in range(PAGES)]

    def move(way: str) -> None:
        transfers.begin()
        (transfers.pages_down if way == "d2h" else transfers.pages_up)(PoolKind.MAIN, moves)
        (transfers.image_down if way == "d2h" else transfers.image_up)(0, 0)
        transfers.mark()

    nbytes = PAGES * transfers.page_bytes[PoolKind.MAIN] + transfers.image_bytes
    big, plain, event = room.buffer(0, (nbytes,), "u8"), device.host((nbytes,), "u8"), device.event()

    def whole(way: str) -> None:
        (device.download(plain, big) if way == "d2h" else device.upload(big, plain))
        event.record()

    rows = [("moved", f"{nbytes / 1e6:.0f} MB: {PAGES} pages and a state image of 27B")]
    for way in ("d2h", "h2d"):
        one, ours = _least(whole, way, event.wait), _least(move, way, transfers.wait)
        begin = time.perf_counter()
        move(way)
        submitted = time.perf_counter() - begin
        transfers.wait()
        speeds = f"one copy {nbytes / one / 1e9:.1f} GB/s, pages {nbytes / ours / 1e9:.1f} GB/s ({one / ours:.0%})"
        rows.append((way, f"{speeds}, {ours * 1e3:.1f} ms, submitted in {submitted * 1e3:.1f} ms"))
    room.close()
    return rows


def _least(work: Callable[[str], None], way: str, wait: Callable[[], None], n: int = 5) -> float:
    """Seconds of the fastest of ``n``."""
    best = math.inf
    for _ in range(n):
        begin = time.perf_counter()
        work(way)
        wait()
        best = min(best, time.perf_counter() - begin)
    return best


def copies_stage(out: Path) -> Rows:
    with opened() as device:
        return copies(device)


STAGES = {"context": Stage(30, copies_stage)}
