"""What the stages share: a table's rows, an open device, medians, and the place of things."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

TESTS = Path(__file__).parents[2]
ROOT = TESTS.parent
Row = tuple[str, str]
"""What was measured or checked, and what came out."""
Rows = list[Row]


class Stage(NamedTuple):
    limit: float
    """Seconds after which it is stopped."""
    measure: Callable[[Path], Iterable[Row]]
    """Called with a folder for its files; ``*.log`` in it are kept. Rows that came before a failure are kept too."""
    compares: bool = False
    """Whether it compares with the host, whose kernels are compiled before it starts."""


@contextmanager
def opened() -> Iterator[Any]:
    """A device for one stage."""
    from ninfer._cuda.device import CudaDevice

    device = CudaDevice(0)
    try:
        yield device
    finally:
        device.close()


def seconds(device: Any, work: Callable[[], object], repeat: int = 20, rounds: int = 5) -> float:
    """Median over ``rounds`` of the mean of ``repeat`` submissions."""
    work()
    return median(device.seconds(lambda: [work() for _ in range(repeat)]) / repeat for _ in range(rounds))


def environment() -> dict[str, str]:
    """For a process that imports the package and these tests."""
    paths = (str(ROOT / "src"), str(TESTS), os.environ.get("PYTHONPATH", ""))
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
