// How chunks reach a warp: its run among those of its block, and the chunks of it that are on their way.
#pragma once
#include "sums.cuh"

// Returns when all but this thread's `pending` newest groups of copies have arrived; pending < 5.
DEVICE void copies_wait(int pending) {
    if (pending == 1) copies_wait<1>();
    else if (pending == 2) copies_wait<2>();
    else if (pending == 3) copies_wait<3>();
    else if (pending == 4) copies_wait<4>();
    else copies_wait<0>();
}

// Where the two octets of a tile lie.
struct TileRows {
    const u8 *codes[2], *high[2], *scales[2];  // of their first rows; NVFP4: scales of the whole matrix
    int row_bytes[2], high_bytes[2], scale_bytes[2];  // NVFP4: scale blocks of a row
    int row[2], last[2];

    DEVICE TileRows(const Stream& a, const Job& job, int tile) {
        Octet octet[2];
        tile_octets(octet, a, (int)job.segment, (int)job.end, tile);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const Segment& s = a.segment[octet[h].segment];
            const bool blocks = (int)job.format == NVFP4;
            row[h] = octet[h].row, last[h] = maximum(octet[h].count, 1) - 1;
            row_bytes[h] = (int)s.row_bytes, high_bytes[h] = (int)s.high_bytes, scale_bytes[h] = blocks ? (int)s.columns / 64 : (int)s.scale_bytes;
            codes[h] = s.codes + (i64)row[h] * row_bytes[h], high[h] = s.high + (i64)row[h] * high_bytes[h];
            scales[h] = blocks ? s.scales : s.scales + (i64)row[h] * scale_bytes[h];
        }
    }
};

// A lane's part of what a warp copies: the next chunk of a tile. once: the cache gives it up first.
template <int F, bool once> struct Feed {
    using C = Chunk<F>;
    static constexpr int pieces = C::row / 16, step = 32 / pieces, loads = 16 / step;  // of a row; rows at once; of a chunk
    static constexpr int planes = F == Q5 ? 1 : F == Q6 ? 2 : 0;
    const u8 *code[loads], *high[planes + 1], *scale;
    int left;  // bytes of codes to the end of the rows
    int to, to_high, to_scale;

    DEVICE explicit Feed(int lane) {
        const int row = lane / pieces, half = lane / 2, quarter = lane / 4;
        to = here(row * C::row + 16 * (lane % pieces ^ C::swizzle(row)));  // the pieces of rows a step on trade places alike
        to_high = here(C::high_offset + (F == Q5 ? 32 * half + 16 * (lane % 2 ^ C::high_swizzle(half)) : 64 * quarter + 16 * (lane % 4 ^ C::high_swizzle(quarter))));
        to_scale = here(C::scale_offset + (F == NVFP4 ? 16 * (lane % 16) + 4 * (lane / 16) : 8 * (lane % 16) + 4 * (lane / 16)));
    }

    // Where chunk `number` of a tile begins.
    DEVICE void enter(const TileRows& r, int number, int lane) {
        left = r.row_bytes[0] - number * C::row;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            auto row = [&](int i) { return minimum(i, r.last[h]); };
#pragma unroll
            for (int i = 0; i < loads / 2; ++i)
                code[h * (loads / 2) + i] = r.codes[h] + (i64)row(step * i + lane / pieces) * r.row_bytes[h] + (number * C::row + 16 * (lane % pieces));
            if (F == Q6) high[h] = r.high[h] + (i64)row(lane / 4) * r.high_bytes[h] + (number * 64 + 16 * (lane % 4));
            if (F == Q5 && (h == 0 || lane >= 16)) high[0] = r.high[h] + (i64)row(lane / 2 % 8) * r.high_bytes[h] + (number * 32 + 16 * (lane % 2));
            if (C::scale && (h == 0 || lane % 16 >= 8))
                scale = F == NVFP4 ? nvfp4_scale(r.scales[h], r.scale_bytes[h], r.row[h] + row(lane % 8), 4 * number + lane / 16)
                                   : r.scales[h] + (i64)row(lane % 8) * r.scale_bytes[h] + (number * 8 + 4 * (lane / 16));
        }
    }

    // Start copying, and go on to the chunk after it.
    DEVICE void copy(u8* stage, int lane) {
        const bool inside = 16 * (lane % pieces) < left;
        auto copy = [](u8* to, const u8* from, bool inside) {
            if constexpr (once) copy16_once_if(to, from, inside);
            else copy16_if(to, from, inside);
        };
#pragma unroll
        for (int i = 0; i < loads; ++i) copy(stage + to + step * i * C::row, code[i], inside), code[i] += C::row;
        if constexpr (F == Q5) copy(stage + to_high, high[0], 64 * (lane % 2) < left), high[0] += 32;
        if constexpr (F == Q6) {
#pragma unroll
            for (int h = 0; h < 2; ++h) copy(stage + to_high + 512 * h, high[h], 32 * (lane % 4) < left), high[h] += 64;
        }
        if constexpr (F == NVFP4) {
#pragma unroll
            for (int i = 0; i < 2; ++i) copy4(stage + to_scale + 8 * i, scale + 1024 * i, 32 * (2 * i + lane / 16) < left ? 4 : 0);
            scale += 2048;
        } else if constexpr (C::scale > 0) {
            copy4(stage + to_scale, scale, 64 * (lane / 16) < left ? 4 : 0), scale += 8;
        }
        left -= C::row;
    }
};

// A block's part of a job, in chunks of its tiles one after another, and in it each warp's run.
struct Share {
    int block, slice, slices;
    int begin, size;  // of the columns of its slice
    int chunks, quantum;
    int block_begin, block_end;
    Runs blocks, runs;

    DEVICE Share(const Job& job, int warps) : blocks{(int)job.length, (int)job.longer} {
        block = block_x() - (int)job.block, slice = 0, slices = (int)job.slices;
        if (slices > 1) slice = quotient(block, (int)job.blocks), block -= slice * (int)job.blocks;
        begin = slice * (int)job.slice, chunks = here((int)(slice + 1 == slices ? job.last : job.chunks));
        size = (int)job.chunks * (int)job.width, quantum = job.whole ? chunks : 1;
        block_begin = blocks.begin(block) * quantum, block_end = blocks.begin(block + 1) * quantum;
        runs = {(block_end - block_begin) >> warps, (block_end - block_begin) & ((1 << warps) - 1)};
    }
    DEVICE int run_begin(int warp) const { return block_begin + runs.begin(warp); }
};

// The chunks of a warp's run on their way through its ring in shared memory.
template <int F, bool once = true> struct Flow {
    static constexpr int bytes = Chunk<F>::bytes;
    Feed<F, once> feed;
    u8* ring;
    int next, end, tile, chunk, slot = 0, size;
    bool inside = false;  // the feed is where the next chunk is

    DEVICE Flow(const Share& s, u8* ring, int stages, int warp, int lane) : feed(lane), ring(ring) {
        next = s.run_begin(warp), end = here(s.run_begin(warp + 1));
        tile = quotient(next, s.chunks), chunk = next - tile * s.chunks, size = here(stages * bytes);
    }
    DEVICE bool over() const { return next >= end; }
    DEVICE void fetch(const Stream& a, const Job& job, const Share& s, int lane) {
        if (next < end) {
            if (!inside) feed.enter(TileRows(a, job, tile), quotient(s.begin, Chunk<F>::columns) + chunk, lane);
            feed.copy(ring + slot, lane);
            ++next;
            inside = ++chunk < s.chunks;
            if (!inside) chunk = 0, ++tile;
        }
        copies_commit();
        slot += bytes;
        if (slot == size) slot = 0;
    }
};
