"""How the sampler's kernels find the best ids of a position (see test_simulator), against a sort of all keys."""

from __future__ import annotations

import numpy as np
import pytest
from fakes.cuda_simulator import SimulatedDevice
from numba import cuda
from ops.harness import Lab
from ops.sampler import PLAIN, Case, run

from ninfer._cpu.device import CpuDevice
from ninfer._cuda.sampler_keys import position
from ninfer._cuda.sampler_select import best_of, gather, rank
from ninfer._cuda.sampling import LISTED, RANKED

THREADS, SHIFT, GROUPS = 64, 5, 70
V = (GROUPS << SHIFT) - 9
WANT = [2, 20, LISTED]


def _find(capacity: int):
    room, most_groups, listed_ids = capacity + THREADS, GROUPS, LISTED

    @cuda.jit
    def find(listed_out, facts, heads, want, logits, masks, real, whole):
        keys = cuda.shared.array(room, np.uint64)
        listed = cuda.shared.array(listed_ids, np.uint64)
        tid = cuda.threadIdx.x
        at = position(0, 1, V, 0, logits, masks, heads, real, whole, heads)
        mine = np.uint64(0)
        for g in range(tid, GROUPS, THREADS):
            keys[g] = heads[g]
            mine = max(mine, heads[g])
        best, low = best_of(mine, keys, capacity, THREADS)
        n, narrowed = gather(keys, capacity, most_groups, want, GROUPS, SHIFT, low, best, THREADS, at)
        rank(keys, n, listed, THREADS)
        if tid < min(n, LISTED):
            listed_out[tid] = listed[tid]
        if tid == 0:
            facts[0], facts[1], facts[2], facts[3] = best, low, n, narrowed

    return find


def _logits(kind: str, rng: np.random.Generator) -> np.ndarray:
    ids = np.arange(V)
    made = {
        "spread": rng.normal(0, 2, V),
        "equal": np.zeros(V),
        "ties": np.round(rng.normal(0, 2, V)),
        "falling": -ids / 7,
        "rising": ids / 7,
        "one group": rng.normal(0, 1, V) + 20 * (ids >> SHIFT == 3),
        "one column": rng.normal(0, 1, V) + 20 * (ids % 32 == 5),
        "wide": rng.normal(0, 1, V) * 10.0 ** rng.integers(-30, 30, V),
    }
    return made[kind].astype(np.float32)


def _legal(kind: str, rng: np.random.Generator) -> np.ndarray:
    made = {
        "all": np.ones(V, bool),
        "few": rng.random(V) < 0.01,
        "two groups": np.isin(np.arange(V) >> SHIFT, [8, 69]),
        "many groups": np.arange(V) >> SHIFT > 20,
    }
    made[kind][V - 1] = True
    return made[kind]


KINDS = ["spread", "equal", "ties", "falling", "rising", "one group", "one column", "wide"]
QUICK = {(kind, "all") for kind in KINDS} | {("equal", "two groups"), ("ties", "few"), ("spread", "many groups")}


@pytest.mark.parametrize(
    ("kind", "legal"),
    [
        pytest.param(kind, legal, marks=[] if (kind, legal) in QUICK else pytest.mark.full)
        for kind in KINDS
        for legal in ("all", "few", "two groups", "many groups")
    ],
)
def test_the_best_ids_in_order(kind: str, legal: str) -> None:
    rng = np.random.default_rng(5)
    logits, allowed = _logits(kind, rng), _legal(legal, rng)
    bits = (logits + np.float32(0)).view(np.uint32)
    flipped = np.where(bits >> 31, ~bits, bits | 0x80000000).astype(np.uint64)
    keys = np.where(allowed, flipped << np.uint64(32) | (0xFFFFFFFF - np.arange(V)).astype(np.uint64), np.uint64(0))
    heads = np.append(keys, np.zeros(9, np.uint64)).reshape(GROUPS, -1).max(1)
    masks = np.packbits(np.append(allowed, np.zeros(9, bool)), bitorder="little").view(np.uint32)
    order = np.sort(keys[allowed])[::-1]
    for want in WANT:
        capacity = max(GROUPS, want * -(-(want << SHIFT) // THREADS))  # what is promised to be enough
        listed, facts = np.zeros(LISTED, np.uint64), np.zeros(4, np.uint64)
        whole, real = np.array([want, -1, 1, 0], np.int32), np.array([1, 1, 0, 0, 0], np.float32)
        _find(capacity)[1, THREADS](listed, facts, heads, want, logits, masks, real, whole)
        best, low, n, narrowed = (int(fact) for fact in facts)
        assert best == order[0]
        assert low == 0 or np.count_nonzero(heads >= low) >= LISTED
        assert min(want, len(order)) <= n <= RANKED
        m = min(n, want)
        np.testing.assert_array_equal(listed[:m], order[:m])
        assert narrowed or n == len(order)


def test_more_legal_ids_than_are_listed_one_in_each_group() -> None:
    """All of them can be drawn, though few threads see one."""
    groups = 2 * LISTED
    legal = np.zeros((1, 1, groups << SHIFT), bool)
    legal[..., 3::32] = True
    lab, reference = Lab(SimulatedDevice(THREADS, groups, 2048)), Lab(CpuDevice(threads=1))
    drawn = []
    for index in range(4):
        case = Case(np.zeros(legal.shape), [PLAIN], np.zeros(legal.shape[1:]), legal, index=np.array([[index]]))
        got, want = run(lab, case), run(reference, case)
        np.testing.assert_array_equal(got.token, want.token)
        drawn.append(int(got.token[0, 0]))
    assert max(drawn) >= LISTED << SHIFT
