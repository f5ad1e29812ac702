"""How far a request may ever write, and how far one unit writes. The first bounds the second: an admitted request
can always be driven to its output limit inside the pages it reserved."""

from __future__ import annotations

from collections.abc import Iterable

from ninfer.program.layout import PoolKind


def reserved_tokens(prompt: int, output: int) -> int:
    """Tokens a request can ever execute. The last token it emits is never executed."""
    return prompt + max(output - 1, 0)


def checkpoint_tokens(kind: PoolKind, frontier: int) -> int:
    """Tokens of a pool that a checkpoint at ``frontier`` needs. A multi-token prediction layer's last row depends on
    the token after it, so that row is executed again."""
    return max(0, frontier - 1) if kind is PoolKind.MTP else frontier


def unit_touch(
    pools: Iterable[PoolKind], frontier: int, width: int, window: int = 0, context: int = 0
) -> dict[PoolKind, int]:
    """Tokens each pool must map before a unit that executes ``width`` columns from ``frontier`` on.

    The width of a prefill chunk is its length, of a decode row 1 plus its licensed drafts, of forced control its
    token count. Columns beyond it write nothing. window: drafts made for the next round, each a column of the drafting
    module behind what the unit executes, inside the context; the first needs none of its own.
    """
    ahead = min(context, frontier + width + window - 1)
    return {kind: ahead if kind is PoolKind.MTP else frontier + width for kind in pools}
