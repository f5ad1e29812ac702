"""Rows of the block tables: which page holds which block of an active history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ninfer.errors import InvariantError
from ninfer.program.layout import PoolKind


class ExecutionRows:
    """One int32 ``[rows, blocks]`` matrix per pool: the host master of what the device reads.

    ``version`` changes with every edit; whoever uploads a table compares it.
    """

    def __init__(self, pools: Sequence[PoolKind], rows: int, blocks: int) -> None:
        self.tables: Mapping[PoolKind, npt.NDArray[np.int32]] = {
            pool: np.zeros((rows, blocks), np.int32) for pool in pools
        }
        self._free = {pool: list(range(rows - 1, -1, -1)) for pool in pools}
        self.version = 0

    def lease(self, pool: PoolKind) -> int | None:
        free = self._free[pool]
        return free.pop() if free else None

    def publish(self, pool: PoolKind, row: int, first_block: int, page_ids: Sequence[int]) -> None:
        """Set the page ids of consecutive blocks of a row."""
        self.tables[pool][row, first_block : first_block + len(page_ids)] = page_ids
        self.version += 1

    def release(self, pool: PoolKind, row: int) -> None:
        if row in self._free[pool]:
            raise InvariantError(f"{pool.name}: execution row {row} was released twice")
        self._free[pool].append(row)

    def leased(self, pool: PoolKind) -> int:
        return len(self.tables[pool]) - len(self._free[pool])
