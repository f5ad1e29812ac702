// Tiles of bf16 in shared memory as operands of matrix instructions.
//
// Pieces of 16 bytes trade places within a row, so that the rows that an instruction reads together meet every bank once.
#pragma once
#include "common.cuh"

// Piece p + odd of a row of 2 HD bytes; p is even, and known when compiled, so that few addresses serve all pieces.
template <int HD> DEVICE u8* piece(u8* tile, int row, int p, int odd) {
    return tile + row * 2 * HD + (odd ^ row & 7 ^ p & 6) * 16 + (p & ~7) * 16;
}

// Operand a of 16 rows from `row` and columns 16k .. 16k + 15.
template <int HD> DEVICE void load_rows(u32 (&r)[4], u8* tile, int row, int k, int lane) {
    load_tiles(r, piece<HD>(tile, row + lane % 16, 2 * k, lane / 16));
}

// Operand a whose rows are columns 16k .. of the tile and whose columns are its rows from `row`.
template <int HD> DEVICE void load_columns(u32 (&r)[4], u8* tile, int row, int k, int lane) {
    load_tiles_transposed(r, piece<HD>(tile, row + lane / 16 * 8 + lane % 8, 2 * k, lane / 8 % 2));
}

// Operands b of rows `row` .. + 15 and columns 16n .. 16n + 7 (r[0], r[1]), 16n + 8 .. 16n + 15 (r[2], r[3]).
template <int HD> DEVICE void load_right(u32 (&r)[4], u8* tile, int row, int n, int lane) {
    load_tiles_transposed(r, piece<HD>(tile, row + lane % 16, 2 * n, lane / 16));
}

// Operands b that are transposed rows: column `row` .. + 7 (r[0], r[1]) and the next eight (r[2], r[3]) of step k.
template <int HD> DEVICE void load_right_rows(u32 (&r)[4], u8* tile, int row, int k, int lane) {
    load_tiles(r, piece<HD>(tile, row + lane / 16 * 8 + lane % 8, 2 * k, lane / 8 % 2));
}
