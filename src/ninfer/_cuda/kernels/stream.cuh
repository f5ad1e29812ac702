// Products of up to 16 columns with stored matrices: weights stream through the chip once, columns stay in shared memory.
//
// The chunks of all tiles, one after another, are cut into an even run a warp. A warp keeps the next chunks of its run on
// their way, across tiles, and waits for no other; what it has of tiles that others share in is added up at the end.
#pragma once
#include "chunks.cuh"

// `total` things in `parts` runs whose lengths differ by one at most.
struct Runs {
    int length, longer;
    DEVICE Runs(int total, int parts) : length(total / parts), longer(total % parts) {}
    DEVICE int begin(int part) const { return part * length + minimum(part, longer); }
    DEVICE int holder(int i) const {
        const int edge = longer * (length + 1);
        return i < edge ? i / (length + 1) : longer + (i - edge) / maximum(length, 1);
    }
};

template <int NT> struct Sums {
    float v[NT][4];
    DEVICE void zero() {
#pragma unroll
        for (int n = 0; n < NT; ++n) v[n][0] = v[n][1] = v[n][2] = v[n][3] = 0;
    }
    // [NT][32] of four floats
    DEVICE void store(float* to, int lane) const {
#pragma unroll
        for (int n = 0; n < NT; ++n) ((Float4*)to)[32 * n + lane] = {v[n][0], v[n][1], v[n][2], v[n][3]};
    }
    DEVICE void add(const float* from, int lane) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            const Float4 f = ((const Float4*)from)[32 * n + lane];
            v[n][0] += f.x, v[n][1] += f.y, v[n][2] += f.z, v[n][3] += f.w;
        }
    }
    // from device memory that other blocks wrote
    DEVICE void add_fresh(const float* from, int lane) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            float f[4];
            load_fresh(f, from + 4 * (32 * n + lane));
#pragma unroll
            for (int i = 0; i < 4; ++i) v[n][i] += f[i];
        }
    }
};

// Put the sums of a tile, times factor, where they belong.
template <int NT> DEVICE void finish_tile(const Stream& a, const Octet (&octet)[2], const Sums<NT>& sums, float factor, int lane) {
    const int g = lane / 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        if (g >= octet[h].count || (h && a.result == SWIGLU)) continue;
        const Segment& s = a.segment[octet[h].segment];
        const float own = factor * row_factor(s, octet[h].row + g);
        const float other = a.result == SWIGLU ? factor * row_factor(a.segment[octet[1].segment], octet[1].row + g) : 0;
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int column = 8 * n + lane % 4 * 2 + i;
                if (column >= a.columns) continue;
                const i64 at = column * s.out_stride + s.out_first + (octet[h].row + g - s.first);
                float sum = own * sums.v[n][2 * h + i];
                if (a.result == STORE_F32) {
                    ((float*)s.out)[at] = sum;
                    continue;
                }
                u16* out = (u16*)s.out + at;
                if (a.result == ADD) sum = from_bf16(*out) + (a.scale ? a.scale[column] : 1.0f) * sum;
                if (a.result == SWIGLU) sum = silu(sum) * (other * sums.v[n][2 + i]);
                *out = to_bf16(sum);
            }
    }
}

// One column: its elements [begin, begin + size), times 1 + norm, in operand order; shift[size / 64][8 NT]: -bias times
// their sums by 64. The norm's own factor is left to finish: squares[warp] sum up to what it is made of.
template <int NT> DEVICE_CALL void put_column(const Stream& a, u8* x, float* shift, float* squares, int begin, int size, float bias) {
    const int K = (int)a.K, lane = thread() % 32;
    float square = 0;
#pragma unroll 1
    for (int first = a.norm ? 0 : begin; first < maximum(a.norm ? K : 0, begin + size); first += 8 * threads()) {
        const int k = first + 8 * thread();
        Word4 v = load8(a.x, k, K, K % 8 == 0);
        if (a.norm) {
            float f[8], w[8];
            unpack8(f, v);
            unpack8(w, load8(a.norm, k, K, K % 8 == 0));
#pragma unroll
            for (int i = 0; i < 8; ++i) square += f[i] * f[i], f[i] *= 1.0f + w[i];
            v = {pack(f[0], f[1]), pack(f[2], f[3]), pack(f[4], f[5]), pack(f[6], f[7])};
        }
        const bool inside = k >= begin && k < begin + size;
        if (inside) *(Word4*)(x + 2 * (k - begin)) = operand_order(v);
        if (bias != 0) {
            float f[8];
            unpack8(f, v);
            float sum = ((f[0] + f[1]) + (f[2] + f[3])) + ((f[4] + f[5]) + (f[6] + f[7]));
#pragma unroll
            for (int mask = 1; mask < 8; mask *= 2) sum += shuffle_xor(sum, mask);
            if (inside && lane % 8 == 0) shift[(k - begin) / 64 * 8 * NT] = -bias * sum;
        }
    }
    square = sum_warp(square);
    if (lane == 0) squares[thread() / 32] = square;
    sync();
}

// Several columns, made ready before: elements [begin, begin + size) of each, `stride` bytes apart, and their shifts.
template <int NT> DEVICE_CALL void put_columns(const Stream& a, u8* x, float* shift, int begin, int size, int stride, float bias) {
    const int columns = (int)a.columns, padded = ((int)a.K + 127) / 128 * 128, pieces = size / 8, groups = size / 64;
#pragma unroll 1
    for (int i = thread(); i < columns * pieces; i += threads()) {
        const int c = i / pieces, k = i % pieces * 8;
        copy16(x + c * stride + 2 * k, a.x + (i64)c * padded + begin + k, begin + k < padded ? 16 : 0);
    }
    copies_commit();
    if (bias != 0)
#pragma unroll 1
        for (int i = thread(); i < columns * groups; i += threads()) {
            const int c = i / groups, k = begin + i % groups * 64;
            shift[i % groups * 8 * NT + c] = k < padded ? -bias * a.sums[c * (padded / 64) + k / 64] : 0.0f;
        }
    copies_wait<0>();
    sync();
}

// Where a block is: the run of chunks [begin, end) of a slice of K that it works on, among those of the other blocks.
struct Share {
    int slice, block, chunks, quantum, begin, end;  // chunks of a tile; chunks that blocks do not part
    Runs blocks;

    DEVICE Share(const Job& job, int chunks, int number)
        : slice(number / (int)job.blocks), block(number % (int)job.blocks), chunks(chunks), quantum(job.whole ? chunks : 1),
          blocks((int)job.tiles * chunks / quantum, (int)job.blocks) {
        begin = blocks.begin(block) * quantum, end = blocks.begin(block + 1) * quantum;
    }
};

// A block's sums of a tile are done: add those of other blocks, and if they are the last, finish the tile.
template <int NT> DEVICE void settle(const Stream& a, const Job& job, const Share& share, int tile, Sums<NT> sums, const float* squares) {
    const int lane = thread() % 32, ticket = (int)job.ticket + tile;
    const int first = share.blocks.holder(tile * share.chunks / share.quantum);
    const int last = share.blocks.holder((tile * share.chunks + share.chunks - 1) / share.quantum);
    const int parts = job.slices > 1 ? (int)job.slices : last - first + 1;
    if (parts > 1) {
        float* partial = a.partial + (i64)ticket * a.parts * (NT * 128);
        sums.store(partial + (job.slices > 1 ? share.slice : share.block - first) * NT * 128, lane);
        fence();
        sync_warp();
        const int arrived = lane == 0 ? atomic_add(a.tickets + ticket, 1) : 0;
        if (from_lane(arrived, 0) < parts - 1) return;
        fence();
        sums.zero();
        for (int i = 0; i < parts; ++i) sums.add_fresh(partial + i * NT * 128, lane);
        if (lane == 0) a.tickets[ticket] = 0;
    }
    float factor = 1.0f;
    if (a.norm) {
        factor = 0;
        for (int w = 0; w < threads() / 32; ++w) factor += squares[w];
        factor = 1.0f / sqrtf(factor / (int)a.K + (float)a.eps);
    }
    Octet octet[2];
    tile_octets(octet, a, (int)job.segment, (int)job.end, tile);
    finish_tile<NT>(a, octet, sums, factor, lane);
}

template <int F, int NT, int STAGES> DEVICE void stream(const Stream& a, const Job& job) {
    using C = Chunk<F>;
    DYNAMIC_SHARED(shared);
    __shared__ float squares[16];
    release_successors();
    const int warps = threads() / 32, warp = from_lane(thread() / 32, 0), lane = thread() % 32, columns = (int)a.columns;
    const int begin = (block_x() - (int)job.block) / (int)job.blocks * (int)job.slice, width = minimum((int)job.slice, (int)a.K - begin);
    const int chunks = (width + C::columns - 1) / C::columns, size = ((int)job.slice + C::columns - 1) / C::columns * C::columns;
    const int stride = 2 * size + 80;
    u8* x = shared;  // [columns][stride]
    float* shift = (float*)(x + (columns * stride + 127) / 128 * 128);  // [size / 64][8 NT]
    float* heads = shift + (BIAS<F> ? size / 64 * 8 * NT + 31 & ~31 : 0);  // [warps][NT][32][4]
    u8* ring = (u8*)(heads + warps * NT * 128) + warp * STAGES * C::bytes;

    const Share share(job, chunks, block_x() - (int)job.block);
    const Runs runs(share.end - share.begin, warps);
    const int run_begin = share.begin + runs.begin(warp), run_end = share.begin + runs.begin(warp + 1);

    const u8* column[NT];
#pragma unroll
    for (int n = 0; n < NT; ++n) column[n] = x + minimum(8 * n + lane / 4, columns - 1) * stride;
    Source<F> source;
    Sums<NT> sums;
    sums.zero();
    int ahead = run_begin, ahead_tile = run_begin / chunks, ahead_chunk = run_begin % chunks, slot = 0;
    int tile = ahead_tile, chunk = ahead_chunk, current = 0;
#pragma unroll 1
    for (int i = run_begin + 1 - STAGES;; ++i) {
        if (i == run_begin) {  // weights do not depend on the kernels before this one, the columns do
            after_predecessors();
            if (a.sums) put_columns<NT>(a, x, shift, begin, size, stride, BIAS<F>);
            else put_column<NT>(a, x, shift, squares, begin, size, BIAS<F>);
        }
        if (i >= run_begin) {
            if (i >= run_end) break;
            copies_wait<STAGES - 2>();
            sync_warp();  // the chunk has arrived for all lanes, and all are done with the one before it
        }
        if (ahead < run_end) {
            if (ahead == run_begin || ahead_chunk == 0) {
                Octet octet[2];
                tile_octets(octet, a, (int)job.segment, (int)job.end, ahead_tile);
                source.enter(a, octet, begin / C::columns + ahead_chunk, lane);
            }
            source.copy(ring + slot, lane);
            ++ahead;
            if (++ahead_chunk == chunks) ahead_chunk = 0, ++ahead_tile;
        }
        copies_commit();
        slot = slot == (STAGES - 1) * C::bytes ? 0 : slot + C::bytes;
        if (i < run_begin) continue;

        const u8* own[NT];
#pragma unroll
        for (int n = 0; n < NT; ++n) own[n] = column[n] + chunk * (2 * C::columns);
        multiply_chunk<F, NT>(sums.v, ring + current, own, shift + chunk * (C::groups * 8 * NT) + lane % 4 * 2, lane);
        current = current == (STAGES - 1) * C::bytes ? 0 : current + C::bytes;
        if (++chunk == chunks) {
            if (tile * chunks >= run_begin) settle<NT>(a, job, share, tile, sums, squares);
            else sums.store(heads + warp * NT * 128, lane);
            sums.zero();
            chunk = 0, ++tile;
        }
    }
    copies_wait<0>();
    sync_warp();
    if (chunk && run_begin < run_end) sums.store((float*)ring, lane);  // its copies are done with
    sync();

    // tiles that no warp had to itself
    for (int tile = share.begin / chunks + warp; tile * chunks < share.end; tile += warps) {
        const int from = maximum(tile * chunks, share.begin), to = minimum((tile + 1) * chunks, share.end);
        const int first = runs.holder(from - share.begin), last = runs.holder(to - 1 - share.begin);
        if (first == last && to - from == chunks) continue;
        sums.zero();
        for (int w = first; w <= last; ++w) {
            const bool head = share.begin + runs.begin(w + 1) >= (tile + 1) * chunks;
            sums.add(head ? heads + w * NT * 128 : (float*)(ring + (w - warp) * STAGES * C::bytes), lane);
        }
        settle<NT>(a, job, share, tile, sums, squares);
    }
}

#define STREAM(format, columns)                                                                     \
    KERNEL(stream_##format, Stream, 512, 1) {                                                       \
        if (a.jobs == 1 || block_x() < a.job[1].block) stream<format, columns / 8, 3>(a, a.job[0]); \
        else stream<BF16, columns / 8, 3>(a, a.job[1]);                                             \
    }
