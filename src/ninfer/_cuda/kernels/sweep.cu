// Reads memory as fast as it comes: what the bytes of every other kernel are compared with.
#include "common.cuh"

constexpr int WORDS = 8;  // 16 bytes each, of a thread at a time

struct Sweep {
    u32* out;  // [blocks * threads]
    const Word4* data;
    i64 tiles;  // of WORDS * threads words
    i64 rounds;
};

KERNEL(sweep, Sweep, 512, 2) {
    after_predecessors();
    u32 seen = 0;
    for (i64 round = 0; round < a.rounds; ++round)
        for (i64 tile = block_x(); tile < a.tiles; tile += grid_x()) {
            const Word4* words = a.data + tile * WORDS * threads() + thread();
            Word4 v[WORDS];
#pragma unroll
            for (int i = 0; i < WORDS; ++i) v[i] = words[i * threads()];
#pragma unroll
            for (int i = 0; i < WORDS; ++i) seen ^= v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
        }
    a.out[block_x() * threads() + thread()] = seen;
}
