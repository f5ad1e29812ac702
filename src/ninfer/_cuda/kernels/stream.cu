// Products of up to 16 columns with stored matrices: weights stream through the chip once, columns stay in shared memory.
//
// Blocks live for the whole launch and walk over tiles of 32 rows. The warps of a block share out a tile's columns; each
// keeps its own chunks on their way, across tiles, and never waits for another but to add up a tile.
#include "products.cuh"

constexpr int WARPS = 8, PITCH = 36;

// Where a warp is: a chunk of a tile.
struct Cursor {
    int tile, chunk;
    Rows16 rows[2];

    DEVICE void enter(const Products& a, int chunks, int warp) {
        for (; tile < a.tiles; tile += grid_x()) {
            tile_rows(rows, a, tile, 0, 1);
            chunk = warp;
            if (chunk < chunks) return;
        }
    }

    DEVICE void next(const Products& a, int chunks, int warp) {
        chunk += WARPS;
        if (chunk >= chunks) tile += grid_x(), enter(a, chunks, warp);
    }
};

template <int F, int NT> DEVICE void stream(const Products& a) {
    using T = Traits<F>;
    constexpr int STAGE = T::scale_offset + 32 * T::scale;
    DYNAMIC_SHARED(shared);
    __shared__ float squares[16][WARPS];
    __shared__ int ticket;
    const int warp = thread() / 32, lane = thread() % 32, columns = (int)a.columns, K = (int)a.K;
    const int begin = block_y() * (int)a.slice, width = minimum((int)a.slice, K - begin), stride = 2 * (int)a.slice + 64;
    const int chunks = (width + T::span - 1) / T::span;
    u8* stages = shared + warp * STAGES * STAGE;
    float* room = (float*)(shared + WARPS * STAGES * STAGE);  // [WARPS][8 NT][PITCH]
    u8* x = (u8*)(room + WARPS * 8 * NT * PITCH);

    // weights do not depend on the kernels before this one
    Cursor ahead{block_x()};
    ahead.enter(a, chunks, warp);
    int slot = 0;
    auto fetch = [&] {
        if (ahead.tile < a.tiles) {
            const int k = begin + ahead.chunk * T::span;
            u8* stage = stages + slot * STAGE;
            load_chunk<F>(stage, ahead.rows, k, lane);
            ahead.next(a, chunks, warp);
        }
        copies_commit();
        slot = (slot + 1) % STAGES;
    };
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; ++i) fetch();

    after_predecessors();
    if (a.norm) {
        int team = 1;  // warps to a column
        while (2 * team * columns <= WARPS) team *= 2;
        for (int c = warp / team; c < columns; c += WARPS / team) {
            float square = 0;
            for (int k = 8 * (warp % team * 32 + lane); k < K; k += 8 * 32 * team) {
                float f[8];
                unpack8(f, load8(a.x + (i64)c * K, k, K, K % 8 == 0));
#pragma unroll
                for (int i = 0; i < 8; ++i) square += f[i] * f[i];
            }
            square = sum_warp(square);
            if (lane == 0) squares[c][warp % team] = square;
        }
        sync();
        if (thread() < columns) {
            float square = 0;
            for (int i = 0; i < team; ++i) square += squares[thread()][i];
            squares[thread()][0] = 1.0f / sqrtf(square / K + (float)a.eps);
        }
        sync();
    }
    const int each = (int)a.slice / 8;
    for (int i = thread(); i < columns * each; i += threads()) {
        const int c = i / each, k = i % each * 8;
        *(Word4*)(x + c * stride + 2 * k) = operand_order(normed8(a.x + (i64)c * K, a.norm, begin + k, K, squares[c][0]));
    }
    sync();

    int current = 0;
    for (int tile = block_x(); tile < a.tiles; tile += grid_x()) {
        Rows16 rows[2];
        tile_rows(rows, a, tile, 0, 1);
        float total[2][NT][4] = {};
        for (int chunk = warp; chunk < chunks; chunk += WARPS) {
            copies_wait<STAGES - 2>();
            sync_warp();  // the stage has arrived for all lanes, and all are done with the one before it
            fetch();
#pragma unroll
            for (int u = 0; u < T::span / 64; ++u)
                multiply_unit<F, NT>(total, stages + current * STAGE, u, x + 2 * (chunk * T::span + 64 * u), stride, columns, lane);
            current = (current + 1) % STAGES;
        }

        // add up the warps
        sync();  // all have read what they needed of the tile before
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    room[(warp * 8 * NT + 8 * n + lane % 4 * 2 + i % 2) * PITCH + 16 * half + 8 * (i / 2) + lane / 4] = total[half][n][i];
        sync();
        float mine[NT];  // row lane of column warp + 8n
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            mine[n] = 0;
            for (int w = 0; w < WARPS; ++w) mine[n] += room[(w * 8 * NT + 8 * n + warp) * PITCH + lane];
        }
        if (a.slices > 1) {
            float* partial = a.partial + (i64)tile * NT * 256 + thread();
            const i64 next = a.tiles * NT * 256;
#pragma unroll
            for (int n = 0; n < NT; ++n) partial[block_y() * next + 256 * n] = mine[n];
            fence();
            sync();
            if (thread() == 0) ticket = atomic_add(a.tickets + tile, 1);
            sync();
            if (ticket < a.slices - 1) continue;
            fence();
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                mine[n] = 0;
                for (int s = 0; s < a.slices; ++s) mine[n] += ((volatile float*)partial)[s * next + 256 * n];
            }
            if (thread() == 0) a.tickets[tile] = 0;
        }
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            const int column = 8 * n + warp;
            if (a.result == SWIGLU) {
                const float up = shuffle_xor(mine[n], 16);
                if (lane < 16) finish_swiglu(a, rows, lane, column, mine[n], up);
            } else {
                finish(a, lane < 16 ? rows[0] : rows[1], lane % 16, column, mine[n]);
            }
        }
    }
    copies_wait<0>();
}

// One format a launch: a kernel for all of them at once would hold the registers of the largest.
#define STREAMS(format)                                                         \
    KERNEL(stream_##format##_8, Products, 256, 3) { stream<format, 1>(a); } \
    KERNEL(stream_##format##_16, Products, 256, 2) { stream<format, 2>(a); }
STREAMS(BF16)
STREAMS(FP32)
STREAMS(Q4)
STREAMS(Q5)
STREAMS(Q6)
STREAMS(Q8)
STREAMS(NVFP4)
STREAMS(FP8)
