"""Recurrent state. A StateImage is the complete fixed-size model state at one token frontier; it has a device slot, a
host slot, or both. Slots belong to no lane."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from ninfer.contract import Handle, HandleTable
from ninfer.errors import InvariantError


@dataclass(slots=True)
class StateImage:
    """frontier: tokens the state has absorbed. mutable: one sequence advances it in place. refs: checkpoints and
    bindings that need it. pins: units and copies that read it where it is."""

    device: int | None
    frontier: int = 0
    mutable: bool = True
    host: int | None = None
    refs: int = 1
    pins: int = 0


@dataclass(frozen=True, slots=True)
class ActiveStateBinding:
    """The images a sequence's units read and write. They differ after a fork, until a unit has written all of
    ``write``."""

    read: Handle
    write: Handle

    @property
    def forked(self) -> bool:
        return self.read is not self.write and self.read != self.write


@dataclass(frozen=True, slots=True)
class StateAudit:
    """Slots in use, recomputed from the images and the copies on their way."""

    capacity: int
    used: int
    host_capacity: int
    host_used: int


class StateStore:
    def __init__(self, device_slots: int, host_slots: int = 0) -> None:
        self.capacity = device_slots
        self.host_capacity = host_slots
        self.images: HandleTable[StateImage] = HandleTable("image")
        self._free = list(range(device_slots))  # heaps
        self._host_free = list(range(host_slots))
        self._taken: set[int] = set()  # slots of copies on their way
        self._host_taken: set[int] = set()

    @property
    def available(self) -> int:
        return len(self._free)

    @property
    def host_available(self) -> int:
        return len(self._host_free)

    # -- images of active sequences ------------------------------------------------------------------------------

    def new_active(self, frontier: int = 0) -> Handle | None:
        """A mutable image on the device, or None when no slot is free. Units start a row at 0 from zero state."""
        return self.images.insert(StateImage(heapq.heappop(self._free), frontier)) if self._free else None

    def advance(self, image: Handle, frontier: int) -> None:
        """Record that the image has absorbed ``frontier`` tokens; it never goes back."""
        state = self.images.get(image)
        if not state.mutable or frontier < state.frontier:
            raise InvariantError(f"state at {state.frontier} tokens cannot go to {frontier}")
        state.frontier = frontier

    def fork(self, source: Handle, slot: int | None = None) -> ActiveStateBinding | None:
        """Read an immutable image, write a new one; None when no slot is free. The source stays where it is.

        slot: a taken device slot to write.
        """
        state = self.images.get(source)
        if state.mutable or state.device is None:
            raise InvariantError(f"{source} cannot be read: it is mutable or not on the device")
        if slot is None:
            slot = self.take_device()
        if slot is None:
            return None
        self._taken.remove(slot)
        state.refs += 1
        state.pins += 1
        return ActiveStateBinding(source, self.images.insert(StateImage(slot, state.frontier)))

    def settle(self, binding: ActiveStateBinding) -> ActiveStateBinding:
        """A unit has written the whole of ``write``: the source is needed no more."""
        self.unpin(binding.read)
        self.release(binding.read)
        return ActiveStateBinding(binding.write, binding.write)

    def abandon(self, binding: ActiveStateBinding) -> None:
        """The sequence ends before it has written anything: both images go back."""
        self.unpin(binding.read)
        self.release(binding.read)
        self.release(binding.write)

    def freeze(self, image: Handle) -> None:
        """The image changes no more: a checkpoint has it."""
        state = self.images.get(image)
        if not state.mutable:
            raise InvariantError(f"{image} is frozen already")
        state.mutable = False

    def thaw(self, image: Handle) -> None:
        """A sequence takes an image that nothing else needs and advances it in place. Its host copy goes."""
        state = self.images.get(image)
        if state.mutable or state.refs != 1 or state.pins or state.device is None:
            raise InvariantError(f"{image} cannot be taken over")
        state.mutable = True
        self._free_host(state)

    def insert_frozen(self, frontier: int, host: int) -> Handle:
        """An immutable image whose only replica is in a taken host slot."""
        self._host_taken.remove(host)
        return self.images.insert(StateImage(None, frontier, mutable=False, host=host))

    # -- references and replicas ---------------------------------------------------------------------------------

    def retain(self, image: Handle) -> None:
        self.images.get(image).refs += 1

    def release(self, image: Handle) -> None:
        """Give one reference back; the last one frees the image."""
        state = self.images.get(image)
        state.refs -= 1
        if state.refs:
            return
        if state.pins:
            raise InvariantError(f"{image} was released while it is read")
        self.images.remove(image)
        self._free_device(state)
        self._free_host(state)

    def pin(self, image: Handle) -> None:
        self.images.get(image).pins += 1

    def unpin(self, image: Handle) -> None:
        state = self.images.get(image)
        if state.pins < 1:
            raise InvariantError(f"{image} was unpinned twice")
        state.pins -= 1

    def take_device(self) -> int | None:
        """A device slot for a copy on its way, or None."""
        return _take(self._free, self._taken)

    def take_host(self) -> int | None:
        """A host slot for a copy on its way, or None."""
        return _take(self._host_free, self._host_taken)

    def return_device(self, slot: int) -> None:
        self._taken.remove(slot)
        heapq.heappush(self._free, slot)

    def return_host(self, slot: int) -> None:
        self._host_taken.remove(slot)
        heapq.heappush(self._host_free, slot)

    def publish_device(self, image: Handle, slot: int) -> None:
        """The copy in a taken slot is complete."""
        state = self.images.get(image)
        if state.device is not None:
            raise InvariantError(f"{image} is on the device already")
        self._taken.remove(slot)
        state.device = slot

    def publish_host(self, image: Handle, slot: int) -> None:
        """The copy in a taken slot is complete."""
        state = self.images.get(image)
        if state.host is not None or state.mutable:
            raise InvariantError(f"{image} has a host copy already, or still changes")
        self._host_taken.remove(slot)
        state.host = slot

    def drop_device(self, image: Handle) -> None:
        """Keep the host copy alone."""
        state = self.images.get(image)
        if state.host is None or state.pins or state.mutable:
            raise InvariantError(f"{image} would be lost or is in use")
        self._free_device(state)

    def drop_host(self, image: Handle) -> None:
        """Keep the device copy alone."""
        state = self.images.get(image)
        if state.device is None:
            raise InvariantError(f"{image} would be lost")
        self._free_host(state)

    # -- audit ---------------------------------------------------------------------------------------------------

    def audit(self) -> StateAudit:
        """Walk the images. Raises InvariantError when a slot is held twice or lost, or an image is stored nowhere."""
        images = [image for _, image in self.images.live()]
        held = [i.device for i in images if i.device is not None] + [*self._taken]
        host = [i.host for i in images if i.host is not None] + [*self._host_taken]
        if sorted(held + self._free) != list(range(self.capacity)):
            raise InvariantError(f"state slots {sorted(held + self._free)} are not 0..{self.capacity - 1}")
        if sorted(host + self._host_free) != list(range(self.host_capacity)):
            raise InvariantError(f"host slots {sorted(host + self._host_free)} are not 0..{self.host_capacity - 1}")
        if any((i.device is None and i.host is None) or i.refs < 1 or i.pins < 0 for i in images):
            raise InvariantError("a state image has no replica, no owner or a negative pin count")
        return StateAudit(self.capacity, len(held), self.host_capacity, len(host))

    def _free_device(self, state: StateImage) -> None:
        if state.device is not None:
            heapq.heappush(self._free, state.device)
            state.device = None

    def _free_host(self, state: StateImage) -> None:
        if state.host is not None:
            heapq.heappush(self._host_free, state.host)
            state.host = None


def _take(free: list[int], taken: set[int]) -> int | None:
    if not free:
        return None
    slot = heapq.heappop(free)
    taken.add(slot)
    return slot
