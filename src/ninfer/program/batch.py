"""One model transaction: what Program keeps beside a PendingBatch, and what may be decided about its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from ninfer.contract import ProducedRow, RowDecision, RowStatus, TokenScore
from ninfer.errors import InvariantError
from ninfer.program.frame import HostBlock
from ninfer.program.sequence import SequenceRecord

NO_LEGAL_TOKEN, NOT_FINITE = -1, -2
"""What sampling reports instead of a token."""


class Round(NamedTuple):
    """A round that is ready to run. drafts: what each row verifies, in ``width`` columns a row. ahead: drafts it makes.
    first: the token after the prompt is decided, from a stored hidden. constrained: rows that have a mask. forked: some
    row reads another state slot than it writes."""

    records: tuple[SequenceRecord, ...]
    drafts: tuple[tuple[int, ...], ...]
    width: int
    ahead: int
    first: bool
    constrained: Sequence[int]
    forked: bool


@dataclass(slots=True, eq=False)
class Pending:
    """Program's side of a PendingBatch. columns: recorded columns of a row, which wait for ``commit``; 0 where state
    has advanced. drafted: drafts verified of each row. ahead: drafts made for the next round. scored: some row wants
    log-probabilities. dead: by row, bits of the columns without a legal token. undecided: the round whose Finish waits
    for masks."""

    records: tuple[SequenceRecord, ...]
    columns: int = 0
    drafted: tuple[int, ...] = ()
    ahead: int = 0
    scored: bool = False
    dead: Mapping[int, int] = field(default_factory=dict)
    undecided: Round | None = None


def judged(i: int, row: ProducedRow, out: HostBlock, pending: Pending) -> ProducedRow:
    """Row ``i`` of a batch, failed where no token was legal, with the log-probabilities it asked for."""
    tokens, first = row.tokens, i * max(pending.columns, 1)
    if tokens[-1] == NO_LEGAL_TOKEN or pending.dead.get(i, 0) >> (len(tokens) - 1) & 1:
        return row._replace(tokens=(), status=RowStatus.CONSTRAINT_FAILED)
    wanted = pending.records[i].request.sampling.logprobs
    if wanted < 0:
        return row
    f, scores = out.fields, []
    for column in range(first, first + len(tokens)):
        top = zip(f["alt_ids"][column, :wanted].tolist(), f["alt_logprobs"][column, :wanted].tolist())
        scores.append(TokenScore(float(f["logprob"][column]), tuple((i, score) for i, score in top if i >= 0)))
    return row._replace(scores=tuple(scores))


def check_decisions(rows: Sequence[ProducedRow], decisions: Sequence[RowDecision]) -> None:
    """Refuse decisions that a batch of these rows cannot have. Raises InvariantError."""
    if len(decisions) != len(rows):
        raise InvariantError(f"{len(decisions)} decisions for a batch of {len(rows)} rows")
    for i, (row, d) in enumerate(zip(rows, decisions)):
        if d.cancelled or row.status is RowStatus.CONSTRAINT_FAILED:
            legal = d.accepted == 0 and d.terminal
        else:
            legal = 1 <= d.accepted <= len(row.tokens) and (d.terminal or d.accepted == len(row.tokens))
        if not legal or (d.boundaries and not _ascend((0, *d.boundaries, d.accepted + 1))):
            raise InvariantError(f"row {i} produced {len(row.tokens)} tokens ({row.status.value}): illegal {d}")


def _ascend(numbers: Sequence[int]) -> bool:
    return all(a < b for a, b in pairwise(numbers))
