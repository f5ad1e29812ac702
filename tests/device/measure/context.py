"""The context store on a GPU: copies of 8,192 tokens and a state image of the 27B geometry to host memory and back,
beside one plain copy of as many bytes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

from ninfer.device import Device
from ninfer.program.layout import PAGE, KVCodec, KVGeometry, PoolKind, build_pool_layouts
from ninfer.program.stores.host import HostArena
from ninfer.program.transfers import Transfers

from .stage import Rows, Stage, opened

PAGES = 8192 // PAGE
STATE = (((48, 128, 128), "f32"), ((3, 10240), "bf16"))
"""Recurrent state and convolution inputs: shape of a slot, element type."""


def copies(device: Device, pages: int = PAGES, layers: tuple[int, int] = (16, 48), nbytes: int = 3 << 30) -> Rows:
    """Rows of a table: what moves, and for each direction how fast beside one copy of the same bytes. layers: with
    attention, and recurrent."""
    layouts = build_pool_layouts({PoolKind.MAIN: KVGeometry(layers[0], 4, 256)}, KVCodec.BF16)
    room = device.arena(nbytes)
    at, planes, images = 0, [], []
    for plane in layouts[0].planes:
        planes.append(room.buffer(at, plane.shape(pages), plane.dtype))
        at += -(-planes[-1].nbytes // 256) * 256
    for shape, dtype in [*STATE * layers[1], ((5120,), "bf16")]:
        images.append(room.buffer(at, (1, *shape), dtype))
        at += -(-images[-1].nbytes // 256) * 256
    arena = HostArena(layouts, 1 << 30)
    transfers = Transfers(device, {PoolKind.MAIN: planes}, images, arena)
    moves = [(page, arena.allocate(PoolKind.MAIN)) for page in range(pages)]

    def move(way: str) -> None:
        transfers.begin()
        (transfers.pages_down if way == "d2h" else transfers.pages_up)(PoolKind.MAIN, moves)
        (transfers.image_down if way == "d2h" else transfers.image_up)(0, 0)
        transfers.mark()

    moved = pages * transfers.page_bytes[PoolKind.MAIN] + transfers.image_bytes
    big, plain, event = room.buffer(0, (moved,), "u8"), device.host((moved,), "u8"), device.event()

    def whole(way: str) -> None:
        (device.download(plain, big) if way == "d2h" else device.upload(big, plain))
        event.record()

    rows = [("moved", f"{moved / 1e6:.0f} MB: {pages} pages and a state image of 27B")]
    for way in ("d2h", "h2d"):
        one, ours = _least(whole, way, event.wait), _least(move, way, transfers.wait)
        begin = time.perf_counter()
        move(way)
        submitted = time.perf_counter() - begin
        transfers.wait()
        speeds = f"one copy {moved / one / 1e9:.1f} GB/s, pages {moved / ours / 1e9:.1f} GB/s ({one / ours:.0%})"
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
