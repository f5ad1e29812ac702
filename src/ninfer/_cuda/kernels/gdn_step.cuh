// Gated DeltaNet of a few columns: what comes into a head, and its state.
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

// Channel c of a head's q, k and v: 2 DK, then dv. kind: the part, or -1 beyond; own: where in it. Keys narrower than DK
// are padded by channels that are not real.
struct Channel {
    int kind, own, channel;
    bool real;
    u64 w, x;  // four bf16, the oldest lowest: weights, and the inputs of the column last put

    // Weights, and what was there before the first column, which the kernels before this one do not touch. Every load is on
    // its way before the first is used.
    DEVICE void begin(const Gdn& a, int head, int key, int b, int c) {
        kind = c < DK ? 0 : c < 2 * DK ? 1 : c < 2 * DK + (int)a.dv ? 2 : -1;
        own = kind == 2 ? c - 2 * DK : c % DK;
        real = kind == 2 || kind >= 0 && own < (int)a.dk;
        channel = kind == 2 ? head * (int)a.dv + own : key * (int)a.dk + own;
        const int taps = (int)a.taps, channels = channels_of(a), at = real ? kind * (int)(a.nk * a.dk) + channel : 0;
        const u16* tail = a.tail + (i64)a.read[b] * (taps - 1) * channels + at;
        const bool fresh = a.start[b] == 0;
        u16 weight[TAPS], before[TAPS];
#pragma unroll
        for (int j = 0; j < TAPS; ++j) weight[j] = a.convolution[maximum(j - TAPS + taps, 0) * channels + at];
#pragma unroll
        for (int j = 0; j < TAPS - 1; ++j) before[j] = tail[maximum(j - TAPS + taps, 0) * channels];
        w = x = 0;
#pragma unroll
        for (int j = 0; j < TAPS; ++j) {
            const bool inside = real && j >= TAPS - taps;
            w |= (u64)(inside ? weight[j] : (u16)0) << 16 * j;
            if (j < TAPS - 1) x |= (u64)(inside && !fresh ? before[j] : (u16)0) << 16 * (j + 1);
        }
    }

    DEVICE u16 column(const Gdn& a, i64 token) const {
        const int n = kind == 2 ? (int)(a.nv * a.dv) : (int)(a.nk * a.dk);
        return real ? a.qkv[kind][token * n + channel] : (u16)0;
    }
    DEVICE void put(u16 column) { x = x >> 16 | (u64)column << 48; }

    DEVICE float convolved() const {
        float sum = 0;
#pragma unroll
        for (int j = 0; j < TAPS; ++j) sum += from_bf16((u16)(w >> 16 * j)) * from_bf16((u16)(x >> 16 * j));
        return silu(sum);
    }

    DEVICE void put_tail(const Gdn& a, i64 slot) const {
        const int taps = (int)a.taps, channels = channels_of(a);
        u16* out = a.tail + slot * (taps - 1) * channels + kind * (int)(a.nk * a.dk) + channel;
#pragma unroll
        for (int j = 1; j < TAPS; ++j)
            if (j > TAPS - taps) out[(j - 1 - TAPS + taps) * channels] = (u16)(x >> 16 * j);
    }
};
