"""What a request may start from, and the question that is put to the planner about it. Reads, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ninfer.context import Candidate, CheckpointRef, ContextPort, PrefillWork
from ninfer.contract import Handle, PreparedRequest
from ninfer.errors import InvariantError
from ninfer.runtime.catalogue import Catalogue, Entry
from ninfer.runtime.costs import CostModel, pairs
from ninfer.runtime.question import Question, Value
from ninfer.runtime.sessions import SessionIndex

Superseded = Callable[[Entry, int], bool]
"""Whether a checkpoint of an entry no longer matches the conversation it belongs to."""


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
    matching = {candidate.ref for candidate in sources.candidates}

    def superseded(entry: Entry, checkpoint: int) -> bool:
        own = request.session is not None and entry.session == request.session
        return own and CheckpointRef(entry.owner, checkpoint) not in matching

    bound = _bound(sessions, request)
    candidates = sources.candidates
    return Question(
        candidates,
        values(catalogue, superseded),
        [_own_loss(catalogue, c, costs, superseded) for c in candidates],
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


def _own_loss(catalogue: Catalogue, candidate: Candidate, costs: CostModel, superseded: Superseded) -> int:
    """1/256 nanoseconds that consuming a source is expected to lose: what lies deeper in it than its start."""
    if candidate.ref is None or not candidate.consume:
        return 0
    entry, worst = catalogue.get(candidate.ref.owner), 0
    for number, checkpoint in entry.checkpoints.items():
        gap = checkpoint.key.frontier - candidate.reused_tokens
        if gap > 0:
            again = costs.prefill_ns(PrefillWork(1, gap, pairs(candidate.reused_tokens, gap)))
            worst = max(worst, catalogue.weight(entry, superseded=superseded(entry, number)) * again)
    return worst


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
