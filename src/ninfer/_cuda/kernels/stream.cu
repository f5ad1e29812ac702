// Products of up to 16 columns with stored matrices: weights stream through the chip once, columns stay in shared memory.
//
// Blocks live for the whole launch and walk over tiles of 32 rows. The warps of a block share out a tile's columns; each
// keeps its own chunks on their way, across tiles, and never waits for another but to add up a tile.
#include "products.cuh"

constexpr int WARPS = 8, PITCH = 36;

// Where a warp is: a chunk of a tile.
struct Cursor {
    int tile, chunk, chunks;
    Rows16 rows[2];

    DEVICE void enter(const Products& a, int width, int warp) {
        for (; tile < a.tiles; tile += grid_x()) {
            tile_rows(rows, a, tile, 0, 1);
            chunks = chunk_count(rows, width);
            chunk = warp;
            if (chunk < chunks) return;
        }
    }

    DEVICE void next(const Products& a, int width, int warp) {
        chunk += WARPS;
        if (chunk >= chunks) tile += grid_x(), enter(a, width, warp);
    }
};

template <int NT> DEVICE void stream(const Products& a) {
    DYNAMIC_SHARED(shared);
    __shared__ float squares[16][WARPS];
    __shared__ int ticket;
    const int warp = thread() / 32, lane = thread() % 32, columns = (int)a.columns, K = (int)a.K;
    const int begin = block_y() * (int)a.slice, width = minimum((int)a.slice, K - begin), stride = 2 * (int)a.slice + 64;
    u8* stages = shared + warp * STAGES * a.stage;
    float* sums = (float*)(shared + WARPS * STAGES * a.stage);  // [2][WARPS][8 NT][PITCH]
    u8* x = (u8*)(sums + 2 * WARPS * 8 * NT * PITCH);

    // weights do not depend on the kernels before this one
    Cursor ahead{block_x()};
    ahead.enter(a, width, warp);
    int slot = 0;
    auto fetch = [&] {
        if (ahead.tile < a.tiles) {
            const int k = begin + ahead.chunk * span_of((int)ahead.rows[0].segment->format);
            u8* stage = stages + slot * a.stage;
            with_format((int)ahead.rows[0].segment->format, [&](auto f) { load_chunk<f.value>(stage, ahead.rows, k, lane); });
            ahead.next(a, width, warp);
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

    int current = 0, turn = 0;
    for (int tile = block_x(); tile < a.tiles; tile += grid_x(), turn ^= 1) {
        Rows16 rows[2];
        tile_rows(rows, a, tile, 0, 1);
        const int format = (int)rows[0].segment->format, span = span_of(format), chunks = chunk_count(rows, width);
        float total[2][NT][4] = {};
        for (int chunk = warp; chunk < chunks; chunk += WARPS) {
            copies_wait<STAGES - 2>();
            sync_warp();  // the stage has arrived for all lanes, and all are done with the one before it
            fetch();
            with_format(format, [&](auto f) {
#pragma unroll 1
                for (int u = 0; u < Traits<f.value>::span / 64; ++u)
                    multiply_unit<f.value, NT>(total, stages + current * a.stage, u, x + 2 * (chunk * span + 64 * u), stride, columns, lane);
            });
            current = (current + 1) % STAGES;
        }

        // add up the warps
        float* room = sums + turn * WARPS * 8 * NT * PITCH;
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

KERNEL(stream_8, Products, 256, 2) { stream<1>(a); }
KERNEL(stream_16, Products, 256, 2) { stream<2>(a); }
