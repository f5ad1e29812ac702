"""The sampling Ops as the device runs them; the sampler itself is tested against enumerated distributions elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
from ops.harness import Array, Lab

from ninfer._cpu import sampling
from ninfer.ops import SampleOut, SampleRows


def rows_of(
    lab: Lab, B: int, W: int, real: Array, whole: Array, seed: Array, index: Array, purpose: Array
) -> SampleRows:
    return SampleRows(
        B, W, lab.put(real), lab.put(whole, "i32"), lab.put(seed, "u32"), lab.put(index, "i64"), lab.put(purpose, "i32")
    )


@pytest.mark.parametrize("one", ["lab", "lab1"])
def test_sample_decides_every_position_by_itself(
    request: pytest.FixtureRequest, rng: np.random.Generator, one: str
) -> None:
    lab: Lab = request.getfixturevalue(one)
    B, W, V, lanes = 3, 2, 333, 4
    logits = rng.normal(size=(B * W, V)).astype(np.float32) * 3
    masks = rng.integers(0, 2**32, (B, W, (V + 31) // 32), np.uint32)
    counts = rng.integers(0, 3, (lanes, V)).astype(np.int32)
    real = np.array([[0.0, 1.0, 0.0, 0.0, 0.0], [0.8, 0.9, 0.05, 0.5, 0.1], [1.3, 1.0, 0.0, 0.0, 0.0]], np.float32)
    whole = np.array([[20, 3, 1, 2], [7, 20, 1, 0], [0, -1, 0, 3]], np.int32)
    seed = rng.integers(0, 2**32, (B, 2), np.uint32)
    index, purpose = rng.integers(0, 2**33, (B, W)), rng.integers(0, 2, (B, W))
    out = SampleOut(
        lab.empty(B, W, dtype="i32"), lab.empty(B, W), lab.empty(B, W, 20, dtype="i32"), lab.empty(B, W, 20)
    )
    scratch = lab.scratch(lab.ops.sample_scratch(B * W, V))
    rows = rows_of(lab, B, W, real, whole, seed, index, purpose)
    lab.ops.sample(out, lab.put(logits), lab.put(masks, "u32"), lab.put(counts, "i32"), rows, scratch)
    token, logprob = np.zeros((B, W), np.int32), np.zeros((B, W), np.float32)
    alt_ids, alt_logprobs = np.zeros((B, W, 20), np.int32), np.zeros((B, W, 20), np.float32)
    sampling.sample(
        token, logprob, alt_ids, alt_logprobs, logits, masks, counts, real, whole, seed, index, np.int32(purpose),
        np.zeros(V, np.uint64),
    )  # fmt: skip
    np.testing.assert_array_equal(lab.get(out.token), token)
    np.testing.assert_array_equal(lab.get(out.logprob), logprob)
    for b, alternatives in enumerate((3, 20, 0)):
        got_ids, got = lab.get(out.alt_ids)[b, :, :alternatives], lab.get(out.alt_logprobs)[b, :, :alternatives]
        np.testing.assert_array_equal(got_ids, alt_ids[b, :, :alternatives])
        np.testing.assert_array_equal(got, alt_logprobs[b, :, :alternatives])


def test_count_adds_real_columns_of_known_tokens(lab: Lab) -> None:
    counts = lab.put(np.zeros((3, 5)), "i32")
    tokens = lab.put([[1, 1, 4], [0, 2, 3], [-1, 5, 2]], "i32")
    lab.ops.count(counts, lab.put([2, 0, 1], "i32"), tokens, lab.put([3, 1, 3], "i32"))
    assert lab.get(counts).tolist() == [[1, 0, 0, 0, 0], [0, 0, 1, 0, 0], [0, 2, 0, 0, 1]]
