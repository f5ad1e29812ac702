"""Fill an input frame: what the rows of one unit tell the device."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from ninfer.program.frame import HostRows, InputFrame
from ninfer.program.sequence import SequenceRecord

FIRST_TOKEN, ORDINARY_DECODE, BONUS = 0, 1, 4
"""Purposes of random numbers: one sequence index draws independently for each. The last follows accepted drafts."""


def fill_decode(
    frame: InputFrame, W: int, records: tuple[SequenceRecord, ...], constrained: tuple[int, ...], forked: bool
) -> None:
    """Rows of ``W`` columns that decide the tokens behind their ledgers; the first column of a row is its anchor.

    What a row has for as long as it runs is left alone while the frame's last round had the same rows. forked: some row
    reads another state slot than it writes, which ends with this round. Generated tokens advance all three rotary axes
    alike.
    """
    rows = frame.rows(len(records), W)
    if forked or W > 1 or frame.members != records or frame.constrained != constrained:
        rows.width[:] = 1
        _fill_places(rows, records)
        _fill_sampling(rows, records, constrained, ORDINARY_DECODE)
        frame.members = () if forked or W > 1 else records  # drafts change widths and purposes
        frame.constrained = constrained
    starts, tokens, times, heights, widths, indices = rows.firsts
    for b, r in enumerate(records):
        at = r.frontier
        starts[b], tokens[b], indices[b] = at, r.ledger[at], r.length
        times[b] = heights[b] = widths[b] = at + r.request.identity.rope_delta
    if W > 1:
        rows.positions[:] = rows.positions[:, :, :1] + np.arange(W)
        rows.index[:] = rows.index[:, :1] + np.arange(W)


def fill_following(frame: InputFrame, tokens: Sequence[int]) -> None:
    """The rows of one column that the frame's last round had, each one token further."""
    starts, anchors, times, heights, widths, indices = frame.rows(len(tokens)).firsts
    for b, token in enumerate(tokens):
        starts[b] += 1
        anchors[b] = token
        indices[b] += 1
        times[b] = heights[b] = widths[b] = widths[b] + 1


def fill_first(frame: InputFrame, records: tuple[SequenceRecord, ...], constrained: tuple[int, ...]) -> None:
    """Rows that decide the token after their prompt, from a stored hidden."""
    frame.members = ()
    rows = frame.rows(len(records))
    fill_recall(rows, records)
    _fill_sampling(rows, records, constrained, FIRST_TOKEN)
    rows.index[:, 0] = [r.length for r in records]


def _fill_places(rows: HostRows, records: Sequence[SequenceRecord]) -> None:
    rows.read[:] = [r.read for r in records]
    rows.write[:] = [r.slot for r in records]
    rows.table[:] = [r.row for r in records]


def _fill_sampling(
    rows: HostRows, records: Sequence[SequenceRecord], constrained: Collection[int], purpose: int
) -> None:
    rows.lanes[:] = [r.lane for r in records]
    rows.real[:] = [r.real for r in records]
    rows.whole[:] = [r.whole for r in records]
    rows.seed[:] = [r.seed for r in records]
    rows.purpose[:] = purpose
    for row in constrained:
        rows.whole[row, 2] = 1


def fill_drafts(
    rows: HostRows, records: Sequence[SequenceRecord], drafts: Sequence[tuple[int, ...]], window: int
) -> None:
    """The drafts a round verifies, in the columns behind the anchors. Call after ``fill_decode``. window: most drafts
    of a round, whose proposals are kept for every lane."""
    rows.draft_table[:] = [r.draft_row or 0 for r in records]
    rows.proposed[:] = window * rows.lanes[:, None] + np.arange(rows.proposed.shape[1])
    for row, own in enumerate(drafts):
        n = rows.drafted[row] = len(own)
        rows.width[row] = 1 + n
        rows.tokens[row, 1 : 1 + n] = rows.drafts[row, :n] = own
        if n:
            rows.purpose[row] = BONUS


def fill_recall(rows: HostRows, records: Sequence[SequenceRecord]) -> None:
    """Rows whose stored hidden, that of their last prompt token, is sampled from."""
    rows.start[:] = [r.frontier - 1 for r in records]
    rows.width[:] = 1
    rows.read[:] = rows.write[:] = [r.read for r in records]
    rows.positions[:, :, 0] = np.stack([r.request.identity.positions[:, r.frontier - 1] for r in records], axis=1)


def fill_joined(rows: HostRows, record: SequenceRecord, token: int) -> None:
    """The last executed token of a row and the one behind it, for the drafting module."""
    fill_recall(rows, (record,))
    rows.draft_table[0] = record.draft_row
    rows.tokens[0, 0] = token


def fill_wide(
    frame: InputFrame,
    record: SequenceRecord,
    tokens: Sequence[int] | npt.NDArray[np.int32],
    positions: npt.NDArray[np.int32],
    columns: int,
) -> None:
    """One row, run as ``columns`` columns. positions [3, n] of its n tokens; tokens: those, and the one behind them
    where it is known."""
    width, fields = positions.shape[1], frame.block.fields
    rows = frame.rows(1)
    rows.start[0] = record.frontier
    rows.width[0] = width
    rows.read[0] = record.read
    rows.write[0] = record.slot
    rows.table[0] = record.row
    rows.lanes[0] = record.lane
    rows.last[0] = width - 1
    if record.draft_row is not None:
        rows.draft_table[0] = record.draft_row
    fields["wide_tokens"][: len(tokens)] = tokens
    fields["wide_positions"][: 3 * columns].reshape(3, columns)[:, :width] = positions


def fill_fold(rows: HostRows, records: Sequence[SequenceRecord], width: int, accepted: Sequence[int]) -> None:
    """Keep the first ``accepted`` of the ``width`` columns each row just recorded; 0 keeps nothing."""
    rows.start[:] = [r.frontier for r in records]
    rows.width[:] = accepted
    rows.read[:] = [r.read for r in records]
    rows.write[:] = [r.slot for r in records]
    rows.accepted[:] = accepted
    rows.last[:] = [b * width + max(n, 1) - 1 for b, n in enumerate(accepted)]
    rows.kept[:] = [r.slot if n else -1 for r, n in zip(records, accepted)]
