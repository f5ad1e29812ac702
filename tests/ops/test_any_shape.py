"""Products of random shapes, formats and cuts."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from ops.harness import FORMATS, Array, Lab, near

from ninfer.ops import Matrix, Segment


@st.composite
def cuts(draw: st.DrawFn) -> tuple[str, int, int, list[tuple[int, int]], int, int]:
    """(format, N, K, row segments, T, seed)."""
    format = draw(st.sampled_from(FORMATS))
    if format == "nvfp4":
        N, K = 128 * draw(st.integers(1, 2)), 64 * draw(st.integers(1, 30))
    else:
        N, K = draw(st.integers(1, 300)), draw(st.integers(1, 2300))
    ends = st.lists(st.integers(0, N), min_size=2, max_size=2, unique=True).map(sorted)
    segments = [(int(b), int(e)) for b, e in draw(st.lists(ends, min_size=1, max_size=3))]
    return format, N, K, segments, draw(st.sampled_from([1, 2, 3, 4, 5, 7, 8, 9, 20])), draw(st.integers(0, 99))


def apply(lab: Lab, matrix: Matrix, x: Array) -> Array:
    room = lab.put(np.full((len(x), matrix.rows + 3), 7.0))
    out = room.head(len(x), matrix.rows)
    lab.ops.norm_project([out], lab.put(x), None, [matrix], 0.0, lab.scratch(1))
    assert (lab.get(room).reshape(-1)[len(x) * matrix.rows :] == 7.0).all(), "written past the result"
    return lab.get(out)


@given(cuts())
def test_products(lab: Lab, cut: tuple[str, int, int, list[tuple[int, int]], int, int]) -> None:
    format, N, K, segments, T, seed = cut
    rng = np.random.default_rng(seed)
    stored, exact = lab.stored(format, rng.normal(size=(N, K)))
    matrix = lab.ops.matrix([Segment(stored, b, e) for b, e in segments])
    exact = np.concatenate([exact[b:e] for b, e in segments])
    x = rng.normal(size=(T, K)).astype(np.float32)
    got = apply(lab, matrix, x)
    near(got, x.astype(np.float64) @ exact.T, 2e-6 * K**0.5 * max(1.0, float(np.max(np.abs(exact)))))
    for t in (0, T - 1):
        np.testing.assert_array_equal(apply(lab, matrix, x[t : t + 1])[0].view(np.uint32), got[t].view(np.uint32))
