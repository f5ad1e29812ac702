// Gated DeltaNet of many columns, 64 at a time on matrix instructions.
//
// Over a chunk that is entered with the state S, with G the running sum of the log decays, D[i][j] = e^(G_i - G_j) for
// j <= i and A the part below the diagonal of (beta K K^T) D, the deltas and outputs of all its columns are
//
//   delta = (1 + A)^-1 beta (V - e^G K S)
//   O     = e^G Q S + (Q K^T D) delta
//   S    <- e^G_last S + K^T (e^(G_last - G) delta)
//
// gdn_chunk makes what does not depend on S, for all chunks at once; gdn_carry takes the state from chunk to chunk. The
// state, the sums, G and the inverse are fp32, the factors of products bf16: both sides of a chunk see the same keys.
#pragma once
#include "gdn.cuh"

constexpr int CHUNK = 64, SLICE = 32;
constexpr int SQUARE = CHUNK * CHUNK * 2, HEAD = 2 * SQUARE + CHUNK * 8, VALUES = CHUNK * SLICE * 4;

// A chunk's scratch: for every key head K and Q [CHUNK, DK] bf16; for every value head the inverse and Q K^T D [CHUNK,
// CHUNK] bf16, G and beta fp32, then slices of V [CHUNK, SLICE] fp32, which outputs replace. Tiles lie as in shared memory.
DEVICE i64 head_bytes(const Gdn& a) { return HEAD + (a.dv + SLICE - 1) / SLICE * VALUES; }

DEVICE u8* chunk_keys(const Gdn& a, int b, int chunk, int key) {
    const i64 count = (a.W + CHUNK - 1) / CHUNK, nbytes = a.nk * 4 * CHUNK * DK + a.nv * head_bytes(a);
    return a.chunks + (b * count + chunk) * nbytes + (i64)key * 4 * CHUNK * DK;
}

DEVICE u8* chunk_head(const Gdn& a, int b, int chunk, int head) {
    return chunk_keys(a, b, chunk, (int)a.nk) + head * head_bytes(a);
}

// Where a slice keeps a value: rows that are stored together meet different banks.
DEVICE int value_at(int row, int column) { return row * SLICE + (column ^ (row & 3) * 8); }
