// Gated DeltaNet of one column or a few: a head's state in shared memory.
#pragma once
#include "gdn.cuh"

constexpr int WARPS = 8, ROWS = DK / WARPS, WIDE = 128;  // of a block; rows of a state that a warp has, and its columns

// Where a column of row r of a state is, so that tiles meet every bank once. Quads stay together.
DEVICE int state_column(int r, int column) { return column ^ r / 2 % 4 * 8; }

// A head's state into shared memory [DK][WIDE], on its way until copies_wait<0>, with zeros beyond it or without one.
template <bool VECTORS, bool TILES = false> DEVICE void load_state(float* room, const float* state, int dk, int dv) {
    const int first = thread() / 32 * ROWS, column = thread() % 32 * 4, rows = column < dv ? maximum(0, minimum(ROWS, dk - first)) : 0;
#pragma unroll 4
    for (int r = 0; r < ROWS; ++r) {
        const float* row = state + (i64)(first + r) * dv;
        float* to = room + (first + r) * WIDE + (TILES ? state_column(first + r, column) : column);
        if (VECTORS && state && r < rows) copy16(to, row + column, 16);
        else {
            float x[4] = {0, 0, 0, 0};
            if (state && r < rows) load_quad<VECTORS>(x, row, column, dv);
            store4(to, x);
        }
    }
    copies_commit();
}
