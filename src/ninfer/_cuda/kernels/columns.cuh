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
        parts = maximum(1, quotient(warps, rows)), step = quotient(warps, parts);
        row = quotient(warp, parts), part = warp - row * parts;
        if (row >= step) row = rows;  // no part is left for it
    }
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

// Columns that came as they were, normed and in operand order; where they are normed, the block has the whole of them.
// squares: room for a float a column and warp. A thread sees what it asked for alone, and the norm, which all did.
template <int F> DEVICE void put_columns(const Stream& a, const Columns& c, const Norm<F>& norm, float* squares) {
    const int columns = (int)a.columns;
    const Deal deal(columns);
    auto own = [&](int row) { return (u16*)(c.x + row * c.stride); };
    if (norm.from) {
#pragma unroll 1
        for (int row = deal.row; row < columns; row += deal.step) {
            float square = 0;
#pragma unroll 2
            for (int i = deal.first(); i < 2 * c.size; i += deal.stride()) {
                float f[8];
                unpack8(f, *(const Word4*)(own(row) + i / 2));
#pragma unroll
                for (int j = 0; j < 8; ++j) square += f[j] * f[j];
            }
            square = sum_warp(square);
            if (thread() % 32 == 0) squares[row * deal.parts + deal.part] = square;
        }
        sync();
    }
#pragma unroll 1
    for (int row = deal.row; row < columns; row += deal.step) {
        float inverse = 1.0f;
        if (norm.from) {
            float square = 0;
            for (int i = 0; i < deal.parts; ++i) square += squares[row * deal.parts + i];
            inverse = inverse_root(square * reciprocal((float)a.K) + (float)a.eps);
        }
#pragma unroll 2
        for (int i = deal.first(); i < 2 * c.size; i += deal.stride()) {
            const u16* factors = norm.from && i < 2 * norm.K ? (const u16*)norm.at(i / 2) - i / 2 : nullptr;
            *(Word4*)(own(row) + i / 2) = operand_order(normed8(own(row), factors, i / 2, (int)a.K, inverse));
        }
    }
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
