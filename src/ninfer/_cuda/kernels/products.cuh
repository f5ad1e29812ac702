// What the projection kernels share: their arguments, and columns in operand order.
#pragma once
#include "weights.cuh"

enum Result { STORE_BF16, STORE_F32, ADD, SWIGLU };

constexpr int MAX_SEGMENTS = 20, MAX_JOBS = 4;

// The segments of one format, and the blocks that work on them: `slices` times `blocks` of them, from `block` on. In wide.cuh
// `blocks` of them, and slices, whole, length and longer are what `Work` makes of them.
struct Job {
    i64 format, width, stage;          // of a chunk: columns, bytes
    i64 segment, end, tiles, ticket;   // ticket: number of its first tile
    i64 block, blocks, slices, slice;  // K is cut into `slices` of `slice` columns
    i64 chunks, last;                  // of a tile in a slice, and in the last one
    i64 whole, length, longer;  // blocks take whole tiles, or chunks: so many, and the first `longer` blocks one more
};

// Where wide.cuh puts the result as well, in panels, for the product that comes next.
struct Left {
    u8* panels;        // or null
    const u16* norm;   // [features] or null: of that product, whose columns are the result times what is added to one in it,
    float* squares;    // [columns / 4][features / 16][4]: and of the result by itself, what squares of 16 features add up to
};

// Where columns and results lie, and what becomes of the products of segments 2i and 2i + 1 (SWIGLU) or of every one.
struct Stream {
    const u16* x;       // [columns, K]; or made ready by `operands`, for formats that are not codes; or by `panels`
    const u16* norm;    // [K] or null; null where columns are ready
    const float* sums;  // powers of two of `codes` by 64, from `operands`; or null: columns are as they are; wide.cuh: `squares`
                        // that were left with the columns, or null: they are normed
    const u8* codes;    // [columns][2][K padded]: made ready by `operands`, for codes
    double eps;
    i64 columns, K, result, jobs, warps, stages;  // warps of a block, a power of two, as its logarithm
    const float* scale;  // [columns] or null: ADD multiplies with it
    float* partial;      // [tickets][parts]: sums of parts of a tile
    i64 parts;
    int* tickets;  // one a tile of all jobs; zero between launches
    Left left;
    Job job[MAX_JOBS];
    Segment segment[MAX_SEGMENTS];
};

// The job that this block works on.
DEVICE const Job& own_job(const Stream& a) {
    int j = 0;
    while (j + 1 < a.jobs && block_x() >= a.job[j + 1].block) ++j;
    return a.job[j];
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
