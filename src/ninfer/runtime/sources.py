"""What a request may start from, and the question that is put to the planner about it. Reads, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ninfer.context import Candidate, CheckpointRef, ContextPort
from ninfer.contract import Handle, PreparedRequest
from ninfer.errors import InvariantError
from ninfer.runtime.catalogue import Catalogue, Entry
from ninfer.runtime.costs import CostModel, pairs
from ninfer.runtime.lanes import REWRITE
from ninfer.runtime.question import Question, Value
from ninfer.runtime.sessions import SessionIndex
from ninfer.work import PrefillWork

Superseded = Callable[[Entry, int], bool]
"""Whether a checkpoint of an entry no longer matches the conversation it belongs to. A request without a session
belongs to those that it can take up where a client may have changed the rest."""


@dataclass(frozen=True, slots=True)
class Sources:
    """candidates: checkpoints that match the prompt exactly, then the root. listed: how many its digests suggested."""

    candidates: tuple[Candidate, ...]
    listed: int = 0


def find_sources(
    program: ContextPort, catalogue: Catalogue, sessions: SessionIndex, request: PreparedRequest, most: int
) -> Sources:
    """Look a prompt up: at most ``most`` checkpoints are compared with it, the deepest ones."""
    root = program.inspect(None, request, False)
    if root is None:
        raise InvariantError("the root does not match a prompt")
    hold = catalogue.hold_of(request.id)
    own = [CheckpointRef(hold.owner, q) for q in sorted(hold.checkpoints, reverse=True)] if hold is not None else []
    held = [candidate for ref in own if (candidate := program.inspect(ref, request, True)) is not None]
    if request.participation == "disabled":
        return Sources((*held, root))
    listed = catalogue.index.shortlist(request.identity, request.digest)
    found = [
        candidate
        for ref in _own_first(listed[:most], _bound(sessions, request))
        for consume in _dispositions(catalogue.get(ref.owner), ref, request)
        if (candidate := program.inspect(ref, request, consume)) is not None
    ]
    return Sources((*held, *found, root), len(listed))


def ask(
    catalogue: Catalogue,
    sessions: SessionIndex,
    request: PreparedRequest,
    sources: Sources,
    costs: CostModel,
    slots_short: Mapping[str, int],
) -> Question:
    """What each candidate and each retained history is worth to this request."""
    candidates = sources.candidates
    matching = {candidate.ref for candidate in candidates}
    continued = {ref.owner for ref in matching if ref is not None and _continues(catalogue, ref)}

    def superseded(entry: Entry, checkpoint: int) -> bool:
        own = entry.session == request.session and (request.session is not None or entry.owner in continued)
        return own and CheckpointRef(entry.owner, checkpoint) not in matching

    bound = _bound(sessions, request)
    furthest = max(c.reused_tokens for c in candidates)
    return Question(
        candidates,
        values(catalogue, superseded),
        [_own_loss(catalogue, c, furthest, costs, superseded) for c in candidates],
        next((i for i, c in enumerate(candidates) if c.ref is not None and c.ref.owner == bound), None),
        slots_short,
    )


def values(catalogue: Catalogue, superseded: Superseded = lambda entry, checkpoint: False) -> dict[Handle, Value]:
    """What every retained history is worth."""
    return {
        entry.owner: Value(
            entry.retention,
            {q: catalogue.weight(entry, superseded=superseded(entry, q)) for q in entry.checkpoints},
            entry.hits,
            entry.used,
            entry.hold is None,
        )
        for entry in catalogue
    }


def _own_loss(
    catalogue: Catalogue, candidate: Candidate, furthest: int, costs: CostModel, superseded: Superseded
) -> int:
    """1/256 nanoseconds that consuming a source is expected to lose.

    What lies deeper in it than its start: its tokens alone, for whoever asked for it would have to begin a unit anyway;
    nothing where the source's own session has left that behind. The start itself goes on in the request, unless another
    candidate starts further on: then the history would be used up for what that one has already.
    """
    if candidate.ref is None or not candidate.consume:
        return 0
    entry, start, worst = catalogue.get(candidate.ref.owner), candidate.reused_tokens, 0
    for number, checkpoint in entry.checkpoints.items():
        frontier, gone = checkpoint.key.frontier, superseded(entry, number)
        again = 0
        if frontier > start and not (gone and entry.session is not None):
            again = costs.prefill_ns(PrefillWork(0, frontier - start, pairs(start, frontier - start)))
        elif frontier == start < furthest:
            again = costs.prefill_ns(PrefillWork(1, start, pairs(0, start)))
        worst = max(worst, catalogue.weight(entry, superseded=gone) * again)
    return worst


def _continues(catalogue: Catalogue, ref: CheckpointRef) -> bool:
    return catalogue.get(ref.owner).checkpoints[ref.checkpoint].kind in REWRITE


def _dispositions(entry: Entry, ref: CheckpointRef, request: PreparedRequest) -> tuple[bool, ...]:
    """Whether to ask for consuming the source, for copying from it, or for both.

    A shared prefix is copied from. A session's history is consumed by its own next request alone, an anonymous one by
    any. Where that would lose deeper checkpoints, copying is a candidate too.
    """
    if not entry.private:
        return (False,)
    if entry.session is not None and not (entry.session == request.session and request.update_session):
        return (False,)
    frontier = entry.checkpoints[ref.checkpoint].key.frontier
    deepest = all(checkpoint.key.frontier <= frontier for checkpoint in entry.checkpoints.values())
    return (True,) if deepest else (False, True)


def _bound(sessions: SessionIndex, request: PreparedRequest) -> Handle | None:
    return sessions.lookup(request.session) if request.session is not None else None


def _own_first(refs: Sequence[CheckpointRef], bound: Handle | None) -> list[CheckpointRef]:
    return sorted(refs, key=lambda ref: ref.owner != bound)
