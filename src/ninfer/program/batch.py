"""One model transaction: what Program keeps beside a PendingBatch, and what may be decided about its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ninfer.contract import ProducedRow, RowDecision, RowStatus, SequenceHandle, TokenScore
from ninfer.errors import InvariantError
from ninfer.program.frame import HostBlock
from ninfer.program.sequence import SequenceRecord

NO_LEGAL_TOKEN, NOT_FINITE = -1, -2
"""What sampling reports instead of a token."""


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """Program's side of a PendingBatch. columns: recorded columns of a row, which wait for ``commit``; 0 where state
    has advanced. drafted: drafts verified of each row. ahead: drafts made for the next round. dead: by row, bits of the
    columns without a legal token. following: drafts for the next round, by row, once the batch has been waited for."""

    records: tuple[SequenceRecord, ...]
    columns: int = 0
    drafted: tuple[int, ...] = ()
    ahead: int = 0
    dead: Mapping[int, int] = field(default_factory=dict)
    following: list[tuple[int, ...]] = field(default_factory=list)


def produced_row(
    sequence: SequenceHandle, record: SequenceRecord, out: HostBlock, first: int, tokens: tuple[int, ...], dead: int,
    drafted: int,
) -> ProducedRow:  # fmt: skip
    """One row of a batch. first: where its columns begin in the output block. dead: bits as in ``Pending``."""
    if tokens[-1] == NO_LEGAL_TOKEN or dead >> (len(tokens) - 1) & 1:
        return ProducedRow(sequence, (), RowStatus.CONSTRAINT_FAILED, drafted=drafted)
    wanted = record.request.sampling.logprobs
    if wanted < 0:
        return ProducedRow(sequence, tokens, drafted=drafted)
    f, scores = out.fields, []
    for column in range(first, first + len(tokens)):
        top = zip(f["alt_ids"][column, :wanted].tolist(), f["alt_logprobs"][column, :wanted].tolist())
        scores.append(TokenScore(float(f["logprob"][column]), tuple((i, score) for i, score in top if i >= 0)))
    return ProducedRow(sequence, tokens, RowStatus.OK, tuple(scores), drafted)


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
