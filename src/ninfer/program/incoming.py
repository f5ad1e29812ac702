"""What one candidate of a planning session takes from the stores, and what it needs left as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ninfer.context import Candidate, CaptureOffer, CaptureSkip, CheckpointRef
from ninfer.contract import Handle, PreparedRequest, SequenceHandle
from ninfer.errors import InvariantError
from ninfer.identity import same_prefix
from ninfer.program.history import History
from ninfer.program.layout import PAGE, PoolKind, pages
from ninfer.program.licensing import checkpoint_tokens
from ninfer.program.projection import Index
from ninfer.program.store import Store
from ninfer.work import PrefillWork, TransferBatch

NOTHING: Index = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Incoming:
    """owner, checkpoint, frontier: the source, which is no victim. units: device pages taken. states: device state
    slots taken; negative where a capture gives some back.

    held: images that active rows hold on the device afterwards, beyond the one each of them writes. pages, image:
    objects that stay as they are. transfers, prefill: work. entitlement, in_place: of the branch of each pool. thaws:
    the source's image is taken over, not read. shed: checkpoints of a consumed source, deeper than the start, that go
    before a slot is taken; freed: device slots of their images. request and lane of a start; capture: the row and what
    was offered.
    """

    source: Literal["root", "move", "fork", "capture", "none"]
    owner: Handle | None = None
    frontier: int = 0
    units: Mapping[PoolKind, int] = field(default_factory=dict)
    states: int = 0
    held: int = 0
    pages: Mapping[PoolKind, Index] = field(default_factory=dict)
    image: Index = field(default_factory=lambda: NOTHING)
    transfers: tuple[TransferBatch, ...] = ()
    prefill: PrefillWork = field(default_factory=PrefillWork)
    entitlement: Mapping[PoolKind, int] = field(default_factory=dict)
    in_place: Mapping[PoolKind, bool] = field(default_factory=dict)
    checkpoint: int | None = None
    thaws: bool = False
    shed: frozenset[int] = frozenset()
    freed: int = 0
    request: PreparedRequest | None = None
    lane: int | None = None
    capture: tuple[SequenceHandle, CaptureOffer] | None = None


def inspect(store: Store, ref: CheckpointRef | None, request: PreparedRequest, consume: bool) -> Candidate | None:
    """The start that a checkpoint offers, or None. A shared history is never consumed."""
    if ref is None:
        return Candidate(None, 0, False, store.prefill(request, 0))
    found = store.histories.find(ref)
    if found is None or not same_prefix(found[0].identity, request.identity, found[1].frontier):
        return None
    history, checkpoint = found
    consume = consume and ref.owner.kind == "continuation"
    prefill = store.prefill(request, checkpoint.frontier)
    return Candidate(ref, checkpoint.frontier, consume, prefill, store.restoring(history, checkpoint))


def materialization(store: Store, request: PreparedRequest, lane: int, candidate: Candidate) -> Incoming:
    """A start of the request. Raises InvariantError for a candidate that is no longer there."""
    entitlement = store.profile.entitlement(len(request.identity.tokens), request.effective_output)
    if candidate.ref is None:
        return Incoming(
            "root", units=entitlement, states=1, held=held_by_active(store), prefill=candidate.prefill,
            entitlement=entitlement, in_place=dict.fromkeys(store.kv, False), request=request, lane=lane,
        )  # fmt: skip
    found = store.histories.find(candidate.ref)
    if found is None:
        raise InvariantError(f"{candidate.ref} is gone")
    history, checkpoint = found
    F, image = checkpoint.frontier, store.states.images.get(checkpoint.image)
    spaces = history.spaces
    cut = {kind: checkpoint_tokens(kind, F) for kind in store.kv}
    in_place = {
        kind: candidate.consume and cut[kind] % PAGE != 0 and not kv.shared_tail(spaces[kind], cut[kind])
        for kind, kv in store.kv.items()
    }
    inherited = {c.image for c in history.checkpoints.values() if c.frontier < F} if candidate.consume else set()
    thaws = candidate.consume and image.refs == 1
    states = int(not thaws or image.device is None)
    shed = _beyond(history, F) if candidate.consume and states else frozenset()
    copied = {kind: int(cut[kind] % PAGE != 0 and not in_place[kind]) for kind in store.kv}
    return Incoming(
        source="move" if candidate.consume else "fork",
        owner=candidate.ref.owner,
        frontier=F,
        units={
            kind: kv.branch_units(spaces[kind], cut[kind], entitlement[kind], in_place[kind])
            for kind, kv in store.kv.items()
        },
        states=states,
        held=held_by_active(store) + sum(store.states.images.get(i).device is not None for i in inherited),
        pages={kind: block_index(store, history, kind, F) for kind in store.kv},
        image=np.array([checkpoint.image.index], np.int64),
        transfers=(*candidate.min_restore, *store.transfer("d2d", copied, 0)),
        prefill=candidate.prefill,
        entitlement=entitlement,
        in_place=in_place,
        checkpoint=candidate.ref.checkpoint,
        thaws=thaws,
        shed=shed,
        freed=_freed(store, [history.checkpoints[i].image for i in shed]),
        request=request,
        lane=lane,
    )


def capture(store: Store, sequence: SequenceHandle, offer: CaptureOffer) -> Incoming | CaptureSkip:
    """A checkpoint of an active row where it stands."""
    record = store.sequences.get(sequence)
    if offer.frontier != record.frontier or not offer.frontier or record.binding.forked or not record.intact:
        return CaptureSkip.NOT_STABLE
    held = any(c.frontier == offer.frontier for c in record.checkpoints.values())
    if (offer.private is None and not offer.shared) or (held and not offer.shared):
        return CaptureSkip.HELD
    tails = {kind: int(offer.shared and checkpoint_tokens(kind, offer.frontier) % PAGE != 0) for kind in store.kv}
    freed = _freed(store, [record.checkpoints[i].image for i in offer.replace if i in record.checkpoints])
    shared_only = offer.private is None
    return Incoming(
        "capture",
        frontier=offer.frontier,
        units=tails,
        states=1 - freed,
        held=held_by_active(store) + int(not shared_only) - freed,
        transfers=store.transfer("d2d", tails, 0),
        capture=(sequence, offer),
    )


def held_by_active(store: Store) -> int:
    """Device slots that active rows hold beyond the one each of them writes. A fork's source is there for a moment
    only and does not count."""
    images = {c.image for _, record in store.sequences.live() for c in record.checkpoints.values()}
    return sum(store.states.images.get(image).device is not None for image in images)


def block_index(store: Store, history: History, kind: PoolKind, frontier: int) -> Index:
    count = pages(checkpoint_tokens(kind, frontier))
    blocks = store.kv[kind].spaces.get(history.spaces[kind]).blocks[:count]
    return np.array([b.index for b in blocks], np.int64)


def _beyond(history: History, frontier: int) -> frozenset[int]:
    return frozenset(i for i, c in history.checkpoints.items() if c.frontier > frontier)


def _freed(store: Store, images: Sequence[Handle]) -> int:
    """Device slots that come back when the references to these images are given up."""
    states = {image: store.states.images.get(image) for image in images}
    return sum(s.refs == images.count(image) and s.device is not None for image, s in states.items())
