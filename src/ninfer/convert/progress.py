"""Counting bytes aloud: a bar, a callback, or nothing."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from ninfer.options import ProgressCallback


class Meter:
    """Called with each number of bytes done. A context manager around one stage of ``total`` bytes.

    progress: ``None`` shows a bar in a terminal or notebook, a bool always or never, a callable is told
    ``(stage, done, total)`` instead.
    """

    def __init__(self, stage: str, total: int, progress: bool | ProgressCallback | None) -> None:
        self.done = 0
        self._stage, self._total = stage, total
        self._callback = progress if callable(progress) else None
        self._bar: Any = None
        if self._callback is None and progress is not False:
            from tqdm.auto import tqdm

            hidden = False if progress else None  # None: hidden unless it is a terminal
            self._bar = tqdm(desc=stage, total=total, unit="B", unit_scale=True, disable=hidden)

    def __call__(self, nbytes: int) -> None:
        self.done += nbytes
        if self._callback is not None:
            self._callback(self._stage, self.done, self._total)
        elif self._bar is not None:
            self._bar.update(nbytes)

    def __enter__(self) -> Meter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
