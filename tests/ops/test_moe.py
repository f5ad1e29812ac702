"""Routing and expert products against float64."""

from __future__ import annotations

import numpy as np
import pytest
from ops.harness import Array, Lab, bf16, near

from ninfer.device import Buffer
from ninfer.ops import Bank, Segment

EPS = 1e-6


def norm1(x: Array, w: Array) -> Array:
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + EPS) * (1 + w)


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def bank_of(
    lab: Lab, rng: np.random.Generator, E: int, I: int, H: int, formats: tuple[str, str]
) -> tuple[Bank, Array, Array, Array]:
    """A bank whose gate and up rows interleave per expert in one parent, and its decoded [E, ...] matrices."""
    both, decoded = lab.stored(formats[0], rng.normal(size=(E * 2 * I, H)) / np.sqrt(H))
    down, decoded_down = lab.stored(formats[1], rng.normal(size=(E * H, I)) / np.sqrt(I))
    matrix = lab.ops.matrix
    bank = Bank(
        tuple(matrix([Segment(both, 2 * e * I, (2 * e + 1) * I)]) for e in range(E)),
        tuple(matrix([Segment(both, (2 * e + 1) * I, (2 * e + 2) * I)]) for e in range(E)),
        tuple(matrix([Segment(down, e * H, (e + 1) * H)]) for e in range(E)),
    )
    decoded = decoded.reshape(E, 2, I, H)
    return bank, decoded[:, 0], decoded[:, 1], decoded_down.reshape(E, H, I)


@pytest.mark.parametrize(("T", "E", "k", "H"), [(1, 5, 2, 24), (9, 12, 3, 96), (33, 40, 8, 64), (3, 1, 1, 16)])
def test_route(lab: Lab, rng: np.random.Generator, T: int, E: int, k: int, H: int) -> None:
    router, r = lab.matrix("bf16", rng.normal(size=(E, H)))
    score, s = lab.matrix("bf16", rng.normal(size=(1, H)))
    x, w = rng.normal(size=(T, H)).astype(np.float32), rng.normal(size=H) * 0.2
    u, ids, weights, shared = lab.empty(T, H), lab.empty(T, k, dtype="i32"), lab.empty(T, k), lab.empty(T)
    lab.ops.moe_route(u, ids, weights, shared, lab.put(x), lab.put(w, "bf16"), router, score, EPS)
    exact = norm1(x.astype(np.float64), bf16(w))
    near(lab.get(u), exact, 2e-6 * float(np.max(np.abs(exact))))
    logits = exact @ r.T
    order = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    gap = np.diff(-np.sort(-logits, axis=1)[:, : k + 1], axis=1)
    assert (gap < -1e-5).all() or k == E, "two router values too close for this seed"
    np.testing.assert_array_equal(lab.get(ids), order)
    top = np.take_along_axis(logits, order, 1)
    soft = np.exp(top - top[:, :1])
    near(lab.get(weights), soft / soft.sum(1, keepdims=True), 1e-5)
    near(lab.get(shared), 1 / (1 + np.exp(-(exact @ s.T)[:, 0])), 1e-5)


def test_equal_logits_go_to_the_lower_id(lab: Lab) -> None:
    H, E, k = 16, 6, 4
    values = np.zeros((E, H))
    values[[1, 3, 4]] = 1.0
    router, _ = lab.matrix("fp32", values)
    score, _ = lab.matrix("fp32", np.zeros((1, H)))
    u, ids, weights, shared = lab.empty(1, H), lab.empty(1, k, dtype="i32"), lab.empty(1, k), lab.empty(1)
    lab.ops.moe_route(
        u, ids, weights, shared, lab.put(np.ones((1, H))), lab.put(np.zeros(H), "bf16"), router, score, EPS
    )
    assert lab.get(ids).tolist() == [[1, 3, 4, 0]]
    got = lab.get(weights)[0]
    assert got[0] == got[1] == got[2] > got[3]
    near(lab.get(shared), np.array([0.5]), 1e-7)


def experts(lab: Lab, u: Array, ids: Array, weights: Array, x: Array, bank: Bank, I: int) -> tuple[Array, Array]:
    T, k = ids.shape
    out, target, chosen = lab.empty(T, k, I), lab.put(x), lab.put(ids, "i32")
    lab.ops.moe_swiglu(out, lab.put(u), chosen, bank)
    lab.ops.moe_down_add(target, out, chosen, lab.put(weights), bank)
    return lab.get(out), lab.get(target)


@pytest.mark.parametrize(
    "formats", [("q4_g64_fp16", "q5_g64_fp16"), ("bf16", "q8_g32_fp16"), ("nvfp4", "fp8_e4m3fn_row_bf16")]
)
@pytest.mark.parametrize("T", [1, 2, 40])
def test_experts(lab: Lab, rng: np.random.Generator, formats: tuple[str, str], T: int) -> None:
    E, k, I, H = 8, 3, 64, 192
    bank, gate, up, down = bank_of(lab, rng, E, I, H, formats)
    u, x = (rng.normal(size=(T, H)).astype(np.float32) for _ in range(2))
    ids = np.stack([rng.permutation(E)[:k] for _ in range(T)])
    weights = rng.dirichlet(np.ones(k), T).astype(np.float32)
    out, target = experts(lab, u, ids, weights, x, bank, I)
    exact = u.astype(np.float64)
    want = silu(np.einsum("th,tkih->tki", exact, gate[ids])) * np.einsum("th,tkih->tki", exact, up[ids])
    near(out, want, 1e-5)
    parts = np.einsum("tki,tkhi->tkh", np.float64(out), down[ids])
    near(target, x + np.einsum("tk,tkh->th", weights.astype(np.float64), parts), 1e-5)


def test_tokens_do_not_depend_on_their_company(lab: Lab, lab1: Lab, rng: np.random.Generator) -> None:
    E, k, I, H, T = 4, 2, 36, 100, 70
    state = rng.bit_generator.state
    results: list[list[Array]] = []
    for one in (lab, lab1):
        rng.bit_generator.state = state
        bank, *_ = bank_of(one, rng, E, I, H, ("q8_g32_fp16", "q6_g64_fp16"))
        u, x = (rng.normal(size=(T, H)).astype(np.float32) for _ in range(2))
        ids = np.stack([rng.permutation(E)[:k] for _ in range(T)])
        weights = rng.dirichlet(np.ones(k), T).astype(np.float32)
        for size in (70, 1, 9):
            parts = [
                experts(one, u[a : a + size], ids[a : a + size], weights[a : a + size], x[a : a + size], bank, I)
                for a in range(0, T, size)
            ]
            results.append([np.concatenate([p[i] for p in parts]) for i in range(2)])
    for result in results[1:]:
        for got, want in zip(result, results[0]):
            np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


def test_a_shared_expert_is_a_scaled_swiglu(lab: Lab, rng: np.random.Generator) -> None:
    """What follows the routed experts: norm_swiglu without a norm, project_add with the token's gate."""
    T, H, I = 5, 48, 30
    gate, g = lab.matrix("q8_g32_fp16", rng.normal(size=(I, H)) / np.sqrt(H))
    up, u_ = lab.matrix("q8_g32_fp16", rng.normal(size=(I, H)) / np.sqrt(H))
    down, d = lab.matrix("q8_g32_fp16", rng.normal(size=(H, I)) / np.sqrt(I))
    u, x = (rng.normal(size=(T, H)).astype(np.float32) for _ in range(2))
    scale = rng.uniform(size=T).astype(np.float32)
    product: Buffer = lab.empty(T, I)
    target = lab.put(x)
    lab.ops.norm_swiglu(product, lab.put(u), None, gate, up, EPS, lab.scratch(1))
    lab.ops.project_add(target, product, down, lab.put(scale))
    exact = u.astype(np.float64)
    want = x + scale[:, None].astype(np.float64) * ((silu(exact @ g.T) * (exact @ u_.T)) @ d.T)
    near(lab.get(target), want, 1e-5)
