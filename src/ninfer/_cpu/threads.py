"""Numba's threading layer: which one, how many threads, and when it must not be used."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ninfer import env
from ninfer.errors import DeviceError, EngineClosed

_workqueue = threading.Lock()


def choose() -> AbstractContextManager[object]:
    """Start Numba's threading layer and return what to hold while kernels run.

    A layer that several threads may enter at once (TBB, OpenMP) is preferred. The work queue is not one, so launches
    on it take turns process-wide. A layer that the application chose or already started is kept. Raises DeviceError.
    """
    import numba
    from numba.core import config as numba_config
    from numba.np.ufunc import parallel

    config: Any = numba_config
    chosen = config.THREADING_LAYER
    try:
        if chosen == "default" and not parallel._is_initialized:
            config.THREADING_LAYER = "threadsafe"
        try:
            parallel._launch_threads()
        except ValueError:
            config.THREADING_LAYER = "workqueue"
            parallel._launch_threads()
        layer = numba.threading_layer()
    except (ValueError, ImportError, RuntimeError) as error:
        raise DeviceError(f"no usable Numba threading layer: {error}") from error
    finally:
        config.THREADING_LAYER = chosen
    if layer in ("omp", "tbb"):
        return nullcontext()
    if layer == "workqueue":
        return _workqueue
    raise DeviceError(f"unknown Numba threading layer {layer!r}")


def count(wanted: int | None) -> int:
    """Threads of a device: ``wanted``, else NINFER_CPU_THREADS, else one per usable core.

    Raises DeviceError above Numba's limit.
    """
    import numba

    limit = int(numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
    wanted = wanted or env.cpu_threads()
    if wanted is None:
        return min(limit, len(os.sched_getaffinity(0)))
    if wanted > limit:
        raise DeviceError(f"{wanted} threads asked for, Numba's limit is {limit}")
    return wanted


def call(threads: int, function: Callable[..., None], *args: object) -> None:
    """Call compiled parallel code with ``threads`` threads, whatever the calling thread's own setting is."""
    import numba

    before = numba.get_num_threads()
    if before == threads:
        function(*args)
        return
    numba.set_num_threads(threads)
    try:
        function(*args)
    finally:
        numba.set_num_threads(before)


class Process:
    """The process that owns a device. Threads do not survive a fork, and the OpenMP layer aborts in the child."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    def check(self) -> None:
        """Raises EngineClosed in any process but the owner."""
        if os.getpid() != self.pid:
            raise EngineClosed(f"opened in process {self.pid}, used in its fork {os.getpid()}")
