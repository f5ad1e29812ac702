"""The expert kernels and row moves, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernels.checks import close
from ops.harness import Lab, bf16
from ops.test_moe import EPS, bank_of, norm1, silu


@pytest.mark.parametrize(
    ("T", "E", "k", "H"), [(1, 5, 2, 24), (9, 12, 3, 96), (33, 40, 8, 64), (140, 6, 1, 16), (5, 600, 40, 16)]
)
def test_route(device: Any, rng: np.random.Generator, T: int, E: int, k: int, H: int) -> None:
    lab = Lab(device)
    router, r = lab.matrix("bf16", rng.normal(size=(E, H)))
    score, s = lab.matrix("bf16", rng.normal(size=(1, H)))
    x, w = bf16(rng.normal(size=(T, H))), bf16(rng.normal(size=H) * 0.2)
    u, ids = lab.empty(T, H, dtype="bf16"), lab.empty(T, k, dtype="i32")
    weights, shared = lab.empty(T, k), lab.empty(T)
    lab.ops.moe_route(u, ids, weights, shared, lab.put(x, "bf16"), lab.put(w, "bf16"), router, score, EPS)
    close(lab.get(u), norm1(x, w))
    # from the rounded input that the experts also see
    logits = lab.get(u).astype(np.float64) @ r.T
    chosen = lab.get(ids)
    top = np.take_along_axis(logits, chosen, 1)
    best = -np.sort(-logits, axis=1)[:, :k]
    np.testing.assert_allclose(top, best, atol=1e-4)
    assert all(len(set(row)) == k for row in chosen.tolist())
    soft = np.exp(top - top[:, :1])
    np.testing.assert_allclose(lab.get(weights), soft / soft.sum(1, keepdims=True), atol=1e-4)
    np.testing.assert_allclose(lab.get(shared), 1 / (1 + np.exp(-(lab.get(u) @ s.T)[:, 0])), atol=1e-4)


def test_equal_logits_go_to_the_lower_id(device: Any) -> None:
    lab, H, E, k = Lab(device), 16, 6, 4
    values = np.zeros((E, H))
    values[[1, 3, 4]] = 1.0
    router, _ = lab.matrix("fp32", values)
    score, _ = lab.matrix("fp32", np.zeros((1, H)))
    u, ids, weights, shared = lab.empty(1, H, dtype="bf16"), lab.empty(1, k, dtype="i32"), lab.empty(1, k), lab.empty(1)
    one, zero = lab.put(np.ones((1, H)), "bf16"), lab.put(np.zeros(H), "bf16")
    lab.ops.moe_route(u, ids, weights, shared, one, zero, router, score, EPS)
    assert lab.get(ids).tolist() == [[1, 3, 4, 0]]
    assert lab.get(shared).tolist() == [0.5]


@pytest.mark.parametrize(
    ("formats", "I", "H"),
    [
        (("q4_g64_fp16", "q5_g64_fp16"), 80, 192),
        (("bf16", "q8_g32_fp16"), 64, 192),
        (("nvfp4", "fp8_e4m3fn_row_bf16"), 64, 192),
        (("q6_g64_fp16", "bf16"), 36, 100),
    ],
)
@pytest.mark.parametrize("T", [1, 2, 40])
def test_experts(device: Any, rng: np.random.Generator, formats: tuple[str, str], I: int, H: int, T: int) -> None:
    lab, E, k = Lab(device), 8, 3
    device.order = T % 2
    bank, gate, up, down = bank_of(lab, rng, E, I, H, formats)
    u, x = (bf16(rng.normal(size=(T, H))) for _ in range(2))
    ids = np.stack([rng.permutation(E)[:k] for _ in range(T)])
    weights = rng.dirichlet(np.ones(k), T).astype(np.float32)
    out, target, chosen = lab.empty(T, k, I, dtype="bf16"), lab.put(x, "bf16"), lab.put(ids, "i32")
    lab.ops.moe_swiglu(out, lab.put(u, "bf16"), chosen, bank)
    want = silu(np.einsum("th,tkih->tki", u, gate[ids])) * np.einsum("th,tkih->tki", u, up[ids])
    close(lab.get(out), want)
    lab.ops.moe_down_add(target, out, chosen, lab.put(weights), bank)
    parts = np.einsum("tki,tkhi->tkh", lab.get(out).astype(np.float64), down[ids])
    close(lab.get(target), x + np.einsum("tk,tkh->th", weights.astype(np.float64), parts))


def test_an_expert_of_all_tokens(device: Any, rng: np.random.Generator) -> None:
    """Blocks share it out; experts that nobody chose have none."""
    lab, E, I, H, T = Lab(device), 5, 16, 64, 70
    bank, gate, up, down = bank_of(lab, rng, E, I, H, ("q8_g32_fp16", "bf16"))
    u, x = (bf16(rng.normal(size=(T, H))) for _ in range(2))
    ids = np.full((T, 1), 3)
    out, target, chosen = lab.empty(T, 1, I, dtype="bf16"), lab.put(x, "bf16"), lab.put(ids, "i32")
    lab.ops.moe_swiglu(out, lab.put(u, "bf16"), chosen, bank)
    close(lab.get(out)[:, 0], silu(u @ gate[3].T) * (u @ up[3].T))
    lab.ops.moe_down_add(target, out, chosen, lab.put(np.ones((T, 1))), bank)
    close(lab.get(target), x + lab.get(out)[:, 0].astype(np.float64) @ down[3].T)


def test_scatter_skips_negative_rows_and_gather_reads_back(device: Any, rng: np.random.Generator) -> None:
    lab = Lab(device)
    dst, src = bf16(rng.normal(size=(6, 33))), bf16(rng.normal(size=(4, 33)))
    target = lab.put(dst, "bf16")
    lab.ops.scatter(target, lab.put(src, "bf16"), lab.put([5, -1, 0, 2], "i32"))
    want = dst.copy()
    want[[5, 0, 2]] = src[[0, 2, 3]]
    np.testing.assert_array_equal(lab.get(target), want)
    out = lab.empty(3, 33, dtype="bf16")
    lab.ops.gather(out, target, lab.put([2, 2, 5], "i32"))
    np.testing.assert_array_equal(lab.get(out), want[[2, 2, 5]])
