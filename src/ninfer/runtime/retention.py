"""What a retained history is worth, and how that fades."""

from __future__ import annotations

import enum

ONE = 256
"""Fixed-point unit of a weight."""


class Retention(enum.Enum):
    """Why a history is kept. The value is its weight when it was last used."""

    DISPOSABLE = 1
    RECENT_PRIVATE = 4
    LIVE_SESSION = 16
    SHARED_STABLE = 64


RETENTIONS = tuple(Retention)
"""From the least worth keeping to the most."""


def weight(retention: Retention, age: int, window: int) -> int:
    """The weight in 1/256, halved for every ``window`` admissions in which nobody used the history.

    ``age`` counts those admissions. After 9 + log2(class weight) windows nothing is left, so no entry, however valued,
    can keep a newer one out for ever.
    """
    return (retention.value * ONE) >> (age // window)
