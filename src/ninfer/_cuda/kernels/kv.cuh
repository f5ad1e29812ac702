// Pages of cached keys and values in shared memory, as operands of matrix instructions.
//
// A page holds 64 ordinals of one key head.
#pragma once
#include "tiles.cuh"

constexpr int PAGE = 64, SCALED = 64, WARPS = 4;  // ordinals of a page; features that share a scale; warps of a block

// int8 codes: the fp16 scale of features of which `top` is the largest magnitude, what it divides by, and a code.
DEVICE u16 scale_of(float top) { return to_half(fminf(top / 127.0f, 65504.0f)); }
DEVICE float inverse_of(float scale) { return scale == 0.0f ? 0.0f : 1.0f / scale; }
DEVICE u8 code_of(float v, float inverse) { return (u8)(int)fminf(fmaxf(rintf(v * inverse), -127.0f), 127.0f); }

// A page of whole rows of PIECES pieces, one after another at src; zero from row `valid` on. place(row, p): where they go.
template <int PIECES, class Place> DEVICE void load_page(const u8* src, int valid, Place place) {
    // the threads take STEP rows at a time; after KINDS steps their places are those before, 8 rows or more further on
    constexpr int THREADS = 32 * WARPS, STEP = THREADS / PIECES, KINDS = STEP < 8 ? 8 / STEP : 1;
    const int t = here(thread()), row = t / PIECES;
    u8* to[KINDS];
#pragma unroll
    for (int i = 0; i < KINDS; ++i) to[i] = place(row + STEP * i, t % PIECES);
#pragma unroll
    for (int i = 0; i < PAGE / STEP; ++i)
        copy16(to[i % KINDS] + i / KINDS * KINDS * THREADS * 16, src + 16 * (t + i * THREADS), row + STEP * i < valid ? 16 : 0);
}

// bf16: fragments come as whole 8 x 8 tiles.
template <int HD> struct Bf16Plane {
    static constexpr bool SCALES = false;
    static constexpr int BYTES = PAGE * 2 * HD;

    // The page that begins at row `place` of hd features of the plane; zero beyond hd and from row `valid` on.
    static DEVICE void load(u8* tile, const void* plane, const u16*, i64 place, int hd, int valid) {
        const u16* src = (const u16*)plane + place * hd;
        if (hd == HD) return load_page<HD / 8>((const u8*)src, valid, [&](int row, int p) { return piece<HD>(tile, row, p & ~1, p & 1); });
        for (int i = thread(); i < PAGE * HD; i += threads()) {
            const int row = i / HD, d = i % HD;
            ((u16*)piece<HD>(tile, row, d / 8 & ~1, d / 8 & 1))[d % 8] = row < valid && d < hd ? src[row * hd + d] : (u16)0;
        }
    }

    // Eight query features as the keys' fragments want them: in order.
    static DEVICE void put_query(u8* tile, int row, int p, Word4 v) { *(Word4*)piece<HD>(tile, row, p & ~1, p & 1) = v; }

    // Keys row .. row + 15 at features 16k .. 16k + 15: r[0], r[1] the first eight keys, r[2], r[3] the others.
    static DEVICE void keys(u32 (&r)[4], u8* tile, int row, int k, int lane) {
        load_right_rows<HD>(r, tile, row, k, lane);
    }

    // Values of ordinals row .. row + 15, columns 2n (r[0], r[1]) and 2n + 1 of eight features each.
    static DEVICE void values(u32 (&r)[4], u8* tile, int row, int n, int lane) {
        load_right<HD>(r, tile, row, n, lane);
    }

    // The feature of column `column` of eight-column tile n.
    static DEVICE int feature(int n, int column) { return 8 * n + column; }
};

// int8: lanes read four codes at a time and widen them, so features come in an order of their own. The scales of the
// page, [PAGE, groups] fp16, follow the codes.
template <int HD> struct Int8Plane {
    static constexpr bool SCALES = true;
    static constexpr int CODES = PAGE * HD, BYTES = CODES + PAGE * HD / SCALED * 2;

    static DEVICE u8* place(u8* tile, int row, int p) { return tile + row * HD + (p ^ row & (HD < 128 ? 3 : 7)) * 16; }

    static DEVICE void load(u8* tile, const void* plane, const u16* scales, i64 begin, int hd, int valid) {
        const u8* src = (const u8*)plane + begin * hd;
        if (hd == HD) load_page<HD / 16>(src, valid, [&](int row, int p) { return place(tile, row, p); });
        else
            for (int i = thread(); i < PAGE * HD; i += threads()) {
                const int row = i / HD, d = i % HD;
                place(tile, row, d / 16)[d % 16] = row < valid && d < hd ? src[row * hd + d] : (u8)0;
            }
        const int groups = (hd + SCALED - 1) / SCALED, bytes = valid * groups * 2;
        const u8* from = (const u8*)(scales + begin * groups);
        for (int i = thread(); i < PAGE * groups * 2 / 16; i += threads())
            copy16(tile + CODES + 16 * i, from + 16 * i, maximum(0, minimum(16, bytes - 16 * i)));
    }

    static DEVICE float scale(const u8* tile, int groups, int row, int group) {
        return from_half(((const u16*)(tile + CODES))[row * groups + group]);
    }

    // A lane's four consecutive features are elements 2t, 2t + 1, 2t + 8 and 2t + 9 of a fragment.
    static DEVICE void put_query(u8* tile, int row, int p, Word4 v) {
        u32 *low = (u32*)(piece<HD>(tile, row, p & ~1, 0) + p % 2 * 8), *high = (u32*)(piece<HD>(tile, row, p & ~1, 1) + p % 2 * 8);
        low[0] = v.x, low[1] = v.z, high[0] = v.y, high[1] = v.w;
    }

    static DEVICE void keys(u32 (&r)[4], u8* tile, int row, int k, int lane) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 codes = *(const u32*)(place(tile, row + 8 * i + lane / 4, k) + lane % 4 * 4);
            r[2 * i] = widen(bytes(codes, 0, 0x4140)), r[2 * i + 1] = widen(bytes(codes, 0, 0x4342));
        }
    }

    // A tile's column is every fourth feature of 32: a lane's word has its column of four tiles.
    static DEVICE void values(u32 (&r)[4], u8* tile, int row, int n, int lane) {
        const int p = n / 2 * 2 + lane / 16, at = lane / 4 % 4 * 4;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int first = row + 8 * i + lane % 4 * 2;
            const u32 even = *(const u32*)(place(tile, first, p) + at), odd = *(const u32*)(place(tile, first + 1, p) + at);
            r[i] = widen(bytes(even, odd, n % 2 ? 0x0602 : 0x0400)), r[2 + i] = widen(bytes(even, odd, n % 2 ? 0x0703 : 0x0501));
        }
    }

    static DEVICE int feature(int n, int column) { return 32 * (n / 4) + 4 * column + n % 4; }

    // The whole page as a tile of bf16, by the threads together.
    static DEVICE void widen_page(u8* tile, u8* page, int groups) {
#pragma unroll 2
        for (int i = here(thread()); i < PAGE * HD / 16; i += 32 * WARPS) {
            const int row = i / (HD / 16), p = i % (HD / 16);
            const Word4 codes = *(const Word4*)place(page, row, p);
            const float s = p / 4 < groups ? scale(page, groups, row, p / 4) : 0.0f;
            const u32 high = pack(s, s), low = pack(s - from_bf16((u16)high), s - from_bf16((u16)high));
            auto scaled = [&](u32 word, u32 selector) {
                const u32 pair = widen(bytes(word, 0, selector));
                return fma2(pair, high, fma2(pair, low, 0));
            };
            *(Word4*)piece<HD>(tile, row, 2 * p, 0) = {scaled(codes.x, 0x4140), scaled(codes.x, 0x4342), scaled(codes.y, 0x4140), scaled(codes.y, 0x4342)};
            *(Word4*)piece<HD>(tile, row, 2 * p, 1) = {scaled(codes.z, 0x4140), scaled(codes.z, 0x4342), scaled(codes.w, 0x4140), scaled(codes.w, 0x4342)};
        }
    }

    // Codes in the low bytes of two halves as bf16: 128 + the low seven bits, less 128, or 256 where the sign is set.
    static DEVICE u32 widen(u32 pair) {
        return fma2((pair & 0x00800080u) | 0x43004300u, 0xBF80BF80u, (pair & 0x007F007Fu) | 0x43004300u);
    }
};
