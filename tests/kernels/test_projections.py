"""The projection kernels, against float64 on the stored weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernels.checks import close, poison
from ops.harness import FORMATS, Lab, bf16

from ninfer._cuda import shares
from ninfer.ops import Segment

EPS = 1e-6


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def norm1(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS) * (1 + w)


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_and_width(device: Any, rng: np.random.Generator, format: str) -> None:
    lab = Lab(device)
    for (N, K), widths in {(256, 192): (1, 16, 40), (384, 1088): (3, 9, 130), (45, 77): (2, 12, 20)}.items():
        if format == "nvfp4" and N % 128:
            continue
        matrix, exact = lab.matrix(format, rng.normal(size=(N, K)))
        for T in widths:
            device.order = T % 2
            device.shared_limit = (227 if T % 3 else 99) << 10
            x = bf16(rng.normal(size=(T, K)))
            out = lab.empty(T, N, dtype="bf16")
            scratch = poison(lab, lab.ops.norm_scratch(T, K))
            lab.ops.norm_project([out], lab.put(x, "bf16"), None, [matrix], 0.0, scratch)
            close(lab.get(out), x @ exact.T)


@pytest.mark.parametrize("format", ["bf16", "q4_g64_fp16", "q5_g64_fp16", "fp8_e4m3fn_row_bf16"])
@pytest.mark.parametrize("T", [1, 4, 12, 33, 100])
def test_blocks_share_tiles(
    device: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, format: str, T: int
) -> None:
    """Blocks begin and end inside tiles, or have a slice of K; twice, as the second finds what the first left."""
    lab, N, K = Lab(device), 72, 2304
    monkeypatch.setattr(shares, "_SHARING", 0.0)
    monkeypatch.setattr(shares, "_PART", 0.0)
    monkeypatch.setattr(device, "multiprocessors", 7)
    device.shared_limit = (180 if T % 3 else 99) << 10
    matrix, exact = lab.matrix(format, rng.normal(size=(N, K)) / np.sqrt(K))
    x, w = bf16(rng.normal(size=(T, K))), bf16(rng.normal(size=K) * 0.2)
    scratch = poison(lab, lab.ops.norm_scratch(T, K))
    for order in range(2):
        device.order = order
        out = lab.empty(T, N, dtype="bf16")
        lab.ops.norm_project([out], lab.put(x, "bf16"), lab.put(w, "bf16"), [matrix], EPS, scratch)
        close(lab.get(out), norm1(x, w) @ exact.T)


@pytest.mark.parametrize(("T", "blocks"), [(1, 3), (1, 132), (5, 3), (30, 3), (140, 3)])
def test_norm_several_matrices_and_segments(
    device: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, T: int, blocks: int
) -> None:
    """With many blocks, which then have few warps, some of these have part of a column to norm."""
    lab, K = Lab(device), 640
    monkeypatch.setattr(device, "multiprocessors", blocks)
    parents = {f: lab.stored(f, rng.normal(size=(256, K))) for f in FORMATS}
    spans = [(f, int(b), int(b + n)) for f, b, n in zip(FORMATS, rng.integers(0, 100, 8), rng.integers(1, 140, 8))]
    many = lab.ops.matrix([Segment(parents[f][0], b, e) for f, b, e in spans])
    one, exact = lab.matrix("q6_g64_fp16", rng.normal(size=(33, K)))
    wanted = [np.concatenate([parents[f][1][b:e] for f, b, e in spans]), exact]
    x, w = bf16(rng.normal(size=(T, K)) * 5), bf16(rng.normal(size=K) * 0.2)
    outs = [lab.empty(T, m.rows, dtype="bf16") for m in (many, one)]
    lab.ops.norm_project(
        outs, lab.put(x, "bf16"), lab.put(w, "bf16"), [many, one], EPS, poison(lab, lab.ops.norm_scratch(T, K))
    )
    for out, matrix in zip(outs, wanted):
        close(lab.get(out), norm1(x, w) @ matrix.T)


@pytest.mark.parametrize("T", [1, 8, 13, 65, 129])
@pytest.mark.parametrize("scaled", [False, True])
def test_project_add(device: Any, rng: np.random.Generator, T: int, scaled: bool) -> None:
    lab, N, K = Lab(device), 70, 1300
    matrix, exact = lab.matrix("q5_g64_fp16", rng.normal(size=(N, K)) / np.sqrt(K))
    x, y, s = bf16(rng.normal(size=(T, N))), bf16(rng.normal(size=(T, K))), np.float32(rng.uniform(size=T))
    target = lab.put(x, "bf16")
    for _ in range(2):
        lab.ops.project_add(target, lab.put(y, "bf16"), matrix, lab.put(s) if scaled else None)
    close(lab.get(target), x + 2 * (s[:, None] if scaled else 1.0) * (y @ exact.T))


@pytest.mark.parametrize("T", [1, 11, 66, 131])
@pytest.mark.parametrize("formats", [("q4_g64_fp16", "q4_g64_fp16"), ("fp8_e4m3fn_row_bf16", "q8_g32_fp16")])
def test_norm_swiglu(device: Any, rng: np.random.Generator, T: int, formats: tuple[str, str]) -> None:
    lab, I, K = Lab(device), 90, 1280
    (gate, g), (up, u) = (lab.matrix(f, rng.normal(size=(I, K)) / np.sqrt(K)) for f in formats)
    x, w = bf16(rng.normal(size=(T, K))), bf16(rng.normal(size=K) * 0.2)
    for norm in (None, lab.put(w, "bf16")):
        out = lab.empty(T, I, dtype="bf16")
        lab.ops.norm_swiglu(out, lab.put(x, "bf16"), norm, gate, up, EPS, poison(lab, lab.ops.norm_scratch(T, K)))
        column = x if norm is None else norm1(x, w)
        close(lab.get(out), silu(column @ g.T) * (column @ u.T), 8e-3)


@pytest.mark.parametrize("format", FORMATS)
def test_embed_and_head_share_a_matrix(device: Any, rng: np.random.Generator, format: str) -> None:
    lab, V, H = Lab(device), 256, 64
    matrix, exact = lab.matrix(format, rng.normal(size=(V, H)))
    tokens = [0, 5, V - 1, -1, V, 2**31 - 1, 5]
    out = lab.empty(len(tokens), H, dtype="bf16")
    lab.ops.embed(out, matrix, lab.put(tokens, "i32"))
    np.testing.assert_array_equal(lab.get(out), bf16(exact[[0, 5, V - 1, 0, 0, 0, 5]]))
    hidden, used = bf16(rng.normal(size=(3, H))), V - 11
    logits = lab.empty(3, used)
    lab.ops.head(logits, lab.put(hidden, "bf16"), matrix)
    # columns meet integer codes in 16-bit fixed point
    fixed = format in ("q4_g64_fp16", "q5_g64_fp16", "q6_g64_fp16", "q8_g32_fp16")
    np.testing.assert_allclose(lab.get(logits), hidden @ exact[:used].T, atol=5e-4 if fixed else 2e-4)


def test_final_norm_of_chosen_rows(device: Any, rng: np.random.Generator) -> None:
    lab = Lab(device)
    for T, H in ((1, 7), (9, 64), (5, 4000)):
        x, w = bf16(rng.normal(size=(T, H)) * 3), bf16(rng.normal(size=H) * 0.2)
        index = rng.integers(0, T, 3)
        some, every = lab.empty(3, H, dtype="bf16"), lab.empty(T, H, dtype="bf16")
        lab.ops.final_norm(some, lab.put(x, "bf16"), lab.put(w, "bf16"), lab.put(index, "i32"), EPS)
        lab.ops.final_norm(every, lab.put(x, "bf16"), lab.put(w, "bf16"), None, EPS)
        close(lab.get(every), norm1(x, w))
        np.testing.assert_array_equal(lab.get(some), lab.get(every)[index])


def test_norm_pair_puts_two_norms_side_by_side(device: Any, rng: np.random.Generator) -> None:
    lab = Lab(device)
    for T, H in ((1, 7), (9, 64)):
        a, b, u, v = (bf16(rng.normal(size=shape)) for shape in ((T, H), (T, H), (H,), (H,)))
        out = lab.empty(T, 2 * H, dtype="bf16")
        lab.ops.norm_pair(out, *(lab.put(x, "bf16") for x in (a, b, u, v)), EPS)
        close(lab.get(out), np.hstack([norm1(a, u), norm1(b, v)]))


def test_draft_rows_go_on_behind_the_last_kept_draft(device: Any, rng: np.random.Generator) -> None:
    lab, B, W, S, limit = Lab(device), 40, 3, 2, 500
    positions, start = rng.integers(0, 1000, (3, B * W)), rng.integers(0, limit, B)
    accepted = rng.integers(0, W, B)
    rows = lab.rows(B, W, start.tolist(), positions=positions)
    index, begin, width = (lab.empty(*shape, dtype="i32") for shape in ((B,), (S, B), (S, B)))
    axes = lab.empty(S, 3, B, dtype="i32")
    lab.ops.draft_rows(index, begin, width, axes, lab.put(accepted, "i32"), rows, limit)
    last, ordinals = np.arange(B) * W + accepted, [start + accepted + 1 + s for s in range(S)]
    np.testing.assert_array_equal(lab.get(index), last)
    np.testing.assert_array_equal(lab.get(begin), np.minimum(ordinals, limit - 1))
    np.testing.assert_array_equal(lab.get(width), np.less(ordinals, limit))
    np.testing.assert_array_equal(lab.get(axes), [positions[:, last] + 1 + s for s in range(S)])
