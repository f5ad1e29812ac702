// Products of up to 16 columns with stored matrices: weights stream through the chip once, columns stay in shared memory.
//
// The chunks of all tiles, one after another, are cut into an even run a warp. A warp keeps the next chunks of its run on
// their way, across tiles, and waits for no other; what it has of tiles that others share in is added up at the end.
#pragma once
#include "codes.cuh"
#include "sums.cuh"

// A block's columns [begin, begin + size) in shared memory, as its format meets them.
struct Columns {
    u8* x;         // [columns][stride] bf16, or high and low bytes in turn
    float* power;  // [columns][size / 64], of high and low bytes
    int begin, size, stride;
    bool coded;
    float factor;
};

// One column of K elements, a multiple of 8, times 1 + norm. The norm's own factor is left to the end: squares[warp] add up
// to its square.
struct Column {
    const u16 *x, *norm;
    int K, k, end;
    Word4 v, w;

    DEVICE Column(const Stream& a, const Columns& c) : x(a.x), norm(a.norm), K((int)a.K) {
        k = (norm ? 0 : c.begin) + 8 * thread(), end = norm ? maximum(K, c.begin + c.size) : c.begin + c.size;
    }

    DEVICE void ask() {
        v = w = {0, 0, 0, 0};
        if (k >= K) return;
        v = *(const Word4*)(x + k);
        if (norm) w = *(const Word4*)(norm + k);
    }

    // A thread's eights one after another: code that is run once takes as long to arrive as to run.
    DEVICE void put(const Columns& c, float* squares) {
        float square = 0;
#pragma unroll 1
        for (bool more = true; more;) {
            const Word4 u = v, n = w;
            const int at = k - c.begin;
            k += 8 * threads();
            more = k - 8 * thread() < end;
            if (more) ask();
            put8(c, at, u, n, square);
        }
        square = sum_warp(square);
        if (thread() % 32 == 0) squares[thread() / 32] = square;
    }

    DEVICE static void put8(const Columns& c, int at, Word4 v, Word4 w, float& square) {
        const bool inside = at >= 0 && at < c.size;
        float f[8], g[8];
        unpack8(f, v), unpack8(g, w);
#pragma unroll
        for (int i = 0; i < 8; ++i) square += f[i] * f[i], f[i] *= 1.0f + g[i];
        v = {pack(f[0], f[1]), pack(f[2], f[3]), pack(f[4], f[5]), pack(f[6], f[7])};
        if (!c.coded) {
            if (inside) *(Word4*)(c.x + 2 * at) = operand_order(v);
            return;
        }
        unpack8(f, v);
        u64 high, low;
        float scale;
        fix8(high, low, scale, f);
        if (inside) {
            *(u64*)(c.x + at) = high, *(u64*)(c.x + c.stride + at) = low;
            if (at % 64 == 0) c.power[at / 64] = c.factor * scale;
        }
    }
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

// Returns when all but this thread's `pending` newest groups of copies have arrived; pending < 5.
DEVICE void copies_wait(int pending) {
    if (pending == 1) copies_wait<1>();
    else if (pending == 2) copies_wait<2>();
    else if (pending == 3) copies_wait<3>();
    else if (pending == 4) copies_wait<4>();
    else copies_wait<0>();
}

// A lane's part of what a warp copies: the next chunk of a tile.
template <int F> struct Feed {
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
    DEVICE void enter(const Stream& a, const Octet (&octet)[2], int number, int lane) {
        left = (int)a.segment[octet[0].segment].row_bytes - number * C::row;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const Segment& s = a.segment[octet[h].segment];
            const int last = maximum(octet[h].count, 1) - 1, row_bytes = (int)s.row_bytes;
#pragma unroll
            for (int i = 0; i < loads / 2; ++i) {
                const int row = octet[h].row + minimum(step * i + lane / pieces, last);
                code[h * (loads / 2) + i] = s.codes + (i64)row * row_bytes + (number * C::row + 16 * (lane % pieces));
            }
            if (F == Q6) high[h] = s.high + (i64)(octet[h].row + minimum(lane / 4, last)) * (int)s.high_bytes + (number * 64 + 16 * (lane % 4));
            if (F == Q5 && (h == 0 || lane >= 16))
                high[0] = s.high + (i64)(octet[h].row + minimum(lane / 2 % 8, last)) * (int)s.high_bytes + (number * 32 + 16 * (lane % 2));
            if (C::scale && (h == 0 || lane % 16 >= 8)) {
                const int row = octet[h].row + minimum(lane % 8, last);
                scale = F == NVFP4 ? nvfp4_scale(s, row, 4 * number + lane / 16)
                                   : s.scales + (i64)row * (int)s.scale_bytes + (number * 8 + 4 * (lane / 16));
            }
        }
    }

    // Start copying, and go on to the chunk after it.
    DEVICE void copy(u8* stage, int lane) {
        const bool inside = 16 * (lane % pieces) < left;
#pragma unroll
        for (int i = 0; i < loads; ++i) copy16_if(stage + to + step * i * C::row, code[i], inside), code[i] += C::row;
        if constexpr (F == Q5) copy16_if(stage + to_high, high[0], 64 * (lane % 2) < left), high[0] += 32;
        if constexpr (F == Q6)
#pragma unroll
            for (int h = 0; h < 2; ++h) copy16_if(stage + to_high + 512 * h, high[h], 32 * (lane % 4) < left), high[h] += 64;
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

template <int F> struct NoPlaces {
    DEVICE explicit NoPlaces(int) {}
};
template <int F, bool coded> struct PlacesOf { using type = CodePlaces<F>; };
template <int F> struct PlacesOf<F, false> { using type = NoPlaces<F>; };

// This block's part of `job`, whose rows are all of format F.
template <int IT, int F> DEVICE void stream(const Stream& a, const Job& job, u8* shared, float* squares) {
    using C = Chunk<F>;
    constexpr int NT = (IT + 1) / 2, width = C::columns, bytes = C::bytes;  // eights of columns; of a chunk
    constexpr bool coded = is_coded(F);
    const int warps = 1 << (int)a.warps, warp = from_lane(thread() / 32, 0), lane = thread() % 32, columns = (int)a.columns;
    const int slices = (int)job.slices, stages = (int)a.stages, ring_bytes = here(stages * bytes);
    int block = block_x() - (int)job.block, slice = 0;
    if (slices > 1) slice = quotient(block, (int)job.blocks), block -= slice * (int)job.blocks;
    const int begin = slice * (int)job.slice, chunks = here((int)(slice + 1 == slices ? job.last : job.chunks));
    const int size = (int)job.chunks * width, quantum = job.whole ? chunks : 1;
    const int stride = coded ? size + 64 : 2 * size + 80;  // so that the columns of a product meet every bank once
    const int nbytes = (columns * (coded ? 2 * stride : stride) + 127) / 128 * 128;
    const Columns c{shared, (float*)(shared + nbytes), begin, size, stride, coded, code_factor(F)};
    Float4* heads = (Float4*)(shared + nbytes + (coded ? (size / 16 * columns + 127) / 128 * 128 : 0));  // [warps][NT][32]
    u8* ring = (u8*)(heads + warps * NT * 32) + here(warp * stages * bytes);

    // this block's run of chunks, and in it this warp's
    const Runs blocks{(int)job.length, (int)job.longer};
    const int block_begin = blocks.begin(block) * quantum, block_end = blocks.begin(block + 1) * quantum;
    const Runs runs{block_end - block_begin >> (int)a.warps, block_end - block_begin & warps - 1};
    const int run_begin = here(block_begin + runs.begin(warp)), run_end = here(block_begin + runs.begin(warp + 1));

    Feed<F> feed(lane);
    int tile = quotient(run_begin, chunks), chunk = run_begin - tile * chunks, current = 0;
    int ahead = run_begin, ahead_tile = tile, ahead_chunk = chunk, slot = 0;
    const int number = quotient(begin, width);
    auto fetch = [&] {
        if (ahead < run_end) {
            if (ahead == run_begin || ahead_chunk == 0) {
                Octet octet[2];
                tile_octets(octet, a, (int)job.segment, (int)job.end, ahead_tile);
                feed.enter(a, octet, number + ahead_chunk, lane);
            }
            feed.copy(ring + slot, lane);
            ++ahead;
            if (++ahead_chunk == chunks) ahead_chunk = 0, ++ahead_tile;
        }
        copies_commit();
        slot += bytes;
        if (slot == ring_bytes) slot = 0;
    };
    // Weights do not depend on the kernels before this one, the columns do: these are asked for behind few weights, as they
    // would wait for many, and before the rest.
    Column single(a, c);
#pragma unroll 1
    for (int i = 1;; ++i) {
        if (i == 3) {
            await_predecessors();
            if (ahead >= run_end) release_successors();
            if (a.sums) ask_columns(a, c);
            else single.ask();
        }
        if (i >= stages) break;
        fetch();
    }
    if (a.sums) copies_wait(stages - 3), put_powers(a, c);
    else single.put(c, squares);
    sync();

    float factor = 1.0f;
    if (a.norm) {
        factor = 0;
        for (int w = 0; w < warps; ++w) factor += squares[w];
        factor = inverse_root(factor * reciprocal((float)a.K) + (float)a.eps);
    }
    auto settle = [&](int tile, Sums<NT>& sums) {
        int part = slice, parts = slices;
        if (!job.whole) blocks.share(tile * chunks, chunks, block, part, parts);
        if (!add_parts(a, sums, (int)job.ticket + tile, part, parts, lane)) return;
        Octet octet[2];
        tile_octets(octet, a, (int)job.segment, (int)job.end, tile);
        finish_tile<NT, coded, IT>(a, octet, sums, factor, lane);
    };

    const typename PlacesOf<F, coded>::type places(lane);
    constexpr int operands = coded ? IT : NT;
    const u8* column[operands];
    const float* power[operands];
#pragma unroll
    for (int i = 0; i < operands; ++i) {
        const int row = coded ? 2 * minimum(4 * i + lane / 8, columns - 1) + lane / 4 % 2 : minimum(8 * i + lane / 4, columns - 1);
        column[i] = c.x + here(row * stride + (coded ? (F == Q8 ? 8 : 16) * (lane % 4) : 0));
        power[i] = c.power + here(minimum(4 * i + lane % 4, columns - 1) * (size / 64));
    }
    Sums<NT> sums;
    sums.zero();
#pragma unroll 1
    for (int i = run_begin; i < run_end; ++i) {
        copies_wait(stages - 2);
        sync_warp();  // the chunk has arrived for all lanes, and all are done with the one before it
        fetch();
        if (ahead == run_end) release_successors();  // their weights follow these

        const u8* own[operands];
        const float* powers[operands];
#pragma unroll
        for (int j = 0; j < operands; ++j) own[j] = column[j] + chunk * (coded ? width : 2 * width), powers[j] = power[j] + chunk * (width / 64);
        if constexpr (coded) multiply_codes<F, IT>(sums.v, ring + current, places, own, powers);
        else multiply_chunk<F, NT>(sums.v, ring + current, own, lane);
        current += bytes;
        if (current == ring_bytes) current = 0;
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
            const Float4* part = head ? heads + w * NT * 32 : (Float4*)(ring + (w - warp) * ring_bytes);
#pragma unroll
            for (int n = 0; n < NT; ++n) sums.add(n, part[32 * n + lane]);
        }
        settle(tile, sums);
    }
}

// `KNOWN`: the format of all rows, or FORMATS.
template <int IT, int KNOWN> DEVICE void stream_jobs(const Stream& a) {
    DYNAMIC_SHARED(shared);
    __shared__ float squares[16];
    int j = 0;
    while (j + 1 < a.jobs && block_x() >= a.job[j + 1].block) ++j;
    const Job& job = a.job[j];
    with_known_format<KNOWN>((int)job.format, [&](auto f) { stream<IT, f.value>(a, job, shared, squares); });
}

#define STREAM(columns, name, known) \
    KERNEL(stream_##columns##name, Stream, 512, 1) { stream_jobs<columns / 4, known>(a); }
// A kernel for launches of one format each is smaller than the one for all.
#define STREAMS(columns)          \
    STREAM(columns, , FORMATS)    \
    STREAM(columns, _BF16, BF16)  \
    STREAM(columns, _Q4, Q4)      \
    STREAM(columns, _Q5, Q5)      \
    STREAM(columns, _Q6, Q6)      \
    STREAM(columns, _Q8, Q8)      \
    STREAM(columns, _NVFP4, NVFP4) \
    STREAM(columns, _FP8, FP8)
