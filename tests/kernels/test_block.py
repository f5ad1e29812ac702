"""The kernels of block drafting, against float64 on what they are given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernels.checks import close, poison
from ops import block_oracle as oracle
from ops.block_oracle import EPS
from ops.harness import Lab, bf16

from ninfer.block_ops import ContextKV
from ninfer.ops import AttentionShape


def test_place_and_norm0(device: Any, rng: np.random.Generator) -> None:
    lab = Lab(device)
    for T, H in ((1, 7), (5, 300)):
        x, w, out = bf16(rng.normal(size=(T, H)) * 3), bf16(rng.normal(size=H)), bf16(rng.normal(size=(T, H + 20)))
        target, normed, some = lab.put(out, "bf16"), lab.empty(T, H, dtype="bf16"), lab.empty(3, H, dtype="bf16")
        lab.ops.block.place(target, lab.put(x, "bf16"), 11)
        out[:, 11 : 11 + H] = x
        np.testing.assert_array_equal(lab.get(target), out)
        lab.ops.block.norm0(normed, lab.put(x, "bf16"), lab.put(w, "bf16"), None, EPS)
        close(lab.get(normed), oracle.norm0(x, w))
        index = rng.integers(0, T, 3)
        lab.ops.block.norm0(some, lab.put(x, "bf16"), lab.put(w, "bf16"), lab.put(index, "i32"), EPS)
        np.testing.assert_array_equal(lab.get(some), lab.get(normed)[index])


@pytest.mark.parametrize("hd", [24, 128])
def test_rotate(device: Any, rng: np.random.Generator, hd: int) -> None:
    lab, B, W, heads = Lab(device), 2, 3, 3
    x, w = bf16(rng.normal(size=(B * W, heads * hd))), bf16(rng.normal(size=hd))
    target, rows = lab.put(x, "bf16"), lab.rows(B, W, [7, 30000])
    lab.ops.block.rotate(target, lab.put(w, "bf16"), rows, AttentionShape(3, 3, hd, hd, 1e4, (0,) * (hd // 2)), EPS)
    ordinals = np.concatenate([np.arange(3) + 7, np.arange(3) + 30000])
    want = oracle.rotate(oracle.norm0(x.reshape(-1, heads, hd), w), ordinals, 1e4, hd)
    close(lab.get(target), want.reshape(x.shape))


@pytest.mark.parametrize(
    ("hd", "ratio", "W", "window", "causal", "paged"),
    [
        (20, 3, 6, 90, False, False), (20, 3, 6, None, True, True), (64, 1, 16, 5, True, False),
        (128, 4, 16, 100, False, False), (128, 4, 40, None, False, True), (200, 2, 8, None, False, True),
    ],
)  # fmt: skip
def test_append_and_attention(
    device: Any, rng: np.random.Generator, hd: int, ratio: int, W: int, window: int | None, causal: bool, paged: bool
) -> None:
    lab, B, hk, length = Lab(device), 2, 2, 3
    device.order = W % 2
    starts = [0, 170 if paged else 320]
    shape = AttentionShape(hk * ratio, hk, hd, hd, 1e4, (0,) * (hd // 2))
    planes = [lab.put(rng.normal(size=(3 * length, hk, 64, hd)), "bf16") for _ in range(2)]
    table = rng.permutation(3 * length).reshape(3, length)
    kv = ContextKV(*planes, length, lab.put(table, "i32") if paged else None)
    history = bf16(rng.normal(size=(2, starts[1], hk, hd)))
    for begin, end in ((0, 1), (1, 300), (300, 320)):
        n = max(0, min(end, starts[1]) - begin)
        rows = lab.rows(2, 300, [0, begin], width=[0, n], read=[0, 0], write=[0, 2])
        piece = np.full((2, 2, 300, hk * hd), np.nan)
        piece[:, 1, :n] = history[:, begin : begin + n].reshape(2, n, hk * hd)
        lab.ops.block.append(kv, *(lab.put(p.reshape(-1, hk * hd), "bf16") for p in piece), rows)
    q = bf16(rng.normal(size=(B * W, ratio * hk * hd)) * 2)
    k, v = (bf16(rng.normal(size=(B * W, hk * hd))) for _ in range(2))
    out, rows = lab.empty(*q.shape, dtype="bf16"), lab.rows(B, W, starts, read=[0, 2], write=[1, 1])
    scratch = poison(lab, lab.ops.block.attention_scratch(B * W, 64 * length, shape))
    lab.ops.block.attention(out, *(lab.put(x, "bf16") for x in (q, k, v)), kv, rows, shape, window, causal, scratch)
    got = lab.get(out).reshape(B, W, -1, hd)
    for b in range(B):
        keys, values = history[:, : starts[b]]
        own = [x.reshape(B, W, -1, hd)[b] for x in (q, k, v)]
        close(got[b], oracle.attention(own[0], keys, values, *own[1:], window, causal))


def test_begin(device: Any) -> None:
    lab = Lab(device)
    rows, decided = lab.rows(3, 4, [5, 64, 0]), lab.put([[11, 12, 13, 14], [21, 22, 23, 24], [-1, 0, 0, 0]], "i32")
    tokens, start, width = (lab.empty(*s, dtype="i32") for s in ((3, 5), (3,), (3,)))
    lab.ops.block.begin(tokens, start, width, decided, lab.put([2, 0, 0], "i32"), rows, 99)
    np.testing.assert_array_equal(lab.get(tokens), [[13] + [99] * 4, [21] + [99] * 4, [0] + [99] * 4])
    np.testing.assert_array_equal(lab.get(start), [8, 65, 1])
    np.testing.assert_array_equal(lab.get(width), [3, 1, 1])


@pytest.mark.parametrize(("taps", "group"), [(2, 16), (3, 4)])
def test_convolve(device: Any, rng: np.random.Generator, taps: int, group: int) -> None:
    lab, T, H = Lab(device), 10, 320
    x, delta = (bf16(rng.normal(size=s)) for s in ((T, H), (T, 2 * taps * H // group)))
    base = bf16(rng.normal(size=(2, taps, H)))
    for side in (0, 1):
        want = oracle.convolve(x, base, delta, side, 5)
        for add in (False, True):
            out = lab.put(x, "bf16")
            args = lab.put(x, "bf16"), lab.put(base, "bf16"), lab.put(delta, "bf16"), side, 5
            lab.ops.block.convolve(out, *args, add=add)
            close(lab.get(out), want + (x if add else 0))


def test_select(device: Any, rng: np.random.Generator) -> None:
    for _ in range(4):
        oracle.check_selection(Lab(device), rng, "bf16", 1e-5)
