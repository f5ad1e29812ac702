"""The sampler's kernels against the CPU's, in a process that simulates CUDA (see test_simulator)."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from fakes.cuda_simulator import SimulatedDevice
from ops.harness import Lab
from ops.sampler import BONUS, PLAIN, Case, run
from ops.test_acceptance import (  # noqa: F401  the same tests, on this device
    test_a_column_without_legal_ids_ends_the_row_only_where_it_is_reached,
    test_a_proposal_equal_to_the_target_is_always_kept,
    test_greedy_keeps_drafts_that_are_the_argmax,
)

from ninfer._cpu.device import CpuDevice
from ninfer._cuda import sampler_whole

warnings.simplefilter("error")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


@pytest.fixture(scope="module")
def lab() -> Lab:
    return Lab(SimulatedDevice(8))


@pytest.fixture(scope="module")
def reference() -> Lab:
    return Lab(CpuDevice(threads=1))


SHAPES = [
    PLAIN | {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    PLAIN | {"temperature": 0.0, "top_k": 20},
    PLAIN | {"temperature": 1.3, "presence": 0.5, "frequency": 0.2},
    PLAIN | {"top_p": 0.98, "temperature": 2.5},
    PLAIN | {"min_p": 0.02, "top_p": 0.95, "temperature": 1.5},
    PLAIN | {"min_p": 0.2, "top_k": 64},
    PLAIN | {"top_k": 1},
    PLAIN | {"temperature": 3.0, "top_p": 0.7},
]


def draw_case(seed: int, drafted: bool) -> Case:
    rng = np.random.default_rng(seed)
    B, W, V = 2, 3 if drafted else 1, (5, 110, 33, 96, 31, 200, 512)[seed % 7]
    logits = rng.normal(0, 1.5, (B, W, V))
    if seed % 3 == 0:
        logits = np.round(logits)  # ties
    legal = None
    if seed % 2:
        legal = rng.random((B, W, V)) < rng.choice([0.9, 0.3, 0.02])
        legal[:, :, rng.integers(V)] = True
    params = [SHAPES[rng.integers(len(SHAPES))] for _ in range(B)]
    drafts = None
    if drafted:
        best = np.argsort(-logits, axis=-1)[:, : W - 1]
        tokens = best[..., rng.integers(min(3, V))].astype(np.int32)
        ids = q = None
        if seed % 4 >= 2:
            ids = best[..., : min(6, V)].astype(np.int32)
            q = rng.dirichlet(np.ones(ids.shape[-1]), ids.shape[:-1]).astype(np.float32)
        drafts = (rng.integers(0, W, B), tokens, ids, q)
    return Case(
        logits, params, rng.integers(0, 3, (2, V)), legal, alternatives=int(rng.integers(-1, min(20, V) + 1)),
        lanes=[1, 0], seed=rng.integers(0, 2**32, (B, 2)), index=rng.integers(0, 10**9, (B, W)), purpose=BONUS,
        drafts=drafts,
    )  # fmt: skip


def agree(case: Case, got, want) -> None:
    B, W, _ = case.logits.shape
    for b in range(B):
        n = W
        if want.accepted is not None:
            assert got.accepted[b] == want.accepted[b]
            n = int(want.accepted[b]) + 1
        np.testing.assert_array_equal(got.token[b, :n], want.token[b, :n])
        np.testing.assert_allclose(got.logprob[b, :n], want.logprob[b, :n], atol=2e-5)
        np.testing.assert_array_equal(got.alt_ids[b, :n], want.alt_ids[b, :n])
        np.testing.assert_allclose(got.alt_logprobs[b, :n], want.alt_logprobs[b, :n], atol=2e-5)


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(5, 60))])
def test_same_tokens_as_the_host(lab: Lab, reference: Lab, seed: int, drafted: bool) -> None:
    case = draw_case(seed, drafted)
    agree(case, run(lab, case), run(reference, case))


@pytest.mark.parametrize("params", [SHAPES[0], SHAPES[3]])
def test_narrowed_candidates(reference: Lab, params: dict[str, float]) -> None:
    """Blocks with as many threads as listed ids narrow what they gather; all logits may be equal."""
    lab = Lab(SimulatedDevice(64))
    rng = np.random.default_rng(3)
    for logits in (rng.normal(0, 1, (1, 1, 96)), np.zeros((1, 1, 96))):
        case = Case(logits, [params], np.zeros((1, 96)), alternatives=20, index=np.array([[77]]))
        agree(case, run(lab, case), run(reference, case))


def test_broken_and_missing_logits(lab: Lab) -> None:
    logits = np.zeros((3, 1, 100))
    logits[0, 0, 70], logits[1, 0, 70] = np.nan, -np.inf
    legal = np.ones((3, 1, 100), bool)
    legal[1, 0, 70] = False
    legal[2] = False
    case = Case(logits, [PLAIN] * 3, np.zeros((1, 100)), legal)
    result = run(lab, case)
    assert result.token[0, 0] == -2
    assert result.token[1, 0] >= 0
    assert result.token[2, 0] == -1


def test_count_adds_only_real_columns(lab: Lab) -> None:
    counts = lab.put(np.zeros((2, 6)), "i32")
    lab.ops.count(counts, lab.put([1, 0], "i32"), lab.put([[2, 2, 5], [3, 4, 4]], "i32"), lab.put([3, 1], "i32"))
    np.testing.assert_array_equal(lab.get(counts), [[0, 0, 0, 1, 0, 0], [0, 0, 2, 0, 0, 1]])


BEYOND = [
    PLAIN | {"temperature": 4.0},
    PLAIN | {"temperature": 2.0, "top_p": 0.95, "presence": 0.3},
    PLAIN | {"temperature": 3.0, "min_p": 0.3},
    PLAIN | {"temperature": 3.0, "min_p": 0.4, "top_p": 0.6},
    PLAIN | {"temperature": 0.05},
]


@pytest.mark.parametrize("candidates", [1024, 6])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 40))])
def test_draws_beyond_the_listed_ids(
    reference: Lab, monkeypatch: pytest.MonkeyPatch, candidates: int, seed: int
) -> None:
    """Where many ids are as likely: with and without drafts that fail, and where the last list does not hold them."""
    monkeypatch.setattr(sampler_whole, "CANDIDATES", candidates)
    lab, rng = Lab(SimulatedDevice(8)), np.random.default_rng(seed)
    B, W, V = 2, 1 + seed % 3, 300
    logits = rng.normal(0, 0.8, (B, W, V))
    if seed % 4 == 3:
        logits = np.round(logits)
    drafts = ids = q = None
    if W > 1:
        ids = rng.permuted(np.tile(np.arange(V), (B, W - 1, 1)), axis=-1)[..., :5].astype(np.int32)
        q = rng.dirichlet(np.ones(5), ids.shape[:-1]).astype(np.float32)
        drafts = (np.full(B, W - 1), ids[..., 0], *((ids, q) if seed % 2 else (None, None)))
    params = [BEYOND[rng.integers(len(BEYOND))] for _ in range(B)]
    case = Case(
        logits, params, rng.integers(0, 3, (2, V)), rng.random((B, W, V)) < 0.9, alternatives=3, lanes=[1, 0],
        seed=rng.integers(0, 2**32, (B, 2)), index=rng.integers(0, 10**9, (B, W)), purpose=BONUS, drafts=drafts,
    )  # fmt: skip
    agree(case, run(lab, case), run(reference, case))
