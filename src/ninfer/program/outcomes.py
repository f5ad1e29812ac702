"""How things become what they are next: a taken start an active row, a row's position a checkpoint, an ended row a
history. Assignments only; whatever could fail has happened before."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ninfer.context import CheckpointKind, ShortlistKey
from ninfer.contract import Handle, PreparedRequest, Resume
from ninfer.identity import digest_chain
from ninfer.program.history import Checkpoint, History, resident_identity, shortlist_key
from ninfer.program.incoming import Incoming
from ninfer.program.layout import PoolKind
from ninfer.program.licensing import checkpoint_tokens
from ninfer.program.sequence import Phase, SequenceRecord, new_record
from ninfer.program.store import Store
from ninfer.program.stores.images import ActiveStateBinding
from ninfer.program.taking import Taken


def become_row(store: Store, incoming: Incoming, taken: Taken) -> Handle:
    """The materialized sequence."""
    assert incoming.request is not None
    assert incoming.lane is not None
    consumed = incoming.source == "move" and incoming.owner is not None
    history = store.histories.remove(incoming.owner) if consumed and incoming.owner is not None else None
    inherited: dict[int, Checkpoint] = {}
    following = 0
    binding = taken.binding
    if history is not None:
        following = max(history.checkpoints) + 1
        for i, checkpoint in history.checkpoints.items():
            if checkpoint.frontier < incoming.frontier:
                inherited[i] = checkpoint
            elif i == incoming.checkpoint and incoming.thaws:
                binding = ActiveStateBinding(checkpoint.image, checkpoint.image)
            else:
                store.states.release(checkpoint.image)
    assert binding is not None
    if incoming.thaws:
        if taken.slot is not None:
            store.states.publish_device(binding.write, taken.slot)
        store.states.thaw(binding.write)
    spaces = {kind: store.kv[kind].close_branch(branch) for kind, branch in taken.branches.items()}
    table_rows = {kind: store.kv[kind].spaces.get(space).row for kind, space in spaces.items()}
    row, draft_row = table_rows.pop(PoolKind.MAIN), next(iter(table_rows.values()), None)
    assert row is not None
    slots = (_slot(store, binding.read), _slot(store, binding.write))
    record = new_record(incoming.request, incoming.lane, incoming.frontier, binding, slots, spaces, row, draft_row)
    record.checkpoints, record.next_checkpoint = inherited, following
    return store.sequences.insert(record)


def become_checkpoint(store: Store, incoming: Incoming, taken: Taken) -> tuple[Handle | None, int | None]:
    """The shared history a capture publishes and the id of its private checkpoint. The row goes on from a fork of its
    state, or in place after a copy to the host."""
    assert incoming.capture is not None
    sequence, offer = incoming.capture
    record, states = store.sequences.get(sequence), store.states
    for i in offer.replace & set(record.checkpoints):
        states.release(record.checkpoints.pop(i).image)
    if taken.host_slot is not None:
        image = states.insert_frozen(offer.frontier, taken.host_slot)
    else:
        image = record.binding.write
        states.freeze(image)
        binding = states.fork(image, taken.slot)
        assert binding is not None
        record.binding, record.read, record.slot = binding, _slot(store, image), _slot(store, binding.write)
    key = shortlist_key(record, offer.frontier)
    captured, published = None, None
    if offer.private is not None:
        captured = record.next_checkpoint
        record.next_checkpoint += 1
        record.checkpoints[captured] = Checkpoint(offer.private, offer.frontier, image, key)
        states.retain(image)
    if offer.shared:
        published = _publish(store, record, image, key, taken)
    else:
        states.release(image)
    return published, captured


def _publish(store: Store, record: SequenceRecord, image: Handle, key: ShortlistKey, taken: Taken) -> Handle:
    spaces = {kind: store.kv[kind].close_branch(branch) for kind, branch in taken.branches.items()}
    checkpoint = Checkpoint(CheckpointKind.SHARED_STABLE_PREFIX, key.frontier, image, key)
    return store.histories.insert("shared", History(resident_identity(record, key.frontier), spaces, {0: checkpoint}))


def settle(store: Store, record: SequenceRecord) -> None:
    """A unit has written the whole state of a forked row."""
    record.binding = store.states.settle(record.binding)
    record.read = record.slot
    store.revision += 1


def become_history(store: Store, record: SequenceRecord, endpoint: bool) -> Handle | None:
    """What an ended row leaves: its checkpoints, with one more where it stopped if that is wanted and possible."""
    kept = dict(record.checkpoints)
    if endpoint and record.intact and not record.binding.forked and record.frontier:
        store.states.freeze(record.binding.write)
        key = shortlist_key(record, record.frontier)
        kept[record.next_checkpoint] = Checkpoint(
            CheckpointKind.SESSION_ENDPOINT, record.frontier, record.binding.write, key
        )
    else:
        _release_state(store, record)
    if not kept:
        for kind, space in record.spaces.items():
            store.kv[kind].release(space)
        return None
    frontier = max(c.frontier for c in kept.values())
    for kind, space in record.spaces.items():
        store.kv[kind].deactivate(space, checkpoint_tokens(kind, frontier))
    return store.histories.insert("continuation", History(resident_identity(record, frontier), record.spaces, kept))


def resumable(record: SequenceRecord) -> PreparedRequest:
    """How a row that has not ended is admitted again: a prompt that is not finished as it was, else everything that has
    been executed as the prompt, and the anchor behind it."""
    request = record.request
    if record.phase is Phase.PREFILL:
        return request
    frontier = record.length - 1
    identity = resident_identity(record, frontier)
    prompt = request.resume.prompt if request.resume is not None else record.prompt
    return replace(
        request,
        identity=identity,
        digest=digest_chain(identity, request.digest),
        effective_output=record.room + 1,
        resume=Resume(int(record.ledger[frontier]), prompt),
    )


def generated(request: PreparedRequest) -> npt.NDArray[np.int32]:
    """Tokens that a request had generated and executed when it was paused."""
    resume, tokens = request.resume, request.identity.tokens
    return tokens[len(tokens) if resume is None else resume.prompt :]


def vanish(store: Store, record: SequenceRecord) -> None:
    """Return everything a row holds."""
    _release_state(store, record)
    for checkpoint in record.checkpoints.values():
        store.states.release(checkpoint.image)
    for kind, space in record.spaces.items():
        store.kv[kind].release(space)


def _release_state(store: Store, record: SequenceRecord) -> None:
    if record.binding.forked:
        store.states.abandon(record.binding)
    else:
        store.states.release(record.binding.write)


def _slot(store: Store, image: Handle) -> int:
    slot = store.states.images.get(image).device
    assert slot is not None
    return slot
