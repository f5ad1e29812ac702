// Products of one column with stored matrices: as in stream.cuh, with less to be done at the end.
//
// Of a tile's sums a lane has one row, and what rows hold already is asked for while the weights stream by.
#pragma once
#include "stream.cuh"

// One column of K elements, a multiple of 8, times 1 + norm, on its way through shared memory: [end - begin] of x, then of
// norm. The norm's own factor is left to the end: squares[warp] add up to its square. A thread sees its own eights alone.
struct Column {
    const u16 *x, *norm;
    u8* raw;
    int begin, end, inside;  // what a norm counts may be more than what is multiplied; inside: before K

    DEVICE Column(const Stream& a, const Columns& c, u8* raw) : x(a.x), norm(a.norm), raw(raw) {
        begin = norm ? 0 : c.begin, end = c.begin + c.size;
        if (norm) end = maximum(end, (int)a.K);
        inside = minimum(end, (int)a.K);
    }
    DEVICE int bytes() const { return (2 * (end - begin) * (norm ? 2 : 1) + 127) / 128 * 128; }

    DEVICE void ask(const u16* from, int offset) {
#pragma unroll 1
        for (int k = begin + 8 * thread(); k < inside; k += 8 * threads()) copy16_if(raw + offset + 2 * (k - begin), from + k, true);
    }
    DEVICE void ask_norm() {
        if (norm) ask(norm, 2 * (end - begin));
    }
    DEVICE void ask_column() { ask(x, 0); }

    DEVICE void put(const Columns& c, float* squares) {
        float square = 0;
#pragma unroll 1
        for (int first = begin + 8 * (thread() & ~31); first < end; first += 8 * threads()) {  // whole warps, which share scales
            const int k = first + 8 * (thread() % 32);
            const u8* from = raw + 2 * (k - begin);
            Word4 v = {0, 0, 0, 0}, w = v;
            if (k < inside) {
                v = *(const Word4*)from;
                if (norm) w = *(const Word4*)(from + 2 * (end - begin));
            }
            put8(c, k - c.begin, v, w, square);
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

// 1 / the norm of the one column, or 1.
DEVICE float norm_factor(const Stream& a, const float* squares, int warps) {
    if (!a.norm) return 1.0f;
    float sum = 0;
    for (int w = 0; w < warps; ++w) sum += squares[w];
    return inverse_root(sum * reciprocal((float)a.K) + (float)a.eps);
}

// Where row lane % 16 of a tile belongs. Of gate and up, lanes from 8 on have rows of up, which go nowhere by themselves.
struct Spot {
    int segment, row;  // of the segment
    bool inside;

    DEVICE Spot(const Stream& a, const Job& job, int tile) {
        const bool pair = a.result == SWIGLU;
        const int r = thread() % 16;
        const int i = tile_segment(a, (int)job.segment, (int)job.end, tile);
        segment = pair && r >= 8 ? i + 1 : i;
        row = (tile - (int)a.segment[i].tile) * (pair ? 8 : 16) + (pair ? r % 8 : r);
        inside = row < (int)a.segment[i].rows && thread() % 32 < (pair ? 8 : 16);
    }
    DEVICE i64 place(const Stream& a) const { return a.segment[segment].out_first + row; }
    DEVICE float factor(const Stream& a) const {
        const Segment& s = a.segment[segment];
        return row_factor(s, (int)s.first + minimum(row, (int)s.rows - 1));
    }
    // What a product is added to.
    DEVICE float now(const Stream& a) const { return a.result == ADD && inside ? from_bf16(((const u16*)a.segment[segment].out)[place(a)]) : 0.0f; }
};

// Sums of a tile: lanes r and r + 16 have that of row r. known: what the row holds and its factor.
DEVICE void settle_rows(const Stream& a, const Job& job, const Share& s, int tile, const Spot& spot, Float2 known, float sum) {
    const int lane = thread() % 32, r = lane % 16;
    int part = s.slice, parts = s.slices;
    if (!job.whole) s.blocks.share(tile * s.chunks, s.chunks, s.block, part, parts);
    if (parts > 1) {
        float* partial = a.partial + ((i64)job.ticket + tile) * a.parts * 16 + r;
        if (lane < 16) partial[part * 16] = sum;
        if (!comes_last(a.tickets + (int)job.ticket + tile, parts, lane)) return;
        sum = 0;
#pragma unroll 2
        for (int j = 0; j < parts; ++j) sum += load_fresh(partial + j * 16);
    }
    sum *= known.y;
    if (a.result == SWIGLU) sum = silu(sum) * shuffle_xor(sum, 8);
    if (!spot.inside) return;
    void* out = a.segment[spot.segment].out;
    if (a.result == STORE_F32) ((float*)out)[spot.place(a)] = sum;
    else ((u16*)out)[spot.place(a)] = to_bf16(known.x + (a.result == ADD && a.scale ? a.scale[0] : 1.0f) * sum);
}

template <int F> DEVICE void single(const Stream& a, const Job& job, u8* shared) {
    __shared__ float squares[16];
    constexpr int bytes = Chunk<F>::bytes;
    constexpr bool coded = is_coded(F);
    const int warps = 1 << (int)a.warps, warp = from_lane(thread() / 32, 0), lane = thread() % 32, r = lane % 16, stages = (int)a.stages;
    const Share s(job, (int)a.warps);
    const Columns c = columns_at<F>(shared, s, 1);
    float* sums = (float*)((u8*)c.power + (coded ? (s.size / 16 + 127) / 128 * 128 : 0));  // [2][warps][16]: of ends, of beginnings
    Float2* known = (Float2*)(sums + 32 * warps) + 16 * warp;                                // of the first tile the warp settles
    Column column(a, c, (u8*)(sums + 64 * warps));
    u8* rings = column.raw + column.bytes();

    Flow<F, coded> flow(s, rings + here(warp * stages * bytes), stages, warp, lane);  // giving up bytes first costs whole passes 2 %
    column.ask_norm();
#pragma unroll 1
    for (int i = 1; i < 3; ++i) flow.fetch(a, job, s, lane);
    // The column does depend on the kernels before this one. It is asked for behind few weights, as it would wait for many.
    await_predecessors();
    if (!coded || flow.over()) release_successors();  // where instructions are few, those that come in take nothing away
    column.ask_column();
    copies_commit();
    const bool settles = first_left(s, warp) * s.chunks < s.block_end;
    Float2 mine = {0.0f, 1.0f};
    if (settles) {
        const Spot spot(a, job, first_left(s, warp));
        mine = {spot.now(a), spot.factor(a)};
    }
#pragma unroll 1
    for (int i = 3; i < stages; ++i) flow.fetch(a, job, s, lane);
    copies_wait(stages - 3);
    column.put(c, squares);
    if (settles && lane < 16) known[r] = mine;
    sync();
    const float factor = norm_factor(a, squares, warps);

    auto settle_own = [&](int tile, const Sums<1>& own) {
        const Spot spot(a, job, tile);
        const float upper = from_bits((u32)from_lane((int)bits(own.v[0][0]), r % 8 * 4)), lower = from_bits((u32)from_lane((int)bits(own.v[0][2]), r % 8 * 4));
        settle_rows(a, job, s, tile, spot, {spot.now(a), factor * spot.factor(a)}, r < 8 ? upper : lower);
    };
    multiply_run<1, F>(a, job, s, c, flow, s.run_begin(warp), stages, settle_own, [&](bool head, const Sums<1>& own) {
        float* to = sums + ((head ? 0 : warps) + warp) * 16 + lane / 4;
        if (lane % 4 == 0) to[0] = own.v[0][0], to[8] = own.v[0][2];
    });
    sync();
    each_left(s, warp, warps, [&](int tile, int first, int last) {
        const Spot spot(a, job, tile);
        const Float2 row = tile == first_left(s, warp) ? known[r] : Float2{spot.now(a), spot.factor(a)};
        float sum = 0;
#pragma unroll 2
        for (int w = first; w <= last; ++w) sum += sums[((has_head(s, w, tile) ? 0 : warps) + w) * 16 + r];
        settle_rows(a, job, s, tile, spot, {row.x, factor * row.y}, sum);
    });
}
