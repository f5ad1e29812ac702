// Products of one column with stored matrices: as in stream.cuh, with less to be done at the end.
//
// Of a tile's sums a lane has one row, and what rows hold already is asked for while the weights stream by.
#pragma once
#include "stream.cuh"

// Where row lane % 16 of a tile belongs. Of gate and up, lanes from 8 on have rows of up, which go nowhere by themselves.
struct Spot {
    int segment, row;  // of the segment
    bool inside;

    DEVICE Spot(const Stream& a, const Job& job, int tile) {
        const bool pair = a.result == SWIGLU;
        const int r = thread() % 16;
        int i = (int)job.segment;
        while (i + 1 + pair < (int)job.end && tile >= (int)a.segment[i + 1 + pair].tile) i += 1 + pair;
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
        int* ticket = a.tickets + (int)job.ticket + tile;
        if (lane < 16) partial[part * 16] = sum;
        fence();
        sync_warp();
        const int arrived = lane == 0 ? atomic_add(ticket, 1) : 0;
        if (from_lane(arrived, 0) < parts - 1) return;
        fence();
        sum = 0;
#pragma unroll 2
        for (int j = 0; j < parts; ++j) sum += load_fresh(partial + j * 16);
        if (lane == 0) *ticket = 0;
    }
    sum *= known.y;
    if (a.result == SWIGLU) sum = silu(sum) * shuffle_xor(sum, 8);
    if (!spot.inside) return;
    void* out = a.segment[spot.segment].out;
    if (a.result == STORE_F32) ((float*)out)[spot.place(a)] = sum;
    else ((u16*)out)[spot.place(a)] = to_bf16(known.x + (a.result == ADD && a.scale ? a.scale[0] : 1.0f) * sum);
}

template <int F> DEVICE void single(const Stream& a, const Job& job, u8* shared, float* squares) {
    constexpr int bytes = Chunk<F>::bytes;
    constexpr bool coded = is_coded(F);
    const int warps = 1 << (int)a.warps, warp = from_lane(thread() / 32, 0), lane = thread() % 32, r = lane % 16, stages = (int)a.stages;
    const Share s(job, (int)a.warps);
    const Columns c = columns_at<F>(shared, s, 1);
    float* sums = (float*)((u8*)c.power + (coded ? (s.size / 16 + 127) / 128 * 128 : 0));  // [2][warps][16]: of ends, of beginnings
    Float2* known = (Float2*)(sums + 32 * warps) + 16 * warp;                                // of the first tile the warp settles
    u8* rings = (u8*)(sums + 64 * warps);

    Flow<F> flow(Start(a, job, s, warp), s, rings + here(warp * stages * bytes), stages, lane);
    auto rows_of = [&](int tile) { return TileRows(a, job, tile); };
    Column column(a, c);
    const bool settles = first_left(s, warp) * s.chunks < s.block_end;
    Float2 mine = {0.0f, 1.0f};
#pragma unroll 1
    for (int i = 1;; ++i) {
        if (i == 3) {
            await_predecessors();
            if (!coded || flow.over()) release_successors();  // where instructions are few, those that come in take nothing away
            column.ask();
            if (settles) {
                const Spot spot(a, job, first_left(s, warp));
                mine = {spot.now(a), spot.factor(a)};
            }
        }
        if (i >= stages) break;
        flow.fetch(s, lane, rows_of);
    }
    column.put(c, squares);
    if (settles && lane < 16) known[r] = mine;
    sync();
    const float factor = norm_factor(a, squares, warps);

    auto settle_own = [&](int tile, const Sums<1>& own) {
        const Spot spot(a, job, tile);
        const float upper = from_bits((u32)from_lane((int)bits(own.v[0][0]), r % 8 * 4)), lower = from_bits((u32)from_lane((int)bits(own.v[0][2]), r % 8 * 4));
        settle_rows(a, job, s, tile, spot, {spot.now(a), factor * spot.factor(a)}, r < 8 ? upper : lower);
    };
    multiply_run<1, F>(a, s, c, flow, s.run_begin(warp), stages, rows_of, settle_own, [&](bool head, const Sums<1>& own) {
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

template <int KNOWN> DEVICE void single_jobs(const Stream& a) {
    DYNAMIC_SHARED(shared);
    __shared__ float squares[16];
    const Job& job = a.job[job_of(a)];
    with_known_format<KNOWN>((int)job.format, [&](auto f) { single<f.value>(a, job, shared, squares); });
}
