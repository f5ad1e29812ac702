"""What a request's result says about its constraint."""

from __future__ import annotations

from typing import Literal

import attrs

from ninfer.constraints.cache import CacheOutcome

Branch = Literal["undecided", "content", "tools"]


@attrs.frozen(kw_only=True)
class ConstraintReport:
    """State describes committed output; counters and seconds include work that was undone.

    kind: what the constraint was made from, or "tools". branch: what the answer turned out to be, decided at its first
    byte. complete: the output, with the text it continued, may end here. terminated: the model ended it. cache:
    whether the compiled language was there, made for this request, or awaited. masks: positions filled.
    mask_h2d_bytes: bytes sent to the device for them. prepare_seconds (compiling, first mask), mask_seconds and
    matcher_seconds (reading tokens) are host time inside other intervals; None unless the engine times its phases.
    """

    kind: str
    branch: Branch = "undecided"
    complete: bool = False
    terminated: bool = False
    cache: CacheOutcome = "hit"
    masks: int = 0
    mask_h2d_bytes: int = 0
    prepare_seconds: float | None = None
    mask_seconds: float | None = None
    matcher_seconds: float | None = None
