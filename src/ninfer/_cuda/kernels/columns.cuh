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
