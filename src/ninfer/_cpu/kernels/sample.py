"""Kernels around the sampler."""

from __future__ import annotations

from numba import carray, types

from ninfer._cpu.kernel import kernel
from ninfer._cpu.kernels.simd import f32, i32p, i64p, u32p, u64p
from ninfer._cpu.sampling import MAX_ALTERNATIVES, decide_position


@kernel("sample")
def sample(a, begin, end, ws):
    """Decide every ``tasks``-th position, from the task's own on.

    Words: tasks, positions, W, V, token, logprob, alternatives' ids, their log-probabilities, logits, masks, counts,
    real, whole, seed, index, purpose, scratch (uint64 [tasks, V]).
    """
    w = i64p(a)
    vocab, alternatives = w[3], MAX_ALTERNATIVES
    words = (vocab + 31) // 32
    for task in range(begin, end):
        keys = carray(u64p(w[16] + 8 * task * vocab), vocab)
        for p in range(task, w[1], w[0]):
            b = p // w[2]
            whole = carray(i32p(w[12] + 16 * b), 4)
            token, logprob, _ = decide_position(
                carray(f32(w[8] + 4 * p * vocab), vocab),
                carray(u32p(w[9] + 4 * p * words), words),
                carray(i32p(w[10] + 4 * types.int64(whole[3]) * vocab), vocab),
                carray(f32(w[11] + 20 * b), 5),
                whole,
                carray(u32p(w[13] + 8 * b), 2),
                i64p(w[14])[p],
                i32p(w[15])[p],
                keys,
                carray(i32p(w[6] + 4 * p * alternatives), alternatives),
                carray(f32(w[7] + 4 * p * alternatives), alternatives),
                carray(i32p(w[12]), 0),
                -1,
                carray(i32p(w[12]), 0),
                carray(f32(w[11]), 0),
            )
            i32p(w[4])[p] = token
            f32(w[5])[p] = logprob


@kernel("accept")
def accept(a, begin, end, ws):
    """Verify the drafts of every ``tasks``-th row, from the task's own on.

    Words: tasks, rows, W, V, token, logprob, alternatives' ids, their log-probabilities, accepted, logits, masks,
    counts, real, whole, seed, index, purpose, number of drafts, drafts, candidates' ids, their probabilities, C,
    scratch (uint64 [tasks, V]).
    """
    w = i64p(a)
    W, vocab, C, alternatives = w[2], w[3], w[21], MAX_ALTERNATIVES
    words = (vocab + 31) // 32
    for task in range(begin, end):
        keys = carray(u64p(w[22] + 8 * task * vocab), vocab)
        for b in range(task, w[1], w[0]):
            whole = carray(i32p(w[13] + 16 * b), 4)
            drafts = carray(i32p(w[18] + 4 * b * (W - 1)), W - 1)
            count = min(types.int64(i32p(w[17])[b]), W - 1)
            kept = True
            column = types.int64(0)
            while kept:
                p = b * W + column
                proposal = b * (W - 1) + column
                size = C if column < count else 0
                token, logprob, kept = decide_position(
                    carray(f32(w[9] + 4 * p * vocab), vocab),
                    carray(u32p(w[10] + 4 * p * words), words),
                    carray(i32p(w[11] + 4 * types.int64(whole[3]) * vocab), vocab),
                    carray(f32(w[12] + 20 * b), 5),
                    whole,
                    carray(u32p(w[14] + 8 * b), 2),
                    i64p(w[15])[p],
                    i32p(w[16])[p],
                    keys,
                    carray(i32p(w[6] + 4 * p * alternatives), alternatives),
                    carray(f32(w[7] + 4 * p * alternatives), alternatives),
                    drafts[:column],
                    types.int64(drafts[column]) if column < count else -1,
                    carray(i32p(w[19] + 4 * proposal * C), size),
                    carray(f32(w[20] + 4 * proposal * C), size),
                )
                i32p(w[4])[p] = token
                f32(w[5])[p] = logprob
                column += 1
            i32p(w[8])[b] = column - 1


@kernel("count")
def count(a, begin, end, ws):
    """counts[lanes[b], tokens[b, w]] += 1; one task. Words: counts, lanes, tokens, width, B, W, lanes, V."""
    w = i64p(a)
    for b in range(w[4]):
        lane = types.int64(i32p(w[1])[b])
        for column in range(min(types.int64(i32p(w[3])[b]), w[5])):
            token = types.int64(i32p(w[2])[b * w[5] + column])
            if 0 <= lane < w[6] and 0 <= token < w[7]:
                i32p(w[0])[lane * w[7] + token] += 1
