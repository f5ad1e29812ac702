// Products of 17 to 128 columns with stored matrices: 16 rows a warp, all columns a block, both on their way through shared
// memory. Weights are decoded once for all columns, scale included, into the registers that the matrix units take them from,
// so that sums run over all of K; while a warp's products of one group of columns are worked on, it decodes the next.
//
// Blocks share out the chunks of all their tiles of 16 rows a warp evenly, and add up those they share.
#pragma once
#include "sums.cuh"

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
template <int N8> DEVICE void panel_mma(float (&c)[N8][4], u32 a0, u32 a1, u32 a2, u32 a3, const u8* b) {
    const u8* own = b + 4 * (thread() % 32);  // column lane/4, elements 2*(lane%4) and + 1
#pragma unroll
    for (int n = 0; n < N8; ++n) mma(c[n], a0, a1, a2, a3, *(const u32*)(own + 128 * n), *(const u32*)(own + 128 * (N8 + n)));
}
#endif

// Columns 16t .. 16t + 15 of group u of a stage's row, in two eights; times their scale, `scales` being those of the row.
template <int F> DEVICE void scaled_pairs(u32 (&p)[2][4], const u8* stage, u64 scales, int row, int u, int t) {
    using C = Chunk<F>;
    if constexpr (F == Q8) {
        const Word4 all = *(const Word4*)(stage + row * C::row + 16 * ((4 * u + t) ^ C::swizzle(row)));
        q8_pairs(p[0], all.x, all.y), q8_pairs(p[1], all.z, all.w);
    } else {
        chunk_pairs<F>(p, stage, row, u, t, 0);
    }
    if constexpr (Traits<F>::scaled) {
        constexpr u32 minus = F == Q4 ? 0xC308C308 : F == Q5 ? 0xC310C310 : 0xC320C320;
        const float scale = from_half((u16)(scales >> 16 * (F == Q8 ? 2 * u + t / 2 : u)));
        const u32 pair = pack(scale, scale);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            u32& both = p[i / 4][i % 4];
            if (BIAS<F> != 0) both = fma2(both, ONE, minus);
            both = fma2(both, pair, MINUS_ZERO);
        }
    }
}

// A warp's 16 rows of a group of 64 columns.
struct Operand {
    u32 upper[2][4], lower[2][4];  // of rows lane/4 and lane/4 + 8

    template <int F> DEVICE void decode(const u8* stage, const u64 (&scales)[2], int u, int lane) {
        scaled_pairs<F>(upper, stage, scales[0], lane / 4, u, lane % 4);
        scaled_pairs<F>(lower, stage, scales[1], 8 + lane / 4, u, lane % 4);
    }
    // sums += these times x[k / 8][8 N8 columns][8], in the background
    template <int N8> DEVICE void multiply(float (&sums)[N8][4], const u8* x) const {
        panel_begin();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 *a = upper[i / 2] + i % 2 * 2, *b = lower[i / 2] + i % 2 * 2;
            panel_mma<N8>(sums, a[0], b[0], a[1], b[1], x + i * 256 * N8);
        }
        panel_commit();
    }
};

// Where a warp's sums of a tile lie while they become results: 32 columns of 16 rows.
DEVICE float* place(float* room, int row, int column) { return room + 16 * column + 4 * (row / 4 ^ column / 2 & 3) + row % 4; }

DEVICE void put_result(const Stream& a, void* out, i64 at, float v, int column) {
    if (a.result == STORE_F32) {
        ((float*)out)[at] = v;
        return;
    }
    u16* p = (u16*)out + at;
    *p = to_bf16(a.result == ADD ? from_bf16(*p) + (a.scale ? a.scale[column] : 1.0f) * v : v);
}

// Eight features of a column, normed but for its length, to which they add their squares.
DEVICE Word4 normed_later(Word4 v, Word4 norm, float& square) {
    float f[8], w[8];
    unpack8(f, v), unpack8(w, norm);
#pragma unroll
    for (int i = 0; i < 8; ++i) square += f[i] * f[i], f[i] *= 1.0f + w[i];
    return {pack(f[0], f[1]), pack(f[2], f[3]), pack(f[4], f[5]), pack(f[6], f[7])};
}

// Leave features f .. f + 7 of a column, f a multiple of 8, in panels of `room` columns.
DEVICE void leave8(u8* panels, Word4 v, int f, int column, int room) {
    u32* to = (u32*)panels + panel_place(f, column, room) / 2;
    v = operand_order(v);
    to[0] = v.x, to[4 * room] = v.y, to[8 * room] = v.z, to[12 * room] = v.w;
}

// What is left to multiply the sums of columns by: where the product before this one left them, their norm's factor. `factors` are
// shared by the block.
template <int N8> DEVICE void put_factors(const Stream& a, float* factors) {
    constexpr int at_once = 5;
    const int warp = from_lane(thread() / 32, 0), lane = thread() % 32, tiles = (int)a.K / 16;
#pragma unroll 1
    for (int four = warp; four < 2 * N8; four += threads() / 32) {
        float square[4] = {};
        const float* squares = a.sums + 4 * four * tiles;
        if (a.sums && 4 * four < a.columns)
#pragma unroll 1
            for (int tile = lane; tile < tiles; tile += 32 * at_once) {
                float v[at_once][4] = {};
#pragma unroll
                for (int i = 0; i < at_once; ++i)
                    if (tile + 32 * i < tiles) load4(v[i], squares + 4 * (tile + 32 * i));
#pragma unroll
                for (int i = 0; i < at_once; ++i)
#pragma unroll
                    for (int j = 0; j < 4; ++j) square[j] += v[i][j];
            }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            square[j] = sum_warp(square[j]);
            const float root = inverse_root(square[j] * reciprocal((float)a.K) + (float)a.eps);
            if (lane == j) factors[4 * four + j] = a.sums ? root : 1.0f;
        }
    }
}

// Put the sums of a tile where they belong, by way of 2 KB of shared memory that are this warp's own.
template <int N8>
DEVICE void finish_wide(const Stream& a, const Octet (&octet)[2], const Sums<N8>& sums, const float* factors, float* room, int lane) {
    const int g = lane / 4, t = lane % 4, pair = a.result == SWIGLU, count = octet[0].count, rows = pair ? 8 : 16;
    const Segment& s = a.segment[octet[0].segment];
    const float upper = row_factor(s, octet[0].row + minimum(g, count - 1));
    const float lower = row_factor(a.segment[octet[1].segment], octet[1].row + minimum(g, maximum(octet[1].count, 1) - 1));
    const i64 first = s.out_first + octet[0].row - s.first, stride = s.out_stride;
    const int size = a.result == STORE_F32 ? 4 : 2;
    const bool vectors = count >= rows && ((u64)s.out + first * size) % 16 == 0 && stride * size % 16 == 0;
#pragma unroll 1
    for (int begin = 0; begin < minimum(8 * N8, (int)a.columns); begin += 32) {
        sync_warp();
#pragma unroll
        for (int n = 0; n < N8; ++n)
            if (n / 4 * 32 == begin)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float factor = factors[8 * n + 2 * t + i];
                    *place(room, g, n % 4 * 8 + 2 * t + i) = factor * upper * sums.v[n][i];
                    *place(room, 8 + g, n % 4 * 8 + 2 * t + i) = factor * lower * sums.v[n][2 + i];
                }
        sync_warp();
        const int left = minimum(32, (int)a.columns - begin);
        if (!vectors) {
#pragma unroll 1
            for (int column = lane / 16; column < left; column += 2) {
                const int row = lane % 16;
                float v = *place(room, row, column);
                if (pair) v = silu(v) * *place(room, row + 8 & 15, column);
                if (row < minimum(rows, count)) put_result(a, s.out, (begin + column) * stride + first + row, v, begin + column);
            }
        } else if (lane < left) {
            const float factor = a.scale ? a.scale[begin + lane] : 1.0f;
            float square = 0;
#pragma unroll 1
            for (int row = 0; row < rows; row += 8) {
                float f[2][4], w[2][4];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    load4(f[i], place(room, row + 4 * i, lane));
                    if (!pair) continue;
                    load4(w[i], place(room, 8 + 4 * i, lane));
#pragma unroll
                    for (int j = 0; j < 4; ++j) f[i][j] = silu(f[i][j]) * w[i][j];
                }
                const i64 at = (begin + lane) * stride + first + row;
                if (a.result == STORE_F32) {
                    store4((float*)s.out + at, f[0]), store4((float*)s.out + at + 4, f[1]);
                    continue;
                }
                Word4 *out = (Word4*)((u16*)s.out + at), norm = {};
                if (a.left.norm) norm = *(const Word4*)(a.left.norm + first + row);
                if (a.result == ADD) {
                    float old[8];
                    unpack8(old, *out);
#pragma unroll
                    for (int j = 0; j < 8; ++j) f[j / 4][j % 4] = old[j] + factor * f[j / 4][j % 4];
                }
                Word4 all = {pack(f[0][0], f[0][1]), pack(f[0][2], f[0][3]), pack(f[1][0], f[1][1]), pack(f[1][2], f[1][3])};
                *out = all;
                if (!a.left.panels) continue;
                if (a.left.norm) all = normed_later(all, norm, square);
                leave8(a.left.panels, all, (int)first + row, begin + lane, 8 * N8);
            }
            if (a.left.norm) a.left.squares[(begin + lane) / 4 * (stride / 4) + first / 4 + lane % 4] = square;
        }
    }
}

template <int N8> DEVICE void wide(const Stream& a) {
    DYNAMIC_SHARED(shared);
    __shared__ float factors[8 * N8];
    int j = 0;
    while (j + 1 < a.jobs && block_x() >= a.job[j + 1].block) ++j;
    const Job& job = a.job[j];
    const int warps = threads() / 32, warp = from_lane(thread() / 32, 0), lane = thread() % 32;
    const int format = (int)job.format, bytes = (int)job.stage, stages = (int)a.stages, chunks = (int)job.chunks;
    const int room = (int)job.width * 16 * N8;
    Panel* panel = (Panel*)shared;  // [stages]
    u8* x = shared + 128;           // [stages][width / 8][8 N8 columns][8] bf16
    u8* ring = x + stages * room + warp * stages * bytes;

    const Runs blocks{(int)job.length, (int)job.longer};
    const int block = block_x() - (int)job.block, begin = blocks.begin(block), end = blocks.begin(block + 1);
    const int first = quotient(begin, chunks), last = quotient(end - 1, chunks);
    int i = begin, current = 0, turn = 0, next = begin - first * chunks;  // next: chunk to fetch, of its tile
    Source source;
    Sums<N8> sums;
    if (thread() == 0)
#pragma unroll 1
        for (int s = 0; s < stages; ++s) panel_expect(panel + s, warps);
    // chunk `ahead`: of this warp's rows, then of the columns for all warps
    auto fetch_rows = [&](auto f, int ahead, int slot) {
        if (ahead >= end) return;
        if (ahead == begin || next == 0) {
            Octet octet[2];
            tile_octets(octet, a, (int)job.segment, (int)job.end, minimum(quotient(ahead, chunks) * warps + warp, (int)job.tiles - 1));
            source.enter<f.value>(a, octet, next, lane);
        }
        source.copy<f.value>(ring + slot * bytes, lane);
    };
    auto fetch_columns = [&](int ahead, int slot, int turn) {
        if (ahead < end) {
            panel_fetch(x + slot * room, (const u8*)a.x + (i64)next * room, room, panel + slot, turn);
            if (++next == chunks) next = 0;
        }
        copies_commit();
    };
    with_format(format, [&](auto f) {
        if constexpr (f.value != FP32) {
#pragma unroll 1
            for (int s = 0; s < stages - 1; ++s) {
                fetch_rows(f, begin + s, s);
                if (s == 0) await_predecessors(), release_successors();  // weights do not depend on the kernels before this one
                fetch_columns(begin + s, s, 0);
            }
        }
    });
    put_factors<N8>(a, factors);
    sync();  // places for columns are set up, too
    // tile after tile; then what others share of the first and the last
#pragma unroll 1
    for (int step = first; step <= last + 2; ++step) {
        const bool shared_tile = step > last;
        const int tile = step <= last ? step : step == last + 1 ? first : last, own = tile * warps + warp;
        if (step == last + 2 && first == last) break;
        int part, parts;
        blocks.share(tile * chunks, chunks, block, part, parts);
        u8* stage = ring;
        if (!shared_tile) {
            sums.zero();
            const int stop = minimum(end, (tile + 1) * chunks);
            with_format(format, [&](auto f) {
                constexpr int F = f.value, groups = Chunk<F>::groups;
                if constexpr (F != FP32) {
                    Operand operand[2];
#pragma unroll 1
                    for (; i < stop; ++i) {
                        if (stages > 2) copies_wait<1>();
                        else copies_wait<0>();
                        sync_warp();
                        stage = ring + current * bytes;
                        u64 scales[2] = {0, 0};
                        if constexpr (Traits<F>::scaled)
#pragma unroll
                            for (int h = 0; h < 2; ++h) scales[h] = *(const u64*)(stage + Chunk<F>::scale_offset + 8 * (8 * h + lane / 4));
                        operand[0].decode<F>(stage, scales, 0, lane);
                        panel_arrived(panel + current, turn);
                        const u8* columns = x + current * room;
                        operand[0].multiply<N8>(sums.v, columns);
                        const int slot = current ? current - 1 : stages - 1;  // where the chunk before this one was
                        fetch_rows(f, i + stages - 1, slot);
#pragma unroll
                        for (int u = 1; u < groups; ++u) {
                            operand[u & 1].decode<F>(stage, scales, u, lane);
                            panel_wait<0>();
                            operand[u & 1].multiply<N8>(sums.v, columns + u * (1024 * N8));
                        }
                        fetch_columns(i + stages - 1, slot, turn + (current > 0));
                        panel_wait<0>();
                        panel_leave(panel + current);
                        if (++current == stages) current = 0, ++turn;
                    }
                }
            });
        }
        if (own >= job.tiles || parts == 1 && shared_tile) continue;
        if (parts > 1) {
            auto partial = [&](int part) {
                const int holder = block_x() - block + blocks.holder(tile * chunks) + part;
                return (Float4*)a.partial + ((i64)(2 * holder + (part > 0)) * warps + warp) * (N8 * 32);
            };
            if (!shared_tile) {
                sums.store(partial(part), lane);
                continue;
            }
            fence();
            sync_warp();
            int* ticket = a.tickets + job.ticket + own;
            const int before = lane == 0 ? atomic_add(ticket, 1) : 0;
            if (from_lane(before, 0) < parts - 1) continue;
            fence();
            if (lane == 0) *ticket = 0;
            sums.zero();
            constexpr int at_once = N8 < 16 ? 2 : 1;
#pragma unroll at_once
            for (int p = 0; p < parts; ++p) {
                const Float4* from = partial(p) + lane;
#pragma unroll
                for (int n = 0; n < N8; ++n) {
                    float v[4];
                    load_fresh(v, (const float*)(from + 32 * n));
                    sums.add(n, {v[0], v[1], v[2], v[3]});
                }
            }
        }
        Octet octet[2];
        tile_octets(octet, a, (int)job.segment, (int)job.end, own);
        finish_wide<N8>(a, octet, sums, factors, (float*)stage, here(lane));
    }
    copies_wait<0>();
}
