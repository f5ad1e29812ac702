// Up to 16 columns in shared memory, as the products of a format meet them.
#pragma once
#include "codes.cuh"
#include "flow.cuh"

// A block's columns [begin, begin + size) in shared memory, as its format meets them.
struct Columns {
    u8* x;         // [columns][stride] bf16, or high and low bytes in turn
    float* power;  // [columns][size / 64], of high and low bytes
    int begin, size, stride;
    bool coded;
    float factor;
};

// One column of K elements, a multiple of 8, times 1 + norm. The norm's own factor is left to the end: squares[warp] add up
// to its square.
struct Column {
    const u16 *x, *norm;
    int K, k, end;
    Word4 v, w;

    DEVICE Column(const Stream& a, const Columns& c) : x(a.x), norm(a.norm), K((int)a.K) {
        k = (norm ? 0 : c.begin) + 8 * thread(), end = norm ? maximum(K, c.begin + c.size) : c.begin + c.size;
    }

    DEVICE void ask() {
        v = w = {0, 0, 0, 0};
        if (k >= K) return;
        v = *(const Word4*)(x + k);
        if (norm) w = *(const Word4*)(norm + k);
    }

    // A thread's eights one after another: code that is run once takes as long to arrive as to run.
    DEVICE void put(const Columns& c, float* squares) {
        float square = 0;
#pragma unroll 1
        for (bool more = true; more;) {
            const Word4 u = v, n = w;
            const int at = k - c.begin;
            k += 8 * threads();
            more = k - 8 * thread() < end;
            if (more) ask();
            put8(c, at, u, n, square);
        }
        square = sum_warp(square);
        if (thread() % 32 == 0) squares[thread() / 32] = square;
    }

    DEVICE static void put8(const Columns& c, int at, Word4 v, Word4 w, float& square) {
        const bool inside = at >= 0 && at < c.size;
        float f[8], g[8];
        unpack8(f, v), unpack8(g, w);
#pragma unroll
        for (int i = 0; i < 8; ++i) square += f[i] * f[i], f[i] *= 1.0f + g[i];
        v = {pack(f[0], f[1]), pack(f[2], f[3]), pack(f[4], f[5]), pack(f[6], f[7])};
        if (!c.coded) {
            if (inside) *(Word4*)(c.x + 2 * at) = operand_order(v);
            return;
        }
        unpack8(f, v);
        u64 high, low;
        float scale;
        fix8(high, low, scale, f);
        if (inside) {
            *(u64*)(c.x + at) = high, *(u64*)(c.x + c.stride + at) = low;
            if (at % 64 == 0) c.power[at / 64] = c.factor * scale;
        }
    }
};

// Several columns, made ready before: ask for them, and, when they are there, add their powers of two.
DEVICE void ask_columns(const Stream& a, const Columns& c) {
    const int columns = (int)a.columns, padded = ((int)a.K + 127) / 128 * 128;
    const int rows = c.coded ? 2 * columns : columns, element = c.coded ? 1 : 2;
    const u8* from = c.coded ? a.codes : (const u8*)a.x;
#pragma unroll 1
    for (int row = 0; row < rows; ++row)
#pragma unroll 4
        for (int i = 16 * thread(); i < c.size * element; i += 16 * threads())
            copy16_if(c.x + row * c.stride + i, from + ((i64)row * padded + c.begin) * element + i, c.begin + i / element < padded);
    copies_commit();
}

DEVICE void put_powers(const Stream& a, const Columns& c) {
    const int columns = (int)a.columns, padded = ((int)a.K + 127) / 128 * 128, groups = c.size / 64;
#pragma unroll 1
    for (int column = thread() / 32; column < columns; column += threads() / 32)
        for (int i = thread() % 32; i < groups; i += 32)
            c.power[column * groups + i] = c.begin + 64 * i < padded ? c.factor * a.sums[column * (padded / 64) + c.begin / 64 + i] : 0.0f;
}

// A block's columns, of one format's product, at the start of its shared memory.
template <int F> DEVICE Columns columns_at(u8* shared, const Share& s, int columns) {
    constexpr bool coded = is_coded(F);
    const int stride = coded ? s.size + 64 : 2 * s.size + 80;  // so that the columns of a product meet every bank once
    const int nbytes = (columns * (coded ? 2 * stride : stride) + 127) / 128 * 128;
    return {shared, (float*)(shared + nbytes), s.begin, s.size, stride, coded, code_factor(F)};
}

// 1 / the norm of the one column, or 1.
DEVICE float norm_factor(const Stream& a, const float* squares, int warps) {
    if (!a.norm) return 1.0f;
    float sum = 0;
    for (int w = 0; w < warps; ++w) sum += squares[w];
    return inverse_root(sum * reciprocal((float)a.K) + (float)a.eps);
}
