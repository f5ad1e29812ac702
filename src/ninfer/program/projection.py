"""What becomes of every replica when inactive owners are degraded. A pure function of who requires an object and who
wants it on the device: the order in which owners are named changes nothing, and an object counts once however many
owners share it.

The rules, for each object (a page of one pool, or a state image) that has replicas on the device, the host or both:
not required by anybody: all replicas go. Required: the device replica stays where an active row needs it or an owner
wants it; else it goes, after a copy to the host unless there is one. A host replica beside a device replica stays
where an owner keeps duplicates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Index = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Stance:
    """What one owner asks of an axis: the objects it requires, those it wants on the device, and whether host copies
    of these are kept too."""

    required: Index
    device: Index
    duplicates: bool


@dataclass(frozen=True, slots=True)
class Moves:
    """Objects whose device replica goes, whose host replica goes, and that are copied to the host before the device
    replica goes. ``device`` and ``demoted`` have none in common."""

    device: Index
    host: Index
    demoted: Index


class Axis:
    """Replicas of one kind of object by index. needed: an active row or an open transition has it as it is."""

    def __init__(self, device: Flags, host: Flags, needed: Flags) -> None:
        self.device = device
        self.host = host
        self.needed = needed
        n = len(device)
        self._required, self._wanted, self._kept = (np.zeros(n, np.int32) for _ in range(3))

    def add(self, stance: Stance, owners: int = 1) -> None:
        """Count an owner with this stance; -1 takes it away again."""
        self._required[stance.required] += owners
        self._wanted[stance.device] += owners
        if stance.duplicates:
            self._kept[stance.required] += owners

    def project(self, needed: Index) -> Moves:
        """What goes when the counted owners are all there are and ``needed`` objects stay as they are."""
        fixed = self.needed.copy()
        fixed[needed] = True
        alive = fixed | (self._required > 0)
        stays = self.device & (fixed | (self._wanted > 0)) & alive
        demoted = self.device & alive & ~stays & ~self.host
        return Moves(
            np.flatnonzero(self.device & ~stays & ~demoted),
            np.flatnonzero(self.host & ~fixed & (~alive | (stays & (self._kept == 0)))),
            np.flatnonzero(demoted),
        )
