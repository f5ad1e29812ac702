// Sums of the expert kernels: 32 rows a warp, one column or 8 NT of them.
#pragma once
#include "products.cuh"

DEVICE int chunk_count(const Rows16 (&tile)[2], int width) {
    const int span = span_of((int)tile[0].segment->format);
    return (width + span - 1) / span;
}

constexpr int STAGES = 3;  // chunks of a warp on their way or in work

// A block's warps take 32 rows each and walk over the same columns [begin, begin + width) of K. `source(c)` is the operand
// row of column c; x holds STAGES chunks of all of them.
template <int NT, class Columns>
DEVICE void panel_sums(float (&total)[2][NT][4], const Rows16 (&rows)[2], u8* stages, int stage, u8* x, int begin, int width, int columns, Columns source) {
    const int lane = thread() % 32, format = (int)rows[0].segment->format, span = span_of(format), chunks = chunk_count(rows, width);
    const int stride = 2 * span + 64, size = 8 * NT * stride, pieces = span / 8;
    auto fetch = [&](int chunk) {
        if (chunk < chunks) {
            with_format(format, [&](auto f) { load_chunk<f.value>(stages + chunk % STAGES * stage, rows, begin + chunk * span, lane); });
            if (chunk == 0) await_predecessors(), release_successors();  // weights do not depend on the kernels before this one
            for (int i = thread(); i < columns * pieces; i += threads())
                copy16(x + chunk % STAGES * size + i / pieces * stride + i % pieces * 16, source(i / pieces) + begin + chunk * span + i % pieces * 8, 16);
        }
        copies_commit();
    };
#pragma unroll 1
    for (int chunk = 1 - STAGES; chunk < chunks; ++chunk) {
        if (chunk >= 0) {
            copies_wait<STAGES - 2>();
            sync();  // the chunk has arrived for all, and all are done with the one before it
        }
        fetch(chunk + STAGES - 1);
        if (chunk < 0) continue;
        with_format(format, [&](auto f) {
#pragma unroll 1
            for (int u = 0; u < Traits<f.value>::span / 64; ++u)
                multiply_unit<f.value, NT>(total, stages + chunk % STAGES * stage, u, x + chunk % STAGES * size + 128 * u, stride, columns, lane);
        });
    }
    copies_wait<0>();
}

// One warp: chunks `first`, first + step, ... of 32 rows times columns whose operands lie in shared memory from x on.
DEVICE void walk_sums(float (&total)[2][1][4], const Rows16 (&rows)[2], u8* stages, int stage, const u8* x, int K, int first, int step) {
    const int lane = thread() % 32, format = (int)rows[0].segment->format, span = span_of(format), chunks = chunk_count(rows, K);
    auto fetch = [&](int turn) {
        const int chunk = first + turn * step;
        if (chunk < chunks)
            with_format(format, [&](auto f) { load_chunk<f.value>(stages + turn % STAGES * stage, rows, chunk * span, lane); });
        copies_commit();
    };
#pragma unroll 1
    for (int turn = 1 - STAGES; first + turn * step < chunks; ++turn) {
        copies_wait<STAGES - 2>();
        sync_warp();
        fetch(turn + STAGES - 1);
        if (turn < 0) continue;
        with_format(format, [&](auto f) {
#pragma unroll 1
            for (int u = 0; u < Traits<f.value>::span / 64; ++u)
                multiply_unit<f.value, 1>(total, stages + turn % STAGES * stage, u, x + 2 * ((first + turn * step) * span + 64 * u), 0, 1, lane);
        });
    }
    copies_wait<0>();
    sync_warp();
}
