// Products of 17 to 128 columns with stored matrices: blocks of 128 rows and 32 or 64 columns, both operands on their way
// through shared memory, weights decoded once for all columns of the block.
#pragma once
#include "products.cuh"

constexpr int WARPS = 4, PITCH = 36;

template <int F, int NT> DEVICE void panel(const Products& a) {
    DYNAMIC_SHARED(shared);
    __shared__ int ticket;
    const int warp = thread() / 32, lane = thread() % 32, padded = ((int)a.K + 127) / 128 * 128;
    const int begin = block_y() * (int)a.slice, width = minimum((int)a.slice, (int)a.K - begin);
    const int first = block_z() * 8 * NT, columns = minimum(8 * NT, (int)a.columns - first);
    Rows16 rows[2];
    tile_rows(rows, a, block_x(), warp, WARPS);
    u8* stages = shared + warp * STAGES * a.stage;
    float total[2][NT][4] = {};
    panel_sums<NT, F>(total, rows, stages, (int)a.stage, shared + WARPS * STAGES * a.stage, begin, width, columns,
                   [&](int c) { return a.x + (i64)(first + c) * padded; });

    if (a.slices > 1) {
        const int tile = block_x() + (int)a.tiles * block_z();
        float* partial = a.partial + (i64)tile * (8 * NT * 32 * WARPS) + thread();
        const i64 next = a.tiles * ((a.columns + 8 * NT - 1) / (8 * NT)) * (8 * NT * 32 * WARPS);
        float* flat = &total[0][0][0];
#pragma unroll
        for (int i = 0; i < 8 * NT; ++i) partial[block_y() * next + i * threads()] = flat[i];
        fence();
        sync();
        if (thread() == 0) ticket = atomic_add(a.tickets + tile, 1);
        sync();
        if (ticket < a.slices - 1) return;
        fence();
#pragma unroll
        for (int i = 0; i < 8 * NT; ++i) flat[i] = 0;
#pragma unroll 1
        for (int s = 0; s < a.slices; ++s)
#pragma unroll
            for (int i = 0; i < 8 * NT; ++i) flat[i] += ((volatile float*)partial)[s * next + i * threads()];
        if (thread() == 0) a.tickets[tile] = 0;
    }
    // through shared memory, so that lanes become rows
    float* room = (float*)(shared + WARPS * STAGES * a.stage) + warp * 8 * NT * PITCH;
    sync();
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                room[(8 * n + lane % 4 * 2 + i % 2) * PITCH + 16 * half + 8 * (i / 2) + lane / 4] = total[half][n][i];
    sync_warp();
    const Rows16 own = lane < 16 ? rows[0] : rows[1];
#pragma unroll 1
    for (int c = 0; c < columns; ++c) {
        const float sum = room[c * PITCH + lane];
        if (a.result == SWIGLU) {
            const float up = shuffle_xor(sum, 16);
            if (lane < 16) finish_swiglu(a, rows, lane, first + c, sum, up);
        } else {
            finish(a, own, lane % 16, first + c, sum);
        }
    }
}

// One format a launch: a kernel for all of them at once would hold the registers of the largest.
#define PANEL(format, NT) \
    KERNEL(panel_##format, Products, 128, 2) { panel<format, NT>(a); }
