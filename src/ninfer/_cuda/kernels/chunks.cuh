// Stored rows on their way through shared memory, 16 rows and 128 bytes of codes each at a time, and their products.
//
// A chunk's 64-column groups meet the columns in one order for all formats: lane 4g + t holds rows g, g + 8 and columns
// 16t..16t+15 of a group (8t..8t+7 of both halves where a scale covers 32), in the order of weights.cuh within eight.
#pragma once
#include "products.cuh"

template <int F> struct Chunk {
    using T = Traits<F>;
    static constexpr int row = F == FP32 ? 256 : 128;  // bytes of a row's codes
    static constexpr int columns = T::nibbles ? 256 : row / T::element, groups = columns / 64;
    static constexpr int high = F == Q5 ? 32 : F == Q6 ? 64 : 0;
    static constexpr int scale = F == NVFP4 ? 16 : T::scaled ? 8 : 0;
    static constexpr int high_offset = 16 * row, scale_offset = 16 * (row + high), bytes = 16 * (row + high + scale);
    // 16-byte pieces of a row trade places so that a warp's reads meet every bank once
    DEVICE static int swizzle(int row) { return T::nibbles ? 2 * (row & 3) : F == BF16 || F == FP32 ? row & 1 : 4 * (row & 1); }
    DEVICE static int high_swizzle(int row) { return F == Q5 ? row >> 2 & 1 : row >> 1 & 3; }
};

// Eight rows of a segment from parent row `row`; rows from `count` on repeat the last one and store nothing.
struct Octet {
    int segment, row, count;
};

// The segment, of [first, end), that tile `number` is in; of gate and up that of gate.
DEVICE int tile_segment(const Stream& a, int first, int end, int number) {
    const bool pair = a.result == SWIGLU;
    int i = first;
    while (i + 1 + pair < end && number >= a.segment[i + 1 + pair].tile) i += 1 + pair;
    return i;
}

// The two octets of tile `number` of segments [first, end): 16 rows of one segment, or 8 of gate and the same 8 of up.
DEVICE void tile_octets(Octet (&octet)[2], const Stream& a, int first, int end, int number) {
    const bool pair = a.result == SWIGLU;
    const int i = tile_segment(a, first, end, number);
    const int begin = (number - (int)a.segment[i].tile) * (pair ? 8 : 16), rows = (int)a.segment[i].rows;
    octet[0] = {i, (int)a.segment[i].first + begin, rows - begin};
    octet[1] = pair ? Octet{i + 1, (int)a.segment[i + 1].first + begin, rows - begin} : Octet{i, octet[0].row + 8, rows - begin - 8};
    if (octet[1].count < 1) octet[1] = {i, (int)a.segment[i].first + rows - 1, 0};
}

// A lane's part of a tile's next chunk.
struct Source {
    const u8 *code[2], *high[2], *scale;
    int next[2][3];  // from a lane's first row of an octet to its others
    int left;        // bytes of codes to the end of the rows

    // Where chunk `number` of a tile begins.
    template <int F> DEVICE void enter(const Stream& a, const Octet (&octet)[2], int number, int lane) {
        using C = Chunk<F>;
        constexpr int pieces = C::row / 16, step = 32 / pieces, more = 8 / step - 1;  // of a row; rows of the warp at once
        left = (int)a.segment[octet[0].segment].row_bytes - number * C::row;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const Segment& s = a.segment[octet[h].segment];
            const int last = maximum(octet[h].count, 1) - 1, first = minimum(lane / pieces, last), row_bytes = (int)s.row_bytes;
            code[h] = s.codes + (i64)(octet[h].row + first) * row_bytes + (number * C::row + 16 * (lane % pieces));
#pragma unroll
            for (int i = 0; i < more; ++i) next[h][i] = (minimum(step * (i + 1) + lane / pieces, last) - first) * row_bytes;
            if (F == Q6) high[h] = s.high + (i64)(octet[h].row + minimum(lane / 4, last)) * (int)s.high_bytes + (number * 64 + 16 * (lane % 4));
            if (F == Q5 && (h == 0 || lane >= 16))
                high[0] = s.high + (i64)(octet[h].row + minimum(lane / 2 % 8, last)) * (int)s.high_bytes + (number * 32 + 16 * (lane % 2));
            if (C::scale && (h == 0 || lane % 16 >= 8)) {
                const int row = octet[h].row + minimum(lane % 8, last);
                scale = F == NVFP4 ? nvfp4_scale(s, row, 4 * number + lane / 16)
                                   : s.scales + (i64)row * (int)s.scale_bytes + (number * 8 + 4 * (lane / 16));
            }
        }
    }

    // Start copying, and go on to the chunk after it.
    template <int F> DEVICE void copy(u8* stage, int lane) {
        using C = Chunk<F>;
        constexpr int pieces = C::row / 16, step = 32 / pieces, more = 8 / step - 1;
        const int row = lane / pieces;  // the pieces of rows a step on trade places alike
        u8* to = stage + row * C::row + 16 * (lane % pieces ^ C::swizzle(row));
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            copy16_once_if(to + 8 * h * C::row, code[h], 16 * (lane % pieces) < left);
#pragma unroll
            for (int i = 0; i < more; ++i) {
                const int at = (8 * h + step * (i + 1)) * C::row;
                copy16_once_if(to + at, code[h] + next[h][i], 16 * (lane % pieces) < left);
            }
            code[h] += C::row;
        }
        if constexpr (F == Q5) {
            copy16_once_if(stage + C::high_offset + 32 * (lane / 2) + 16 * (lane % 2 ^ C::high_swizzle(lane / 2)), high[0], 64 * (lane % 2) < left);
            high[0] += 32;
        }
        if constexpr (F == Q6) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                copy16_once_if(stage + C::high_offset + 64 * (8 * h + lane / 4) + 16 * (lane % 4 ^ C::high_swizzle(lane / 4)), high[h], 32 * (lane % 4) < left);
                high[h] += 64;
            }
        }
        if constexpr (F == NVFP4) {
#pragma unroll
            for (int i = 0; i < 2; ++i)
                copy4(stage + C::scale_offset + 16 * (lane % 16) + 4 * (2 * i + lane / 16), scale + 1024 * i, 32 * (2 * i + lane / 16) < left ? 4 : 0);
            scale += 2048;
        } else if constexpr (C::scale > 0) {
            copy4(stage + C::scale_offset + 8 * (lane % 16) + 4 * (lane / 16), scale, 64 * (lane / 16) < left ? 4 : 0);
            scale += 8;
        }
        left -= C::row;
    }
};

// Columns 16t .. 16t + 15 of group u of stage row `row`, as they are stored; F is not FP32.
template <int F> struct Held {
    Word4 words[F == BF16 ? 2 : 1];
    u32 more;  // what is stored beside them

    DEVICE void load(const u8* stage, int row, int u, int t) {
        using C = Chunk<F>;
        const u8 *codes = stage + row * C::row, *high = stage + C::high_offset + row * C::high;
        if constexpr (Traits<F>::nibbles) {
            const u64 both = *(const u64*)(codes + (32 * u ^ 16 * C::swizzle(row)) + 8 * t);
            words[0].x = (u32)both, words[0].y = (u32)(both >> 32);
            if (F == NVFP4) more = stage[C::scale_offset + 16 * row + 4 * u + t];
            if (F == Q5) more = *(const u16*)(high + (8 * u ^ 16 * C::high_swizzle(row)) + 2 * t);
            if (F == Q6) more = *(const u32*)(high + (16 * u ^ 16 * C::high_swizzle(row)) + 4 * t);
        } else if constexpr (F == BF16) {
#pragma unroll
            for (int j = 0; j < 2; ++j) words[j] = *(const Word4*)(codes + 16 * ((2 * t + j) ^ C::swizzle(row)));
        } else {
            words[0] = *(const Word4*)(codes + 16 * ((4 * u + t) ^ C::swizzle(row)));
        }
    }
    // The first eight of them, or the second; codes more than their values by BIAS.
    DEVICE void pairs(u32 (&p)[4], int j) const {
        const u32 w = j ? words[0].y : words[0].x;
        if constexpr (F == Q4 || F == Q5 || F == Q6) biased_pairs<F>(p, w, F == Q4 ? 0 : j ? more >> (F == Q5 ? 8 : 16) : more);
        else if constexpr (F == NVFP4) nvfp4_pairs(p, w, more);
        else if constexpr (F == BF16) bf16_pairs(p, words[j]);
        else if constexpr (F == Q8) j ? q8_pairs(p, words[0].z, words[0].w) : q8_pairs(p, words[0].x, words[0].y);
        else j ? fp8_pairs(p, words[0].z, words[0].w) : fp8_pairs(p, words[0].x, words[0].y);
    }
};

// Columns of group u that lane t multiplies, sixteen in two eights, of stage row `row`.
template <int F> DEVICE void chunk_pairs(u32 (&p)[2][4], const u8* stage, int row, int u, int t, int part) {
    using C = Chunk<F>;
    const u8* codes = stage + row * C::row;
    if constexpr (F == FP32) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const u8* piece = codes + 16 * (4 * t + 2 * j);
            const int odd = 16 * C::swizzle(row);
            fp32_pairs(p[j], (const float*)(piece + odd), (const float*)(piece + (16 ^ odd)), part);
        }
    } else if constexpr (F == Q8) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const u64 both = *(const u64*)(codes + 16 * ((4 * u + 2 * j + t / 2) ^ C::swizzle(row)) + 8 * (t & 1));
            q8_pairs(p[j], (u32)both, (u32)(both >> 32));
        }
    } else {
        Held<F> held;
        held.load(stage, row, u, t);
        held.pairs(p[0], 0), held.pairs(p[1], 1);
    }
}

// sum[n] += 16 rows of the stage times eight columns of bf16: c0, c1 of row lane/4 and columns 2*(lane%4), + 1; c2, c3 of
// row + 8. x[n]: the lane's column, at the chunk.
template <int F, int NT> DEVICE void multiply_chunk(float (&sum)[NT][4], const u8* stage, const u8* const* x, int lane) {
    using C = Chunk<F>;
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int u = 0; u < C::groups; ++u)
#pragma unroll
        for (int part = 0; part < (F == FP32 ? 2 : 1); ++part) {
            u32 r[2][4], s[2][4];
            chunk_pairs<F>(r, stage, g, u, t, part), chunk_pairs<F>(s, stage, 8 + g, u, t, part);
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const Word4 b = *(const Word4*)(x[n] + 128 * u + 32 * t + 16 * j);
                    mma(sum[n], r[j][0], s[j][0], r[j][1], s[j][1], b.x, b.y);
                    mma(sum[n], r[j][2], s[j][2], r[j][3], s[j][3], b.z, b.w);
                }
        }
}
