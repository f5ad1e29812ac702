"""One decision round of a batch: launched, then waited for. Forward leaves logits, masks are filled beside it, Finish
decides; then what drafts goes on for the round after, while the decisions are taken in."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

from ninfer.contract import MaskProvider, ProducedRow, RowStatus, SequenceHandle
from ninfer.errors import DeviceError
from ninfer.program.batch import NOT_FINITE, Pending, Round, judged
from ninfer.program.filling import fill_decode, fill_drafts, fill_first, fill_following
from ninfer.program.memory import Shape
from ninfer.program.sequence import SequenceRecord
from ninfer.program.units import Units


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
    constrained = tuple(masks.constrained_rows()) if masks is not None else ()
    width = 1 if first or not shape.window else units.width(max(map(len, drafts)))
    forked = any(r.read != r.slot for r in records)
    if first:
        fill_first(units.decision, records, constrained)
    else:
        fill_decode(units.decision, width, records, constrained, forked)
    if shape.window:
        fill_drafts(units.decision.rows(len(records), width), records, drafts, shape.window)
    return Round(records, drafts, width, units.ahead(ahead), first, constrained, forked)


def launch(units: Units, ready: Round) -> None:
    """Submit Forward."""
    B, W = len(ready.records), ready.width
    units.recall(B) if ready.first else units.forward(B, W, ready.forked)


def decide(units: Units, ready: Round, masks: MaskProvider | None) -> Pending:
    """Fill the masks while Forward runs, submit Finish."""
    B, W = len(ready.records), ready.width
    dead: dict[int, int] = {}
    if masks is not None and ready.constrained:
        slots = units.masks(B, W)
        for row in ready.constrained:
            drafts = ready.drafts[row]
            dead[row] = masks.fill(row, drafts, slots[row, : 1 + len(drafts)]).dead
    scored = any(r.request.sampling.logprobs >= 0 for r in ready.records)
    everything = any(r.everything for r in ready.records)
    units.finish(
        B, W, ready.first, scored, masked=bool(ready.constrained), everything=everything, ahead=ready.ahead
    )  # fmt: skip
    return Pending(ready.records, W if W > 1 else 0, tuple(map(len, ready.drafts)), ready.ahead, scored, dead)


def follow(units: Units, records: tuple[SequenceRecord, ...], tokens: Sequence[int]) -> Pending:
    """Submit the round after one of these rows of one column each, which go on with these tokens; where some are
    constrained, Forward alone."""
    constrained = units.decision.constrained
    ready = Round(records, ((),) * len(records), 1, 0, False, constrained, False)
    fill_following(units.decision, tokens)
    launch(units, ready)
    if constrained:
        return Pending(records, drafted=(0,) * len(records), undecided=ready)
    return decide(units, ready, None)


def collect(
    units: Units, pending: Pending, sequences: Sequence[SequenceHandle], first: bool
) -> tuple[ProducedRow, ...]:
    """Wait for the round and read its rows. Raises DeviceError where a logit that decided was not finite."""
    B, W = len(pending.records), max(pending.columns, 1)
    out, drafted = units.results(decode=not first), pending.drafted
    decided = out.numbers["token"][: B * W].tolist()
    if pending.columns:
        kept = out.numbers["accepted"][:B].tolist()
        produced = [tuple(decided[i * W : i * W + n + 1]) for i, n in enumerate(kept)]
    else:
        produced = [(token,) for token in decided]
    rows = tuple([ProducedRow(*row) for row in zip(sequences, produced, repeat(RowStatus.OK), repeat(None), drafted)])
    worst = min([tokens[-1] for tokens in produced])
    if worst == NOT_FINITE:
        raise DeviceError(f"{rows}: logits are not finite")
    if worst < 0 or pending.dead or pending.scored:
        rows = tuple([judged(i, row, out, pending) for i, row in enumerate(rows)])
    return rows


def executed(pending: Pending, accepted: Sequence[int]) -> list[int]:
    """Recorded columns of each row that its accepted tokens keep: all but the last of them are executed."""
    return [r.length + n - 1 - r.frontier if n else 0 for r, n in zip(pending.records, accepted)]
