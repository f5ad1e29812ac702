// Stored matrices as tensor-core operands: rows go to shared memory as they are stored, codes become bf16 in registers.
//
// A warp takes 32 rows at a time (two 16-row operands) in chunks of `span` columns. Columns are handled eight at a time,
// in the order 0 4 1 5 2 6 3 7, which is how eight nibbles of a word come apart in pairs; the other operand is kept in the
// same order. Lane 4g + t holds rows g, g + 8 and columns 8t..8t+7 of every 32.
#pragma once
#include "common.cuh"

enum Format { BF16, FP32, Q4, Q5, Q6, Q8, NVFP4, FP8, FORMATS };

// Rows [first, first + rows) of a stored matrix, and where their products go.
struct Segment {
    const u8* codes;
    const u8* high;
    const u8* scales;
    const u8* divisor;
    i64 format, row_bytes, high_bytes, scale_bytes;
    i64 first, rows, columns;
    i64 vectors;  // rows start at multiples of 16 bytes
    void* out;    // [tokens, out_stride], this segment's rows from column out_first
    i64 out_first, out_stride;
    i64 tile;  // number of its first tile
};

// 16 rows of a segment from parent row `row`; rows from `count` on repeat the last one.
struct Rows16 {
    const Segment* segment;
    int row, count;
};

template <int F> struct Traits {
    static constexpr bool nibbles = F == Q4 || F == Q5 || F == Q6 || F == NVFP4;
    static constexpr int span = nibbles ? 128 : 64;  // columns of a chunk
    static constexpr int row = F == FP32 ? 256 : F == BF16 ? 128 : 64;  // bytes of a chunk's row
    static constexpr int high = F == Q5 ? 16 : F == Q6 ? 32 : 0;
    static constexpr int scale = F == NVFP4 ? 8 : F == Q4 || F == Q5 || F == Q6 || F == Q8 ? 4 : 0;
    static constexpr int group = F == Q8 ? 32 : 64;  // columns of a scale that is applied to sums
    static constexpr bool scaled = scale && F != NVFP4;
    static constexpr int element = F == FP32 ? 4 : F == BF16 ? 2 : 1;
    static constexpr int high_offset = 32 * row, scale_offset = 32 * (row + high);
    // 16-byte pieces of a row trade places so that a warp's reads meet every bank once
    DEVICE static int swizzle(int row) {
        return nibbles ? row >> 1 & 3 : F == BF16 ? (row & 1) << 2 : F == FP32 ? row & 1 : (row >> 1 & 1) << 1;
    }
};

// Call `f` with the format as a compile-time constant.
template <int F> struct Constant {
    static constexpr int value = F;
};
template <class Function> DEVICE void with_format(int format, Function f) {
    switch (format) {
        case BF16: return f(Constant<BF16>());
        case FP32: return f(Constant<FP32>());
        case Q4: return f(Constant<Q4>());
        case Q5: return f(Constant<Q5>());
        case Q6: return f(Constant<Q6>());
        case Q8: return f(Constant<Q8>());
        case NVFP4: return f(Constant<NVFP4>());
        case FP8: return f(Constant<FP8>());
    }
}

// The same where the format is `known` when compiled; or FORMATS.
template <int known, class Function> DEVICE void with_known_format(int format, Function f) {
    if constexpr (known < FORMATS) f(Constant<known>());
    else with_format(format, f);
}

DEVICE int span_of(int format) { return format >= Q4 && format <= Q6 || format == NVFP4 ? 128 : 64; }

DEVICE const u8* nvfp4_scale(const u8* scales, i64 blocks, int row, int block) {
    return scales + (((i64)(row / 128) * blocks + block) * 512 + row % 32 * 16 + row % 128 / 32 * 4);
}
DEVICE const u8* nvfp4_scale(const Segment& s, int row, int block) { return nvfp4_scale(s.scales, s.columns / 64, row, block); }

// What a row's sum is multiplied with at the end.
DEVICE float row_factor(const Segment& s, int row) {
    if (s.format == FP8) return from_bf16(((const u16*)s.scales)[row]);
    if (s.format == NVFP4) return 512.0f / *(const float*)s.divisor;
    return 1.0f;
}

// Start copying columns [k, k + span) of 32 rows into a warp's stage.
template <int F> DEVICE void load_chunk(u8* stage, const Rows16 (&tile)[2], int k, int lane) {
    using T = Traits<F>;
    constexpr int pieces = T::row / 16;
    const int begin = k / T::span * T::row;
#pragma unroll 4
    for (int i = 0; i < pieces; ++i) {
        const int row = (32 * i + lane) / pieces, piece = lane % pieces;
        const Rows16& r = tile[2 * i / pieces];
        const Segment& s = *r.segment;
        const u8* source = s.codes + (i64)(r.row + minimum(row % 16, r.count - 1)) * s.row_bytes;
        const int offset = begin + 16 * piece, valid = maximum(0, minimum(16, (int)s.row_bytes - offset));
        u8* target = stage + row * T::row + 16 * (piece ^ T::swizzle(row));
        if (T::element == 1 && F != FP8 || s.vectors) {
            copy16_once(target, valid ? source + offset : s.codes, valid);
        } else {
            for (int e = 0; e < 16; e += T::element)
                for (int b = 0; b < T::element; ++b) target[e + b] = e < valid ? source[offset + e + b] : (u8)0;
        }
    }
    if constexpr (T::high > 0) {
        constexpr int high = T::high / 16;
#pragma unroll
        for (int i = 0; i < high; ++i) {
            const int row = (32 * i + lane) / high, piece = lane % high;
            const Rows16 r = row < 16 ? tile[0] : tile[1];
            const Segment& s = *r.segment;
            const u8* source = s.high + (i64)(r.row + minimum(row % 16, r.count - 1)) * s.high_bytes;
            copy16_once(stage + T::high_offset + row * T::high + 16 * piece, source + k / 128 * T::high + 16 * piece, 16);
        }
    }
    if constexpr (T::scale > 0) {
        const Rows16 r = lane < 16 ? tile[0] : tile[1];
        const Segment& s = *r.segment;
        const int row = r.row + minimum(lane % 16, r.count - 1);
        u8* target = stage + T::scale_offset + lane * T::scale;
        if constexpr (F == NVFP4) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const bool inside = k / 64 + i < s.columns / 64;
                copy4(target + 4 * i, inside ? nvfp4_scale(s, row, k / 64 + i) : s.scales, inside ? 4 : 0);
            }
        } else {
            copy4(target, s.scales + (i64)row * s.scale_bytes + k / T::group * 2, 4);
        }
    }
}

// -- eight codes as four bf16 pairs (0,4) (1,5) (2,6) (3,7)

constexpr u32 ONE = 0x3F803F80, MINUS_ZERO = 0x80008000;

// A code below the exponent of 128 reads 128 + code; with its sign bit flipped, `bias` = 128 + half the codes more than its
// value.
template <int F> constexpr int BIAS = F == Q4 ? 136 : F == Q5 ? 144 : F == Q6 ? 160 : 0;

// The bits of codes 0 2 4 6 (odd: 1 3 5 7) above their nibbles, each on top of its own nibble, in bytes.
template <int F> DEVICE u32 spread(u32 high, int odd) {
    if constexpr (F == Q5) return (high & (odd ? 0xAA : 0x55)) * (0x410410 >> odd);  // a product puts every other one of eight in its place
    const u32 x = high >> 2 * odd & 0x3333;
    return (x * 0x101 & 0x00330033) * 0x110;
}

// Eight nibbles, and from its lowest bit on `high`, the bits above them, one after another: with BIAS.
template <int F> DEVICE void biased_pairs(u32 (&p)[4], u32 w, u32 high) {
    if constexpr (F == Q4) {
#pragma unroll
        for (int i = 0; i < 4; ++i) p[i] = and_xor(w >> 4 * i, 0x000F000F, 0x43084308);
        return;
    }
    constexpr u32 top = F == Q5 ? 0x10101010 : 0x30303030, flip = F == Q5 ? 0x10101010 : 0x20202020;
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
        const u32 codes = and_xor(w >> 4 * odd, 0x0F0F0F0F, and_xor(spread<F>(high, odd), top, flip));
        p[odd] = bytes(codes, 0x43434343, 0x4240), p[2 + odd] = bytes(codes, 0x43434343, 0x4341);
    }
}

// `high`: the bits above the eight nibbles, one after another.
template <int F> DEVICE void grouped_pairs(u32 (&p)[4], u32 w, u32 high) {
    constexpr u32 minus = F == Q4 ? 0xC308C308 : F == Q5 ? 0xC310C310 : 0xC320C320;
    biased_pairs<F>(p, w, high);
#pragma unroll
    for (int i = 0; i < 4; ++i) p[i] = fma2(p[i], ONE, minus);
}

DEVICE void q8_pairs(u32 (&p)[4], u32 a, u32 b) {
    // a byte below the exponent of 2^23 reads 2^23 + byte
    a ^= 0x80808080, b ^= 0x80808080;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        p[i] = pack(from_bits(bytes(a, 0x4B000000, 0x7440 + i)) - 8388736.0f, from_bits(bytes(b, 0x4B000000, 0x7440 + i)) - 8388736.0f);
}

DEVICE void fp8_pairs(u32 (&p)[4], u32 a, u32 b) {
    // E4M3 read as bf16 is 2^120 too small, subnormals included
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 x = bytes(a, b, 0x4000 + 0x1010 * i);
        p[i] = fma2(x & 0x80008000 | x >> 4 & 0x07F007F0, 0x7B807B80, MINUS_ZERO);
    }
}

DEVICE float e4m3(u32 code) { return from_bits((code & 0x7F) << 20) * 0x1p120f; }

// Values times scale / 512. E2M1 read as bf16 is 2^126 too small.
DEVICE void nvfp4_pairs(u32 (&p)[4], u32 w, u32 scale) {
    const float factor = e4m3(scale) * 0x1p117f;
    const u32 pair = pack(factor, factor);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 y = i < 3 ? w << (12 - 4 * i) : w;
        p[i] = fma2(y & 0x80008000 | y >> 6 & 0x01C001C0, pair, MINUS_ZERO);
    }
}

DEVICE void bf16_pairs(u32 (&p)[4], Word4 v) {
    p[0] = bytes(v.x, v.z, 0x5410), p[1] = bytes(v.x, v.z, 0x7632);
    p[2] = bytes(v.y, v.w, 0x5410), p[3] = bytes(v.y, v.w, 0x7632);
}

// Part 0 is the value rounded to bf16, part 1 what that left over.
DEVICE void fp32_pairs(u32 (&p)[4], const float* f, const float* g, int part) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        p[i] = pack(f[i], g[i]);
        if (part) p[i] = pack(f[i] - low(p[i]), g[i] - high(p[i]));
    }
}

// Columns 64u + 32j + 8t .. + 7 of a stage's row.
template <int F> DEVICE void stage_pairs(u32 (&p)[4], const u8* stage, int row, int u, int j, int t, int part) {
    using T = Traits<F>;
    const u8* codes = stage + row * T::row;
    if constexpr (T::nibbles) {
        const u32 w = *(const u32*)(codes + 16 * ((2 * u + j) ^ T::swizzle(row)) + 4 * t);
        if constexpr (F == NVFP4) {
            nvfp4_pairs(p, w, stage[T::scale_offset + 8 * row + 4 * u + 2 * j + t / 2]);
        } else {
            const u8* high = stage + T::high_offset + row * T::high;
            const u32 bits = F == Q5 ? high[8 * u + 4 * j + t] : F == Q6 ? *(const u16*)(high + 16 * u + 8 * j + 2 * t) : 0;
            grouped_pairs<F>(p, w, bits);
        }
    } else if constexpr (F == BF16) {
        bf16_pairs(p, *(const Word4*)(codes + 16 * ((4 * j + t) ^ T::swizzle(row))));
    } else if constexpr (F == FP32) {
        const int piece = 8 * j + 2 * t;
        fp32_pairs(p, (const float*)(codes + 16 * (piece ^ T::swizzle(row))), (const float*)(codes + 16 * ((piece + 1) ^ T::swizzle(row))), part);
    } else {
        const u64 both = *(const u64*)(codes + 16 * ((2 * j + t / 2) ^ T::swizzle(row)) + 8 * (t & 1));
        if constexpr (F == Q8) q8_pairs(p, (u32)both, (u32)(both >> 32));
        else fp8_pairs(p, (u32)both, (u32)(both >> 32));
    }
}

// sums[half][n] += 16 rows x 64 columns of the stage times columns 8n..8n+7 of x. `x` is the unit's first byte in column 0;
// columns are `stride` bytes apart, and those from `columns` on read as zero.
template <int F, int NT>
DEVICE void multiply_unit(float (&sums)[2][NT][4], const u8* stage, int u, const u8* x, int stride, int columns, int lane) {
    using T = Traits<F>;
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int part = 0; part < (F == FP32 ? 2 : 1); ++part) {
        u32 w[2][2][2][4];
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int j = 0; j < 2; ++j)
#pragma unroll
                for (int i = 0; i < 2; ++i) stage_pairs<F>(w[half][j][i], stage, 16 * half + 8 * i + g, u, j, t, part);
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            Word4 b[2] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
            if (8 * n + g < columns) {
                const u8* p = x + (8 * n + g) * stride + 16 * t;
                b[0] = *(const Word4*)p, b[1] = *(const Word4*)(p + 64);
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float own[4] = {0, 0, 0, 0};
                float(&c)[4] = T::scaled ? own : sums[half][n];
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const u32(&r)[4] = w[half][j][0], (&s)[4] = w[half][j][1];
                    mma(c, r[0], s[0], r[1], s[1], b[j].x, b[j].y);
                    mma(c, r[2], s[2], r[3], s[3], b[j].z, b[j].w);
                    if (T::scaled && (T::group == 32 || j == 1)) {
                        const u8* scale = stage + T::scale_offset + 4 * (16 * half + g) + 2 * (T::group == 32 ? j : u);
                        const float upper = from_half(*(const u16*)scale), lower = from_half(*(const u16*)(scale + 32));
                        sums[half][n][0] += upper * c[0], sums[half][n][1] += upper * c[1];
                        sums[half][n][2] += lower * c[2], sums[half][n][3] += lower * c[3];
                        c[0] = c[1] = c[2] = c[3] = 0;
                    }
                }
            }
        }
    }
}

// -- without a stage

// Columns k..k+7 of a row, exactly; zero beyond the last column. k is a multiple of 8.
template <int F> DEVICE void decode8(float (&f)[8], const Segment& s, int row, int k) {
    const u8* codes = s.codes + (i64)row * s.row_bytes;
    u32 p[4];
    float factor = 1.0f;
    if constexpr (F == BF16) {
        unpack8(f, load8((const u16*)codes, k, (int)s.columns, s.vectors));
    } else if constexpr (F == FP32) {
#pragma unroll
        for (int i = 0; i < 8; ++i) f[i] = k + i < s.columns ? ((const float*)codes)[k + i] : 0.0f;
    } else if constexpr (F == NVFP4) {
        nvfp4_pairs(p, *(const u32*)(codes + k / 2), nvfp4_scale(s, row, k / 64)[k % 64 / 16]);
        factor = row_factor(s, row);
    } else if constexpr (F == FP8) {
        u32 a = 0, b = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (k + i < s.columns) a |= (u32)codes[k + i] << 8 * i;
            if (k + 4 + i < s.columns) b |= (u32)codes[k + 4 + i] << 8 * i;
        }
        fp8_pairs(p, a, b);
        factor = row_factor(s, row);
    } else {
        factor = from_half(*(const u16*)(s.scales + (i64)row * s.scale_bytes + k / Traits<F>::group * 2));
        if constexpr (F == Q8) {
            const u64 both = *(const u64*)(codes + k);
            q8_pairs(p, (u32)both, (u32)(both >> 32));
        } else {
            const u8* high = s.high + (i64)row * s.high_bytes;
            const u32 bits = F == Q5 ? high[k / 8] : F == Q6 ? *(const u16*)(high + k / 4) : 0;
            grouped_pairs<F>(p, *(const u32*)(codes + k / 2), bits);
        }
    }
    if constexpr (F != BF16 && F != FP32) {
#pragma unroll
        for (int i = 0; i < 4; ++i) f[i] = low(p[i]) * factor, f[i + 4] = high(p[i]) * factor;
    }
}
