"""The masks of one batch, as Program borrows them for one unit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ninfer.contract import MaskProvider, RowMask

if TYPE_CHECKING:
    from ninfer.constraints.matcher import Matcher


class BatchMasks:
    """Rows in batch order; a row without a matcher has no constraint."""

    def __init__(self, matchers: Sequence[Matcher | None]) -> None:
        self._matchers = matchers
        self._constrained = [row for row, matcher in enumerate(matchers) if matcher is not None]

    def constrained_rows(self) -> Sequence[int]:
        return self._constrained

    def fill(self, row: int, drafts: Sequence[int], slots: npt.NDArray[np.uint32]) -> RowMask:
        matcher = self._matchers[row]
        assert matcher is not None
        return matcher.lookahead(drafts, slots)


def batch_masks(matchers: Sequence[Matcher | None]) -> MaskProvider | None:
    """The provider of a batch; None when no row of it is constrained."""
    return BatchMasks(matchers) if any(matchers) else None
