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

// How `rows` are dealt out: a warp has part `part` of every `step`-th row from `row`, of `parts` parts, whose vectors of 16
// bytes its lanes take in turn.
struct Deal {
    int parts, part, row, step;
    DEVICE explicit Deal(int rows) {
        const int warps = threads() / 32, warp = from_lane(thread() / 32, 0);
        parts = parts_of(rows), step = quotient(warps, parts);
        row = quotient(warp, parts), part = warp - row * parts;
        if (row >= step) row = rows;  // no part is left for it
    }
    static DEVICE int parts_of(int rows) { return maximum(1, quotient(threads() / 32, rows)); }
    DEVICE int first() const { return 16 * (part * 32 + thread() % 32); }
    DEVICE int stride() const { return 16 * 32 * parts; }
};

// Several columns: ask for them, as they are made ready, or, where there are no `sums`, as they are.
DEVICE void ask_columns(const Stream& a, const Columns& c) {
    const int columns = (int)a.columns, K = (int)a.K, padded = a.sums ? (K + 127) / 128 * 128 : K;
    const int rows = c.coded ? 2 * columns : columns, element = c.coded ? 1 : 2, inside = minimum(c.size, padded - c.begin) * element;
    const u8* from = (c.coded ? a.codes : (const u8*)a.x) + c.begin * element;
    const Deal deal(rows);
#pragma unroll 1
    for (int row = deal.row; row < rows; row += deal.step)
#pragma unroll 4
        for (int i = deal.first(); i < c.size * element; i += deal.stride())
            copy16_if(c.x + row * c.stride + i, from + (i64)row * padded * element + i, i < inside);
    copies_commit();
}

// The norm of columns that come as they are, while it is needed: in the last stage of every warp, which chunks reach last.
template <int F> struct Norm {
    static constexpr int bytes = Chunk<F>::bytes;
    const u16* from;  // or null
    u8* rings;
    int stages, K;

    DEVICE u8* at(int k) const { return rings + (2 * k / bytes * stages + stages - 1) * bytes + 2 * k % bytes; }
    DEVICE void ask() const {
        if (!from) return;
#pragma unroll 1
        for (int k = 8 * thread(); k < K; k += 8 * threads()) copy16_if(at(k), from + k, true);
    }
};

// Columns that came as they were, in operand order; where they are normed, times what is added to one in the norm, and the
// block has the whole of them: what their length divides by is left to the end. squares: of a row's parts, max(warps, rows)
// floats. A thread sees what it asked for alone, so the norm must have been waited for by all.
template <int F> DEVICE void put_columns(const Stream& a, const Columns& c, const Norm<F>& norm, float* squares) {
    const int columns = (int)a.columns;
    const Deal deal(columns);
#pragma unroll 1
    for (int row = deal.row; row < columns; row += deal.step) {
        u16* own = (u16*)(c.x + row * c.stride);
        float square = 0;
#pragma unroll 2
        for (int i = deal.first(); i < 2 * c.size; i += deal.stride()) {
            Word4 v = *(const Word4*)(own + i / 2);
            if (norm.from) {
                float f[8], w[8];
                unpack8(f, v);
                unpack8(w, i < 2 * norm.K ? *(const Word4*)norm.at(i / 2) : Word4{0, 0, 0, 0});
#pragma unroll
                for (int j = 0; j < 8; ++j) square += f[j] * f[j], f[j] *= 1.0f + w[j];
                v = {pack(f[0], f[1]), pack(f[2], f[3]), pack(f[4], f[5]), pack(f[6], f[7])};
            }
            *(Word4*)(own + i / 2) = operand_order(v);
        }
        if (!norm.from) continue;
        square = sum_warp(square);
        if (thread() % 32 == 0) squares[row * deal.parts + deal.part] = square;
    }
}

// What is left to multiply a column's sums by: of one that put_columns has normed.
DEVICE float column_factor(const Stream& a, const float* squares, int column) {
    const int parts = Deal::parts_of((int)a.columns);
    float square = 0;
#pragma unroll 4
    for (int i = 0; i < parts; ++i) square += squares[column * parts + i];
    return inverse_root(square * reciprocal((float)a.K) + (float)a.eps);
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
