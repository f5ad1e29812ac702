"""Operations of block drafting against float64."""

from __future__ import annotations

import numpy as np
import pytest
from ops import block_oracle as oracle
from ops.block_oracle import EPS
from ops.harness import Lab, bf16, near

from ninfer.block_ops import ContextKV
from ninfer.ops import AttentionShape


def test_place_fills_columns_and_leaves_the_others(lab: Lab, rng: np.random.Generator) -> None:
    out, x = rng.normal(size=(5, 90)).astype(np.float32), rng.normal(size=(5, 33)).astype(np.float32)
    target = lab.put(out)
    lab.ops.block.place(target, lab.put(x), 50)
    out[:, 50:83] = x
    np.testing.assert_array_equal(lab.get(target), out)


def test_norm0_of_all_and_of_chosen_rows(lab: Lab, rng: np.random.Generator) -> None:
    for T, H in ((1, 7), (9, 64), (40, 250)):
        x, w = rng.normal(size=(T, H)).astype(np.float32) * 3, rng.normal(size=H)
        want = oracle.norm0(x.astype(np.float64), bf16(w))
        index = rng.integers(0, T, 5)
        every, some = lab.empty(T, H), lab.empty(5, H)
        lab.ops.block.norm0(every, lab.put(x), lab.put(w, "bf16"), None, EPS)
        lab.ops.block.norm0(some, lab.put(x), lab.put(w, "bf16"), lab.put(index, "i32"), EPS)
        near(lab.get(every), want, 2e-6 * float(np.max(np.abs(want))))
        np.testing.assert_array_equal(lab.get(some), lab.get(every)[index])


@pytest.mark.parametrize("hd", [24, 64, 50])
def test_rotate_turns_every_head_by_its_ordinal(lab: Lab, rng: np.random.Generator, hd: int) -> None:
    B, W, heads = 2, 3, 5
    x, w = rng.normal(size=(B * W, heads * hd)).astype(np.float32), rng.normal(size=hd)
    rows = lab.rows(B, W, [7, 30000], positions=np.zeros((3, B * W)))
    shape = AttentionShape(heads, heads, hd, hd, 1e4, (0,) * (hd // 2))
    target = lab.put(x)
    lab.ops.block.rotate(target, lab.put(w, "bf16"), rows, shape, EPS)
    ordinals = np.concatenate([np.arange(3) + 7, np.arange(3) + 30000])
    heads_of = x.reshape(-1, heads, hd).astype(np.float64)
    want = oracle.rotate(oracle.norm0(heads_of, bf16(w)), ordinals, 1e4, hd)
    near(lab.get(target), want.reshape(x.shape), 2e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 5, 90])
@pytest.mark.parametrize("paged", [False, True])
def test_attention_over_context_and_block(
    lab: Lab, rng: np.random.Generator, paged: bool, window: int | None, causal: bool
) -> None:
    """Histories that were appended in pieces; a ring holds the end of them, which is all that a window needs."""
    B, W, hq, hk, hd, length = 3, 6, 6, 2, 20, 3
    starts = [0, 70, 180 if paged else 500]
    shape = AttentionShape(hq, hk, hd, hd, 1e4, (0,) * (hd // 2))
    planes = [lab.put(rng.normal(size=(4 * length, hk, 64, hd))) for _ in range(2)]
    table = rng.permutation(4 * length).reshape(4, length)
    kv = ContextKV(*planes, length, lab.put(table, "i32") if paged else None)
    history = [rng.normal(size=(2, n, hk, hd)).astype(np.float32) for n in starts]
    at = [0, 0, 0]
    while any(a < n for a, n in zip(at, starts)):
        widths = [min(int(rng.integers(1, 250)), n - a) for a, n in zip(at, starts)]
        rows = lab.rows(B, 250, at, width=widths, read=[0, 0, 0], write=[2, 0, 3])
        pieces = np.full((2, B, 250, hk * hd), np.nan, np.float32)
        for b, (a, w) in enumerate(zip(at, widths)):
            pieces[:, b, :w] = history[b][:, a : a + w].reshape(2, w, hk * hd)
        lab.ops.block.append(kv, *(lab.put(p.reshape(-1, hk * hd)) for p in pieces), rows)
        at = [a + w for a, w in zip(at, widths)]
    if not paged and window is None:
        starts[2], at[2] = 0, 0  # what lies before the ring is gone
    q = rng.normal(size=(B * W, hq * hd)).astype(np.float32)
    k, v = (rng.normal(size=(B * W, hk * hd)).astype(np.float32) for _ in range(2))
    out, rows = lab.empty(*q.shape), lab.rows(B, W, at, read=[2, 0, 3], write=[1, 1, 1])
    scratch = lab.scratch(lab.ops.block.attention_scratch(B * W, 64 * length, shape))
    lab.ops.block.attention(out, *map(lab.put, (q, k, v)), kv, rows, shape, window, causal, scratch)
    got = lab.get(out).reshape(B, W, hq, hd)
    for b in range(B):
        keys, values = history[b][:, : at[b]].astype(np.float64)
        own = [x.reshape(B, W, -1, hd)[b].astype(np.float64) for x in (q, k, v)]
        near(got[b], oracle.attention(own[0], keys, values, *own[1:], window, causal), 5e-6)


def test_begin_finds_the_block_behind_what_is_kept(lab: Lab) -> None:
    rows = lab.rows(3, 4, [5, 64, 0])
    decided = lab.put([[11, 12, 13, 14], [21, 22, 23, 24], [-1, 0, 0, 0]], "i32")
    tokens, start, width = (lab.empty(*s, dtype="i32") for s in ((3, 5), (3,), (3,)))
    lab.ops.block.begin(tokens, start, width, decided, lab.put([2, 0, 0], "i32"), rows, 99)
    np.testing.assert_array_equal(lab.get(tokens), [[13] + [99] * 4, [21] + [99] * 4, [0] + [99] * 4])
    np.testing.assert_array_equal(lab.get(start), [8, 65, 1])
    np.testing.assert_array_equal(lab.get(width), [3, 1, 1])


@pytest.mark.parametrize(("taps", "group"), [(2, 4), (3, 12), (1, 1)])
def test_convolutions_stay_inside_their_block(lab: Lab, rng: np.random.Generator, taps: int, group: int) -> None:
    T, H, columns = 10, 24, 5
    x, delta = (rng.normal(size=s).astype(np.float32) for s in ((T, H), (T, 2 * taps * H // group)))
    base, out = rng.normal(size=(2, taps, H)), lab.put(x)
    for side in (0, 1):
        want = oracle.convolve(x.astype(np.float64), bf16(base), delta.astype(np.float64), side, columns)
        for add in (False, True):
            out = lab.put(x)
            args = lab.put(x), lab.put(base, "bf16"), lab.put(delta), side, columns
            lab.ops.block.convolve(out, *args, add=add)
            near(lab.get(out), want + (x if add else 0), 1e-5)


def test_select_walks_a_chain_of_candidates(lab: Lab, rng: np.random.Generator) -> None:
    for _ in range(8):
        oracle.check_selection(lab, rng, "f32", 2e-6)
