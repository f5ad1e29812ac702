"""One decision round of a batch: launched, then waited for. Forward leaves logits, masks are filled beside it, Finish
decides and, with a drafting module, drafts for the round after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ninfer.contract import MaskProvider, ProducedRow, SequenceHandle
from ninfer.errors import DeviceError
from ninfer.program.batch import NOT_FINITE, Pending, produced_row
from ninfer.program.filling import (
    FIRST_TOKEN,
    ORDINARY_DECODE,
    fill_decode,
    fill_drafts,
    fill_recall,
    fill_sampling,
)
from ninfer.program.frame import InputFrame
from ninfer.program.memory import Shape
from ninfer.program.sequence import SequenceRecord
from ninfer.program.units import Units


@dataclass(frozen=True, slots=True)
class Round:
    """A round that is ready to run. drafts: what each row verifies, in ``width`` columns a row. ahead: drafts it makes.
    first: the token after the prompt is decided, from a stored hidden. constrained: rows that have a mask."""

    records: tuple[SequenceRecord, ...]
    drafts: tuple[tuple[int, ...], ...]
    width: int
    ahead: int
    first: bool
    constrained: Sequence[int]
    frame: InputFrame


def prepare(
    units: Units,
    shape: Shape,
    records: tuple[SequenceRecord, ...],
    drafts: tuple[tuple[int, ...], ...],
    ahead: int,
    masks: MaskProvider | None,
    first: bool,
) -> Round:
    """Fill the frame of rows whose pages are mapped. Nothing is submitted, so a fault here touches no row. ``ahead``:
    drafts wanted for the round after."""
    constrained = masks.constrained_rows() if masks is not None else ()
    frame = units.frame()
    width = 1 if first else units.width(max(map(len, drafts)))
    rows = frame.rows(len(records), width)
    fill_recall(rows, records) if first else fill_decode(rows, records)
    fill_sampling(rows, records, constrained, FIRST_TOKEN if first else ORDINARY_DECODE)
    if shape.window:
        fill_drafts(rows, records, drafts, shape.window)
    return Round(records, drafts, width, units.ahead(ahead), first, constrained, frame)


def launch(units: Units, ready: Round, masks: MaskProvider | None) -> Pending:
    """Submit Forward, fill the masks while it runs, submit Finish."""
    B, W = len(ready.records), ready.width
    units.recall(ready.frame, B) if ready.first else units.forward(ready.frame, B, W)
    dead: dict[int, int] = {}
    if masks is not None and ready.constrained:
        slots = units.masks(B, W)
        for row in ready.constrained:
            drafts = ready.drafts[row]
            dead[row] = masks.fill(row, drafts, slots[row, : 1 + len(drafts)]).dead
    scores = any(r.request.sampling.logprobs >= 0 for r in ready.records)
    units.finish(ready.frame, B, W, ready.first, scores, masked=bool(ready.constrained), ahead=ready.ahead)
    return Pending(ready.records, W if W > 1 else 0, tuple(map(len, ready.drafts)), ready.ahead, dead)


def collect(
    units: Units, pending: Pending, sequences: Sequence[SequenceHandle], first: bool
) -> tuple[ProducedRow, ...]:
    """Wait for the round and read its rows. Raises DeviceError where a logit that decided was not finite."""
    B, W = len(pending.records), max(pending.columns, 1)
    out = units.results(decode=not first)
    decided = out.fields["token"][: B * W].reshape(B, W).tolist()
    kept = out.fields["accepted"][:B].tolist() if pending.columns else [0] * B
    rows = []
    for i, (sequence, record) in enumerate(zip(sequences, pending.records)):
        tokens = tuple(decided[i][: kept[i] + 1])
        if tokens[-1] == NOT_FINITE:
            raise DeviceError(f"row {i} of a batch of {B}: logits are not finite")
        dead = pending.dead.get(i, 0)
        rows.append(produced_row(sequence, record, out, i * W, tokens, dead, pending.drafted[i]))
    if pending.ahead:
        drafts = out.fields["drafts"][: pending.ahead * B].reshape(-1, B).T
        pending.following.extend(map(tuple, drafts.tolist()))
    return tuple(rows)


def executed(pending: Pending, accepted: Sequence[int]) -> list[int]:
    """Recorded columns of each row that its accepted tokens keep: all but the last of them are executed."""
    return [r.length + n - 1 - r.frontier if n else 0 for r, n in zip(pending.records, accepted)]
