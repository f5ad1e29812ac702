"""The output side of a model transaction: rows are previewed before Program commits, and committed after it."""

from __future__ import annotations

from collections.abc import Sequence

from ninfer.contract import PendingBatch, ProducedRow, RowDecision, RowStatus, UnitLicense
from ninfer.errors import ConstraintDeadEnd, InvariantError
from ninfer.results import SpeculationStats, TokenLogprob
from ninfer.runtime.record import CANCELLED, Ending, RequestRecord

_CANCELLED_ROW = RowDecision(0, terminal=True, cancelled=True)
_FAILED_ROW = RowDecision(0, terminal=True)
_GO_ON = tuple(RowDecision(n) for n in range(16))
LICENCES = tuple(UnitLicense(n) for n in range(16))
PACED = tuple(tuple(UnitLicense(n, ahead) for ahead in range(16)) for n in range(16))
"""By drafts to verify and to make."""
ORDINARY = LICENCES[0]
"""One token, whatever the budgets: a row without output left has ended."""
UNDRAFTED = (0, 0)
"""Drafts verified and kept in a round without any."""


def licence(row: RequestRecord, drafts: int, ahead: int | None = None) -> UnitLicense:
    """What a row may do in one decode round: it never produces more than its output or thinking budget allows.

    The output budget already fits the context, so it bounds the context too. drafts: to verify; ahead: to make for the
    next round, by default all.
    """
    drafts = min(drafts, row.left - 1)
    thinking = row.session.licence()
    if thinking is not None:
        drafts = min(drafts, thinking - 1)
    if ahead is None:
        return LICENCES[max(drafts, 0)]
    # this round decides a token, and the next ends with one
    return PACED[max(drafts, 0)][max(0, min(ahead, row.left - 2))]


def thinks_on(row: RequestRecord) -> bool:
    """Whether the row, if it goes on after one more token, does so with a sampled one: no close of its thinking is due
    then. Not during a preview."""
    left = row.session.licence()
    return left is None or left > 1


def goes_on(decision: RowDecision) -> bool:
    """Whether the row goes on with one token, and nothing is noted about it."""
    return decision is _GO_ON[1]


def check_membership(batch: PendingBatch, rows: Sequence[RequestRecord]) -> None:
    """Raise InvariantError unless the batch has exactly these rows, in this order."""
    if tuple([row.sequence for row in rows]) != batch.sequences:
        raise InvariantError("a batch has other rows than it was launched with")


def preview_row(row: RequestRecord, produced: ProducedRow, *, control: bool) -> RowDecision:
    """Decide about one row without making anything visible. Sets ``row.ending`` where the row ends.

    Raises whatever the session's preview raises; the whole batch must then be aborted.
    """
    if row.response.cancel_requested or row.spoiled is not None:
        row.ending = row.spoiled or CANCELLED
        return _CANCELLED_ROW
    if produced.status is RowStatus.CONSTRAINT_FAILED:
        row.ending = Ending.failed(ConstraintDeadEnd(position=row.produced))
        return _FAILED_ROW
    tokens, left, session = produced.tokens, row.left, row.session
    count = len(tokens)
    if not 1 <= count <= left:
        raise InvariantError(f"a row produced {count} tokens of at most {left}")
    preview = session.preview_control(tokens) if control else session.preview(tokens, _logprobs(produced))
    row.previewed = True
    accepted = row.accepted = preview.accepted
    row.verified = (produced.drafted, min(accepted, count - 1)) if produced.drafted else UNDRAFTED
    terminal = preview.terminal
    if terminal is not None:
        row.ending = Ending.limit(row.request.limit) if terminal[0] == "length" else Ending(*terminal)
    elif accepted == left:
        row.ending = Ending.limit(row.request.limit)
    if not (1 <= accepted <= count and (accepted == count or row.ending is not None)):
        raise InvariantError(f"a preview accepted {accepted} of {count} tokens")
    if row.ending is None and not preview.boundaries and accepted < len(_GO_ON):
        return _GO_ON[accepted]
    return RowDecision(accepted, terminal=row.ending is not None, boundaries=preview.boundaries)


def commit_row(row: RequestRecord, now: float) -> None:
    """Account the committed tokens and commit the session's preview."""
    row.produced += row.accepted
    if row.first_token is None:
        row.first_token = now
    row.last_token = now
    if row.verified[0]:
        row.speculation = (row.speculation or SpeculationStats()).after(*row.verified)
    row.accepted, row.previewed = 0, False
    row.session.commit()


def discard_row(row: RequestRecord) -> None:
    """Forget a preview that will not be committed."""
    if row.previewed:
        row.accepted, row.previewed = 0, False
        row.session.discard()


def _logprobs(produced: ProducedRow) -> tuple[TokenLogprob, ...] | None:
    if produced.scores is None:
        return None
    return tuple(TokenLogprob(t, s.logprob, s.top) for t, s in zip(produced.tokens, produced.scores, strict=True))
