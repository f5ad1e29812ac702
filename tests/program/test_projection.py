"""What becomes of replicas, against the rules applied object by object; ladders; the arithmetic of planning."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.context import CheckpointKind, ShortlistKey
from ninfer.contract import Handle
from ninfer.program.history import Checkpoint, History
from ninfer.program.ladders import ladder
from ninfer.program.projection import Axis, Stance
from ninfer.program.store import span_work
from ninfer.work import PrefillWork


def index(flags) -> np.ndarray:
    return np.flatnonzero(np.array(flags, bool))


class Naive:
    """The rules for one object."""

    def __init__(self, device: bool, host: bool, needed: bool, required: bool, wanted: bool, kept: bool) -> None:
        alive = needed or required
        self.device_goes = device and not (alive and (needed or wanted))
        self.demoted = self.device_goes and alive and not host
        stays = device and not self.device_goes
        self.host_goes = host and not needed and (not alive or (stays and not kept))
        self.lost = alive and (device or host) and not (stays or self.demoted or (host and not self.host_goes))


@given(st.integers(0, 2**32))
def test_every_object_follows_the_rules_and_the_order_of_owners_changes_nothing(seed: int) -> None:
    dice = random.Random(seed)
    n, owners = dice.randrange(1, 12), dice.randrange(5)
    flags = [[dice.random() < p for _ in range(n)] for p in (0.7, 0.4, 0.2)]
    device, host, needed = flags
    axis = Axis(*(np.array(f, bool) for f in flags))
    changes, finals = [], []
    for _ in range(owners):
        stances = []
        for _ in range(2):
            required = [dice.random() < 0.6 for _ in range(n)]
            wanted = [r and dice.random() < 0.6 for r in required]
            stances.append((required, wanted, dice.random() < 0.5))
        before, after = (Stance(index(r), index(w), d) for r, w, d in stances)
        axis.add(before)
        changed = dice.random() < 0.7
        if changed:
            changes += [(before, -1), (after, 1)]
        finals.append(stances[changed])
    also = [dice.random() < 0.1 for _ in range(n)]
    dice.shuffle(changes)
    for stance, owners_more in changes:
        axis.add(stance, owners_more)
    moves = axis.project(index(also))
    for i in range(n):
        expected = Naive(
            device[i], host[i], needed[i] or also[i],
            any(r[i] for r, _, _ in finals), any(w[i] for _, w, _ in finals), any(d and r[i] for r, _, d in finals),
        )  # fmt: skip
        assert not expected.lost
        assert (i in moves.device, i in moves.demoted) == (
            expected.device_goes and not expected.demoted,
            expected.demoted,
        )
        assert (i in moves.host) == expected.host_goes


def test_pages_that_two_owners_share_go_with_the_second() -> None:
    axis = Axis(*(np.full(10, value) for value in (True, False, False)))
    everything = Stance(np.arange(10), np.arange(10), True)
    axis.add(everything, 2)
    for reclaimed in (0, 10):
        axis.add(everything, -1)
        assert len(axis.project(index([])).device) == reclaimed


def history(frontiers, kinds) -> History:
    checkpoints = {
        i: Checkpoint(kind, f, Handle("image", i, 1), ShortlistKey(f, "text", b""))
        for i, (f, kind) in enumerate(zip(frontiers, kinds))
    }
    return History(None, {}, checkpoints)


@pytest.mark.parametrize("host", [False, True])
@given(kinds=st.lists(st.sampled_from(list(CheckpointKind)), min_size=1, max_size=4), gap=st.integers(1, 300))
def test_ladders_only_take_away(host: bool, kinds, gap: int) -> None:
    levels = ladder(history([gap * (i + 1) for i in range(len(kinds))], kinds), 1, host)
    assert 2 <= len(levels) <= 8
    assert levels[0].kept == frozenset(range(len(kinds)))
    assert levels[-1].evicted
    assert not any(level.evicted for level in levels[:-1])
    for a, b in pairwise(levels):
        assert a != b
        assert b.kept <= a.kept
        assert b.device_states <= a.device_states & (b.kept | a.device_states)
        assert b.device_pages <= a.device_pages
        assert b.duplicates <= a.duplicates
    last = levels[-2].kept
    rewrites = {i for i, k in enumerate(kinds) if k in (CheckpointKind.TURN_CLOSURE, CheckpointKind.RESPONSE_REPLAY)}
    assert not rewrites or last == rewrites


def test_pairs_of_a_suffix() -> None:
    assert span_work(1000, 1024, 1) == PrefillWork(1, 24, 24_300)
