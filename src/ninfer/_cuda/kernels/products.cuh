// What the projection kernels share: their arguments, tiles of rows, columns in operand order, and what becomes of a sum.
#pragma once
#include "weights.cuh"

enum Result { STORE_BF16, STORE_F32, ADD, SWIGLU };

constexpr int MAX_SEGMENTS = 20, MAX_JOBS = 4;

// The segments of one format, and the blocks that work on them: `slices` times `blocks` of them, from `block` on.
struct Job {
    i64 format, width, stage, bias;  // of a chunk: columns, bytes; what codes are too large by
    i64 segment, end, tiles, ticket;   // ticket: number of its first tile
    i64 block, blocks, slices, slice;  // K is cut into `slices` of `slice` columns
    i64 chunks, last;                  // of a tile in a slice, and in the last one
    i64 whole, length, longer;  // blocks take whole tiles, or chunks: so many, and the first `longer` blocks one more
};

// Where columns and results lie, and what becomes of the products of segments 2i and 2i + 1 (SWIGLU) or of every one.
struct Stream {
    const u16* x;       // [1, K]; or with sums made ready by `operands`; or by `panels`
    const u16* norm;    // [K] or null; null with sums
    const float* sums;  // of x by 64; or null
    double eps;
    i64 columns, K, result, jobs, warps, stages;  // warps of a block, a power of two, as its logarithm
    const float* scale;  // [columns] or null: ADD multiplies with it
    float* partial;      // [tickets][parts]: sums of parts of a tile
    i64 parts;
    int* tickets;  // one a tile of all jobs; zero between launches
    Job job[MAX_JOBS];
    Segment segment[MAX_SEGMENTS];
};

DEVICE int chunk_count(const Rows16 (&tile)[2], int width) {
    const int span = span_of((int)tile[0].segment->format);
    return (width + span - 1) / span;
}

// Eight columns in operand order: 0 4 1 5 2 6 3 7.
DEVICE Word4 operand_order(Word4 v) {
    return {bytes(v.x, v.z, 0x5410), bytes(v.x, v.z, 0x7632), bytes(v.y, v.w, 0x5410), bytes(v.y, v.w, 0x7632)};
}

DEVICE Word4 normed8(const u16* x, const u16* norm, int k, int K, float inverse) {
    const bool vectors = K % 8 == 0;
    Word4 v = load8(x, k, K, vectors);
    if (!norm) return v;
    float f[8], w[8];
    unpack8(f, v);
    unpack8(w, load8(norm, k, K, vectors));
#pragma unroll
    for (int i = 0; i < 8; ++i) f[i] = f[i] * inverse * (1.0f + w[i]);
    return {pack(f[0], f[1]), pack(f[2], f[3]), pack(f[4], f[5]), pack(f[6], f[7])};
}

// -- sums of 16 rows x 2 and 8 NT columns

constexpr int STAGES = 3;  // chunks of a warp on their way or in work

// A block's warps take 32 rows each and walk over the same columns [begin, begin + width) of K. `source(c)` is the operand
// row of column c; x holds STAGES chunks of all of them. `F` is the rows' format
// where the kernel knows it, else FORMATS.
template <int NT, int F, class Source>
DEVICE void panel_sums(float (&total)[2][NT][4], const Rows16 (&rows)[2], u8* stages, int stage, u8* x, int begin, int width, int columns, Source source) {
    const int lane = thread() % 32, format = (int)rows[0].segment->format, span = span_of(format), chunks = chunk_count(rows, width);
    const int stride = 2 * span + 64, size = 8 * NT * stride, pieces = span / 8;
    auto fetch = [&](int chunk) {
        if (chunk < chunks) {
            with_known_format<F>(format, [&](auto f) { load_chunk<f.value>(stages + chunk % STAGES * stage, rows, begin + chunk * span, lane); });
            if (chunk == 0) after_predecessors();  // weights do not depend on the kernels before this one
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
        with_known_format<F>(format, [&](auto f) {
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
