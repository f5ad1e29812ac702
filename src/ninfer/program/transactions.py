"""Resource transitions: a plan is sealed at one revision, started at most once, and ends committed or aborted.

The only planned transition is MATERIALIZE from nothing. It copies nothing, so a started one is ready at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from ninfer.contract import (
    AdoptionTicket,
    Handle,
    Infeasible,
    PreparedRequest,
    ResourcePlan,
    Shortage,
    StartStatus,
    TransactionKind,
)
from ninfer.errors import InvariantError
from ninfer.program.capacity import KVCapacityProfile
from ninfer.program.kv import KVStore
from ninfer.program.layout import PoolKind
from ninfer.program.licensing import reserved_tokens
from ninfer.program.sequence import SequenceRecord, new_record
from ninfer.program.state import ActiveStateBinding, StateStore


@dataclass(frozen=True, slots=True)
class RunningTransaction:
    """A started plan and everything it holds."""

    plan: ResourcePlan
    request: PreparedRequest
    lane: int
    image: Handle
    spaces: dict[PoolKind, Handle]


class Transactions:
    """Plans, and the one transition that may be open. ``revision`` counts stable changes of ownership or capacity."""

    def __init__(self, profile: KVCapacityProfile, stores: dict[PoolKind, KVStore], states: StateStore) -> None:
        self.profile = profile
        self.stores = stores
        self.states = states
        self.revision = 0
        self.open: RunningTransaction | None = None
        self._ids = count(1)
        self._sealed: dict[int, tuple[ResourcePlan, PreparedRequest]] = {}  # the newest plan of each lane

    def isolated_root_fits(self, request: PreparedRequest) -> Infeasible | None:
        prompt, output = len(request.identity.tokens), request.effective_output
        missing = []
        if prompt < 1:
            missing.append(Shortage("prompt", 1))
        if output < 1:
            missing.append(Shortage("output", 1))
        if reserved_tokens(prompt, output) > self.profile.max_context:
            missing.append(Shortage("context", reserved_tokens(prompt, output) - self.profile.max_context))
        for kind, units in self.profile.entitlement(prompt, output).items():
            if units > self.profile.pages[kind]:
                missing.append(Shortage(f"pages.{kind.name.lower()}", units - self.profile.pages[kind]))
        return Infeasible(tuple(missing)) if missing else None

    def plan_root(self, request: PreparedRequest, lane: int) -> ResourcePlan | tuple[Shortage, ...]:
        impossible = self.isolated_root_fits(request)
        if impossible is not None:
            raise InvariantError(f"planning a request that cannot run alone: {impossible.shortages}")
        wanted = self.profile.entitlement(len(request.identity.tokens), request.effective_output)
        missing = [
            Shortage(f"pages.{kind.name.lower()}", units - self.stores[kind].pool.available)
            for kind, units in wanted.items()
            if units > self.stores[kind].pool.available
        ]
        if not self.states.available:
            missing.append(Shortage("state", 1))
        if missing:
            return tuple(missing)
        plan = ResourcePlan(
            next(self._ids), self.revision, TransactionKind.MATERIALIZE, request.id, lane, tuple(wanted.values())
        )
        self._sealed[lane] = (plan, request)
        return plan

    def start(self, plan: ResourcePlan, ticket: AdoptionTicket) -> StartStatus:
        """Take what the plan needs. STALE and INFEASIBLE leave everything as it was."""
        if plan.lane is None or (ticket.transaction, ticket.lane) != (plan.id, plan.lane):
            raise InvariantError(f"{ticket} was not made for plan {plan.id} on lane {plan.lane}")
        if self.open is not None or plan.revision != self.revision:
            return StartStatus.STALE
        sealed, request = self._sealed.get(plan.lane, (None, None))
        if sealed is not plan or request is None:
            raise InvariantError(f"plan {plan.id} was started before or replaced by a newer one")
        del self._sealed[plan.lane]
        spaces: dict[PoolKind, Handle] = {}
        for (kind, store), units in zip(self.stores.items(), plan.pages, strict=True):
            space = store.create_active(units)
            if space is None:
                self._release_spaces(spaces)
                return StartStatus.INFEASIBLE
            spaces[kind] = space
        image = self.states.new_active()
        if image is None:
            self._release_spaces(spaces)
            return StartStatus.INFEASIBLE
        self.open = RunningTransaction(plan, request, plan.lane, image, spaces)
        return StartStatus.STARTED

    def commit(self) -> tuple[ResourcePlan, SequenceRecord]:
        """Close the open transition; what it took belongs to the sequence from now on."""
        t = self._close()
        self.revision += 1
        slot = self.states.images.get(t.image).slot
        rows = {kind: self.stores[kind].spaces.get(space).row for kind, space in t.spaces.items()}
        binding = ActiveStateBinding(t.image, t.image)
        row, mtp_row = rows[PoolKind.MAIN], rows.get(PoolKind.MTP)
        return t.plan, new_record(t.request, t.lane, binding, t.spaces, slot, row, mtp_row)

    def abort(self) -> ResourcePlan:
        """Close the open transition and return what it took. Nothing has changed, so neither has the revision."""
        t = self._close()
        self._release_spaces(t.spaces)
        self.states.release(t.image)
        return t.plan

    def release(self, record: SequenceRecord) -> None:
        """Return everything a sequence holds."""
        if self.open is not None:
            raise InvariantError("a sequence cannot end while a resource transaction is open")
        self._release_spaces(record.spaces)
        self.states.release(record.binding.write)
        self.revision += 1

    def _close(self) -> RunningTransaction:
        if self.open is None:
            raise InvariantError("no resource transaction is open")
        transaction, self.open = self.open, None
        return transaction

    def _release_spaces(self, spaces: dict[PoolKind, Handle]) -> None:
        for kind, space in spaces.items():
            self.stores[kind].deactivate(space)
