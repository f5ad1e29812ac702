// Sums of products of 17 to 128 columns become results: 16 rows and 32 columns at a time, a slab. Where several blocks have
// parts of a tile, each adds up some of its slabs.
#pragma once
#include "sums.cuh"

// Where a warp's sums of a tile lie while they become results: 32 columns of 16 rows.
DEVICE float* place(float* room, int row, int column) { return room + 16 * column + 4 * (row / 4 ^ column / 2 & 3) + row % 4; }

DEVICE void put_result(const Stream& a, void* out, i64 at, float v, int column) {
    if (a.result == STORE_F32) {
        ((float*)out)[at] = v;
        return;
    }
    u16* p = (u16*)out + at;
    *p = to_bf16(a.result == ADD ? from_bf16(*p) + (a.scale ? a.scale[column] : 1.0f) * v : v);
}

// Eight features of a column, normed but for its length, to which they add their squares.
DEVICE Word4 normed_later(Word4 v, Word4 norm, float& square) {
    float f[8], w[8];
    unpack8(f, v), unpack8(w, norm);
#pragma unroll
    for (int i = 0; i < 8; ++i) square += f[i] * f[i], f[i] *= 1.0f + w[i];
    return {pack(f[0], f[1]), pack(f[2], f[3]), pack(f[4], f[5]), pack(f[6], f[7])};
}

// Leave features f .. f + 7 of a column, f a multiple of 8, in panels of `room` columns.
DEVICE void leave8(u8* panels, Word4 v, int f, int column, int room) {
    u32* to = (u32*)panels + panel_place(f, column, room) / 2;
    v = operand_order(v);
    to[0] = v.x, to[4 * room] = v.y, to[8 * room] = v.z, to[12 * room] = v.w;
}

// What is left to multiply the sums of columns by: where the product before this one left them, their norm's factor. `factors` are
// shared by the block.
template <int N8> DEVICE void put_factors(const Stream& a, float* factors) {
    constexpr int at_once = 5;
    const int warp = from_lane(thread() / 32, 0), lane = thread() % 32, tiles = (int)a.K / 16;
#pragma unroll 1
    for (int four = warp; four < 2 * N8; four += threads() / 32) {
        float square[4] = {};
        const float* squares = a.sums + 4 * four * tiles;
        if (a.sums && 4 * four < a.columns)
#pragma unroll 1
            for (int tile = lane; tile < tiles; tile += 32 * at_once) {
                float v[at_once][4] = {};
#pragma unroll
                for (int i = 0; i < at_once; ++i)
                    if (tile + 32 * i < tiles) load4(v[i], squares + 4 * (tile + 32 * i));
#pragma unroll
                for (int i = 0; i < at_once; ++i)
#pragma unroll
                    for (int j = 0; j < 4; ++j) square[j] += v[i][j];
            }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            square[j] = sum_warp(square[j]);
            const float root = inverse_root(square[j] * reciprocal((float)a.K) + (float)a.eps);
            if (lane == j) factors[4 * four + j] = a.sums ? root : 1.0f;
        }
    }
}

// Where products of 16 rows and 32 columns from `begin` on belong, and what is there: asked for before the products are known.
struct Slab {
    u16* out;  // of this lane's column, at the first row
    i64 first, stride;
    int begin, left, count, rows;
    bool pair, vectors;
    float upper, lower, scale;  // factors of rows lane/4 and lane/4 + 8, and what ADD multiplies with
    Word4 old[2], norm[2];      // by eight rows

    DEVICE Slab(const Stream& a, const Octet (&octet)[2], int begin, int lane) : begin(begin) {
        const Segment& s = a.segment[octet[0].segment];
        const int g = lane / 4, size = a.result == STORE_F32 ? 4 : 2;
        pair = a.result == SWIGLU, count = octet[0].count, rows = pair ? 8 : 16, left = minimum(32, (int)a.columns - begin);
        upper = row_factor(s, octet[0].row + minimum(g, count - 1));
        lower = row_factor(a.segment[octet[1].segment], octet[1].row + minimum(g, maximum(octet[1].count, 1) - 1));
        first = s.out_first + octet[0].row - s.first, stride = s.out_stride;
        vectors = count >= rows && ((u64)s.out + first * size) % 16 == 0 && stride * size % 16 == 0;
        out = (u16*)s.out;
        if (!vectors || lane >= left) return;
        out = (u16*)((u8*)out + ((begin + lane) * stride + first) * size);
        scale = a.scale ? a.scale[begin + lane] : 1.0f;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (8 * i >= rows) continue;
            if (a.result == ADD) old[i] = ((const Word4*)out)[i];
            if (a.left.norm) norm[i] = ((const Word4*)(a.left.norm + first))[i];
        }
    }

    // Put them there, by way of 2 KB of shared memory that are this warp's own.
    template <int N8> DEVICE void finish(const Stream& a, const float (&sums)[N8][4], int panel, const float* factors, float* room, int lane) const {
        const int g = lane / 4, t = lane % 4;
        sync_warp();
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float factor = factors[begin + 8 * n + 2 * t + i];
                *place(room, g, 8 * n + 2 * t + i) = factor * upper * sums[n][i];
                *place(room, 8 + g, 8 * n + 2 * t + i) = factor * lower * sums[n][2 + i];
            }
        sync_warp();
        if (!vectors) {
#pragma unroll 1
            for (int column = lane / 16; column < left; column += 2) {
                const int row = lane % 16;
                float v = *place(room, row, column);
                if (pair) v = silu(v) * *place(room, row + 8 & 15, column);
                if (row < minimum(rows, count)) put_result(a, out, (begin + column) * stride + first + row, v, begin + column);
            }
        } else if (lane < left) {
            float square = 0;
#pragma unroll
            for (int row = 0; row < 16; row += 8) {
                if (row >= rows) continue;
                float f[2][4], w[2][4];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    load4(f[i], place(room, row + 4 * i, lane));
                    if (!pair) continue;
                    load4(w[i], place(room, 8 + 4 * i, lane));
#pragma unroll
                    for (int j = 0; j < 4; ++j) f[i][j] = silu(f[i][j]) * w[i][j];
                }
                if (a.result == STORE_F32) {
                    store4((float*)out + row, f[0]), store4((float*)out + row + 4, f[1]);
                    continue;
                }
                if (a.result == ADD) {
                    float was[8];
                    unpack8(was, old[row / 8]);
#pragma unroll
                    for (int j = 0; j < 8; ++j) f[j / 4][j % 4] = was[j] + scale * f[j / 4][j % 4];
                }
                Word4 all = {pack(f[0][0], f[0][1]), pack(f[0][2], f[0][3]), pack(f[1][0], f[1][1]), pack(f[1][2], f[1][3])};
                *(Word4*)(out + row) = all;
                if (!a.left.panels) continue;
                if (a.left.norm) all = normed_later(all, norm[row / 8], square);
                leave8(a.left.panels, all, (int)first + row, begin + lane, panel);
            }
            if (a.left.norm) a.left.squares[(begin + lane) / 4 * (stride / 4) + first / 4 + lane % 4] = square;
        }
    }
};

// 16 rows whose products several blocks have parts of. Each block adds up some slabs of them, once all parts are there; if
// they do not come in time, because their blocks have no place yet, it leaves its slab to the last block that comes. A word
// counts the parts, and by 256 the slabs that are done, and has bit 16 + i for slab i left.
struct Shared {
    int *word, parts;
    static constexpr int patience = 100;  // looks, of at least half a microsecond

    // This warp's part is stored. The slabs that are left to it.
    DEVICE int arrive(int lane) const {
        sync_warp();
        int before = 0;
        if (lane == 0) fence(), before = atomic_add(word, 1);
        before = from_lane(before, 0);
        return (before & 255) == parts - 1 ? before >> 16 : 0;
    }
    // True when all parts are there, false where the slab is left to another.
    DEVICE bool wait(int slab, int lane) const {
        int seen = parts;
        if (lane == 0) {
            for (int looks = 0; looks < patience; ++looks)
                if (seen = load_fresh(word) & 255, seen >= parts) break;
            if (seen < parts) seen = atomic_add(word, 65536 << slab) & 255;
        }
        seen = from_lane(seen, 0);
        after(lane);
        return seen >= parts;
    }
    // What is read from here on is what all parts are.
    DEVICE void after(int lane) const {
        if (lane == 0) fence();
        sync_warp();
    }
    // A slab of `all` is done.
    DEVICE void done(int all, int lane) const {
        if (lane == 0 && (atomic_add(word, 256) >> 8 & 255) == all - 1) *word = 0;
    }
};
