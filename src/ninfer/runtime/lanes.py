"""Long-lived positions of active requests."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from ninfer.context import CheckpointKind
from ninfer.contract import PreparedRequest, SequenceHandle

REWRITE = (CheckpointKind.TURN_CLOSURE, CheckpointKind.RESPONSE_REPLAY)
"""Checkpoints of which a row keeps the latest alone."""


class LaneState(enum.Enum):
    FREE = "free"
    MATERIALIZING = "materializing"
    ACTIVE = "active"
    TERMINAL_PENDING = "terminal_pending"


class Keep(enum.Enum):
    """What a row leaves when it ends."""

    ENDPOINT = "endpoint"
    """Where it stopped, and the checkpoints it made."""
    CHECKPOINTS = "checkpoints"
    """The checkpoints it made."""
    NOTHING = "nothing"


@dataclass(slots=True)
class Lane:
    """reused: prompt tokens the row began with. private: its own checkpoints, id -> (frontier, kind)."""

    state: LaneState = LaneState.FREE
    request: PreparedRequest | None = None
    sequence: SequenceHandle | None = None
    reused: int = 0
    private: dict[int, tuple[int, CheckpointKind]] = field(default_factory=dict)
    keep: Keep = Keep.NOTHING

    @property
    def publishes(self) -> bool:
        """Whether a place in the catalogue is kept for what the row will leave."""
        return self.request is not None and self.request.participation == "read_write"

    def replaced_by(self, kind: CheckpointKind, anchors: int) -> frozenset[int]:
        """The row's checkpoints that a new one of that kind takes the place of: the former rewrite point, or the
        earliest anchor beyond ``anchors``."""
        if kind in REWRITE:
            return frozenset(q for q, (_, k) in self.private.items() if k in REWRITE)
        held = sorted((f, q) for q, (f, k) in self.private.items() if k is CheckpointKind.LONG_ANCHOR)
        return frozenset(q for _, q in held[: max(0, len(held) + 1 - anchors)])
