"""Final norm, gather and scatter."""

from __future__ import annotations

import numpy as np
from ops.harness import Lab, bf16, near


def test_final_norm_of_chosen_rows(lab: Lab, rng: np.random.Generator) -> None:
    for T, H in ((1, 7), (9, 64), (70, 250)):
        x, w = rng.normal(size=(T, H)).astype(np.float32) * 3, rng.normal(size=H) * 0.2
        exact = x.astype(np.float64)
        want = exact / np.sqrt(np.mean(exact**2, axis=1, keepdims=True) + 1e-6) * (1 + bf16(w))
        index = rng.integers(0, T, 5)
        source, norm = lab.put(x), lab.put(w, "bf16")
        some, every = lab.empty(5, H), lab.empty(T, H)
        lab.ops.final_norm(some, source, norm, lab.put(index, "i32"), 1e-6)
        lab.ops.final_norm(every, source, norm, None, 1e-6)
        near(lab.get(every), want, 2e-6 * float(np.max(np.abs(want))))
        np.testing.assert_array_equal(lab.get(some), lab.get(every)[index])


def test_scatter_skips_negative_rows_and_gather_reads_back(lab: Lab, rng: np.random.Generator) -> None:
    dst, src = rng.normal(size=(6, 33)).astype(np.float32), rng.normal(size=(4, 33)).astype(np.float32)
    target = lab.put(dst)
    lab.ops.scatter(target, lab.put(src), lab.put([5, -1, 0, 2], "i32"))
    want = dst.copy()
    want[[5, 0, 2]] = src[[0, 2, 3]]
    np.testing.assert_array_equal(lab.get(target), want)
    out = lab.empty(3, 33)
    lab.ops.gather(out, target, lab.put([2, 2, 5], "i32"))
    np.testing.assert_array_equal(lab.get(out), want[[2, 2, 5]])


def test_norm_pair_puts_two_norms_side_by_side(lab: Lab, rng: np.random.Generator) -> None:
    for T, H in ((1, 7), (9, 64), (5, 130)):
        a, b = (rng.normal(size=(T, H)).astype(np.float32) for _ in range(2))
        u, v = rng.normal(size=H) * 0.2, rng.normal(size=H) * 0.2
        pair, half = lab.empty(T, 2 * H), lab.empty(T, H)
        norms = lab.put(u, "bf16"), lab.put(v, "bf16")
        lab.ops.norm_pair(pair, lab.put(a), lab.put(b), *norms, 1e-6)
        for i, (x, norm) in enumerate(zip((a, b), norms)):
            lab.ops.final_norm(half, lab.put(x), norm, None, 1e-6)
            np.testing.assert_array_equal(lab.get(pair)[:, i * H : (i + 1) * H], lab.get(half))


def test_draft_rows_go_on_behind_the_last_kept_draft(lab: Lab, rng: np.random.Generator) -> None:
    B, W, S = 3, 4, 2
    positions = rng.integers(0, 1000, (3, B * W))
    rows = lab.rows(B, W, [5, 64, 0], positions=positions)
    accepted = [0, 3, 1]
    index, start, width = (lab.empty(*shape, dtype="i32") for shape in ((B,), (S, B), (S, B)))
    axes = lab.empty(S, 3, B, dtype="i32")
    lab.ops.draft_rows(index, start, width, axes, lab.put(accepted, "i32"), rows, 69)
    last = np.arange(B) * W + accepted
    np.testing.assert_array_equal(lab.get(index), last)
    np.testing.assert_array_equal(lab.get(start), [[6, 68, 2], [7, 68, 3]])
    np.testing.assert_array_equal(lab.get(width), [[1, 1, 1], [1, 0, 1]])
    np.testing.assert_array_equal(lab.get(axes), [positions[:, last] + 1, positions[:, last] + 2])
