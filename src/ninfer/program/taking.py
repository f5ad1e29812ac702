"""What a transition takes for its row or checkpoint before it commits: pages, a state slot, copies into them."""

from __future__ import annotations

from dataclasses import dataclass, field

from ninfer.contract import Handle
from ninfer.errors import InvariantError
from ninfer.program.incoming import Incoming
from ninfer.program.layout import PoolKind, pages
from ninfer.program.licensing import checkpoint_tokens
from ninfer.program.planning import SealedPlan
from ninfer.program.store import Store
from ninfer.program.stores.blocks import Branch
from ninfer.program.stores.host import HostSlot
from ninfer.program.stores.images import ActiveStateBinding


@dataclass(slots=True)
class Taken:
    """branches: spaces in the making. binding: images of a new row. slot, host_slot: a device or host slot for a
    state image. copying: copies between device and host are under way."""

    branches: dict[PoolKind, Branch] = field(default_factory=dict)
    binding: ActiveStateBinding | None = None
    slot: int | None = None
    host_slot: int | None = None
    copying: bool = False


def take(store: Store, sealed: SealedPlan, taken: Taken) -> None:
    """Reserve everything, then copy. What has been taken when an exception comes out is in ``taken``."""
    incoming = sealed.incoming
    if incoming.request is not None:
        _take_row(store, incoming, taken)
    elif incoming.capture is not None:
        _take_checkpoint(store, sealed, taken)


def give_back(store: Store, taken: Taken) -> None:
    for kind, branch in taken.branches.items():
        store.kv[kind].drop_branch(branch)
    if taken.binding is not None:
        if taken.binding.forked:
            store.states.abandon(taken.binding)
        else:
            store.states.release(taken.binding.write)
    if taken.slot is not None:
        store.states.return_device(taken.slot)
    if taken.host_slot is not None:
        store.states.return_host(taken.host_slot)


def _take_row(store: Store, incoming: Incoming, taken: Taken) -> None:
    history = store.histories.get(incoming.owner) if incoming.owner is not None else None
    consume = incoming.source == "move"
    for kind, kv in store.kv.items():
        space = history.spaces[kind] if history is not None else None
        branch = kv.open_branch(
            space,
            checkpoint_tokens(kind, incoming.frontier),
            incoming.entitlement[kind],
            consume=consume,
            in_place=incoming.in_place[kind],
            active=True,
        )
        if branch is None:
            raise InvariantError(f"{kind.name}: pages that a plan counted on are not there")
        taken.branches[kind] = branch
    restoring = _take_state(store, incoming, taken)
    raised = {kind: _restored(store, kind, branch) for kind, branch in taken.branches.items()}
    if restoring is not None or any(raised.values()):
        taken.copying = True
        store.transfers.begin()
        for kind, moves in raised.items():
            store.transfers.pages_up(kind, moves)
        if restoring is not None:
            store.transfers.image_up(*restoring)
        store.transfers.mark()
    _copy_tails(store, taken)


def _take_state(store: Store, incoming: Incoming, taken: Taken) -> tuple[int, int] | None:
    """The state of a new row; (device slot, host slot) of a copy that must fill it first."""
    states = store.states
    if incoming.owner is None or incoming.checkpoint is None:
        taken.binding = _owned(states.new_active())
        return None
    image = store.histories.get(incoming.owner).checkpoints[incoming.checkpoint].image
    state = states.images.get(image)
    if incoming.thaws:
        if state.device is not None:
            return None
        taken.slot, host = states.take_device(), state.host
        if taken.slot is None or host is None:
            raise InvariantError("a state slot that a plan counted on is not there")
        return taken.slot, host
    if state.device is not None:
        taken.binding = states.fork(image)
        if taken.binding is None:
            raise InvariantError("a state slot that a plan counted on is not there")
        return None
    taken.binding = _owned(states.new_active(incoming.frontier))
    slot = states.images.get(taken.binding.write).device
    assert slot is not None
    assert state.host is not None
    return slot, state.host


def _take_checkpoint(store: Store, sealed: SealedPlan, taken: Taken) -> None:
    assert sealed.incoming.capture is not None
    sequence, offer = sealed.incoming.capture
    record = store.sequences.get(sequence)
    if offer.shared:
        for kind, kv in store.kv.items():
            tokens = checkpoint_tokens(kind, offer.frontier)
            branch = kv.open_branch(
                record.spaces[kind], tokens, pages(tokens), consume=False, in_place=False, active=False
            )
            if branch is None:
                raise InvariantError(f"{kind.name}: pages that a plan counted on are not there")
            taken.branches[kind] = branch
    if sealed.snapshot:
        taken.host_slot = store.states.take_host()
        if taken.host_slot is None:
            raise InvariantError("a host slot that a plan counted on is not there")
        taken.copying = True
        store.transfers.begin()
        store.transfers.image_down(record.slot, taken.host_slot)
        store.transfers.mark()
    elif sealed.incoming.states > 0:
        taken.slot = store.states.take_device()
        if taken.slot is None:
            raise InvariantError("a state slot that a plan counted on is not there")
    _copy_tails(store, taken)


def _restored(store: Store, kind: PoolKind, branch: Branch) -> list[tuple[int, HostSlot]]:
    """Copies from the host that a branch waits for: pages that are nowhere else, and a tail that is not either."""
    table = store.kv[kind].pages
    wanted = [*branch.restored]
    if branch.tail is not None and table.get(branch.tail[0]).device is None:
        wanted.append(branch.tail)
    moves = []
    for page, lease in wanted:
        host = table.get(page).host
        assert host is not None
        moves.append((lease.page, host.slot))
    return moves


def _copy_tails(store: Store, taken: Taken) -> None:
    for kind, branch in taken.branches.items():
        source = store.kv[kind].pages.get(branch.tail[0]).device if branch.tail is not None else None
        if branch.tail is not None and source is not None:
            store.transfers.page_across(kind, source.page, branch.tail[1].page)


def _owned(image: Handle | None) -> ActiveStateBinding:
    if image is None:
        raise InvariantError("a state slot that a plan counted on is not there")
    return ActiveStateBinding(image, image)
