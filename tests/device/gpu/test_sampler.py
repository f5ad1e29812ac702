"""The sampler on a GPU: every test of verification, and the host's decisions at the size of a real vocabulary."""

from __future__ import annotations

import numpy as np
import pytest
from ops import test_acceptance
from ops.harness import Lab
from ops.sampler import BONUS, PLAIN, Case, run
from ops.test_acceptance import *  # noqa: F403  the same tests, on this device

pytestmark = pytest.mark.device
test_acceptance.ROUNDS, test_acceptance.ROWS = 40, 512  # few launches of many rows
VOCABULARY = 248_320

PARAMETERS = [
    PLAIN | {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
    PLAIN | {"temperature": 0.0, "top_k": 20},
    PLAIN | {"temperature": 1.0, "top_k": 64, "presence": 1.5, "frequency": 0.1},
    PLAIN | {"temperature": 1.0},
    PLAIN | {"temperature": 1.5, "top_p": 0.95},
    PLAIN | {"temperature": 1.2, "min_p": 0.01},
    PLAIN | {"temperature": 0.9, "top_k": 5, "min_p": 0.1},
    PLAIN | {"temperature": 2.0, "top_p": 0.5, "min_p": 0.001},
]


def case(rng: np.random.Generator, columns: int, masked: bool) -> Case:
    B, V = len(PARAMETERS), VOCABULARY
    logits = rng.normal(0, 3, (B, columns, V)).astype(np.float32)
    logits[:, :, rng.integers(0, V, 50)] += 12
    legal = None
    if masked:
        legal = rng.random((B, columns, V)) < rng.choice([0.5, 1e-3, 1e-4], (B, columns, 1))
        legal[:, :, -1] = True
    drafts = None
    if columns > 1:
        best = np.argpartition(-logits, 8, axis=-1)[:, : columns - 1, :8].astype(np.int32)
        q = rng.dirichlet(np.ones(8), best.shape[:-1]).astype(np.float32)
        drafts = (np.full(B, columns - 1), best[..., 0], best, q)
    return Case(
        logits, PARAMETERS, rng.integers(0, 2, (B, V)) * rng.integers(0, 3, (B, V)), legal, alternatives=20,
        lanes=list(range(B)), seed=rng.integers(0, 2**32, (B, 2)), index=rng.integers(0, 10**6, (B, columns)),
        purpose=BONUS, drafts=drafts,
    )  # fmt: skip


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("columns", [1, 4])
def test_decisions_of_the_host(lab: Lab, reference: Lab, rng: np.random.Generator, columns: int, masked: bool) -> None:
    """A GPU's exp may differ in the last bit, which can move a draw only where two sums almost meet."""
    made = case(rng, columns, masked)
    got, want = run(lab, made), run(reference, made)
    again = run(lab, made)
    np.testing.assert_array_equal(got.token, again.token)
    different = 0
    for b in range(len(PARAMETERS)):
        n = columns if want.accepted is None else int(want.accepted[b]) + 1
        if not np.array_equal(got.token[b, :n], want.token[b, :n]):
            different += 1
            continue
        np.testing.assert_allclose(got.logprob[b, :n], want.logprob[b, :n], atol=5e-5)
        np.testing.assert_array_equal(got.alt_ids[b, :n], want.alt_ids[b, :n])
        np.testing.assert_allclose(got.alt_logprobs[b, :n], want.alt_logprobs[b, :n], atol=5e-5)
    assert different <= 1


def uniform(seed: np.ndarray, index: int, purpose: int) -> float:
    """Word 0 of Philox4x32-10 at counter (index, purpose, 0) under the key ``seed``, its upper 24 bits in [0, 1)."""
    x, key, full = [index & 0xFFFFFFFF, index >> 32, purpose, 0], [int(k) for k in seed], 0xFFFFFFFF
    for _ in range(10):
        a, b = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [(b >> 32) ^ x[1] ^ key[0], b & full, (a >> 32) ^ x[3] ^ key[1], a & full]
        key = [(key[0] + 0x9E3779B9) & full, (key[1] + 0xBB67AE85) & full]
    return (x[0] >> 8) / 2**24


@pytest.mark.parametrize("spread", [0.02, 1.0, 3.0])
def test_draws_from_everything_are_the_quantile(lab: Lab, rng: np.random.Generator, spread: float) -> None:
    """In float64, of the ids in order: the draw is the one at which their weights reach its random number's share. A
    weight that is off in its last bit may move the cut and the draw to the next."""
    shapes = [
        PLAIN, PLAIN | {"temperature": 2.0}, PLAIN | {"top_p": 0.9}, PLAIN | {"temperature": 3.0, "top_p": 0.5},
        PLAIN | {"min_p": 0.2}, PLAIN | {"temperature": 1.5, "min_p": 0.05, "top_p": 0.97},
    ]  # fmt: skip
    B, V = len(shapes), VOCABULARY
    logits = rng.normal(0, spread, (B, 1, V)).astype(np.float32)
    made = Case(
        logits, shapes, np.zeros((B, V)), seed=rng.integers(0, 2**32, (B, 2)), index=rng.integers(0, 10**6, (B, 1)),
        lanes=list(range(B)),
    )  # fmt: skip
    drawn, again = run(lab, made).token[:, 0], run(lab, made).token[:, 0]
    np.testing.assert_array_equal(drawn, again)
    for b, shape in enumerate(shapes):
        order = np.lexsort((np.arange(V), -logits[b, 0]))
        z = logits[b, 0, order].astype(np.float64)
        weights = np.exp((z - z[0]) / shape["temperature"])
        before = np.cumsum(weights) - weights
        cut = (weights < shape["min_p"]) | ((before >= shape["top_p"] * weights.sum()) & (shape["top_p"] < 1))
        kept = weights[: np.argmax(cut) if cut.any() else V]
        share = uniform(made.seed[b], int(made.index[b, 0]), made.purpose) * kept.sum()
        expected = int(np.searchsorted(np.cumsum(kept), share, side="right"))
        assert abs(int(np.flatnonzero(order == drawn[b])[0]) - expected) <= 2, (shape, expected)


def test_equal_logits_over_the_whole_vocabulary(lab: Lab, reference: Lab) -> None:
    logits = np.zeros((8, 1, VOCABULARY), np.float32)
    made = Case(logits, PARAMETERS, np.zeros((1, VOCABULARY)), index=np.arange(8)[:, None], alternatives=5)
    got, want = run(lab, made), run(reference, made)
    np.testing.assert_array_equal(got.alt_ids[..., :5], want.alt_ids[..., :5])
    finite = [b for b, p in enumerate(PARAMETERS) if p["top_k"]]
    np.testing.assert_array_equal(got.token[finite], want.token[finite])
    # 248,320 equal weights: the host's fp32 sums are off by more than a weight, the exact quantile is the middle.
    for b in set(range(8)) - set(finite):
        assert 0 <= got.token[b, 0] < VOCABULARY
