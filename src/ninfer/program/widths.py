"""Which passes are recorded: columns of decode rounds and prefill units, numbers of drafts; and what that takes."""

from __future__ import annotations

from ninfer.device import Device
from ninfer.program.memory import Shape

WIDTHS = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536)
"""Tokens of the recorded prefill units below a whole chunk. Close enough that padding costs at most half a unit."""


def prefill_widths(device: Device, chunk: int) -> tuple[int, ...]:
    """Tokens of the prefill units that are recorded, ascending."""
    return (*(w for w in WIDTHS if w < chunk), chunk) if device.asynchronous else ()


def round_widths(device: Device, shape: Shape) -> tuple[int, ...]:
    """Columns of a row in the decode rounds that can run, ascending: as many as a round needs on the host, elsewhere a
    few that are recorded."""
    if not device.asynchronous:
        return tuple(range(1, shape.width + 1))
    return (*(w for w in (1, 2, 4) if w < shape.width and shape.adaptive), shape.width)


def draft_steps(shape: Shape, widths: tuple[int, ...], whole: bool) -> tuple[int, ...]:
    """Numbers of drafts that are made at once, ascending. whole: all or none."""
    if not shape.window:
        return ()
    return (shape.window,) if whole or not shape.adaptive else tuple(w - 1 for w in widths if w > 1)


def recording_bytes(device: Device, shape: Shape) -> int:
    """Device memory to set aside for the recordings of passes: a decode round of each size and width, with speculation
    also what drafts and what folds, and a prefill unit of each size."""
    widths = round_widths(device, shape)
    rounds = shape.rows * len(widths) * (2 if shape.window else 1)
    drafting = shape.rows * len(draft_steps(shape, widths, whole=False))
    return device.recording_bytes * (rounds + drafting + len(prefill_widths(device, shape.chunk)))


def at_least(n: int, sizes: tuple[int, ...]) -> int:
    """The first of ascending ``sizes`` that is not below ``n``; 0 where there is none."""
    return next((size for size in sizes if size >= n), 0)
