"""One model transaction: what Program keeps beside a PendingBatch, and what may be decided about its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ninfer.contract import ProducedRow, RowDecision, RowStatus, SequenceHandle, TokenScore
from ninfer.errors import InvariantError
from ninfer.program.frame import HostBlock
from ninfer.program.sequence import SequenceRecord

NO_LEGAL_TOKEN, NOT_FINITE = -1, -2
"""What sampling reports instead of a token."""


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """Program's side of a PendingBatch. columns: recorded columns of a control row; 0 elsewhere. dead: rows without a
    legal token."""

    records: tuple[SequenceRecord, ...]
    columns: int = 0
    dead: frozenset[int] = frozenset()


def produced_row(
    sequence: SequenceHandle, record: SequenceRecord, out: HostBlock, row: int, token: int, dead: bool
) -> ProducedRow:
    """The sampled row ``row`` of a batch, read from the output block."""
    if dead or token == NO_LEGAL_TOKEN:
        return ProducedRow(sequence, (), RowStatus.CONSTRAINT_FAILED)
    wanted = record.request.sampling.logprobs
    if wanted < 0:
        return ProducedRow(sequence, (token,))
    f = out.fields
    top = zip(f["alt_ids"][row, :wanted].tolist(), f["alt_logprobs"][row, :wanted].tolist())
    score = TokenScore(float(f["logprob"][row]), tuple((i, logprob) for i, logprob in top if i >= 0))
    return ProducedRow(sequence, (token,), RowStatus.OK, (score,))


def check_decisions(rows: Sequence[ProducedRow], decisions: Sequence[RowDecision]) -> None:
    """Refuse decisions that a batch of these rows cannot have. Raises InvariantError."""
    if len(decisions) != len(rows):
        raise InvariantError(f"{len(decisions)} decisions for a batch of {len(rows)} rows")
    for i, (row, d) in enumerate(zip(rows, decisions)):
        if d.cancelled or row.status is RowStatus.CONSTRAINT_FAILED:
            legal = d.accepted == 0 and d.terminal
        else:
            legal = 1 <= d.accepted <= len(row.tokens) and (d.terminal or d.accepted == len(row.tokens))
        ascending = all(a < b for a, b in zip((0, *d.boundaries), (*d.boundaries, d.accepted + 1)))
        if not legal or not ascending:
            raise InvariantError(f"row {i} produced {len(row.tokens)} tokens ({row.status.value}): illegal {d}")
