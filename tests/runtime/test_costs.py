"""Fixed-point prices and weights, against worked examples."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.runtime.costs import GENERIC, CostModel, PrefillRate, pairs
from ninfer.runtime.retention import RETENTIONS, Retention, weight
from ninfer.work import PrefillWork, TransferBatch


@pytest.mark.parametrize(
    ("batch", "nanoseconds"),
    [
        (TransferBatch("h2d", 1, 2, 41_943_040), 814_006),
        (TransferBatch("d2h", 1, 200, 131_072), 1_535_255),
        (TransferBatch("d2d", 1, 1, 0), 12_863),
    ],
)
def test_a_copy_costs_its_calls_or_its_bytes_whichever_is_more(batch, nanoseconds):
    assert GENERIC.transfer_ns(batch) == nanoseconds


@pytest.mark.parametrize(
    ("retention", "age", "expected"),
    [
        (Retention.LIVE_SESSION, 70, 1024), (Retention.SHARED_STABLE, 479, 1), (Retention.SHARED_STABLE, 480, 0),
        (Retention.DISPOSABLE, 0, 256), (Retention.DISPOSABLE, 31, 256), (Retention.DISPOSABLE, 32, 128),
    ],
)  # fmt: skip
def test_weights_halve_with_every_window(retention, age, expected):
    assert weight(retention, age, 32) == expected


@given(st.sampled_from(RETENTIONS), st.integers(1, 100))
def test_nothing_keeps_a_weight_for_ever(retention, window):
    assert weight(retention, 15 * window, window) == 0
    assert weight(retention, 0, window) == 256 * retention.value


def test_pairs_of_a_suffix():
    assert pairs(1000, 24) == 24_300
    assert pairs(7, 5) == sum(7 + i for i in range(1, 6))


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 5000))
def test_a_longer_prompt_never_costs_less(reused, suffix, more):
    model = CostModel(GENERIC.transfers, PrefillRate(5, 3 << 32, 1 << 30))
    price = [model.prefill_ns(PrefillWork(1, n, pairs(reused, n))) for n in (suffix, suffix + more)]
    assert price[0] <= price[1]
