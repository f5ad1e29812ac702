"""Where a prompt should leave checkpoints. Every one splits its prefill there; choosing one reserves nothing."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from ninfer.context import CaptureOffer, CheckpointKind, ShortlistKey
from ninfer.contract import PreparedRequest
from ninfer.runtime.settings import CacheSettings
from ninfer.runtime.shortlist import PrefixIndex, shortlist_key

REMEMBERED = 256
"""Boundaries whose demand is remembered."""


@dataclass(frozen=True, slots=True)
class PlannedCapture:
    """wanted: worth degrading others for. An unwanted one takes only what is free."""

    offer: CaptureOffer
    wanted: bool

    @property
    def frontier(self) -> int:
        return self.offer.frontier


class Demand:
    """Which prefixes more than one conversation has asked for, as far back as ``REMEMBERED`` of them."""

    def __init__(self) -> None:
        self._asked: OrderedDict[ShortlistKey, str | int] = OrderedDict()

    def ask(self, key: ShortlistKey, conversation: str | int) -> bool:
        """Note the question; whether another conversation has asked it before."""
        before = self._asked.pop(key, None)
        self._asked[key] = conversation
        if len(self._asked) > REMEMBERED:
            self._asked.popitem(last=False)
        return before is not None and before != conversation

    def clear(self) -> None:
        self._asked.clear()


def plan_captures(
    request: PreparedRequest,
    reused: int,
    index: PrefixIndex,
    demand: Demand,
    settings: CacheSettings,
    *,
    room: bool,
    moved: bool,
) -> tuple[PlannedCapture, ...]:
    """Checkpoints to make beyond the ``reused`` tokens, by frontier.

    The caller's markers, and what two conversations had in common (the end of the tools, of the system turn, of the
    prompt), become shared prefixes; so do the former two without demand while there is ``room`` for another one. What a
    request did not have to read, it does not ask for: a conversation's own next turn is no second conversation. The
    position that a later request cannot change, and anchors inside a long prompt, stay with the request.
    """
    n = len(request.identity.tokens)
    conversation = request.session if request.session is not None else request.id
    private: dict[int, CheckpointKind] = {}
    shared: dict[int, bool] = {}
    for frontier in sorted({*request.markers, *request.boundaries}):
        if not 0 < frontier <= n:
            continue
        key = shortlist_key(request.identity, request.digest, frontier)
        if frontier <= reused or _shared_already(index, key):
            continue
        wanted = demand.ask(key, conversation) or frontier in request.markers
        if settings.shared_prefixes and (wanted or (room and frontier < n)):
            shared[frontier] = wanted
    at, kind = request.rewrite or (n, CheckpointKind.RESPONSE_REPLAY.value.upper())
    if at > reused or (at == reused and moved):  # a moved checkpoint has become the row's own state
        private[at] = CheckpointKind[kind]
    for frontier in _anchors(reused, min([n, *private, *shared]), settings):
        private.setdefault(frontier, CheckpointKind.LONG_ANCHOR)
    return tuple(
        PlannedCapture(CaptureOffer(f, private.get(f), f in shared), shared.get(f, True))
        for f in sorted({*private, *shared})
    )


def _anchors(begin: int, end: int, settings: CacheSettings) -> list[int]:
    """Evenly spaced positions inside a stretch without checkpoints, as many as the gap and the count allow."""
    count = min(settings.long_anchors, (end - begin) // settings.anchor_gap)
    return [begin + (end - begin) * (i + 1) // (count + 1) for i in range(count)]


def _shared_already(index: PrefixIndex, key: ShortlistKey) -> bool:
    return any(ref.owner.kind == "shared" for ref in index.find(key))
