"""Counting work aloud: a bar, a callback, or nothing."""

from __future__ import annotations

import sys
import warnings
from types import TracebackType
from typing import Any

from ninfer.options import ProgressCallback


class Meter:
    """Called with each amount of work done. A context manager around one stage of ``total``, or of unknown length.

    progress: ``None`` shows a bar in a terminal or notebook, a bool always or never, a callable is told
    ``(stage, done, total)`` instead, with total 0 where it is unknown. unit: "B" counts bytes. delay: seconds that a
    stage must take before a bar appears.
    """

    def __init__(
        self,
        stage: str,
        total: int | None,
        progress: bool | ProgressCallback | None,
        unit: str = "B",
        delay: float = 0.0,
    ) -> None:
        self.done = 0
        self._stage, self._total = stage, total
        self._callback = progress if callable(progress) else None
        self._bar: Any = None
        if self._callback is None and (progress or (progress is None and _watched())):
            with warnings.catch_warnings(action="ignore"):  # a notebook without widgets gets a bar of text
                from tqdm.auto import tqdm
            self._bar = tqdm(desc=stage, total=total, unit=unit, unit_scale=unit == "B", delay=delay)

    def __call__(self, amount: int, note: str = "") -> None:
        """Count ``amount`` more; ``note`` is shown beside the bar."""
        self.done += amount
        if self._callback is not None:
            self._callback(self._stage, self.done, self._total or 0)
        elif self._bar is not None:
            if note:
                self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(amount)

    def reach(self, done: int, total: int, note: str = "") -> None:
        """Count up to ``done`` of ``total``, for work that reports where it is."""
        if total != self._total:
            self._total = total
            if self._bar is not None:
                self._bar.total = total
        self(done - self.done, note)

    def __enter__(self) -> Meter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()


def _watched() -> bool:
    """Whether somebody looks at standard error: in a terminal or a notebook."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules
