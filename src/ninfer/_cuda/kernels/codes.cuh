// Products of stored integer codes with columns in fixed point, exact within a group of 64 columns.
//
// A group of a column is 16-bit integers times a power of two, which holds every element of at least 1/128 of its largest as
// it is. Codes and both bytes of the integers meet as signed bytes: a column takes two of the eight a product has, its high
// bytes and its low ones. Bytes lie in the order 0 2 4 6 1 3 5 7 by eights, which is how nibbles come apart.
#pragma once
#include "chunks.cuh"

DEVICE constexpr bool is_coded(int format) { return format >= Q4 && format <= Q8; }

// Codes are taken times what moves their sign to a byte's highest bit; the columns' power of two makes up for it.
DEVICE constexpr float code_factor(int format) { return format == Q4 ? 1 / 16.0f : format == Q5 ? 1 / 8.0f : format == Q6 ? 1 / 4.0f : 1.0f; }

// Eight columns of a group that eight lanes share: high and low bytes, and the power of two.
DEVICE void fix8(u64& high, u64& low, float& scale, const float (&f)[8]) {
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) most = bits(f[i]) << 1 > most ? bits(f[i]) << 1 : most;
#pragma unroll
    for (int mask = 1; mask < 8; mask *= 2) {
        const u32 other = bits(shuffle_xor(from_bits(most), mask));
        most = other > most ? other : most;
    }
    const int exponent = maximum((int)(most >> 24), 15);
    const float inverse = from_bits((u32)(268 - exponent) << 23);
    scale = exponent == 255 ? from_bits(0x7FC00000) : from_bits((u32)(exponent - 14) << 23);
    u32 q[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) q[i] = bits(fminf(f[i] * inverse, 32639.0f) + 12582912.0f);  // an integer in the low bits
    u32 pair[4][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int first = i < 2 ? 4 * i : 4 * (i - 2) + 1, second = first + 2;
        pair[i][0] = bytes(q[first], q[second], 0x0040);
        pair[i][1] = bytes(q[first] + 128, q[second] + 128, 0x0051);
    }
    low = bytes(pair[0][0], pair[1][0], 0x5410) | (u64)bytes(pair[2][0], pair[3][0], 0x5410) << 32;
    high = bytes(pair[0][1], pair[1][1], 0x5410) | (u64)bytes(pair[2][1], pair[3][1], 0x5410) << 32;
}

// Where a lane finds its part of every chunk, in bytes from the chunk's start; the same for rows lane/4 and lane/4 + 8.
template <int F> struct CodePlaces {
    using C = Chunk<F>;
    static constexpr int groups = C::groups, planes = F == Q5 ? 2 : F == Q6 ? 4 : 0;
    int codes[F == Q8 ? 2 * groups : groups], high[planes + 1], scales;

    DEVICE explicit CodePlaces(int lane) {
        const int row = lane / 4, t = lane % 4;
        if constexpr (F == Q8) {
            for (int i = 0; i < 2 * groups; ++i) codes[i] = here(row * C::row + 16 * ((2 * i + t / 2) ^ C::swizzle(row)) + 8 * (t & 1));
        } else {
            for (int u = 0; u < groups; ++u) codes[u] = here(row * C::row + (32 * u ^ 16 * C::swizzle(row)) + 8 * t);
        }
        for (int i = 0; i < planes; ++i) high[i] = here(C::high_offset + row * C::high + (16 * i ^ 16 * C::high_swizzle(row)) + (F == Q5 ? 2 : 4) * t);
        scales = here(C::scale_offset + 8 * row);
    }

    // Codes 0 2 4 6, 1 3 5 7, 8 10 12 14 and 9 11 13 15 of the sixteen that the lane has of group u of its row `second`.
    DEVICE void get(u32 (&r)[4], const u8* stage, int second, int u) const {
        stage += second * 8 * C::row;
        if constexpr (F == Q8) {
            // eight columns of each half of the group
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const u64 both = *(const u64*)(stage + codes[2 * u + j]);
                r[2 * j] = bytes((u32)both, (u32)(both >> 32), 0x6420), r[2 * j + 1] = bytes((u32)both, (u32)(both >> 32), 0x7531);
            }
            return;
        }
        constexpr int up = F == Q4 ? 4 : F == Q5 ? 3 : 2;
        constexpr u32 mask = 0x0F0F0F0F << up;
        const u64 both = *(const u64*)(stage + codes[u]);
        const u32 w = (u32)both, v = (u32)(both >> 32), z[4] = {w << up, w >> (4 - up), v << up, v >> (4 - up)};
        stage += second * 8 * (C::high - C::row);
        if constexpr (F == Q4) {
#pragma unroll
            for (int i = 0; i < 4; ++i) r[i] = z[i] & mask;
        } else if constexpr (F == Q5) {
            // a product puts every other one of eight bits on top of its code's byte
            const u32 y = *(const u16*)(stage + high[u / 2] + 8 * (u % 2)), x = y >> 8;
            const u32 spread[4] = {(y & 0x55) * 0x02082080, (y & 0xAA) * 0x01041040, (x & 0x55) * 0x02082080, (x & 0xAA) * 0x01041040};
#pragma unroll
            for (int i = 0; i < 4; ++i) r[i] = and_or(z[i], mask, spread[i] & 0x80808080);
        } else if constexpr (F == Q6) {
            const u32 y = *(const u32*)(stage + high[u]);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const u32 x = y >> (16 * (i / 2) + 2 * (i % 2)) & 0x3333;
                r[i] = and_or(z[i], mask, (x * 0x101 & 0x00330033) * 0x440 & 0xC0C0C0C0);
            }
        }
    }
};

// sums += 16 rows of the stage times 4 IT columns: [i / 2][i % 2] of row lane/4 and column 4i + lane%4, [i / 2][2 + i % 2] of
// row + 8. x[i]: high or low bytes of column 4i + lane/8 from 16 (lane%4) on (8 of halves of a group, for Q8), and power[i]
// of column 4i + lane%4, both at the chunk.
template <int F, int IT, int NT>
DEVICE void multiply_codes(float (&sum)[NT][4], const u8* stage, const CodePlaces<F>& places, const u8* const (&x)[IT], const float* const (&power)[IT]) {
    using C = Chunk<F>;
    u32 scales[2][2];  // of two rows: four scales of a chunk
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u64 both = *(const u64*)(stage + places.scales + 64 * i);
        scales[i][0] = (u32)both, scales[i][1] = (u32)(both >> 32);
    }
    float own[IT][C::groups];
#pragma unroll
    for (int i = 0; i < IT; ++i) {
        if constexpr (C::groups == 4) {
            load4(own[i], power[i]);
        } else {
            const Float2 both = *(const Float2*)power[i];
            own[i][0] = both.x, own[i][1] = both.y;
        }
    }
#pragma unroll
    for (int u = 0; u < C::groups; ++u) {
        u32 r[4], s[4];
        places.get(r, stage, 0, u), places.get(s, stage, 1, u);
#pragma unroll
        for (int i = 0; i < IT; ++i) {
            constexpr int parts = F == Q8 ? 2 : 1;  // scales of a group
            const u8* from = x[i] + 64 * u;
            Word4 b;
            if constexpr (F == Q8) {
                const u64 first = *(const u64*)from, second = *(const u64*)(from + 32);
                b = {(u32)first, (u32)(first >> 32), (u32)second, (u32)(second >> 32)};
            } else {
                b = *(const Word4*)from;
            }
            int c[parts][4] = {};
            mma(c[0], r[0], s[0], r[1], s[1], b.x, b.y), mma(c[parts - 1], r[2], s[2], r[3], s[3], b.z, b.w);
#pragma unroll
            for (int j = 0; j < parts; ++j) {
                const int at = parts * u + j;
                const float upper = at % 2 ? high_half(scales[0][at / 2]) : low_half(scales[0][at / 2]);
                const float lower = at % 2 ? high_half(scales[1][at / 2]) : low_half(scales[1][at / 2]);
                sum[i / 2][i % 2] += upper * own[i][u] * (float)(256 * c[j][0] + c[j][1]);
                sum[i / 2][2 + i % 2] += lower * own[i][u] * (float)(256 * c[j][2] + c[j][3]);
            }
        }
    }
}
