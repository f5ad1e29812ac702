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
