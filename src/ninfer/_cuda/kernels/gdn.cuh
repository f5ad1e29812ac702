// Gated DeltaNet: causal convolution, gates, delta-rule recurrence, gated norm. What its kernels share.
#pragma once
#include "tiles.cuh"

struct Gdn {
    u16* out;        // [tokens, nv * dv]
    const u16* qkv[3];
    const u16* z;
    const u16* gate_a;  // [tokens, nv]
    const u16* gate_b;
    const u16* convolution;  // [taps, channels]
    const float* a_log;
    const float* dt_bias;
    const u16* norm;  // [dv]
    float* state;     // [slots, nv, dk, dv]
    u16* tail;        // [slots, taps - 1, channels]
    float* record_k;  // [tokens, nk, dk] or null
    float* record_d;  // [tokens, nv, dv]
    float* record_g;  // [tokens, nv]
    u16* record_c;    // [tokens, channels]
    const int* start;
    const int* width;
    const int* read;
    const int* write;
    u8* chunks;    // scratch of many columns, see gdn_chunk.cu
    int* tickets;  // [B, nk], zero between launches
    double eps;
    i64 W, nk, nv, dk, dv, taps, group;  // group: value heads whose inverse a block works on at once
    u16* panels;   // gdn_few: `out` is put here as well, in panels of `room` columns; or null
    i64 room;
};

DEVICE int channels_of(const Gdn& a) { return 2 * (int)a.nk * (int)a.dk + (int)a.nv * (int)a.dv; }

// Where a row's convolution inputs are: its columns, and before them its tail, or zeros.
struct Inputs {
    const u16* columns;  // of its part, [W, n]
    const u16* tail;     // of its part, [taps - 1, channels]; null: zeros
    int n, channels, taps;

    DEVICE Inputs(const Gdn& a, int b, int part) : n((int)(part == 2 ? a.nv * a.dv : a.nk * a.dk)), channels(channels_of(a)), taps((int)a.taps) {
        columns = a.qkv[part] + b * (int)a.W * n;
        tail = a.start[b] == 0 ? nullptr : a.tail + (i64)a.read[b] * ((taps - 1) * channels) + part * (int)(a.nk * a.dk);
    }

    // From element i of column t, negative ones before the row's; null: zeros.
    DEVICE const u16* column(int t, int i) const {
        return t >= 0 ? columns + t * n + i : tail && taps - 1 + t >= 0 ? tail + (taps - 1 + t) * channels + i : nullptr;
    }
    DEVICE u16 at(int t, int i) const {
        const u16* p = column(t, i);
        return p ? *p : (u16)0;
    }
};

constexpr int DK = 128, TAPS = 4;  // features of a key or a value, and taps, at most

DEVICE const u16* part_weights(const Gdn& a, int part) { return a.convolution + part * (int)a.nk * (int)a.dk; }

DEVICE float log_decay(const Gdn& a, i64 token, int head) {
    const float x = from_bf16(a.gate_a[token * a.nv + head]) + a.dt_bias[head];
    return -expf(a.a_log[head]) * (x > 20.0f ? x : log1pf(expf(x)));
}

DEVICE float* state_of(const Gdn& a, int slot, int head) { return a.state + (i64)(slot * (int)a.nv + head) * ((int)a.dk * (int)a.dv); }

// Four columns of a row from `column`; VECTORS: rows are whole quads.
template <bool VECTORS> DEVICE void load_quad(float (&x)[4], const float* row, int column, int dv) {
    if constexpr (VECTORS) {
        load4(x, row + column);
    } else {
#pragma unroll
        for (int c = 0; c < 4; ++c) x[c] = column + c < dv ? row[column + c] : 0.0f;
    }
}

template <bool VECTORS> DEVICE void store_quad(float* row, const float (&x)[4], int column, int dv) {
    if constexpr (VECTORS) {
        store4(row + column, x);
    } else {
#pragma unroll
        for (int c = 0; c < 4; ++c)
            if (column + c < dv) row[column + c] = x[c];
    }
}
