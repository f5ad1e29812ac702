"""Recurrent state. A StateImage is the complete fixed-size model state at one token frontier, stored in one of a
fixed number of equal device slots that belong to no lane."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from ninfer.contract import Handle, HandleTable
from ninfer.errors import InvariantError


@dataclass(slots=True)
class StateImage:
    """frontier: tokens the state has absorbed. slot: where it is stored."""

    slot: int
    frontier: int = 0


@dataclass(frozen=True, slots=True)
class ActiveStateBinding:
    """The images a sequence's units read and write; the same one while the state advances in place."""

    read: Handle
    write: Handle


@dataclass(frozen=True, slots=True)
class StateAudit:
    """Slots, recomputed from the images."""

    capacity: int
    used: int


class StateStore:
    def __init__(self, device_slots: int) -> None:
        self.capacity = device_slots
        self.images: HandleTable[StateImage] = HandleTable("image")
        self._free = list(range(device_slots))  # a heap

    @property
    def available(self) -> int:
        return len(self._free)

    def new_active(self) -> Handle | None:
        """A mutable image at frontier 0, or None when no slot is free. Units start a row at 0 from zero state."""
        if not self._free:
            return None
        return self.images.insert(StateImage(heapq.heappop(self._free)))

    def advance(self, image: Handle, frontier: int) -> None:
        """Record that the image has absorbed ``frontier`` tokens; it never goes back."""
        state = self.images.get(image)
        if frontier < state.frontier:
            raise InvariantError(f"state at {state.frontier} tokens cannot go back to {frontier}")
        state.frontier = frontier

    def release(self, image: Handle) -> None:
        """Forget the image and free its slot."""
        heapq.heappush(self._free, self.images.remove(image).slot)

    def audit(self) -> StateAudit:
        """Walk the images. Raises InvariantError when a slot is held twice or lost."""
        slots = sorted([image.slot for _, image in self.images.live()] + self._free)
        if slots != list(range(self.capacity)):
            raise InvariantError(f"state slots {slots} are not 0..{self.capacity - 1}")
        return StateAudit(self.capacity, len(self.images))
