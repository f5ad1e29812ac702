// Products of 17 to 128 columns with stored matrices: 16 rows a warp, all columns a block, both on their way through shared
// memory. Weights are decoded once for all columns, into the registers that the matrix units take them from.
//
// Blocks of as many warps share out the chunks of all their tiles evenly, and add up those they share, as in sums.cuh.
#pragma once
#include "sums.cuh"

#ifndef PANELS
// Where matrix instructions take one warp's operands from registers.
DEVICE void shared_for_panels() {}
DEVICE void panel_begin() {}
DEVICE void panel_end() {}
template <int N8> DEVICE void panel_mma(float (&c)[N8][4], u32 a0, u32 a1, u32 a2, u32 a3, const u8* b) {
    const u8* own = b + 4 * (thread() % 32);  // column lane/4, elements 2*(lane%4) and + 1
#pragma unroll
    for (int n = 0; n < N8; ++n) mma(c[n], a0, a1, a2, a3, *(const u32*)(own + 128 * n), *(const u32*)(own + 128 * (N8 + n)));
}
#endif

// sums += 16 rows of the stage times all columns. x[group][4][k / 8][8 N8][8]; shift[group][8 N8]: what codes are too large
// by, times the columns' sums, negative.
template <int F, int N8> DEVICE void multiply_wide(float (&sum)[N8][4], const u8* stage, const u8* x, const float* shift, int lane) {
    using C = Chunk<F>;
    using T = Traits<F>;
    const int g = lane / 4, t = lane % 4;
    u64 scales[2] = {0, 0};
    if constexpr (T::scaled)
        for (int i = 0; i < 2; ++i) scales[i] = *(const u64*)(stage + C::scale_offset + 8 * (8 * i + g));
#pragma unroll 1
    for (int u = 0; u < C::groups; ++u) {
        u32 r[2][4], s[2][4];
        chunk_pairs<F>(r, stage, g, u, t, 0), chunk_pairs<F>(s, stage, 8 + g, u, t, 0);
        const u8* b = x + u * (1024 * N8);
        if constexpr (!T::scaled) {
            panel_begin();
#pragma unroll
            for (int i = 0; i < 4; ++i) panel_mma<N8>(sum, r[i / 2][i % 2 * 2], s[i / 2][i % 2 * 2], r[i / 2][i % 2 * 2 + 1], s[i / 2][i % 2 * 2 + 1], b + i * 256 * N8);
            panel_end();
        } else {
            constexpr int parts = F == Q8 ? 2 : 1;  // scales of a group
#pragma unroll
            for (int part = 0; part < parts; ++part) {
                float own[N8][4];
#pragma unroll
                for (int n = 0; n < N8; ++n) {
                    Float2 both = {0, 0};
                    if (BIAS<F> != 0) both = *(const Float2*)(shift + 8 * (N8 * u + n) + 2 * t);
                    own[n][0] = own[n][2] = both.x, own[n][1] = own[n][3] = both.y;
                }
                panel_begin();
#pragma unroll
                for (int i = part * 2; i < (parts == 2 ? part * 2 + 2 : 4); ++i)
                    panel_mma<N8>(own, r[i / 2][i % 2 * 2], s[i / 2][i % 2 * 2], r[i / 2][i % 2 * 2 + 1], s[i / 2][i % 2 * 2 + 1], b + i * 256 * N8);
                panel_end();
                const int at = 16 * (parts * u + part);
                const float upper = from_half((u16)(scales[0] >> at)), lower = from_half((u16)(scales[1] >> at));
#pragma unroll
                for (int n = 0; n < N8; ++n) {
                    sum[n][0] += upper * own[n][0], sum[n][1] += upper * own[n][1];
                    sum[n][2] += lower * own[n][2], sum[n][3] += lower * own[n][3];
                }
            }
        }
    }
}

template <int N8> DEVICE void wide(const Stream& a) {
    DYNAMIC_SHARED(shared);
    release_successors();
    const Job& job = a.job[0];
    const int warps = threads() / 32, warp = from_lane(thread() / 32, 0), lane = thread() % 32, columns = (int)a.columns;
    const int format = (int)job.format, bytes = (int)job.stage, groups = (int)job.width / 64, stages = (int)a.stages;
    const int chunks = (int)job.chunks, room = groups * 1024 * N8, shift_room = job.bias ? groups * 8 * N8 : 0;
    u8* x = shared;                                          // [stages][group][8][8 N8] of 16 bytes
    float* shift = (float*)(x + stages * room);              // [stages][group][8 N8]
    u8* ring = (u8*)(shift + stages * shift_room) + warp * stages * bytes;

    const Runs blocks{(int)job.length, (int)job.longer};
    const int begin = blocks.begin(block_x()), end = blocks.begin(block_x() + 1);
    int tile = quotient(begin, chunks), chunk = begin - tile * chunks, current = 0;
    int ahead = begin, ahead_tile = tile, ahead_chunk = chunk, slot = 0;
    Source source;
    Sums<N8> sums;
    sums.zero();
    auto fetch_columns = [&](int number, int slot) {
        const u16* from = a.x + (i64)number * groups * 64 * columns;
        for (int r = warp; r < 8 * groups; r += warps)
            for (int c = lane; c < columns; c += 32) copy16_if(x + slot * room + (8 * N8 * r + c) * 16, from + (r * columns + c) * 8, true);
        for (int i = thread(); i < shift_room / 4; i += threads())
            copy16_if(shift + slot * shift_room + 4 * i, a.sums + (i64)number * shift_room + 4 * i, true);
    };
#pragma unroll 1
    for (int i = begin + 1 - stages; i < end; ++i) {
        if (i >= begin) {
            if (stages > 2) copies_wait<1>();
            else copies_wait<0>();
            shared_for_panels();
            sync();  // the chunk has arrived for all, and all are done with the one before it
        }
        if (ahead < end) {
            const bool fresh = ahead == begin || ahead_chunk == 0;
            Octet octet[2];
            if (fresh) tile_octets(octet, a, (int)job.segment, (int)job.end, minimum(ahead_tile * warps + warp, (int)job.tiles - 1));
            with_format(format, [&](auto f) {
                if (fresh) source.enter<f.value>(a, octet, ahead_chunk, lane);
                source.copy<f.value>(ring + slot * bytes, lane);
            });
            if (ahead == begin) after_predecessors();  // weights do not depend on the kernels before this one
            fetch_columns(ahead_chunk, slot);
            ++ahead;
            if (++ahead_chunk == chunks) ahead_chunk = 0, ++ahead_tile;
        }
        copies_commit();
        slot = slot + 1 == stages ? 0 : slot + 1;
        if (i < begin) continue;

        with_format(format, [&](auto f) {
            if constexpr (f.value != FP32) multiply_wide<f.value, N8>(sums.v, ring + current * bytes, x + current * room, shift + current * shift_room, lane);
        });
        current = current + 1 == stages ? 0 : current + 1;
        if (++chunk == chunks || i + 1 == end) {
            const int own = tile * warps + warp;
            int part, parts;
            blocks.share(tile * chunks, chunks, block_x(), part, parts);
            if (own < job.tiles && add_parts(a, sums, own, part, parts, lane)) {
                Octet octet[2];
                tile_octets(octet, a, (int)job.segment, (int)job.end, own);
                finish_tile<N8>(a, octet, sums, 1.0f, lane);
            }
            sums.zero();
            if (chunk == chunks) chunk = 0, ++tile;
        }
    }
    copies_wait<0>();
}
