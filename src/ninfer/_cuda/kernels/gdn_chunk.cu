// Gated DeltaNet of many columns: what of a chunk does not depend on the state, for all chunks at once.
#include "gdn_chunk.cuh"

constexpr int SPAN = 8 + TAPS - 1;  // inputs of eight columns

// Two channels of a part: their inputs at columns first .. first + 7 and before those, their weights, in bf16 pairs.
struct Span {
    u32 x[SPAN], w[TAPS];

    // `count` of the two channels exist; zeros else, and from column `end` on.
    DEVICE void fetch(const Gdn& a, const Inputs& inputs, const u16* weights, int first, int end, int channel, int count) {
        const bool pairs = count == 2 && inputs.n % 2 == 0;
        if (pairs && first >= TAPS - 1 && first + 8 <= end) {
            const u16* from = inputs.columns + (i64)(first - (TAPS - 1)) * inputs.n + channel;
#pragma unroll
            for (int r = 0; r < SPAN; ++r) x[r] = *(const u32*)(from + r * inputs.n);
        } else {
#pragma unroll
            for (int r = 0; r < SPAN; ++r) {
                const int t = first + r - (TAPS - 1);
                const bool inside = t < end && t > -(int)a.taps;
                x[r] = inside && count > 0 ? inputs.at(t, channel) : 0;
                if (inside && count > 1) x[r] |= (u32)inputs.at(t, channel + 1) << 16;
            }
        }
#pragma unroll
        for (int j = 0; j < TAPS; ++j) {
            const int tap = j - TAPS + (int)a.taps;
            const u16* from = weights + tap * inputs.channels + channel;
            w[j] = tap >= 0 && count > 0 ? from[0] : 0;
            if (tap >= 0 && count > 1) w[j] |= (u32)from[1] << 16;
        }
    }

    DEVICE void convolve(float& y, float& z, int u) const {
        y = z = 0;
#pragma unroll
        for (int j = 0; j < TAPS; ++j) y += low(w[j]) * low(x[u + j]), z += high(w[j]) * high(x[u + j]);
        y = silu(y), z = silu(z);
    }
};

// Blocks (key heads, chunks, B) of eight warps.
DEVICE void make_chunk(const Gdn& a) {
    DYNAMIC_SHARED(shared);
    after_predecessors();
    constexpr int TILE = 2 * CHUNK * DK, STRIDE = CHUNK + 4;
    const int key = block_x(), chunk = block_y(), b = block_z(), ratio = (int)(a.nv / a.nk), dk = (int)a.dk;
    const int warp = thread() / 32, lane = thread() % 32, begin = chunk * CHUNK, width = a.width[b], group = (int)a.group;
    if (begin >= width) return;
    const i64 token = (i64)b * a.W, keys = a.nk * a.dk;
    u8* tiles = shared;                        // K, Q
    float* below = (float*)(tiles + 2 * TILE);  // [group][CHUNK][STRIDE]: A below the diagonal, its inverse's columns above
    float* sums = below + group * CHUNK * STRIDE;  // [ratio][CHUNK]: g, then G
    float* betas = sums + ratio * CHUNK;

    // A warp eight columns: q, k, and v of every value head, 64 channels at a time. The next channels are on their way while
    // these are convolved.
    const int first = begin + 8 * warp;
    float* raw = below;  // [CHUNK][DK]: q, then k, before their norm
#pragma unroll 1
    for (int h = -2; h < ratio; ++h) {
        const int part = minimum(h + 2, 2), head = part < 2 ? key : key * ratio + h, size = part < 2 ? dk : (int)a.dv;
        const int end = part < 2 ? DK : (size + SLICE - 1) / SLICE * SLICE;  // channels beyond `size` are zeros
        const Inputs inputs(a, b, part);
        const u16* weights = part_weights(a, part);
        float* to = part < 2 ? raw : (float*)(chunk_head(a, b, chunk, head) + HEAD);
        Span next;
#pragma unroll 1
        for (int d = 2 * lane - 64; d < end; d += 64) {
            const Span now = next;
            if (d + 64 < end) next.fetch(a, inputs, weights, first, width, head * size + d + 64, minimum(2, size - d - 64));
            if (d < 0) continue;
#pragma unroll
            for (int u = 0; u < 8; ++u) {
                const int row = 8 * warp + u;
                float y[2];
                now.convolve(y[0], y[1], u);
                const bool inside = first + u < width;
                float* pair = part < 2 ? to + row * DK + d : to + d / SLICE * (VALUES / 4) + value_at(row, d % SLICE);
                pair[0] = inside ? y[0] : 0.0f, pair[1] = inside ? y[1] : 0.0f;
            }
        }
        if (a.record_c)
            for (int i = thread(); i < minimum(CHUNK, width - begin) * size; i += threads()) {
                const int t = begin + i / size, channel = head * size + i % size;
                a.record_c[(token + t) * channels_of(a) + part * keys + channel] = inputs.columns[t * inputs.n + channel];
            }
        if (part == 2) continue;
        sync_warp();
#pragma unroll 1
        for (int row = 8 * warp; row < 8 * warp + 8; ++row) {
            const float* x = raw + row * DK;
            float y[DK / 32], square = 0;
#pragma unroll
            for (int j = 0; j < DK / 32; ++j) y[j] = x[32 * j + lane], square += y[j] * y[j];
            const float inverse = inverse_root(sum_warp(square) + 1e-6f) * (part ? 1.0f : inverse_root((float)dk));
#pragma unroll
            for (int j = 0; j < DK / 32; ++j) {
                const int d = 32 * j + lane;
                ((u16*)piece<DK>(tiles + (1 - part) * TILE, row, d / 8 & ~1, d / 8 & 1))[d % 8] = to_bf16(y[j] * inverse);
                if (part && a.record_k && d < dk && begin + row < width) a.record_k[((token + begin + row) * a.nk + key) * dk + d] = y[j] * inverse;
            }
        }
        sync_warp();
    }
    for (int i = thread(); i < ratio * CHUNK; i += threads()) {
        const int head = key * ratio + i / CHUNK, t = begin + i % CHUNK;
        const bool inside = t < width;
        const float g = inside ? log_decay(a, token + t, head) : 0.0f;
        sums[i] = g;
        betas[i] = inside ? sigmoid(from_bf16(a.gate_b[(token + t) * a.nv + head])) : 0.0f;
        if (inside && a.record_g) a.record_g[(token + t) * a.nv + head] = g;
    }
    sync();
    for (int i = thread(); i < 2 * TILE / 16; i += threads()) ((Word4*)chunk_keys(a, b, chunk, key))[i] = ((const Word4*)tiles)[i];
    for (int base = 0; base < ratio * CHUNK; base += threads()) {  // every thread adds up what precedes it, in order
        const int i = base + thread();
        float sum = 0;
        if (i < ratio * CHUNK)
            for (int t = 0; t < CHUNK; ++t)
                if (t <= i % CHUNK) sum += sums[i / CHUNK * CHUNK + t];
        sync();
        if (i < ratio * CHUNK) {
            sums[i] = sum;
            float* gates = (float*)(chunk_head(a, b, chunk, key * ratio + i / CHUNK) + 2 * SQUARE);
            gates[i % CHUNK] = sum, gates[CHUNK + i % CHUNK] = betas[i];
        }
    }
    sync();

    // K K^T and Q K^T: a warp 16 rows and 32 columns
    const int row = warp % 4 * 16, column = warp / 4 * 32;
    float kk[4][4] = {}, qk[4][4] = {};
#pragma unroll
    for (int k = 0; k < DK / 16; ++k) {
        u32 left[4], query[4], right[4];
        load_rows<DK>(left, tiles, row, k, lane);
        load_rows<DK>(query, tiles + TILE, row, k, lane);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            load_right_rows<DK>(right, tiles, column + 16 * n, k, lane);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                mma(kk[2 * n + i], left[0], left[1], left[2], left[3], right[2 * i], right[2 * i + 1]);
                mma(qk[2 * n + i], query[0], query[1], query[2], query[3], right[2 * i], right[2 * i + 1]);
            }
        }
    }
    for (int base = 0; base < ratio; base += group) {
        for (int h = base; h < minimum(ratio, base + group); ++h) {
            u8* decayed = chunk_head(a, b, chunk, key * ratio + h) + SQUARE;
            const float *sum = sums + h * CHUNK, *beta = betas + h * CHUNK;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int i = row + 8 * half + lane / 4;
#pragma unroll
                for (int n = 0; n < 4; ++n) {
                    const int j = column + 8 * n + lane % 4 * 2;
                    float p[2];
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const float decay = j + e <= i ? expf(sum[i] - sum[j + e]) : 0.0f;
                        if (j + e < i) below[((h - base) * CHUNK + i) * STRIDE + j + e] = beta[i] * kk[n][2 * half + e] * decay;
                        p[e] = qk[n][2 * half + e] * decay;
                    }
                    *(u32*)(piece<CHUNK>(decayed, i, j / 8 & ~1, j / 8 & 1) + j % 8 * 2) = pack(p[0], p[1]);
                }
            }
        }
        sync();
        // A thread a column j of the inverse, by forward substitution, 16 rows at a time. Its entries lie in row j.
        const int h = base + thread() / CHUNK, j = thread() % CHUNK;
        if (h < minimum(ratio, base + group)) {
            u8* inverse = chunk_head(a, b, chunk, key * ratio + h);
            float *rows = below + (h - base) * CHUNK * STRIDE, *own = rows + j * STRIDE;
            for (int block = 0; block < CHUNK; block += 16) {
                float x[16];
#pragma unroll
                for (int i = 0; i < 16; ++i) x[i] = block + i == j ? 1.0f : 0.0f;
                for (int k = 0; k < block; k += 4) {
                    float known[4];
                    load4(known, own + k);
#pragma unroll
                    for (int e = 0; e < 4; ++e) known[e] = k + e < j ? 0.0f : known[e];
#pragma unroll
                    for (int i = 0; i < 16; ++i) {
                        float row[4];
                        load4(row, rows + (block + i) * STRIDE + k);
#pragma unroll
                        for (int e = 0; e < 4; ++e) x[i] -= row[e] * known[e];
                    }
                }
#pragma unroll
                for (int i = 0; i < 16; ++i) {
#pragma unroll
                    for (int k = 0; k < 15; ++k)
                        if (k < i) x[i] -= rows[(block + i) * STRIDE + block + k] * x[k];
                    if (block + i >= j) own[block + i] = x[i];
                    ((u16*)piece<CHUNK>(inverse, block + i, j / 8 & ~1, j / 8 & 1))[j % 8] = to_bf16(x[i]);
                }
            }
        }
        sync();
    }
}

KERNEL(gdn_chunk, Gdn, 256, 2) { make_chunk(a); }
