// What the projection kernels share: their arguments, tiles of rows, columns in operand order, and what becomes of a sum.
#pragma once
#include "weights.cuh"

enum Result { STORE_BF16, STORE_F32, ADD, SWIGLU };

constexpr int MAX_SEGMENTS = 24, MAX_JOBS = 2;

// The segments of one format, and the blocks that work on them: `slices` times `blocks` of them.
struct Job {
    i64 format, segment, end, tiles;
    i64 block, blocks, slices, slice;  // K is cut into `slices` of `slice` columns
    i64 whole;                         // blocks take whole tiles
    i64 ticket;                        // of its first tile
};

struct Products {
    const u16* x;     // [columns, K]
    const u16* norm;  // [K] or null
    double eps;
    i64 columns, K, result;
    i64 slices, slice;          // K is cut into `slices` of `slice` columns, a multiple of 128
    i64 stage;                  // bytes of a warp's stage
    i64 segments, tiles;        // with SWIGLU, segments 2i and 2i + 1 are matching rows of gate and up
    const float* scale;         // [columns] or null: ADD multiplies with it
    float* partial;             // sums of every slice
    int* tickets;               // one a tile; zero between launches
    Segment segment[MAX_SEGMENTS];
};

// Where columns and results lie, and what becomes of the products of segments 2i and 2i + 1 (SWIGLU) or of every one.
struct Stream {
    const u16* x;       // [1, K]; or with sums, [columns, K padded to 128] in operand order
    const u16* norm;    // [K] or null; null with sums
    const float* sums;  // [columns, K / 64]: of x by 64; or null
    double eps;
    i64 columns, K, result, jobs;
    const float* scale;  // [columns] or null: ADD multiplies with it
    float* partial;      // [tickets][parts]: sums of parts of a tile
    i64 parts;
    int* tickets;        // one a tile of all jobs; zero between launches
    Job job[MAX_JOBS];
    Segment segment[MAX_SEGMENTS];
};

// The 32 rows of a tile: 32 of one segment, or 16 of gate and the same 16 of up. `rows` of a segment's tile step.
DEVICE void tile_rows(Rows16 (&tile)[2], const Products& a, int number, int warp, int warps) {
    const int step = a.result == SWIGLU ? 2 : 1, rows = (a.result == SWIGLU ? 16 : 32) * warps;
    int i = 0;
    while (i + step < a.segments && number >= a.segment[i + step].tile) i += step;
    const Segment& s = a.segment[i];
    const int begin = (number - (int)s.tile) * rows + warp * (rows / warps);
    const int left = (int)s.rows - begin;
    const int first = (int)s.first + begin;
    if (a.result == SWIGLU) {
        tile[0] = {&s, first, left};
        tile[1] = {&a.segment[i + 1], (int)a.segment[i + 1].first + begin, left};
    } else {
        tile[0] = {&s, first, left};
        tile[1] = {&s, first + 16, left - 16};
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        // a half beyond its segment repeats the last row and stores nothing
        const int last = (int)(tile[h].segment->first + tile[h].segment->rows) - 1;
        if (tile[h].count < 1) tile[h].row = last, tile[h].count = 0;
    }
}

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

// Put the sum of local row `row` (0..15 of a half) and a column where it belongs.
DEVICE void finish(const Products& a, const Rows16& r, int row, int column, float sum) {
    if (row >= r.count || column >= a.columns) return;
    const Segment& s = *r.segment;
    sum *= row_factor(s, r.row + row);
    const i64 at = column * s.out_stride + s.out_first + (r.row + row - s.first);
    if (a.result == STORE_F32) {
        ((float*)s.out)[at] = sum;
    } else {
        u16* out = (u16*)s.out;
        if (a.result == ADD) sum = from_bf16(out[at]) + (a.scale ? a.scale[column] : 1.0f) * sum;
        out[at] = to_bf16(sum);
    }
}

DEVICE void finish_swiglu(const Products& a, const Rows16 (&tile)[2], int row, int column, float gate, float up) {
    if (row >= tile[0].count || column >= a.columns) return;
    gate *= row_factor(*tile[0].segment, tile[0].row + row);
    up *= row_factor(*tile[1].segment, tile[1].row + row);
    const Segment& s = *tile[0].segment;
    ((u16*)s.out)[column * s.out_stride + s.out_first + (tile[0].row + row - s.first)] = to_bf16(silu(gate) * up);
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
