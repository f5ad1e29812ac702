// Arithmetic that every kernel shares.
#pragma once
#include "ptx.cuh"

struct alignas(16) Word4 {
    u32 x, y, z, w;
};

struct alignas(16) Float4 {
    float x, y, z, w;
};

struct alignas(8) Float2 {
    float x, y;
};

DEVICE void load4(float (&x)[4], const float* p) {
    const Word4 v = *(const Word4*)p;
    x[0] = from_bits(v.x), x[1] = from_bits(v.y), x[2] = from_bits(v.z), x[3] = from_bits(v.w);
}
DEVICE void store4(float* p, const float (&x)[4]) { *(Word4*)p = {bits(x[0]), bits(x[1]), bits(x[2]), bits(x[3])}; }

DEVICE float low(u32 pair) { return from_bits(pair << 16); }
DEVICE float high(u32 pair) { return from_bits(pair & 0xFFFF0000u); }
DEVICE float from_bf16(u16 v) { return from_bits((u32)v << 16); }
DEVICE u16 to_bf16(float v) { return (u16)pack(v, 0.0f); }

DEVICE float sigmoid(float x) { return reciprocal(1.0f + expf(-x)); }
DEVICE float silu(float x) { return x * sigmoid(x); }

DEVICE int minimum(int a, int b) { return a < b ? a : b; }
DEVICE int maximum(int a, int b) { return a > b ? a : b; }

DEVICE float sum_warp(float v) {
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) v += shuffle_xor(v, mask);
    return v;
}

DEVICE float max_warp(float v) {
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) v = fmaxf(v, shuffle_xor(v, mask));
    return v;
}

// The sum over a block of at most 1,024 threads, whole warps; `room` holds 32 floats of shared memory.
DEVICE float sum_block(float v, float* room) {
    v = sum_warp(v);
    sync();
    if (thread() % 32 == 0) room[thread() / 32] = v;
    sync();
    v = 0;
    for (int i = 0; i < threads() / 32; ++i) v += room[i];
    return v;
}

DEVICE float max_block(float v, float* room) {
    v = max_warp(v);
    sync();
    if (thread() % 32 == 0) room[thread() / 32] = v;
    sync();
    v = room[0];
    for (int i = 1; i < threads() / 32; ++i) v = fmaxf(v, room[i]);
    return v;
}

// Eight bf16 at p: elements `begin`..`begin + 7` of a row of `size`, zero beyond it. Whole vectors where `vectors`.
DEVICE Word4 load8(const u16* p, int begin, int size, bool vectors) {
    if (vectors && begin + 8 <= size) return *(const Word4*)(p + begin);
    u16 v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = begin + i < size ? p[begin + i] : (u16)0;
    return {v[0] | (u32)v[1] << 16, v[2] | (u32)v[3] << 16, v[4] | (u32)v[5] << 16, v[6] | (u32)v[7] << 16};
}

// Where feature f of a column is in panels of `room` columns, bf16 [K / 8][room][8], which is how wide.cuh takes columns: an eight
// has a pair of each of four lanes, 16 features apart.
DEVICE int panel_place(int f, int column, int room) {
    return ((f / 64 * 8 + f / 8 % 2 * 4 + f % 4) * room + column) * 8 + f / 16 % 4 * 2 + f / 4 % 2;
}

DEVICE void unpack8(float (&f)[8], Word4 v) {
    f[0] = low(v.x), f[1] = high(v.x), f[2] = low(v.y), f[3] = high(v.y);
    f[4] = low(v.z), f[5] = high(v.z), f[6] = low(v.w), f[7] = high(v.w);
}
