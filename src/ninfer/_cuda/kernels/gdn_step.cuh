// Gated DeltaNet of one column or a few: a head's state in shared memory.
#pragma once
#include "gdn.cuh"

constexpr int WARPS = 8, ROWS = DK / WARPS, WIDE = 128;  // of a block; rows of a state that a warp has, and its columns

// Where a column of row r of a state is, so that tiles meet every bank once. Quads stay together.
DEVICE int state_column(int r, int column) { return column ^ r / 2 % 4 * 8; }

// HEIGHT rows of a head's state, `width` columns, into shared memory [HEIGHT][OWN], on their way until copies_wait<0>, with zeros
// beyond them or without one; the state has rows of dv.
template <bool VECTORS, bool TILES = false, int OWN = WIDE, int HEIGHT = DK> DEVICE void load_state(float* room, const float* state, int dk, int dv, int width) {
    constexpr int quads = OWN / 4, height = HEIGHT * quads / (32 * WARPS);
    const int first = thread() / quads * height, column = thread() % quads * 4, rows = column < width ? maximum(0, minimum(height, dk - first)) : 0;
#pragma unroll 4
    for (int r = 0; r < height; ++r) {
        const float* row = state + (i64)(first + r) * dv;
        float* to = room + (first + r) * OWN + (TILES ? state_column(first + r, column) : column);
        if (VECTORS && state && r < rows) copy16(to, row + column, 16);
        else {
            float x[4] = {0, 0, 0, 0};
            if (state && r < rows) load_quad<VECTORS>(x, row, column, width);
            store4(to, x);
        }
    }
    copies_commit();
}
