"""Retained histories as the ResourceManager knows them: who they are and what they are worth.

An entry holds handles, never pages, slots or bytes: those are Program's, and its summaries are read and not compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ninfer.context import CheckpointRef, CheckpointSummary, OwnerSummary
from ninfer.contract import Handle
from ninfer.errors import InvariantError
from ninfer.runtime.retention import Retention, weight
from ninfer.runtime.shortlist import PrefixIndex

PRIVATE, SHARED = "continuation", "shared"
"""Kinds of owner handles: one request's linear history, or a prefix that any request may fork."""


@dataclass(slots=True)
class Entry:
    """One retained owner.

    session: the key it was published under, or None. order: publication order of the request that left it. used: the
    catalogue's clock when it was last hit or published. hits: of each checkpoint. hold: the paused request that alone
    may go on from it, or None; such an entry is not published, so nobody finds it and it takes no place.
    """

    owner: Handle
    retention: Retention
    order: int
    used: int
    session: str | None = None
    checkpoints: dict[int, CheckpointSummary] = field(default_factory=dict)
    hits: dict[int, int] = field(default_factory=dict)
    hold: int | None = None

    @property
    def private(self) -> bool:
        return self.owner.kind == PRIVATE


class Catalogue:
    """Entries by owner, in order of publication. ``clock`` counts successful admissions.

    private, shared: most entries of each kind. window: admissions that halve a weight.
    """

    def __init__(self, private: int, shared: int, window: int) -> None:
        self.capacity: Mapping[str, int] = {PRIVATE: private, SHARED: shared}
        self.window = window
        self.clock = 0
        self.index = PrefixIndex()
        self._entries: dict[Handle, Entry] = {}
        self._count = {PRIVATE: 0, SHARED: 0}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def count(self, kind: str) -> int:
        """Entries of one kind, PRIVATE or SHARED."""
        return self._count[kind]

    def get(self, owner: Handle) -> Entry:
        """The entry. Raises InvariantError when there is none."""
        entry = self._entries.get(owner)
        if entry is None:
            raise InvariantError(f"{owner} is not in the catalogue")
        return entry

    def find(self, owner: Handle) -> Entry | None:
        return self._entries.get(owner)

    def add(self, entry: Entry, summary: OwnerSummary) -> None:
        """Publish an owner with what Program says it holds."""
        kind = entry.owner.kind
        if entry.owner in self._entries or (entry.hold is None and self._count[kind] >= self.capacity[kind]):
            raise InvariantError(f"no room in the catalogue for {entry.owner}")
        self._entries[entry.owner] = entry
        self._count[kind] += entry.hold is None
        self.refresh(entry, summary)

    def refresh(self, entry: Entry, summary: OwnerSummary) -> None:
        """Take over which checkpoints an owner has and where they are."""
        now = {checkpoint.ref.checkpoint: checkpoint for checkpoint in summary.checkpoints}
        for gone in entry.checkpoints.keys() - now.keys():
            entry.hits.pop(gone, None)
            if entry.hold is None:
                self.index.remove(CheckpointRef(entry.owner, gone))
        for number in now.keys() - entry.checkpoints.keys():
            if entry.hold is None:
                self.index.add(now[number].key, CheckpointRef(entry.owner, number))
        entry.checkpoints = now

    def remove(self, owner: Handle) -> Entry:
        """Forget an owner that Program has released or turned into an active sequence."""
        entry = self.get(owner)
        if entry.hold is None:
            for number in entry.checkpoints:
                self.index.remove(CheckpointRef(owner, number))
        del self._entries[owner]
        self._count[owner.kind] -= entry.hold is None
        return entry

    def hold_of(self, request: int) -> Entry | None:
        """What a paused request left, as far as it is still there."""
        return next((entry for entry in self if entry.hold == request), None)

    def hit(self, ref: CheckpointRef) -> None:
        """A request starts from the checkpoint."""
        entry = self.get(ref.owner)
        entry.hits[ref.checkpoint] = entry.hits.get(ref.checkpoint, 0) + 1
        entry.used = self.clock

    def age(self, entry: Entry) -> int:
        """Admissions since the entry was last used."""
        return self.clock - entry.used

    def weight(self, entry: Entry, *, superseded: bool = False) -> int:
        """What the entry is worth now, in 1/256. superseded: it no longer matches the history it belongs to. What a
        paused request left does not fade."""
        if entry.hold is not None:
            return weight(entry.retention, 0, self.window)
        return weight(Retention.DISPOSABLE if superseded else entry.retention, self.age(entry), self.window)

    def clear(self) -> None:
        self._entries.clear()
        self._count = {PRIVATE: 0, SHARED: 0}
        self.index = PrefixIndex()
