"""Verification of drafts: distributions, edges, and independence of the batch."""

from __future__ import annotations

import numpy as np
import pytest
from ops.harness import Lab
from ops.sampler import ACCEPTANCE, BONUS, CORRECTION, PLAIN, Case, distribution, run
from scipy import stats

ROUNDS, ROWS = 313, 64
"""A chi-square test draws ROUNDS * ROWS tokens."""


def follows(observed: np.ndarray, ids: list[int], p: np.ndarray) -> None:
    assert set(np.unique(observed)) <= set(ids)
    counts = np.array([(observed == v).sum() for v in ids])
    frequent = p * len(observed) >= 5
    got = [*counts[frequent], counts[~frequent].sum()]
    want = [*(p[frequent] * len(observed)), p[~frequent].sum() * len(observed)]
    keep = [i for i, expected in enumerate(want) if expected > 0]
    if len(keep) > 1:
        assert stats.chisquare(np.take(got, keep), np.take(want, keep)).pvalue > 1e-4


def batches(lab: Lab, logits, params, counts, legal, proposals, rng):
    """Yield the result of many rounds of rows that share one distribution; drafts are drawn from their proposals."""
    W, V = logits.shape
    for r in range(ROUNDS):
        tokens = np.zeros((ROWS, W - 1), np.int32)
        for w, (ids, q) in enumerate(proposals):
            tokens[:, w] = rng.choice(ids, ROWS, p=q)
        candidates = max(len(ids) for ids, _ in proposals)
        ids = np.full((ROWS, W - 1, candidates), -1, np.int32)
        q = np.zeros((ROWS, W - 1, candidates), np.float32)
        for w, (i, p) in enumerate(proposals):
            ids[:, w, : len(i)], q[:, w, : len(i)] = i, p
        certain = all(len(ids) == 1 for ids, _ in proposals)
        yield (
            tokens,
            run(
                lab,
                Case(
                    np.broadcast_to(logits, (ROWS, W, V)), [params] * ROWS, counts[None],
                    None if legal is None else np.broadcast_to(legal, (ROWS, W, V)), lanes=[0] * ROWS, purpose=BONUS,
                    seed=np.full((ROWS, 2), 7), index=np.arange(ROWS)[:, None] * 50_000 + r * W + np.arange(W),
                    drafts=(np.full(ROWS, W - 1), tokens, None if certain else ids, None if certain else q),
                ),
            ),
        )  # fmt: skip


CASES = {
    "certain": (PLAIN, [([3], [1.0])], False),
    "certain, top-k": (PLAIN | {"top_k": 4, "temperature": 0.7}, [([2], [1.0])], False),
    "certain and illegal": (PLAIN | {"top_k": 20}, [([0], [1.0])], True),
    "sparse": (PLAIN | {"top_k": 5}, [([1, 3, 4], [0.5, 0.3, 0.2])], False),
    "sparse, some illegal": (PLAIN | {"top_p": 0.9}, [([0, 1, 5], [0.4, 0.4, 0.2])], True),
    "penalties": (PLAIN | {"presence": 0.5, "frequency": 0.4}, [([1, 2], [0.6, 0.4])], False),
}


@pytest.mark.parametrize("name", CASES)
def test_verified_tokens_follow_the_target(lab: Lab, rng: np.random.Generator, name: str) -> None:
    """Whatever was drafted, the first token of a round is distributed like an ordinary sample, and so is the one after
    a kept draft."""
    params, proposals, masked = CASES[name]
    V, W = 8, 2
    logits = rng.normal(0, 1, (W, V))
    counts = np.array([0, 1, 0, 2, 0, 0, 0, 0])
    legal = None
    if masked:
        legal = rng.random((W, V)) < 0.7
        legal[:, 0], legal[:, 1] = False, True
    every = np.ones((W, V), bool) if legal is None else legal
    first, after = [], {}
    for tokens, result in batches(lab, logits, params, counts, legal, proposals, rng):
        assert result.accepted is not None
        first.append(result.token[:, 0])
        for b in np.flatnonzero(result.accepted == 1):
            assert result.token[b, 0] == tokens[b, 0]
            after.setdefault(int(tokens[b, 0]), []).append(result.token[b, 1])
    follows(np.concatenate(first), *distribution(logits[0], every[0], counts, params))
    for draft, seen in after.items():
        grown = counts + (np.arange(V) == draft)
        follows(np.array(seen), *distribution(logits[1], every[1], grown, params))


def test_an_illegal_draft_leaves_the_legal_tokens_as_likely_as_they_were(lab: Lab, rng: np.random.Generator) -> None:
    """Two legal tokens a and b of equal weight, drafts a and x by halves of which x is illegal. To end the round at an
    illegal draft and draw from p as if nothing had been drafted would say a three times in four."""
    a, b, x = 2, 5, 6
    logits, legal = np.zeros((2, 8)), np.zeros((2, 8), bool)
    legal[:, [a, b]] = True
    rounds = batches(lab, logits, PLAIN, np.zeros(8), legal, [([a, x], [0.5, 0.5])], rng)
    said = np.concatenate([result.token[:, 0] for _, result in rounds])
    assert set(said.tolist()) == {a, b}
    assert stats.binomtest(int((said == a).sum()), said.size, 0.5).pvalue > 1e-4


def test_acceptance_rate_is_the_overlap(lab: Lab, rng: np.random.Generator) -> None:
    logits = rng.normal(0, 1, (2, 8))
    proposal = ([1, 3, 4, 6], [0.4, 0.3, 0.2, 0.1])
    ids, p = distribution(logits[0], np.ones(8, bool), np.zeros(8), PLAIN)
    q = dict(zip(*proposal))
    overlap = sum(min(p[i], q.get(v, 0.0)) for i, v in enumerate(ids))
    kept = [r.accepted for _, r in batches(lab, logits, PLAIN, np.zeros(8), None, [proposal], rng)]
    total = np.concatenate(kept)
    assert stats.binomtest(int(total.sum()), total.size, overlap).pvalue > 1e-4


def test_greedy_keeps_drafts_that_are_the_argmax(lab: Lab) -> None:
    """A row stops at its first miss; penalties see the drafts before a column; a row may have no draft."""
    V, W = 40, 4
    logits = np.zeros((4, W, V))
    for w in range(W):
        logits[:, w, 5 + w] = 9.0
    logits[1, 1, 5] = 9.5  # the argmax of column 1 unless 5 was just drafted
    greedy = PLAIN | {"temperature": 0.0, "top_k": 20}
    tokens = np.array([[5, 6, 7], [5, 6, 7], [5, 9, 7], [0, 0, 0]], np.int32)
    result = run(
        lab,
        Case(logits, [greedy, greedy | {"presence": 1.0}, greedy, greedy], np.zeros((1, V)),
             drafts=(np.array([3, 3, 3, 0]), tokens, None, None)),
    )  # fmt: skip
    assert list(result.accepted) == [3, 3, 1, 0]
    assert result.token[0].tolist() == [5, 6, 7, 8]
    assert result.token[1].tolist() == [5, 6, 7, 8]
    assert result.token[2, :2].tolist() == [5, 6]
    assert result.token[3, 0] == 5


def test_a_column_without_legal_ids_ends_the_row_only_where_it_is_reached(lab: Lab) -> None:
    V, W = 33, 3
    logits = np.zeros((2, W, V))
    logits[..., 4] = 5.0
    legal = np.ones((2, W, V), bool)
    legal[:, 1] = False
    greedy = PLAIN | {"temperature": 0.0, "top_k": 1}
    tokens = np.array([[4, 4], [3, 4]], np.int32)
    result = run(lab, Case(logits, [greedy] * 2, np.zeros((1, V)), legal, drafts=(np.full(2, 2), tokens, None, None)))
    assert list(result.accepted) == [1, 0]
    assert result.token[0, :2].tolist() == [4, -1]
    assert result.token[1, 0] == 4
    logits[0, 1] = np.nan
    legal[:, 1] = True
    result = run(lab, Case(logits, [greedy] * 2, np.zeros((1, V)), legal, drafts=(np.full(2, 2), tokens, None, None)))
    assert result.token[0, :2].tolist() == [4, -2]


def test_a_proposal_equal_to_the_target_is_always_kept(lab: Lab, rng: np.random.Generator) -> None:
    V = 12
    logits = rng.normal(0, 1, (8, 2, V)).astype(np.float32)
    ids, q = np.zeros((8, 1, V), np.int32), np.zeros((8, 1, V), np.float32)
    tokens = np.zeros((8, 1), np.int32)
    for b in range(8):
        order, p = distribution(logits[b, 0], np.ones(V, bool), np.zeros(V), PLAIN | {"top_k": 20})
        ids[b, 0], q[b, 0] = order, p * (1 - 1e-5)
        tokens[b, 0] = rng.choice(order, p=p)
    result = run(lab, Case(logits, [PLAIN | {"top_k": 20}] * 8, np.zeros((1, V)), drafts=(np.ones(8), tokens, ids, q)))
    assert list(result.accepted) == [1] * 8


def test_a_row_does_not_depend_on_the_batch_around_it(lab: Lab, rng: np.random.Generator) -> None:
    B, W, V = 4, 3, 90
    logits = rng.normal(0, 1.5, (B, W, V))
    params = [PLAIN | {"top_k": 20}, PLAIN | {"temperature": 0.0, "top_k": 5}, PLAIN | {"top_p": 0.8}, PLAIN]
    counts, seed = rng.integers(0, 2, (B, V)), rng.integers(0, 2**32, (B, 2))
    index = rng.integers(0, 10**6, (B, W))
    tokens = np.argsort(-logits, axis=-1)[:, : W - 1, 0].astype(np.int32)
    ids = np.argsort(-logits, axis=-1)[:, : W - 1, :4].astype(np.int32)
    q = np.full(ids.shape, 0.25, np.float32)

    def part(rows: list[int]):
        return run(
            lab,
            Case(logits[rows], [params[b] for b in rows], counts, seed=seed[rows], index=index[rows], alternatives=3,
                 lanes=rows, drafts=(np.full(len(rows), W - 1), tokens[rows], ids[rows], q[rows])),
        )  # fmt: skip

    together = part([0, 1, 2, 3])
    for b in range(B):
        alone = part([b])
        n = int(alone.accepted[0]) + 1
        assert n == together.accepted[b] + 1
        for name in ("token", "logprob"):
            np.testing.assert_array_equal(getattr(alone, name)[0, :n], getattr(together, name)[b, :n])
        np.testing.assert_array_equal(alone.alt_ids[0, :n, :3], together.alt_ids[b, :n, :3])


def test_purposes_are_those_of_the_contract(lab: Lab, rng: np.random.Generator) -> None:
    """Each decision uses its own random number: the same draw is repeated outside with the published generator."""
    from ninfer._cpu.sampling import uniform

    V, n = 6, 200
    logits = rng.normal(0, 1, (2, V))
    ids, p = distribution(logits[0], np.ones(V, bool), np.zeros(V), PLAIN)
    later, p_later = distribution(logits[1], np.ones(V, bool), np.zeros(V), PLAIN)
    draft = ids[1]
    for begin in range(0, n, 8):
        index = np.arange(begin, begin + 8)[:, None] + np.array([0, 1000])
        tokens = np.full((8, 1), draft, np.int32)
        result = run(
            lab,
            Case(np.broadcast_to(logits, (8, 2, V)), [PLAIN] * 8, np.zeros((1, V)), index=index, purpose=BONUS,
                 drafts=(np.ones(8), tokens, None, None)),
        )  # fmt: skip
        for b in range(8):
            i = int(index[b, 0])
            kept = uniform(0, 0, i, ACCEPTANCE) < p[1]
            assert result.accepted[b] == kept
            if kept:
                column, order, probabilities, u = 1, later, p_later, uniform(0, 0, i + 1000, BONUS)
            else:
                rest = np.where(np.arange(len(ids)) == 1, 0, p)
                column, order, probabilities, u = 0, ids, rest / rest.sum(), uniform(0, 0, i, CORRECTION)
            want = order[int(np.searchsorted(np.cumsum(probabilities), u, side="right"))]
            assert result.token[b, column] == want
