"""Resource transitions: a plan is sealed at one revision, started at most once, and ends committed or aborted.

Degrading victims cannot be undone; everything else is taken on the side and either becomes the result or is given
back. So an abort leaves the source as it was, no new row, and victims no worse than the plan's manifest says.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ninfer.context import (
    AdoptionTicket,
    OwnerOutcome,
    ResourcePlan,
    ResourceResult,
    StartStatus,
    TransactionStatus,
    TransferStats,
)
from ninfer.contract import Handle
from ninfer.errors import DeviceError, InvariantError
from ninfer.program.layout import PoolKind
from ninfer.program.outcomes import become_checkpoint, become_row, generated
from ninfer.program.planning import SealedPlan
from ninfer.program.store import Store
from ninfer.program.stores.blocks import Demotion
from ninfer.program.taking import Taken, give_back, take


class Phase(enum.Enum):
    DEMOTING = enum.auto()
    TAKING = enum.auto()
    READY = enum.auto()
    FAILED = enum.auto()


@dataclass(slots=True)
class Running:
    """The open transition. demoting: copies to the host whose device replicas are still there."""

    sealed: SealedPlan
    copied: dict[str, int]
    phase: Phase = Phase.DEMOTING
    demoting: list[tuple[PoolKind, Demotion]] = field(default_factory=list)
    demoting_images: list[tuple[Handle, int]] = field(default_factory=list)
    taken: Taken = field(default_factory=Taken)


class Transactions:
    """The one transition that may be open. Planning leaves its newest plan in ``sealed``. ``reset(lane, tokens)``
    says what the request that takes the lane has generated so far."""

    def __init__(self, store: Store, reset: Callable[[int, npt.NDArray[np.int32]], None]) -> None:
        self.store = store
        self._reset = reset
        self.open: Running | None = None
        self._sealed: SealedPlan | None = None

    def sealed(self, sealed: SealedPlan) -> None:
        self._sealed = sealed

    @property
    def captured(self) -> Handle | None:
        """The row whose capture is open; it runs no unit meanwhile."""
        capture = self.open.sealed.incoming.capture if self.open is not None else None
        return None if capture is None else capture[0]

    def start(self, plan: ResourcePlan, ticket: AdoptionTicket) -> StartStatus:
        """Degrade the victims and begin to copy. STALE leaves everything as it was."""
        if (ticket.transaction, ticket.lane, ticket.claimed) != (plan.id, plan.lane, plan.manifest):
            raise InvariantError(f"{ticket} was not made for plan {plan.id}")
        if self.open is not None or plan.revision != self.store.revision:
            return StartStatus.STALE
        sealed, self._sealed = self._sealed, None
        if sealed is None or sealed.plan is not plan:
            raise InvariantError(f"plan {plan.id} was started before or replaced by a newer one")
        self.open = run = Running(sealed, dict(self.store.transfers.bytes))
        self._degrade(sealed)
        with _failing(run):
            self._demote(run)
        return StartStatus.STARTED

    def poll(self) -> TransactionStatus:
        """Advance as far as copies have come."""
        run = self.open
        if run is None:
            return TransactionStatus.IDLE
        transfers = self.store.transfers
        with _failing(run):
            if run.phase is Phase.DEMOTING and (not _copies_down(run) or transfers.done()):
                self._demoted(run)
                run.phase = Phase.TAKING
                take(self.store, run.sealed, run.taken)
                if run.sealed.incoming.request is not None and run.sealed.plan.lane is not None:
                    self._reset(run.sealed.plan.lane, generated(run.sealed.incoming.request))
            if run.phase is Phase.TAKING and (not run.taken.copying or transfers.done()):
                run.phase = Phase.READY
        if run.phase is Phase.FAILED:
            return TransactionStatus.FAILED
        return TransactionStatus.READY if run.phase is Phase.READY else TransactionStatus.RUNNING

    def commit(self) -> ResourceResult:
        """Everything is in place: the new row or checkpoint exists from now on."""
        run = self.open
        if run is None or run.phase is not Phase.READY:
            raise InvariantError("no resource transaction is ready to commit")
        self.open = None
        store, incoming = self.store, run.sealed.incoming
        store.revision += 1
        row = become_row(store, incoming, run.taken) if incoming.request is not None else None
        published, captured = (None, None)
        if incoming.capture is not None:
            published, captured = become_checkpoint(store, incoming, run.taken)
        return self._result(
            run,
            committed=True,
            sequence=row,
            reused_tokens=incoming.frontier if row is not None else 0,
            source={"move": "consumed", "fork": "kept"}.get(incoming.source, "none"),
            published=None if published is None else store.summary(published),
            captured=captured,
        )

    def abort(self) -> ResourceResult:
        """Give everything back that was taken. Waits for copies under way."""
        run = self.open
        if run is None:
            raise InvariantError("no resource transaction is open")
        self.open = None
        if _copies_down(run) or run.taken.copying:
            with suppress(DeviceError):  # what they wrote is not used
                self.store.transfers.wait()
        for kind, demotion in run.demoting:
            self.store.kv[kind].end_demotion(demotion, copied=False)
        for image, host in run.demoting_images:
            self.store.states.unpin(image)
            self.store.states.return_host(host)
        give_back(self.store, run.taken)
        incoming = run.sealed.incoming
        if incoming.shed and incoming.owner is not None:
            self.store.forget(self.store.histories.get(incoming.owner), [])
        self.store.revision += bool(run.sealed.plan.manifest)
        return self._result(run, committed=False)

    def close(self) -> None:
        """Wait for copies under way: the memory they read and write goes next."""
        if self.open is not None:
            self.abort()

    # -- stages --------------------------------------------------------------------------------------------------

    def _degrade(self, sealed: SealedPlan) -> None:
        """Checkpoints and replicas go that need no replacement."""
        store, incoming = self.store, sealed.incoming
        if incoming.shed and incoming.owner is not None:
            source = store.histories.get(incoming.owner)
            for number in incoming.shed:
                store.states.release(source.checkpoints.pop(number).image)
        for owner, level in sealed.levels.items():
            history = store.histories.remove(owner) if level.evicted else store.histories.get(owner)
            gone = sorted(set(history.checkpoints) - level.kept)
            if gone:
                store.forget(history, gone)
        for kind, moves in sealed.pages.items():
            kv = store.kv[kind]
            for page in _alive(map(kv.pages.at, moves.host.tolist())):
                kv.drop_host(page)
            for page in _alive(map(kv.pages.at, moves.device.tolist())):
                kv.drop_device(page)
        states = store.states
        for image in _alive(map(states.images.at, sealed.images.host.tolist())):
            states.drop_host(image)
        for image in _alive(map(states.images.at, sealed.images.device.tolist())):
            states.drop_device(image)

    def _demote(self, run: Running) -> None:
        """Reserve host memory for everything first, then copy."""
        store, sealed = self.store, run.sealed
        for kind, moves in sealed.pages.items():
            for page in _alive(map(store.kv[kind].pages.at, moves.demoted.tolist())):
                demotion = store.kv[kind].begin_demotion(page)
                if demotion is None:
                    raise InvariantError("host memory that a plan counted on is not there")
                run.demoting.append((kind, demotion))
        for image in _alive(map(store.states.images.at, sealed.images.demoted.tolist())):
            host = store.states.take_host()
            if host is None:
                raise InvariantError("a host slot that a plan counted on is not there")
            store.states.pin(image)
            run.demoting_images.append((image, host))
        if not _copies_down(run):
            return
        store.transfers.begin()
        for kind, kv in store.kv.items():
            leases = [(kv.pages.get(d.page).device, d.slot) for k, d in run.demoting if k is kind]
            store.transfers.pages_down(kind, [(lease.page, slot) for lease, slot in leases if lease is not None])
        for image, host in run.demoting_images:
            device = store.states.images.get(image).device
            assert device is not None
            store.transfers.image_down(device, host)
        store.transfers.mark()

    def _demoted(self, run: Running) -> None:
        """The copies are there: they replace what they were made from."""
        for kind, demotion in run.demoting:
            self.store.kv[kind].end_demotion(demotion, copied=True)
            self.store.kv[kind].drop_device(demotion.page)
        for image, host in run.demoting_images:
            self.store.states.unpin(image)
            self.store.states.publish_host(image, host)
            self.store.states.drop_device(image)
        run.demoting, run.demoting_images = [], []

    def _result(self, run: Running, **outcome: object) -> ResourceResult:
        store, plan = self.store, run.sealed.plan
        owners = []
        consumed = run.sealed.incoming.owner if outcome.get("source") == "consumed" else None
        for owner in [owner for owner in plan.manifest if owner != consumed]:
            history = store.histories.try_get(owner)
            surviving = frozenset(history.checkpoints) if history is not None else frozenset()
            owners.append(OwnerOutcome(owner, surviving, None if history is None else store.summary(owner)))
        copied = {f"{way}_bytes": n - run.copied[way] for way, n in store.transfers.bytes.items()}
        return ResourceResult(
            plan.id, plan.kind, revision_after=store.revision, owners=tuple(owners), transfers=TransferStats(**copied),
            **outcome,  # type: ignore[arg-type]
        )  # fmt: skip


@contextmanager
def _failing(run: Running) -> Iterator[None]:
    """A copy that cannot be made fails the transition and nothing else."""
    try:
        yield
    except (DeviceError, MemoryError):
        run.phase = Phase.FAILED


def _copies_down(run: Running) -> bool:
    return bool(run.demoting or run.demoting_images)


def _alive(handles: Iterator[Handle | None]) -> list[Handle]:
    """Those that are still there."""
    return [h for h in handles if h is not None]
