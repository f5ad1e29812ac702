"""What makes two prefixes the same content: every field up to the frontier, and nothing behind it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.identity import PrefixIdentity, VisionSpan, digest_at, digest_chain, same_prefix

N = 200
SPANS = (VisionSpan(20, 30, "image", (1, 5, 6), b"a" * 32), VisionSpan(100, 8, "video", (2, 2, 2), b"b" * 32))


def identity(**change) -> PrefixIdentity:
    rng = np.random.default_rng(1)
    whole = PrefixIdentity(
        tokens=rng.integers(0, 99, N).astype(np.int32),
        token_types=np.zeros(N, np.uint8),
        positions=np.broadcast_to(np.arange(N, dtype=np.int32), (3, N)),
        vision=SPANS,
        execution_frontiers=(10, 120),
    )
    return dataclasses.replace(whole, **change)


@given(st.integers(0, N), st.integers(0, N - 1), st.sampled_from(["tokens", "token_types", "positions"]))
def test_an_array_counts_up_to_the_frontier(frontier: int, place: int, name: str) -> None:
    other = np.array(getattr(identity(), name))
    other[..., place] += 1
    cut = any(s.begin < frontier < s.begin + s.length for s in SPANS)
    assert same_prefix(identity(), identity(), frontier) == (not cut)
    assert same_prefix(identity(), identity(**{name: other}), frontier) == (not cut and place >= frontier)


@pytest.mark.parametrize("frontier", [20, 50, 99, 100, 108, N])
@pytest.mark.parametrize("span", [0, 1])
@pytest.mark.parametrize(
    "change", [{"digest": b"c" * 32}, {"grid": (1, 6, 5)}, {"modality": "other"}, {"begin": 19}, {"length": 1}]
)
def test_media_count_where_they_begin_before_the_frontier(frontier: int, span: int, change) -> None:
    spans = list(SPANS)
    spans[span] = dataclasses.replace(spans[span], **change)
    begins = min(SPANS[span].begin, spans[span].begin)
    assert same_prefix(identity(), identity(vision=tuple(spans)), frontier) == (frontier <= begins)


@pytest.mark.parametrize("frontier", [21, 49, 101, 107])
def test_a_frontier_inside_media_never_matches(frontier: int) -> None:
    assert not same_prefix(identity(), identity(), frontier)


def test_mode_and_splits_count() -> None:
    assert not same_prefix(identity(), identity(mode="other"), 5)
    for splits, last in (((10,), 119), ((120,), 9), ((10, 60, 120), 55), ((10, 120, 150), 149)):
        other = identity(execution_frontiers=splits)
        assert same_prefix(identity(), other, last)
        assert not same_prefix(identity(), other, 160)
    assert not same_prefix(identity(), identity(), N + 1)


@given(st.integers(0, N), st.integers(0, N))
def test_a_chain_may_grow_from_that_of_a_prefix(frontier: int, known: int) -> None:
    whole = identity()
    part = dataclasses.replace(whole, tokens=whole.tokens[:known], token_types=whole.token_types[:known])
    grown = digest_chain(whole, digest_chain(part))
    assert grown == digest_chain(whole)
    assert digest_at(whole, grown, frontier) == digest_at(identity(), digest_chain(identity()), frontier)
