"""Every Op: how long it takes."""

from __future__ import annotations

from pathlib import Path

from .stage import Rows, Stage, opened


def ops(out: Path) -> Rows:
    """Seconds of every Op at the sizes of real models."""
    from ninfer._cuda.bench import Bench
    from ninfer.device import working

    with opened() as device, working(device):
        return [
            (row["case"], f"{row['us']:.1f} us, {row['GB/s']:.0f} GB/s, {row['ratio']:.2f} of reads")
            for row in Bench(device, ()).measure()
        ]


STAGES = {"ops": Stage(60, ops)}
