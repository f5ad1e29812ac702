// Products of up to 16 columns with stored matrices: weights stream through the chip once, columns stay in shared memory.
//
// The chunks of all tiles, one after another, are cut into an even run a warp. A warp keeps the next chunks of its run on
// their way, across tiles, and waits for no other; what it has of tiles that others share in is added up at the end.
#pragma once
#include "sums.cuh"

// One column of K elements, a multiple of 8: elements [begin, begin + size), times 1 + norm, in operand order; shift[size /
// 64][8 NT]: -bias times their sums by 64. The norm's own factor is left to the end: squares[warp] add up to its square.
template <int NT> DEVICE void put_column(const Stream& a, u8* x, float* shift, float* squares, int begin, int size, float bias) {
    const int K = (int)a.K, end = a.norm ? maximum(K, begin + size) : begin + size;
    float square = 0;
#pragma unroll 1
    for (int first = a.norm ? 0 : begin; first < end; first += 8 * threads()) {
        const int k = first + 8 * thread();
        const bool inside = k >= begin && k < begin + size;
        Word4 v = {0, 0, 0, 0}, w = {0, 0, 0, 0};
        if (k < K) {
            v = *(const Word4*)(a.x + k);
            if (a.norm) w = *(const Word4*)(a.norm + k);
        }
        float f[8], g[8];
        unpack8(f, v), unpack8(g, w);
        float sum = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) square += f[i] * f[i], f[i] *= 1.0f + g[i];
        v = {pack(f[0], f[1]), pack(f[2], f[3]), pack(f[4], f[5]), pack(f[6], f[7])};
        unpack8(f, v);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += f[i];
#pragma unroll
        for (int mask = 1; mask < 8; mask *= 2) sum += shuffle_xor(sum, mask);
        if (inside) {
            *(Word4*)(x + 2 * (k - begin)) = operand_order(v);
            if (bias != 0 && thread() % 8 == 0) shift[(k - begin) / 64 * 8 * NT] = -bias * sum;
        }
    }
    square = sum_warp(square);
    if (thread() % 32 == 0) squares[thread() / 32] = square;
}

// Several columns, made ready before: elements [begin, begin + size) of each, `stride` bytes apart, and their shifts.
template <int NT> DEVICE void put_columns(const Stream& a, u8* x, float* shift, int begin, int size, int stride, float bias) {
    const int columns = (int)a.columns, padded = ((int)a.K + 127) / 128 * 128, warp = thread() / 32, lane = thread() % 32;
#pragma unroll 1
    for (int c = 0; c < columns; ++c) {
        const u16* from = a.x + (i64)c * padded + begin;
#pragma unroll 4
        for (int k = 8 * thread(); k < size; k += 8 * threads()) copy16_if(x + c * stride + 2 * k, from + k, begin + k < padded);
    }
    copies_commit();
    if (bias != 0)
#pragma unroll 1
        for (int c = warp; c < columns; c += threads() / 32)
            for (int i = lane; i < size / 64; i += 32)
                shift[i * 8 * NT + c] = begin + 64 * i < padded ? -bias * a.sums[c * (padded / 64) + begin / 64 + i] : 0.0f;
    copies_wait<0>();
}

// `KNOWN`: the format of all rows, or FORMATS.
template <int NT, int STAGES, int KNOWN> DEVICE void stream(const Stream& a) {
    DYNAMIC_SHARED(shared);
    __shared__ float squares[16];
    release_successors();
    int j = 0;
    while (j + 1 < a.jobs && block_x() >= a.job[j + 1].block) ++j;
    const Job& job = a.job[j];
    const int warps = 1 << (int)a.warps, warp = from_lane(thread() / 32, 0), lane = thread() % 32, columns = (int)a.columns;
    const int format = (int)job.format, width = (int)job.width, slices = (int)job.slices, bytes = (int)job.stage;
    int block = block_x() - (int)job.block, slice = 0;
    if (slices > 1) slice = quotient(block, (int)job.blocks), block -= slice * (int)job.blocks;
    const int begin = slice * (int)job.slice, chunks = (int)(slice + 1 == slices ? job.last : job.chunks);
    const int size = (int)job.chunks * width, stride = 2 * size + 80, quantum = job.whole ? chunks : 1;
    u8* x = shared;                                                       // [columns][stride]
    float* shift = (float*)(x + (columns * stride + 127) / 128 * 128);    // [size / 64][8 NT]
    Float4* heads = (Float4*)(shift + (job.bias ? size / 64 * 8 * NT + 31 & ~31 : 0));  // [warps][NT][32]
    u8* ring = (u8*)(heads + warps * NT * 32) + warp * STAGES * bytes;

    // this block's run of chunks, and in it this warp's
    const Runs blocks{(int)job.length, (int)job.longer};
    const int block_begin = blocks.begin(block) * quantum, block_end = blocks.begin(block + 1) * quantum;
    const Runs runs{block_end - block_begin >> (int)a.warps, block_end - block_begin & warps - 1};
    const int run_begin = block_begin + runs.begin(warp), run_end = block_begin + runs.begin(warp + 1);

    auto settle = [&](int tile, Sums<NT>& sums) {
        int part = slice, parts = slices;
        if (!job.whole) blocks.share(tile * chunks, chunks, block, part, parts);
        if (!add_parts(a, sums, (int)job.ticket + tile, part, parts, lane)) return;
        float factor = 1.0f;
        if (a.norm) {
            factor = 0;
            for (int w = 0; w < warps; ++w) factor += squares[w];
            factor = 1.0f / sqrtf(factor / (int)a.K + (float)a.eps);
        }
        Octet octet[2];
        tile_octets(octet, a, (int)job.segment, (int)job.end, tile);
        finish_tile<NT>(a, octet, sums, factor, lane);
    };

    const u8* column[NT];
#pragma unroll
    for (int n = 0; n < NT; ++n) column[n] = x + minimum(8 * n + lane / 4, columns - 1) * stride;
    Source source;
    Sums<NT> sums;
    sums.zero();
    int tile = quotient(run_begin, chunks), chunk = run_begin - tile * chunks, current = 0;
    int ahead = run_begin, ahead_tile = tile, ahead_chunk = chunk, slot = 0;
    const int number = quotient(begin, width);
#pragma unroll 1
    for (int i = run_begin + 1 - STAGES;; ++i) {
        if (i == run_begin) {  // weights do not depend on the kernels before this one, the columns do
            after_predecessors();
            if (a.sums) put_columns<NT>(a, x, shift, begin, size, stride, (float)job.bias);
            else put_column<NT>(a, x, shift, squares, begin, size, (float)job.bias);
            sync();
        }
        if (i >= run_begin) {
            if (i >= run_end) break;
            copies_wait<STAGES - 2>();
            sync_warp();  // the chunk has arrived for all lanes, and all are done with the one before it
        }
        if (ahead < run_end) {
            const bool fresh = ahead == run_begin || ahead_chunk == 0;
            Octet octet[2];
            if (fresh) tile_octets(octet, a, (int)job.segment, (int)job.end, ahead_tile);
            with_known_format<KNOWN>(format, [&](auto f) {
                if (fresh) source.enter<f.value>(a, octet, number + ahead_chunk, lane);
                source.copy<f.value>(ring + slot, lane);
            });
            ++ahead;
            if (++ahead_chunk == chunks) ahead_chunk = 0, ++ahead_tile;
        }
        copies_commit();
        slot = slot == (STAGES - 1) * bytes ? 0 : slot + bytes;
        if (i < run_begin) continue;

        const u8* own[NT];
#pragma unroll
        for (int n = 0; n < NT; ++n) own[n] = column[n] + chunk * (2 * width);
        with_known_format<KNOWN>(format, [&](auto f) {
            multiply_chunk<f.value, NT>(sums.v, ring + current, own, shift + chunk * (Chunk<f.value>::groups * 8 * NT) + lane % 4 * 2, lane);
        });
        current = current == (STAGES - 1) * bytes ? 0 : current + bytes;
        if (++chunk == chunks) {
            if (tile * chunks >= run_begin) settle(tile, sums);
            else sums.store(heads + warp * NT * 32, lane);
            sums.zero();
            chunk = 0, ++tile;
        }
    }
    copies_wait<0>();
    sync_warp();
    if (chunk && run_begin < run_end) sums.store((Float4*)ring, lane);  // its copies are done with
    sync();

    // tiles that no warp had to itself
#pragma unroll 1
    for (int tile = quotient(block_begin, chunks) + warp; tile * chunks < block_end; tile += warps) {
        const int from = maximum(tile * chunks, block_begin), to = minimum((tile + 1) * chunks, block_end);
        const int first = runs.holder(from - block_begin), last = runs.holder(to - 1 - block_begin);
        if (first == last && to - from == chunks) continue;
        sums.zero();
#pragma unroll 1
        for (int w = first; w <= last; ++w) {
            const bool head = block_begin + runs.begin(w + 1) >= (tile + 1) * chunks;
            const Float4* part = head ? heads + w * NT * 32 : (Float4*)(ring + (w - warp) * STAGES * bytes);
#pragma unroll
            for (int n = 0; n < NT; ++n) sums.add(n, part[32 * n + lane]);
        }
        settle(tile, sums);
    }
}

#define STREAM(columns, name, known) \
    KERNEL(stream_##columns##name, Stream, 512, 1) { stream<columns / 8, 3, known>(a); }
// Code of one format is faster than code that asks every chunk for it.
#define STREAMS(columns)          \
    STREAM(columns, , FORMATS)    \
    STREAM(columns, _BF16, BF16)  \
    STREAM(columns, _Q4, Q4)      \
    STREAM(columns, _Q5, Q5)      \
    STREAM(columns, _Q6, Q6)      \
    STREAM(columns, _Q8, Q8)      \
    STREAM(columns, _NVFP4, NVFP4) \
    STREAM(columns, _FP8, FP8)
