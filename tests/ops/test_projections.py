"""Products of stored matrices against float64, and their bitwise independence of how they are cut."""

from __future__ import annotations

import numpy as np
import pytest
from ops.harness import FORMATS, Lab, bf16, near

from ninfer.artifact.formats import f32_to_bf16
from ninfer.errors import InvariantError
from ninfer.ops import Segment

SHAPES = [(128, 64), (256, 192), (384, 1024)]
ODD = [(1, 1), (3, 17), (5, 40), (67, 100), (130, 263)]


def shapes(format: str) -> list[tuple[int, int]]:
    return SHAPES if format == "nvfp4" else SHAPES + ODD


def norm1(x: np.ndarray, w: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * (1 + w)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def tolerance(want: np.ndarray, K: int) -> float:
    return 1e-5 * max(float(np.std(want)), 1e-3) * max(1.0, np.sqrt(K / 1024))


@pytest.mark.parametrize("format", FORMATS)
def test_project_equals_float64(lab: Lab, rng: np.random.Generator, format: str) -> None:
    for N, K in shapes(format):
        matrix, exact = lab.matrix(format, rng.normal(size=(N, K)))
        assert (matrix.rows, matrix.cols) == (N, K)
        for T in (1, 2, 7, 23):
            x = rng.normal(size=(T, K)).astype(np.float32)
            out = lab.empty(T, N)
            lab.ops.norm_project([out], lab.put(x), None, [matrix], 0.0, lab.scratch(1))
            want = x.astype(np.float64) @ exact.T
            near(lab.get(out), want, tolerance(want, K) if N > 1 else 1e-5)


@pytest.mark.parametrize("format", FORMATS)
def test_columns_do_not_depend_on_their_number_or_on_threads(
    lab: Lab, lab1: Lab, rng: np.random.Generator, format: str
) -> None:
    N, K = (384, 320) if format == "nvfp4" else (275, 290)
    values, x = rng.normal(size=(N, K)), rng.normal(size=(64, K)).astype(np.float32)
    results = []
    for one in (lab, lab1):
        matrix, _ = one.matrix(format, values)
        for T in (1, 2, 3, 5, 8, 17, 64):
            out = one.empty(T, N)
            one.ops.norm_project([out], one.put(x[:T]), None, [matrix], 0.0, one.scratch(1))
            results.append(one.get(out).view(np.uint32))
    for result in results:
        np.testing.assert_array_equal(result, results[6][: len(result)])


def test_segments_of_several_formats_in_order(lab: Lab, rng: np.random.Generator) -> None:
    K = 192
    parents = {f: lab.stored(f, rng.normal(size=(256, K))) for f in FORMATS}
    spans = [(f, int(b), int(b + n)) for f, b, n in zip(FORMATS, rng.integers(0, 100, 8), rng.integers(1, 140, 8))]
    matrix = lab.ops.matrix([Segment(parents[f][0], b, e) for f, b, e in spans])
    exact = np.concatenate([parents[f][1][b:e] for f, b, e in spans])
    for T in (1, 9):
        x = rng.normal(size=(T, K)).astype(np.float32)
        out = lab.empty(T, matrix.rows)
        lab.ops.norm_project([out], lab.put(x), None, [matrix], 0.0, lab.scratch(1))
        want = x.astype(np.float64) @ exact.T
        near(lab.get(out), want, tolerance(want, K))


def test_bytes_of_a_matrix(lab: Lab) -> None:
    stored, _ = lab.stored("q8_g32_fp16", np.ones((64, 256)))
    assert lab.ops.matrix([Segment(stored, 0, 64)]).nbytes == 64 * (256 + 2 * 8)
    assert lab.ops.matrix([Segment(stored, 8, 24)]).nbytes == 16 * (256 + 2 * 8)


@pytest.mark.parametrize("T", [1, 6])
def test_norm_project_of_several_matrices(lab: Lab, rng: np.random.Generator, T: int) -> None:
    K = 96
    matrices = [lab.matrix(f, rng.normal(size=(n, K))) for f, n in (("q8_g32_fp16", 40), ("bf16", 3), ("fp32", 130))]
    x, w = rng.normal(size=(T, K)).astype(np.float32) * 5, rng.normal(size=K) * 0.2
    outs = [lab.empty(T, m.rows) for m, _ in matrices]
    scratch = lab.scratch(lab.ops.norm_scratch(T, K))
    source = lab.put(x)
    lab.ops.norm_project(outs, source, lab.put(w, "bf16"), [m for m, _ in matrices], 1e-6, scratch)
    u = norm1(x.astype(np.float64), bf16(w), 1e-6)
    for out, (_, exact) in zip(outs, matrices):
        want = u @ exact.T
        near(lab.get(out), want, tolerance(want, K))
    np.testing.assert_array_equal(lab.get(source), x)


@pytest.mark.parametrize("T", [1, 11])
@pytest.mark.parametrize("scaled", [False, True])
def test_project_add(lab: Lab, rng: np.random.Generator, T: int, scaled: bool) -> None:
    N, K = 70, 130
    matrix, exact = lab.matrix("q6_g64_fp16", rng.normal(size=(N, K)))
    x, y, s = rng.normal(size=(T, N)), rng.normal(size=(T, K)), rng.uniform(size=T)
    target = lab.put(x)
    lab.ops.project_add(target, lab.put(y), matrix, lab.put(s) if scaled else None)
    x, y, s = (np.float64(np.float32(v)) for v in (x, y, s))
    want = x + (s[:, None] if scaled else 1.0) * (y @ exact.T)
    near(lab.get(target), want, tolerance(want, K))


@pytest.mark.parametrize("format", ["q4_g64_fp16", "fp8_e4m3fn_row_bf16"])
@pytest.mark.parametrize("normed", [False, True])
def test_norm_swiglu(lab: Lab, rng: np.random.Generator, format: str, normed: bool) -> None:
    I, K = 90, 160
    gate, g = lab.matrix(format, rng.normal(size=(I, K)) / np.sqrt(K))
    up, u = lab.matrix(format, rng.normal(size=(I, K)) / np.sqrt(K))
    x, w = rng.normal(size=(9, K)).astype(np.float32), rng.normal(size=K) * 0.2
    column = norm1(x.astype(np.float64), bf16(w), 1e-5) if normed else x.astype(np.float64)
    want = silu(column @ g.T) * (column @ u.T)
    norm = lab.put(w, "bf16") if normed else None
    whole = []
    for T in (9, 1):
        out = lab.empty(T, I)
        lab.ops.norm_swiglu(out, lab.put(x[:T]), norm, gate, up, 1e-5, lab.scratch(lab.ops.norm_scratch(T, K)))
        near(lab.get(out), want[:T], 2e-6 * max(1, float(np.max(np.abs(want)))))
        whole.append(lab.get(out))
    np.testing.assert_array_equal(whole[1][0], whole[0][0])


@pytest.mark.parametrize("format", FORMATS)
def test_embed_and_head_share_a_matrix(lab: Lab, rng: np.random.Generator, format: str) -> None:
    V, H = 256, 64
    matrix, exact = lab.matrix(format, rng.normal(size=(V, H)))
    tokens = [0, 5, V - 1, -1, V, 2**31 - 1, 5]
    out = lab.empty(len(tokens), H)
    lab.ops.embed(out, matrix, lab.put(tokens, "i32"))
    near(lab.get(out), exact[[0, 5, V - 1, 0, 0, 0, 5]], 1e-6 * float(np.max(np.abs(exact))))
    hidden, used = rng.normal(size=(3, H)).astype(np.float32), V - 11
    logits = lab.empty(3, used)
    lab.ops.head(logits, lab.put(hidden), matrix)
    want = hidden.astype(np.float64) @ exact[:used].T
    near(lab.get(logits), want, tolerance(want, H))


def test_small_scales_are_not_flushed(lab: Lab) -> None:
    """Subnormal fp16 group scales and subnormal E4M3 codes keep their value."""
    q8, exact = lab.matrix("q8_g32_fp16", np.full((4, 32), 1e-6) * np.arange(1, 5)[:, None])
    assert exact.min() > 0
    x = lab.put(np.eye(32)[:3])
    out = lab.empty(3, 4)
    lab.ops.norm_project([out], x, None, [q8], 0.0, lab.scratch(1))
    np.testing.assert_array_equal(lab.get(out), exact[:, :3].T.astype(np.float32))
    values = np.zeros((4, 32))
    values[:, 0], values[:, 1:9] = 448, np.arange(8) * 2.0**-9
    fp8, exact = lab.matrix("fp8_e4m3fn_row_bf16", values)
    assert (exact[:, 2:9] > 0).all()
    out = lab.empty(32, 4)
    lab.ops.norm_project([out], lab.put(np.eye(32)), None, [fp8], 0.0, lab.scratch(1))
    np.testing.assert_array_equal(lab.get(out), exact.T.astype(np.float32))


def test_every_code_of_every_format(lab: Lab, rng: np.random.Generator) -> None:
    """Unit columns read single weights back, exactly as the artifact decodes them."""
    from ninfer.artifact.decoding import decode
    from ninfer.artifact.layouts import geometry
    from ninfer.ops import Stored

    for format in FORMATS:
        shape = (128, 256)
        g = geometry(format, None, shape)
        data = rng.integers(0, 256, g.nbytes).astype(np.uint8)
        if format in ("bf16", "fp32"):
            data = rng.normal(size=shape).astype(np.float32).view(np.uint8).reshape(-1)
            data = f32_to_bf16(data.view(np.float32)).view(np.uint8) if format == "bf16" else data
        elif format == "nvfp4":
            plane = data[g.scales.offset : g.scales.offset + g.scales.nbytes]  # type: ignore[union-attr]
            plane[:] = np.arange(plane.size) % 0x7F
            data[g.divisor.offset :] = np.array([2.0], np.float32).view(np.uint8)  # type: ignore[union-attr]
        else:
            codes = data[: g.codes.nbytes]
            if format.startswith("fp8"):
                codes[codes & 0x7F == 0x7F] = 0
            else:
                codes[(codes == 0x80) & (format == "q8_g32_fp16")] = 0
            scales = data[g.scales.offset :].view(np.uint16)  # type: ignore[union-attr]
            scales[:] = (rng.normal(size=scales.size) ** 2).astype(np.float16).view(np.uint16)
            if format.startswith("fp8"):
                scales[:] = f32_to_bf16((rng.normal(size=scales.size) ** 2).astype(np.float32))
        exact = decode(format, data, shape)
        matrix = lab.ops.matrix([Segment(Stored(format, shape, lab.device.weights(data)), 0, 128)])
        out = lab.empty(256, 128)
        lab.ops.norm_project([out], lab.put(np.eye(256)), None, [matrix], 0.0, lab.scratch(1))
        np.testing.assert_array_equal(lab.get(out), exact.T, err_msg=format)
        single = lab.empty(1, 128)
        for k in (0, 77, 255):
            lab.ops.norm_project([single], lab.put(np.eye(256)[k : k + 1]), None, [matrix], 0.0, lab.scratch(1))
            np.testing.assert_array_equal(lab.get(single)[0], exact[:, k], err_msg=format)


def test_wrong_shapes_are_refused(lab: Lab) -> None:
    matrix, _ = lab.matrix("fp32", np.ones((4, 8)))
    with pytest.raises(InvariantError):
        lab.ops.norm_project([lab.empty(1, 5)], lab.empty(1, 8), None, [matrix], 0.0, lab.scratch(1))
    with pytest.raises(InvariantError):
        lab.ops.norm_project([lab.empty(1, 4)], lab.empty(1, 7), None, [matrix], 0.0, lab.scratch(1))
    with pytest.raises(InvariantError):
        lab.ops.head(lab.empty(1, 5), lab.empty(1, 8), matrix)
    stored, _ = lab.stored("fp32", np.ones((4, 8)))
    with pytest.raises(InvariantError):
        lab.ops.matrix([Segment(stored, 2, 5)])
    with pytest.raises(InvariantError):
        lab.ops.matrix([])
