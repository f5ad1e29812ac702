"""Fill an input frame: what the rows of one unit tell the device."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from ninfer.program.frame import HostRows, InputFrame
from ninfer.program.sequence import SequenceRecord

FIRST_TOKEN, ORDINARY_DECODE = 0, 1
"""Purposes of random numbers: one sequence index draws independently for each."""


def fill_decode(rows: HostRows, records: Sequence[SequenceRecord]) -> None:
    """One column per row: its anchor. Generated tokens advance all three rotary axes alike."""
    rows.start[:] = [r.frontier for r in records]
    rows.width[:] = 1
    rows.read[:] = [r.read for r in records]
    rows.write[:] = [r.slot for r in records]
    rows.table[:] = [r.row for r in records]
    rows.tokens[:] = [r.ledger[r.frontier] for r in records]
    rows.positions[:] = [r.frontier + r.request.identity.rope_delta for r in records]


def fill_recall(rows: HostRows, records: Sequence[SequenceRecord]) -> None:
    """Rows whose stored hidden is sampled from."""
    rows.read[:] = [r.read for r in records]


def fill_sampling(
    rows: HostRows, records: Sequence[SequenceRecord], constrained: Collection[int], purpose: int
) -> None:
    """Each row decides the token after its ledger."""
    rows.lanes[:] = [r.lane for r in records]
    rows.real[:] = [r.real for r in records]
    rows.whole[:] = [r.whole for r in records]
    rows.seed[:] = [r.seed for r in records]
    rows.index[:] = [r.length for r in records]
    rows.purpose[:] = purpose
    for row in constrained:
        rows.whole[row, 2] = 1


def fill_wide(
    frame: InputFrame,
    record: SequenceRecord,
    tokens: Sequence[int] | npt.NDArray[np.int32],
    positions: npt.NDArray[np.int32],
    columns: int,
) -> None:
    """One row of many tokens, run as ``columns`` columns. positions [3, tokens]."""
    width, fields = len(tokens), frame.block.fields
    _fill_one(frame.rows(1), record, width)
    fields["last"][0] = width - 1
    fields["wide_tokens"][:width] = tokens
    fields["wide_positions"][: 3 * columns].reshape(3, columns)[:, :width] = positions


def fill_fold(frame: InputFrame, record: SequenceRecord, width: int, accepted: int) -> None:
    """Keep the first ``accepted`` of the ``width`` columns the row just recorded."""
    fields = frame.block.fields
    _fill_one(frame.rows(1), record, width)
    fields["accepted"][0] = accepted
    fields["last"][0] = accepted - 1


def _fill_one(rows: HostRows, record: SequenceRecord, width: int) -> None:
    rows.start[0] = record.frontier
    rows.width[0] = width
    rows.read[0] = record.read
    rows.write[0] = record.slot
    rows.table[0] = record.row
    rows.lanes[0] = record.lane
