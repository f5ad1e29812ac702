// Tiles of 16 rows: which blocks and warps work on them, their sums, and what becomes of these.
#pragma once
#include "chunks.cuh"

// a / b for 0 <= a < 2^23, b > 0; the hardware has no division of integers.
DEVICE int quotient(int a, int b) {
    int q = (int)((float)a * reciprocal((float)b));
    if (q * b > a) --q;
    if ((q + 1) * b <= a) ++q;
    return q;
}

// Runs of `length` things, the first `longer` of them one longer.
struct Runs {
    int length, longer;
    DEVICE int begin(int run) const { return run * length + minimum(run, longer); }
    DEVICE int holder(int i) const {
        const int edge = longer * (length + 1);
        return i < edge ? quotient(i, length + 1) : longer + quotient(i - edge, maximum(length, 1));
    }
    // Which of how many runs that meet things [first, first + count) `run` is.
    DEVICE void share(int first, int count, int run, int& part, int& parts) const {
        const int begins = holder(first);
        part = run - begins, parts = holder(first + count - 1) - begins + 1;
    }
};

// A lane's sums of 16 rows and 8 NT columns: v[n] of row lane/4 and columns 8n + 2*(lane%4), + 1, then of row + 8.
template <int NT> struct Sums {
    float v[NT][4];
    DEVICE void zero() {
#pragma unroll
        for (int n = 0; n < NT; ++n) v[n][0] = v[n][1] = v[n][2] = v[n][3] = 0;
    }
    // [NT][32]
    DEVICE void store(Float4* to, int lane) const {
#pragma unroll
        for (int n = 0; n < NT; ++n) to[32 * n + lane] = {v[n][0], v[n][1], v[n][2], v[n][3]};
    }
    DEVICE void add(int n, Float4 f) { v[n][0] += f.x, v[n][1] += f.y, v[n][2] += f.z, v[n][3] += f.w; }
};

// True for the last of the `parts` that share in a tile to come, each with its part stored; it sees all of them.
DEVICE bool comes_last(int* ticket, int parts, int lane) {
    fence();
    sync_warp();
    const int arrived = lane == 0 ? atomic_add(ticket, 1) : 0;
    if (from_lane(arrived, 0) < parts - 1) return false;
    fence();
    if (lane == 0) *ticket = 0;
    return true;
}

// A block's sums of a tile are done: where other blocks share in it, true for the last of them, with the sums of all.
template <int NT> DEVICE bool add_parts(const Stream& a, Sums<NT>& sums, int ticket, int part, int parts, int lane) {
    if (parts == 1) return true;
    Float4* partial = (Float4*)a.partial + (i64)ticket * a.parts * (NT * 32);
    sums.store(partial + part * NT * 32, lane);
    if (!comes_last(a.tickets + ticket, parts, lane)) return false;
    sums.zero();
    constexpr int at_once = NT < 4 ? 4 : 1;
#pragma unroll at_once
    for (int i = 0; i < parts; ++i)
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            float f[4];
            load_fresh(f, (const float*)(partial + (i * NT + n) * 32 + lane));
            sums.add(n, {f[0], f[1], f[2], f[3]});
        }
    return true;
}

// A lane's places in a tile: what its rows are multiplied by, and what they hold where a product is added to it. Sums over
// codes are of columns 4 apart, IT times 4 of them (see codes.cuh).
template <int NT> struct Known {
    float factor[2];        // of row lane/4, and of row + 8
    u16 now[NT][2][2];      // [column][row]

    // In shared memory: [8] factors, then [NT][32] values.
    static constexpr int factors = 8 * sizeof(Float2);
    DEVICE void store(u8* to, int lane, bool adds) const {
        if (lane % 4 == 0) ((Float2*)to)[lane / 4] = {factor[0], factor[1]};
        if (!adds) return;
#pragma unroll
        for (int n = 0; n < NT; ++n)
            ((u64*)(to + factors))[32 * n + lane] = now[n][0][0] | (u64)now[n][0][1] << 16 | (u64)now[n][1][0] << 32 | (u64)now[n][1][1] << 48;
    }
    DEVICE void load(const u8* from, int lane, bool adds) {
        const Float2 f = ((const Float2*)from)[lane / 4];
        factor[0] = f.x, factor[1] = f.y;
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            const u64 v = adds ? ((const u64*)(from + factors))[32 * n + lane] : 0;
#pragma unroll
            for (int i = 0; i < 4; ++i) now[n][i / 2][i % 2] = (u16)(v >> 16 * i);
        }
    }
};

template <int NT, bool coded, int IT, class Of> DEVICE void each_column(const Stream& a, int lane, Of of) {
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int column = 8 * n + (coded ? lane % 4 + 4 * i : lane % 4 * 2 + i);
            if (!(coded && 2 * n + i >= IT) && column < a.columns) of(n, i, column);
        }
}

// Where row lane/4 of an octet is in a column of its result.
DEVICE i64 place(const Segment& s, const Octet& octet, int column, int lane) { return column * s.out_stride + s.out_first + (octet.row + lane / 4 - s.first); }

template <int NT, bool coded, int IT> DEVICE Known<NT> know_tile(const Stream& a, const Octet (&octet)[2], int lane) {
    const int g = lane / 4;
    Known<NT> known = {};
#pragma unroll
    for (int h = 0; h < 2; ++h) known.factor[h] = row_factor(a.segment[octet[h].segment], octet[h].row + minimum(g, maximum(octet[h].count, 1) - 1));
    if (a.result != ADD) return known;
    const Segment& s = a.segment[octet[0].segment];
    each_column<NT, coded, IT>(a, lane, [&](int n, int i, int column) {
#pragma unroll
        for (int h = 0; h < 2; ++h)
            if (g < octet[h].count) known.now[n][i][h] = ((const u16*)s.out)[place(s, octet[h], column, lane)];
    });
    return known;
}

// Put the sums of a tile, times the factors of its columns, where they belong.
template <int NT, bool coded, int IT, class Factor>
DEVICE void finish_tile(const Stream& a, const Octet (&octet)[2], const Sums<NT>& sums, const Known<NT>& known, int lane, Factor factor) {
    const int halves = a.result == SWIGLU ? 1 : 2;
    const Segment& s = a.segment[octet[0].segment];
    each_column<NT, coded, IT>(a, lane, [&](int n, int i, int column) {
        const float of_column = factor(column);
        float sum[2] = {of_column * known.factor[0] * sums.v[n][i], of_column * known.factor[1] * sums.v[n][2 + i]};
        if (a.result == SWIGLU) sum[0] = silu(sum[0]) * sum[1];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (h >= halves || lane / 4 >= octet[h].count) continue;
            const i64 at = place(s, octet[h], column, lane);
            if (a.result == STORE_F32) ((float*)s.out)[at] = sum[h];
            else ((u16*)s.out)[at] = to_bf16(a.result == ADD ? from_bf16(known.now[n][i][h]) + (a.scale ? a.scale[column] : 1.0f) * sum[h] : sum[h]);
        }
    });
}
