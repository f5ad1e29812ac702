// Products of up to 16 columns with stored matrices: weights stream through the chip once, columns stay in shared memory.
//
// The chunks of all tiles, one after another, are cut into an even run a warp. A warp keeps the next chunks of its run on
// their way, across tiles, and waits for no other; what it has of tiles that others share in is added up at the end.
#pragma once
#include "columns.cuh"

// A block's sums of a tile are done. known: what is known of it, if anything is. squares: of columns normed here.
template <int IT, bool coded, int NT>
DEVICE void settle(const Stream& a, const Job& job, const Share& s, Sums<NT>& sums, int tile, const u8* known, const float* squares, int lane) {
    int part = s.slice, parts = s.slices;
    if (!job.whole) s.blocks.share(tile * s.chunks, s.chunks, s.block, part, parts);
    if (!add_parts(a, sums, (int)job.ticket + tile, part, parts, lane)) return;
    Octet octet[2];
    tile_octets(octet, a, (int)job.segment, (int)job.end, tile);
    Known<NT> own;
    if (known) own.load(known, lane, a.result == ADD);
    else own = know_tile<NT, coded, IT>(a, octet, lane);
    finish_tile<NT, coded, IT>(a, octet, sums, own, lane, [&](int column) { return !coded && a.norm ? column_factor(a, squares, column) : 1.0f; });
}

template <int F> struct NoPlaces {
    DEVICE explicit NoPlaces(int) {}
};
template <int F, bool coded> struct PlacesOf { using type = CodePlaces<F>; };
template <int F> struct PlacesOf<F, false> { using type = NoPlaces<F>; };

// A warp's run. The sums of a tile go to settle(tile, sums), or, of one it shares with other warps, to leave(head, sums); head:
// the run begins inside the tile and holds its end.
template <int IT, int F, bool once, class Settle, class Leave>
DEVICE void multiply_run(const Stream& a, const Job& job, const Share& s, const Columns& c, Flow<F, once>& flow, int begin, int stages, Settle settle, Leave leave) {
    constexpr int NT = (IT + 1) / 2, width = Chunk<F>::columns, bytes = Chunk<F>::bytes;
    constexpr bool coded = is_coded(F);
    const int lane = thread() % 32, columns = (int)a.columns;
    const typename PlacesOf<F, coded>::type places(lane);
    constexpr int operands = coded ? IT : NT;
    const u8* column[operands];
    const float* power[operands];
#pragma unroll
    for (int i = 0; i < operands; ++i) {
        const int row = coded ? 2 * minimum(4 * i + lane / 8, columns - 1) + lane / 4 % 2 : minimum(8 * i + lane / 4, columns - 1);
        column[i] = c.x + here(row * c.stride + (coded ? (F == Q8 ? 8 : 16) * (lane % 4) : 0));
        power[i] = c.power + here(minimum(4 * i + lane % 4, columns - 1) * (c.size / 64));
    }
    int tile = quotient(begin, s.chunks), chunk = begin - tile * s.chunks, current = 0;
    Sums<NT> sums;
    sums.zero();
#pragma unroll 1
    for (int i = begin; i < flow.end; ++i) {
        copies_wait(stages - 2);
        sync_warp();  // the chunk has arrived for all lanes, and all are done with the one before it
        flow.fetch(a, job, s, lane);
        if (flow.over()) release_successors();  // their weights follow these

        const u8* own[operands];
        const float* powers[operands];
#pragma unroll
        for (int j = 0; j < operands; ++j) own[j] = column[j] + chunk * (coded ? width : 2 * width), powers[j] = power[j] + chunk * (width / 64);
        if constexpr (coded) multiply_codes<F, IT>(sums.v, flow.ring + current, places, own, powers);
        else multiply_chunk<F, NT>(sums.v, flow.ring + current, own, lane);
        current += bytes;
        if (current == flow.size) current = 0;
        if (++chunk == s.chunks) {
            if (tile * s.chunks >= begin) settle(tile, sums);
            else leave(true, sums);
            sums.zero();
            chunk = 0, ++tile;
        }
    }
    copies_wait<0>();
    sync_warp();
    if (chunk && begin < flow.end) leave(false, sums);  // its copies are done with
}

DEVICE int first_left(const Share& s, int warp) { return quotient(s.block_begin, s.chunks) + warp; }
// Of the tiles of a block, which no warp had to itself, those that this warp settles: of(tile, its first warp, its last).
template <class Of> DEVICE void each_left(const Share& s, int warp, int warps, Of of) {
#pragma unroll 1
    for (int tile = first_left(s, warp); tile * s.chunks < s.block_end; tile += warps) {
        const int from = maximum(tile * s.chunks, s.block_begin), to = minimum((tile + 1) * s.chunks, s.block_end);
        const int first = s.runs.holder(from - s.block_begin), last = s.runs.holder(to - 1 - s.block_begin);
        if (first < last || to - from < s.chunks) of(tile, first, last);
    }
}
// Whether warp w, of those that share in a tile, has its end and not its beginning.
DEVICE bool has_head(const Share& s, int w, int tile) { return s.run_begin(w + 1) >= (tile + 1) * s.chunks; }

// This block's part of `job`, whose rows are all of format F.
template <int IT, int F> DEVICE void stream(const Stream& a, const Job& job, u8* shared) {
    __shared__ float squares[16];
    constexpr int NT = (IT + 1) / 2, bytes = Chunk<F>::bytes;
    constexpr bool coded = is_coded(F);
    const int warps = 1 << (int)a.warps, warp = from_lane(thread() / 32, 0), lane = thread() % 32, stages = (int)a.stages;
    const Share s(job, (int)a.warps);
    const Columns c = columns_at<F>(shared, s, (int)a.columns);
    Float4* heads = (Float4*)((u8*)c.power + (coded ? (s.size / 16 * (int)a.columns + 127) / 128 * 128 : 0));  // [warps][NT][32]
    // behind them [warps] what is known of the first tile that a warp settles at the end
    auto known_at = [&](int w) { return (u8*)heads + here(warps * NT * 32 * (int)sizeof(Float4) + w * (Known<NT>::factors + (a.result == ADD ? NT * 32 * (int)sizeof(u64) : 0))); };
    u8* rings = known_at(warps);
    auto left_by = [&](int w, bool head) { return head ? heads + w * NT * 32 : (Float4*)(rings + w * stages * bytes); };

    Flow<F> flow(s, rings + here(warp * stages * bytes), stages, warp, lane);
    const Norm<F> norm{coded ? nullptr : a.norm, rings, stages, (int)a.K};  // columns in codes are made ready before
    norm.ask();
    Known<NT> known;
    const bool settles = first_left(s, warp) * s.chunks < s.block_end;
    // Weights do not depend on the kernels before this one, the columns do: these are asked for behind few weights, as they
    // would wait for many, and before the rest.
#pragma unroll 1
    for (int i = 1;; ++i) {
        if (i == 3) {
            await_predecessors();
            if (flow.over()) release_successors();
            ask_columns(a, c);
            if (settles) {
                Octet octet[2];
                tile_octets(octet, a, (int)job.segment, (int)job.end, first_left(s, warp));
                known = know_tile<NT, coded, IT>(a, octet, lane);
            }
        }
        if (i >= stages) break;
        flow.fetch(a, job, s, lane);
    }
    copies_wait(stages - 3);
    if (settles) known.store(known_at(warp), lane, a.result == ADD);
    if constexpr (coded) put_powers(a, c);
    else if (!a.sums) {
        if (norm.from) sync();  // all of it is there
        put_columns<F>(a, c, norm, squares);
    }
    sync();

    auto settle_own = [&](int tile, Sums<NT>& sums) { settle<IT, coded>(a, job, s, sums, tile, nullptr, squares, lane); };
    multiply_run<IT, F>(a, job, s, c, flow, s.run_begin(warp), stages, settle_own, [&](bool head, const Sums<NT>& sums) { sums.store(left_by(warp, head), lane); });
    sync();
    each_left(s, warp, warps, [&](int tile, int first, int last) {
        Sums<NT> sums;
        sums.zero();
#pragma unroll 1
        for (int w = first; w <= last; ++w) {
            const Float4* part = left_by(w, has_head(s, w, tile));
#pragma unroll
            for (int n = 0; n < NT; ++n) sums.add(n, part[32 * n + lane]);
        }
        settle<IT, coded>(a, job, s, sums, tile, tile == first_left(s, warp) ? known_at(warp) : nullptr, squares, lane);
    });
}

// A quarter of the registers, where it costs nothing, is left to blocks of the small kernels around a product: these then
// wait beside its blocks, and not for their end. Blocks have up to 512 threads.
constexpr int ALL = 512, LEAVING = 640;

// `known`: the format of all rows, or FORMATS. work: with the format `f`, of `job`, in `shared` memory.
#define STREAM(name, known, threads, work)                              \
    KERNEL(name, Stream, threads, 1) {                                  \
        DYNAMIC_SHARED(shared);                                         \
        const Job& job = own_job(a);                                    \
        with_known_format<known>((int)job.format, [&](auto f) { work; }); \
    }
// A kernel for launches of one format each is smaller than the one for all.
#define STREAMS_CODED(name, work)        \
    STREAM(name, FORMATS, ALL, work)     \
    STREAM(name##_Q4, Q4, ALL, work)     \
    STREAM(name##_Q5, Q5, ALL, work)     \
    STREAM(name##_Q6, Q6, ALL, work)     \
    STREAM(name##_Q8, Q8, ALL, work)
#define STREAMS(name, work)                  \
    STREAMS_CODED(name, work)                \
    STREAM(name##_BF16, BF16, LEAVING, work) \
    STREAM(name##_NVFP4, NVFP4, ALL, work)   \
    STREAM(name##_FP8, FP8, LEAVING, work)

// Formats that recipes put side by side, in the inputs of mixers: bf16, F and, if it is another, G.
#define STREAM_MIXED(name, F, G, threads, blocks, work)                        \
    KERNEL(name, Stream, threads, blocks) {                                    \
        DYNAMIC_SHARED(shared);                                                \
        const Job& job = own_job(a);                                           \
        auto multiply = [&](auto f) { work; };                                 \
        if ((int)job.format == F) multiply(Constant<F>());                     \
        else if (G == BF16 || (int)job.format == BF16) multiply(Constant<BF16>()); \
        else multiply(Constant<G>());                                          \
    }
