// Products of 17 to 128 columns with stored matrices: 16 rows a warp, all columns a block, both on their way through shared
// memory. Weights are decoded once for all columns, scale included, into the registers that the matrix units take them from,
// so that sums run over all of K; while a warp's products of one group of columns are worked on, it decodes the next.
//
// A tile is 16 rows a warp. Blocks have as many of their own as there are for all, and share the rest, so that each has as
// many chunks (`Work`); what becomes of the sums is in slabs.cuh.
#pragma once
#include "slabs.cuh"

#ifndef PANELS
// Where matrix instructions take one warp's operands from registers.
DEVICE void panel_begin() {}
DEVICE void panel_commit() {}
template <int pending> DEVICE void panel_wait() {}
struct Panel {};
DEVICE void panel_expect(Panel*, int) {}
DEVICE void panel_fetch(u8* dst, const u8* src, int size, Panel*, int) {
    for (int i = 16 * thread(); i < size; i += 16 * threads()) copy16_if(dst + i, src + i, true);
}
// Each warp has waited for its own copies; and all have left the turn before this one.
DEVICE void panel_arrived(Panel*, int) { sync(); }
DEVICE void panel_leave(Panel*) {}
using PanelAt = const u8*;
template <int N8> DEVICE PanelAt panel_at(const u8* b) { return b; }
template <int N8> DEVICE void panel_mma(float (&c)[N8][4], u32 a0, u32 a1, u32 a2, u32 a3, PanelAt b, int offset) {
    const u8* own = b + offset + 4 * (thread() % 32);  // column lane/4, elements 2*(lane%4) and + 1
#pragma unroll
    for (int n = 0; n < N8; ++n) mma(c[n], a0, a1, a2, a3, *(const u32*)(own + 128 * n), *(const u32*)(own + 128 * (N8 + n)));
}
#endif

// A warp's 16 rows of a group of 64 columns, as they are stored.
template <int F> struct Group {
    Held<F> upper, lower;  // of rows lane/4 and lane/4 + 8
    u32 scale[2];          // of those, twice

    DEVICE void load(const u8* stage, const u64 (&scales)[2], int u, int lane) {
        const int g = lane / 4, t = lane % 4;
        upper.load(stage, g, u, t), lower.load(stage, 8 + g, u, t);
        if constexpr (Traits<F>::scaled) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float one = from_half((u16)(scales[h] >> 16 * (F == Q8 ? 2 * u + t / 2 : u)));
                scale[h] = pack(one, one);
            }
        }
    }
};

template <int F> DEVICE void scaled_pairs(u32 (&p)[4], const Held<F>& held, int j, u32 scale) {
    held.pairs(p, j);
    if constexpr (Traits<F>::scaled) {
        constexpr u32 minus = F == Q4 ? 0xC308C308 : F == Q5 ? 0xC310C310 : 0xC320C320;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (BIAS<F> != 0) p[i] = fma2(p[i], ONE, minus);
            p[i] = fma2(p[i], scale, MINUS_ZERO);
        }
    }
}

// Half of a group as operands of two products.
struct Operand {
    u32 upper[4], lower[4];

    template <int F> DEVICE void decode(const Group<F>& group, int j) {
        scaled_pairs<F>(upper, group.upper, j, group.scale[0]), scaled_pairs<F>(lower, group.lower, j, group.scale[1]);
    }
    // sums += these times x[k / 8][8 N8 columns][8] from `offset` on, in the background
    template <int N8> DEVICE void multiply(float (&sums)[N8][4], PanelAt x, int offset) const {
        panel_begin();
        panel_mma<N8>(sums, upper[0], lower[0], upper[1], lower[1], x, offset);
        panel_mma<N8>(sums, upper[2], lower[2], upper[3], lower[3], x, offset + 256 * N8);
        panel_commit();
    }
};

// A block's chunks: a run of those of tiles that blocks share, one after another, then all of its own tiles.
struct Work {
    Runs runs;  // of all shared tiles; or, where each of these has `parts` blocks to itself, of one of them
    int chunks, parts, block;
    int begin, run;          // the block's run
    int own, whole, shared;  // its first tile, how many, and the first that is shared

    DEVICE Work(const Job& job, int block) : runs{(int)job.length, (int)job.longer}, chunks((int)job.chunks), parts((int)job.slices), block(block) {
        whole = (int)job.whole, own = block * whole, shared = whole * (int)job.blocks;
        const int tile = parts ? quotient(block, parts) : 0, part = block - tile * parts;
        begin = tile * chunks + runs.begin(part), run = runs.begin(part + 1) - runs.begin(part);
    }
    DEVICE int total() const { return run + whole * chunks; }
    // Of its run, the first tile, and how many: none, one or two.
    DEVICE int first() const { return quotient(begin, chunks); }
    DEVICE int held() const { return run ? quotient(begin + run - 1, chunks) - first() + 1 : 0; }
    // The tile of chunk i of the block.
    DEVICE int tile(int i) const { return i < run ? shared + quotient(begin + i, chunks) : own + quotient(i - run, chunks); }
    // The block that has the first part of a shared tile, which part this one has, and of how many.
    DEVICE void share(int tile, int& holder, int& part, int& all) const {
        if (parts) holder = tile * parts, part = block - holder, all = parts;
        else runs.share(tile * chunks, chunks, block, part, all), holder = block - part;
    }
};

template <int N8> DEVICE void wide(const Stream& a) {
    DYNAMIC_SHARED(shared);
    __shared__ float factors[8 * N8];
    const Job& job = own_job(a);
    const int warps = threads() / 32, warp = from_lane(thread() / 32, 0), lane = thread() % 32;
    const int format = (int)job.format, bytes = (int)job.stage, stages = (int)a.stages, chunks = (int)job.chunks;
    const int room = (int)job.width * 16 * N8;
    Panel* panel = (Panel*)shared;  // [stages]
    u8* x = shared + 128;           // [stages][width / 8][8 N8 columns][8] bf16
    u8* ring = x + stages * room + warp * stages * bytes;

    const Work work(job, block_x() - (int)job.block);
    const int first = work.first(), held = work.held(), total = work.total();
    int i = 0, current = 0, turn = 0, next = work.begin - first * chunks;  // next: chunk to fetch, of its tile
    Source source;
    Sums<N8> sums;
    if (thread() == 0)
#pragma unroll 1
        for (int s = 0; s < stages; ++s) panel_expect(panel + s, warps);
    // chunk `ahead`: of this warp's rows, then of the columns for all warps
    auto fetch_rows = [&](auto f, int ahead, int slot) {
        if (ahead >= total) return;
        if (ahead == work.run) next = 0;
        if (ahead == 0 || next == 0) {
            Octet octet[2];
            tile_octets(octet, a, (int)job.segment, (int)job.end, minimum(work.tile(ahead) * warps + warp, (int)job.tiles - 1));
            source.enter<f.value>(a, octet, next, lane);
        }
        source.copy<f.value>(ring + slot * bytes, lane);
    };
    auto fetch_columns = [&](int ahead, int slot, int turn) {
        if (ahead < total) {
            panel_fetch(x + slot * room, (const u8*)a.x + (i64)next * room, room, panel + slot, turn);
            if (++next == chunks) next = 0;
        }
        copies_commit();
    };
    with_format(format, [&](auto f) {
        if constexpr (f.value != FP32) {
#pragma unroll 1
            for (int s = 0; s < stages - 1; ++s) {
                fetch_rows(f, s, s);
                if (s == 0) await_predecessors(), release_successors();  // weights do not depend on the kernels before this one
                fetch_columns(s, s, 0);
            }
        }
    });
    put_factors<N8>(a, factors);  // while the first chunks arrive
    sync();  // places for columns are set up, too
    int left_to_me[2] = {0, 0};  // slabs of the tiles of its run
    // tile after tile; then its share of those of its run
#pragma unroll 1
    for (int step = 0; step < work.whole + 2 * held; ++step) {
        const bool late = step >= work.whole + held, own = !late && step >= held;
        const int of_run = late ? step - work.whole - held : step, tile = own ? work.own + step - held : work.shared + first + of_run;
        int holder = 0, part = 0, parts = 1;
        if (!own) work.share(first + of_run, holder, part, parts);
        u8* stage = ring;
        if (!late) {
            sums.zero();
            const int stop = own ? work.run + (step - held + 1) * chunks : minimum(work.run, (first + step + 1) * chunks - work.begin);
            with_format(format, [&](auto f) {
                constexpr int F = f.value, groups = Chunk<F>::groups;
                if constexpr (F != FP32) {
                    // two halves of groups are multiplied while the one after them is decoded
                    Operand operand[3];
#pragma unroll 1
                    for (; i < stop; ++i) {
                        if (stages > 2) copies_wait<1>();
                        else copies_wait<0>();
                        sync_warp();
                        stage = ring + current * bytes;
                        u64 scales[2] = {0, 0};
                        if constexpr (Traits<F>::scaled) {
#pragma unroll
                            for (int h = 0; h < 2; ++h) scales[h] = *(const u64*)(stage + Chunk<F>::scale_offset + 8 * (8 * h + lane / 4));
                        }
                        Group<F> group;
                        group.load(stage, scales, 0, lane);
                        const PanelAt columns = panel_at<N8>(x + current * room);
                        const int slot = current ? current - 1 : stages - 1;  // where the chunk before this one was
#pragma unroll
                        for (int j = 0; j < 2 * groups; ++j) {
                            operand[j % 3].decode<F>(group, j % 2);
                            if (j % 2 && j + 1 < 2 * groups) group.load(stage, scales, j / 2 + 1, lane);
                            if (j == 0) panel_arrived(panel + current, turn);
                            panel_wait<1>();
                            operand[j % 3].multiply<N8>(sums.v, columns, j * (512 * N8));
                            if (j == 0) fetch_rows(f, i + stages - 1, slot);
                        }
                        fetch_columns(i + stages - 1, slot, turn + (current > 0));
                        panel_wait<0>();
                        panel_leave(panel + current);
                        if (++current == stages) current = 0, ++turn;
                    }
                }
            });
        }
        auto partial = [&](int unit, int part) {
            return (Float4*)a.partial + ((i64)(2 * ((int)job.block + holder + part) + (part > 0)) * warps + unit) * (N8 * 32);
        };
        if (!late) {
            const int unit = tile * warps + warp;
            if (parts > 1 && unit < job.tiles) {
                sums.store(partial(warp, part), lane);
                (of_run ? left_to_me[1] : left_to_me[0]) = Shared{a.tickets + job.ticket + unit, parts}.arrive(lane);
            }
        }
        if (late ? parts == 1 : parts > 1) continue;
        // 32 columns of 16 rows at a time: all of a warp's rows, or some of those that blocks share, and what was left to this one
        constexpr int slabs = N8 / 4;
        const int all = ((int)a.columns + 31) / 32;
        const int seat = of_run ? warps - 1 - warp : warp;  // so that a warp has one of either tile, not both
        int item = late ? part + parts * seat : slabs * warp;
        const int stop = late ? slabs * warps : item + slabs, stride = late ? parts * warps : 1;
        int more = late ? (of_run ? left_to_me[1] : left_to_me[0]) : 0;
#pragma unroll 1
        while (item < stop || more) {
            const bool taken_over = item >= stop;
            int unit = warp, slab = 0;
            if (taken_over) {
                while (!(more >> slab & 1)) ++slab;
                more &= more - 1;
            } else {
                unit = item / slabs, slab = item % slabs, item += stride;
            }
            const int number = tile * warps + unit;
            if (number >= job.tiles || slab >= all) continue;
            Octet octet[2];
            tile_octets(octet, a, (int)job.segment, (int)job.end, number);
            const Slab result(a, octet, 32 * slab, lane);
            const Shared shared{a.tickets + job.ticket + number, parts};
            // the slab's sums come to lie first; those of slabs that are done may go
            if (late) {
                sums.zero();
                if (taken_over) shared.after(lane);
                else if (!shared.wait(slab, lane)) continue;
#pragma unroll 4
                for (int p = 0; p < parts; ++p) {
                    const Float4* from = partial(unit, p) + 128 * slab + lane;
#pragma unroll
                    for (int n = 0; n < 4; ++n) {
                        float v[4];
                        load_fresh(v, (const float*)(from + 32 * n));
                        sums.add(n, {v[0], v[1], v[2], v[3]});
                    }
                }
            } else {
#pragma unroll
                for (int n = 4; n < N8; ++n)
                    if (n / 4 == slab)
#pragma unroll
                        for (int i = 0; i < 4; ++i) sums.v[n % 4][i] = sums.v[n][i];
            }
            result.finish(a, sums.v, 8 * N8, factors, (float*)stage, here(lane));
            if (late) shared.done(all, lane);
        }
    }
    copies_wait<0>();
}
