"""The sampler against a float64 oracle, enumerated distributions and published Philox vectors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from ninfer._cpu import sampling

SEED64 = 0x0123456789ABCDEF


@pytest.mark.parametrize(
    ("counter", "key", "word"),
    [
        ((0, 0, 0, 0), (0, 0), 0x6627E8D5),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, 0x408F276D),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), 0xD16CFE09),
    ],
)
def test_philox_known_answers(counter, key, word):
    assert int(sampling.philox(*counter, *key)) == word


@pytest.mark.parametrize(
    ("seed", "index", "purpose", "u"),
    [
        (0, 0, 0, 0.3990464210510254),
        (0, 0, 1, 0.5166791081428528),
        (0, 1, 1, 0.7909692525863647),
        (42, 1000, 2, 0.35711777210235596),
        (42, 1000, 3, 0.3245185613632202),
        (SEED64, 262143, 5, 0.7768022418022156),
    ],
)
def test_uniform_known_answers(seed, index, purpose, u):
    assert float(sampling.uniform(seed & 0xFFFFFFFF, seed >> 32, index, purpose)) == u


def oracle(logits, legal, counts, *, temperature, top_p, min_p, presence, frequency, top_k):
    """float64 distribution over candidate ids in candidate order: (ids, probabilities)."""
    z = logits.astype(np.float64) - np.where(counts > 0, presence + frequency * counts, 0.0)
    ids = sorted(np.flatnonzero(legal), key=lambda v: (-z[v], v))
    if temperature == 0:
        return ids[:1], np.ones(1)
    if top_k:
        ids = ids[:top_k]
    w = np.exp((z[ids] - z[ids[0]]) / temperature)
    goal = top_p * w.sum()
    kept = 1
    while kept < len(ids) and w[kept] >= min_p and (top_p >= 1 or w[:kept].sum() < goal):
        kept += 1
    return ids[:kept], w[:kept] / w[:kept].sum()


def run(logits, legal, counts, params, *, seed=0, indices=(0,), purpose=1, alternatives=-1):
    """Sample one row at several sequence indices through the kernel; returns all its outputs."""
    vocab, n = logits.shape[0], len(indices)
    masks = np.packbits(np.resize(legal, -(-vocab // 32) * 32) & (np.arange(-(-vocab // 32) * 32) < vocab),
                        bitorder="little").view(np.uint32)  # fmt: skip
    token = np.full((1, n), -9, np.int32)
    logprob = np.full((1, n), np.nan, np.float32)
    alt_ids = np.full((1, n, 20), -9, np.int32)
    alt_logprobs = np.full((1, n, 20), np.nan, np.float32)
    real = np.array([[params[k] for k in ("temperature", "top_p", "min_p", "presence", "frequency")]], np.float32)
    whole = np.array([[params["top_k"], alternatives, not legal.all(), 1]], np.int32)
    sampling.sample(
        token, logprob, alt_ids, alt_logprobs, np.repeat(logits[None].astype(np.float32), n, 0),
        np.repeat(masks[None, None], n, 1), np.stack([counts * 0 + 7, counts]).astype(np.int32), real, whole,
        np.array([[seed & 0xFFFFFFFF, seed >> 32]], np.uint32), np.array([indices], np.int64),
        np.full((1, n), purpose, np.int32), np.empty(vocab, np.uint64),
    )  # fmt: skip
    return token[0], logprob[0], alt_ids[0], alt_logprobs[0]


PLAIN = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "presence": 0.0, "frequency": 0.0, "top_k": 0}


def test_worked_example_cuts_with_the_total_before_min_p():
    z = np.array([2, 1, 1, 0, -1], np.float32)
    params = PLAIN | {"temperature": 0.8, "top_k": 4, "min_p": 0.2, "top_p": 0.8}
    token, *_ = run(z, np.ones(5, bool), np.zeros(5, int), params, indices=range(4000))
    seen = np.bincount(token, minlength=5) / 4000
    np.testing.assert_allclose(seen, [0.635724, 0.182138, 0.182138, 0, 0], atol=0.03)
    assert set(token) == {0, 1, 2}


CASES = [
    PLAIN,
    PLAIN | {"temperature": 0.6, "top_k": 3},
    PLAIN | {"top_p": 0.7, "top_k": 20},
    PLAIN | {"top_p": 0.8, "top_k": 0, "temperature": 1.3},
    PLAIN | {"min_p": 0.15, "top_k": 0},
    PLAIN | {"min_p": 0.1, "top_p": 0.9, "top_k": 6, "presence": 0.7, "frequency": 0.3, "temperature": 0.9},
]


@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.parametrize("masked", [False, True])
def test_draws_follow_the_enumerated_distribution(case, masked):
    rng = np.random.default_rng(case)
    z = rng.normal(0, 1.2, 11).astype(np.float32)
    legal = rng.random(11) < 0.6 if masked else np.ones(11, bool)
    counts = rng.integers(0, 3, 11)
    ids, p = oracle(z, legal, counts, **CASES[case])
    token, *_ = run(z, legal, counts, CASES[case], seed=case + 1, indices=range(20_000))
    assert set(token) <= set(ids)
    observed = np.array([(token == v).sum() for v in ids])
    if len(ids) > 1:
        assert stats.chisquare(observed, p * 20_000).pvalue > 1e-4


@given(
    seed=st.integers(0, 2**32 - 1),
    vocab=st.integers(1, 90),
    top_k=st.sampled_from([0, 1, 2, 20, 64]),
    temperature=st.sampled_from([0.0, 0.05, 0.7, 1.0, 3.0]),
    top_p=st.sampled_from([1.0, 0.95, 0.3, 1e-6]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    penalty=st.sampled_from([(0.0, 0.0), (1.5, 0.0), (0.4, -0.3)]),
    density=st.sampled_from([1.0, 0.5, 0.05]),
)
def test_support_and_logprobs_match_the_oracle(seed, vocab, top_k, temperature, top_p, min_p, penalty, density):
    rng = np.random.default_rng(seed)
    z = np.round(rng.normal(0, 2, vocab), 1).astype(np.float32)  # rounding makes ties
    legal = rng.random(vocab) < density
    legal[rng.integers(vocab)] = True
    counts = rng.integers(0, 2, vocab)
    params = {"temperature": temperature, "top_p": top_p, "min_p": min_p, "top_k": top_k,
              "presence": penalty[0], "frequency": penalty[1]}  # fmt: skip
    alternatives = min(20, vocab)
    token, logprob, alt_ids, alt_lp = run(
        z, legal, counts, params, seed=seed, indices=range(8), alternatives=alternatives
    )
    # fp32 rounding may move a cut by one candidate, so the support is checked against slightly looser limits.
    loose = params | {"top_p": min(1.0, top_p * (1 + 1e-5) + 1e-6), "min_p": min_p * (1 - 1e-5)}
    assert set(token) <= set(oracle(z, legal, counts, **loose)[0])
    penal = z.astype(np.float64) - np.where(counts > 0, penalty[0] + penalty[1] * counts, 0)
    norm = np.log(np.exp(penal[legal]).sum())
    np.testing.assert_allclose(logprob, penal[token] - norm, atol=2e-5)
    order = sorted(np.flatnonzero(legal), key=lambda v: (-np.float32(penal[v]), v))
    shown = min(alternatives, len(order))
    np.testing.assert_allclose(alt_lp[0, :shown], penal[order[:shown]] - norm, atol=2e-5)
    assert (alt_ids[0, shown:alternatives] == -1).all()
    assert (alt_ids[0, alternatives:] == -9).all()  # beyond the request nothing is written


def test_ties_go_to_the_smaller_id_and_zero_signs_are_equal():
    z = np.array([-0.0, 1.0, 1.0, 0.0], np.float32)
    everyone = np.ones(4, bool)
    token, _, alts, _ = run(z, everyone, np.zeros(4, int), PLAIN | {"temperature": 0.0, "top_k": 20}, alternatives=4)
    assert token[0] == 1
    assert list(alts[0, :4]) == [1, 2, 0, 3]


def test_a_legal_id_outside_the_unmasked_top_k_is_found():
    z = np.arange(100, dtype=np.float32)
    legal = np.zeros(100, bool)
    legal[3] = True
    token, *_ = run(z, legal, np.zeros(100, int), PLAIN | {"top_k": 20}, indices=range(5))
    assert set(token) == {3}


@pytest.mark.parametrize("top_k", [0, 20])
def test_empty_candidate_set_and_broken_logits_are_told_apart(top_k):
    z = np.zeros(40, np.float32)
    params = PLAIN | {"top_k": top_k}
    assert run(z, np.zeros(40, bool), np.zeros(40, int), params)[0][0] == sampling.NO_LEGAL_TOKEN
    for bad in (np.nan, np.inf, -np.inf):
        z[7] = bad
        assert run(z, np.ones(40, bool), np.zeros(40, int), params)[0][0] == sampling.NOT_FINITE
        legal = np.ones(40, bool)
        legal[7] = False
        assert run(z, legal, np.zeros(40, int), params)[0][0] >= 0


def test_a_draw_does_not_depend_on_the_batch_around_it():
    rng = np.random.default_rng(5)
    vocab, B, W = 50, 3, 4
    logits = rng.normal(0, 1, (B, W, vocab)).astype(np.float32)
    real = np.array([[0.9, 0.95, 0.0, 0.2, 0.1], [0.0, 1, 0, 0, 0], [1.4, 1, 0.02, 0, 0]], np.float32)
    whole = np.array([[20, 3, 0, 2], [20, -1, 0, 0], [0, 0, 0, 1]], np.int32)
    seed = rng.integers(0, 2**32, (B, 2), dtype=np.uint32)
    index = rng.integers(0, 10**6, (B, W))
    purpose = rng.integers(0, 5, (B, W)).astype(np.int32)
    counts = rng.integers(0, 3, (3, vocab)).astype(np.int32)

    def call(rows):
        n = len(rows)
        token, lp = np.empty((n, W), np.int32), np.empty((n, W), np.float32)
        sampling.sample(
            token, lp, np.empty((n, W, 20), np.int32), np.empty((n, W, 20), np.float32),
            logits[rows].reshape(n * W, vocab), np.zeros((n, W, 2), np.uint32), counts, real[rows], whole[rows],
            seed[rows], index[rows], purpose[rows], np.empty(vocab, np.uint64),
        )  # fmt: skip
        return token, lp

    together = call([0, 1, 2])
    for b in range(B):
        alone = call([b])
        np.testing.assert_array_equal(alone[0][0], together[0][b])
        np.testing.assert_array_equal(alone[1][0], together[1][b])


def test_count_adds_only_real_columns():
    counts = np.zeros((2, 6), np.int32)
    sampling.count(counts, np.array([1, 0], np.int32), np.array([[2, 2, 5], [3, 4, 4]], np.int32),
                   np.array([3, 1], np.int32))  # fmt: skip
    np.testing.assert_array_equal(counts, [[0, 0, 0, 1, 0, 0], [0, 0, 2, 0, 0, 1]])
