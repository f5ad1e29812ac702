"""The outcomes an inactive owner may be degraded to, each keeping less than the one before."""

from __future__ import annotations

from ninfer.context import CheckpointKind, OwnerLevel
from ninfer.program.history import History
from ninfer.program.layout import pages

_REWRITE = (CheckpointKind.TURN_CLOSURE, CheckpointKind.RESPONSE_REPLAY)


def ladder(history: History, pools: int, host: bool) -> tuple[OwnerLevel, ...]:
    """2..8 levels: unchanged, then (with host memory) less and less on the device, then fewer checkpoints, evicted.

    Late pages go first: the early ones serve every checkpoint of a history. Of the checkpoints the anchors go first
    and the one before the part that a client may rewrite goes last.
    """
    held = history.checkpoints
    everything = frozenset(held)
    deepest = pages(history.frontier)
    essential = frozenset(i for i in held if held[i].kind is not CheckpointKind.LONG_ANCHOR) or everything
    rewrite = frozenset(i for i in held if held[i].kind in _REWRITE) or essential
    nothing: frozenset[int] = frozenset()

    def level(kept: frozenset[int], states: frozenset[int], blocks: int, duplicates: bool) -> OwnerLevel:
        return OwnerLevel(kept, states, (blocks,) * pools, duplicates)

    levels = [level(everything, everything, deepest, True)]
    if host:
        levels += [
            level(everything, everything, deepest, False),
            level(everything, nothing, deepest, False),
            level(everything, nothing, deepest // 2, False),
            level(everything, nothing, 0, False),
            level(essential, nothing, 0, False),
            level(rewrite, nothing, 0, False),
        ]
    else:
        levels += [level(kept, kept, deepest, True) for kept in (essential, rewrite)]
    levels.append(OwnerLevel(nothing, nothing, (0,) * pools, False))
    return tuple(b for a, b in zip([None, *levels], levels) if a != b)
