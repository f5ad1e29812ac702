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

// Several columns: ask for them, as they are made ready, or, where there are no `sums`, as they are.
DEVICE void ask_columns(const Stream& a, const Columns& c) {
    const int columns = (int)a.columns, K = (int)a.K, padded = a.sums ? (K + 127) / 128 * 128 : K;
    const int rows = c.coded ? 2 * columns : columns, element = c.coded ? 1 : 2;
    const u8* from = c.coded ? a.codes : (const u8*)a.x;
#pragma unroll 1
    for (int row = 0; row < rows; ++row)
#pragma unroll 4
        for (int i = 16 * thread(); i < c.size * element; i += 16 * threads())
            copy16_if(c.x + row * c.stride + i, from + ((i64)row * padded + c.begin) * element + i, c.begin + i / element < padded);
    copies_commit();
}

// The norm of columns that come as they are, [K] of shared memory.
DEVICE void ask_norm(const Stream& a, u8* norm) {
    if (!a.norm) return;
#pragma unroll 1
    for (int k = 8 * thread(); k < a.K; k += 8 * threads()) copy16_if(norm + 2 * k, a.norm + k, true);
}

// Columns that came as they were, normed and in operand order; where they are normed, the block has the whole of them.
// squares: room for a float a column and warp. A thread sees what it asked for alone.
DEVICE void put_columns(const Stream& a, const Columns& c, const u8* norm, float* squares) {
    const int columns = (int)a.columns, warps = threads() / 32, warp = thread() / 32;
    if (a.norm) {
#pragma unroll 1
        for (int row = 0; row < columns; ++row) {
            float square = 0;
#pragma unroll 1
            for (int i = 16 * thread(); i < 2 * c.size; i += 16 * threads()) {
                float f[8];
                unpack8(f, *(const Word4*)(c.x + row * c.stride + i));
#pragma unroll
                for (int j = 0; j < 8; ++j) square += f[j] * f[j];
            }
            square = sum_warp(square);
            if (thread() % 32 == 0) squares[row * warps + warp] = square;
        }
        sync();
    }
#pragma unroll 1
    for (int row = 0; row < columns; ++row) {
        float inverse = 1.0f;
        if (a.norm) {
            const float square = sum_warp(thread() % 32 < warps ? squares[row * warps + thread() % 32] : 0.0f);
            inverse = inverse_root(square * reciprocal((float)a.K) + (float)a.eps);
        }
#pragma unroll 1
        for (int i = 16 * thread(); i < 2 * c.size; i += 16 * threads()) {
            u16* own = (u16*)(c.x + row * c.stride);
            *(Word4*)(own + i / 2) = operand_order(normed8(own, a.norm ? (const u16*)norm : nullptr, i / 2, (int)a.K, inverse));
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
