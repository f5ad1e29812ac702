// Gated DeltaNet of many columns, 64 at a time on matrix instructions.
//
// Over a chunk that is entered with the state S, with G the running sum of the log decays, D[i][j] = e^(G_i - G_j) for
// j <= i and A the part below the diagonal of (beta K K^T) D, the deltas and outputs of all its columns are
//
//   delta = (1 + A)^-1 beta (V - e^G K S)
//   O     = e^G Q S + (Q K^T D) delta
//   S    <- e^G_last S + K^T (e^(G_last - G) delta)
//
// gdn_chunk makes what does not depend on S, for all chunks at once; gdn_carry takes the state from chunk to chunk. The
// state, the sums, G and the inverse are fp32, the factors of products bf16: both sides of a chunk see the same keys.
#include "gdn.cuh"

constexpr int CHUNK = 64, SLICE = 32;
constexpr int SQUARE = CHUNK * CHUNK * 2, HEAD = 2 * SQUARE + CHUNK * 8, VALUES = CHUNK * SLICE * 4;

// A chunk's scratch: for every key head K and Q [CHUNK, DK] bf16; for every value head the inverse and Q K^T D [CHUNK,
// CHUNK] bf16, G and beta fp32, then slices of V [CHUNK, SLICE] fp32, which outputs replace. Tiles lie as in shared memory.
DEVICE i64 head_bytes(const Gdn& a) { return HEAD + (a.dv + SLICE - 1) / SLICE * VALUES; }

DEVICE u8* chunk_keys(const Gdn& a, int b, int chunk, int key) {
    const i64 count = (a.W + CHUNK - 1) / CHUNK, nbytes = a.nk * 4 * CHUNK * DK + a.nv * head_bytes(a);
    return a.chunks + (b * count + chunk) * nbytes + (i64)key * 4 * CHUNK * DK;
}

DEVICE u8* chunk_head(const Gdn& a, int b, int chunk, int head) {
    return chunk_keys(a, b, chunk, (int)a.nk) + head * head_bytes(a);
}

// Where a slice keeps a value: rows that are stored together meet different banks.
DEVICE int value_at(int row, int column) { return row * SLICE + (column ^ (row & 3) * 8); }

// -- all chunks at once; blocks (key heads, chunks, B), eight warps

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

// -- from chunk to chunk; blocks (slices of COLUMNS columns, value heads, B), four warps for 32 columns

// Warps m, m + 4, .. share 16 rows of a chunk and take 32 columns each; so do they with the rows of the state.
template <int COLUMNS, int STAGES> DEVICE void carry(const Gdn& a) {
    DYNAMIC_SHARED(shared);
    after_predecessors();
    constexpr int TILE = 2 * CHUNK * DK, STAGE = 2 * TILE + HEAD + COLUMNS / SLICE * VALUES, BLOCKS = DK / 64;
    const int head = block_y(), b = block_z(), key = head / (int)(a.nv / a.nk), dk = (int)a.dk, dv = (int)a.dv, width = a.width[b];
    const int warp = thread() / 32, lane = thread() % 32, m = warp % 4, n0 = warp / 4 * 2, g = lane / 4, t2 = lane % 4 * 2;
    if (width <= 0) return;
    const int column = block_x() * COLUMNS + warp / 4 * 32;  // the warp's first
    u8 *const state = shared + STAGES * STAGE, *const errors = state + 128 * DK, *const deltas = errors + SQUARE, *const kept = deltas + SQUARE;
    auto load = [&](int chunk) {
        if (chunk * CHUNK < width) {
            u8* to = shared + chunk % STAGES * STAGE;
            const u8 *keys = chunk_keys(a, b, chunk, key), *values = chunk_head(a, b, chunk, head);
            for (int i = thread(); i < 2 * TILE / 16; i += threads()) copy16(to + 16 * i, keys + 16 * i, 16);
            for (int i = thread(); i < HEAD / 16; i += threads()) copy16(to + 2 * TILE + 16 * i, values + 16 * i, 16);
            const u8* slice = values + HEAD + (i64)block_x() * (COLUMNS / SLICE) * VALUES;
            for (int i = thread(); i < COLUMNS / SLICE * VALUES / 16; i += threads()) {
                const bool inside = block_x() * COLUMNS + i * 16 / VALUES * SLICE < dv;
                copy16(to + 2 * TILE + HEAD + 16 * i, inside ? slice + 16 * i : slice, inside ? 16 : 0);
            }
        }
        copies_commit();
    };
    // the bf16 pair at rows `row` + g + 8 * half and columns 8n + t2, + 1 of the warp's columns in a tile of 64
    auto pair = [&](u8* tile, int row, int half, int n) { return (u32*)(piece<64>(tile, row + 8 * half + g, 2 * n0 + (n & ~1), n & 1) + 2 * t2); };

    float s[BLOCKS][4][4] = {};
    load(0);
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int row = 16 * (m + 4 * i) + 8 * (e / 2) + g, c = column + 8 * n + t2 + e % 2;
                if (a.start[b] != 0 && row < dk && c < dv) s[i][n][e] = state_of(a, a.read[b], head)[(i64)row * dv + c];
            }

    for (int chunk = 0; chunk * CHUNK < width; ++chunk) {
        u8 *const keys = shared + chunk % STAGES * STAGE, *const queries = keys + TILE, *const inverse = queries + TILE, *const decayed = inverse + SQUARE;
        const float *sum = (const float*)(decayed + SQUARE), *beta = sum + CHUNK, *values = beta + CHUNK + warp / 4 * (VALUES / 4);
        if (STAGES == 2) load(chunk + 1);
#pragma unroll
        for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
            for (int n = 0; n < 4; ++n)
#pragma unroll
                for (int half = 0; half < 2; ++half) *pair(state, 16 * (m + 4 * i), half, n) = pack(s[i][n][2 * half], s[i][n][2 * half + 1]);
        copies_wait<STAGES - 1>();
        sync();

        // K S and Q S
        float ks[4][4] = {}, o[4][4] = {};
#pragma unroll
        for (int k = 0; k < DK / 16; ++k) {
            u32 left[4], query[4], right[4];
            load_rows<DK>(left, keys, 16 * m, k, lane);
            load_rows<DK>(query, queries, 16 * m, k, lane);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                load_right<64>(right, state, 16 * k, n0 + n, lane);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    mma(ks[2 * n + i], left[0], left[1], left[2], left[3], right[2 * i], right[2 * i + 1]);
                    mma(o[2 * n + i], query[0], query[1], query[2], query[3], right[2 * i], right[2 * i + 1]);
                }
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = 16 * m + 8 * half + g;
            const float decay = expf(sum[row]);
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const float* v = values + value_at(row, 8 * n + t2);
                *pair(errors, 16 * m, half, n) = pack(beta[row] * (v[0] - decay * ks[n][2 * half]), beta[row] * (v[1] - decay * ks[n][2 * half + 1]));
                o[n][2 * half] *= decay, o[n][2 * half + 1] *= decay;
            }
        }
        sync();

        // the deltas; those the state takes, decayed to the chunk's end
        float d[4][4] = {};
        u32 left[4], right[4];
        for (int k = 0; k <= m; ++k) {
            load_rows<64>(left, inverse, 16 * m, k, lane);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                load_right<64>(right, errors, 16 * k, n0 + n, lane);
#pragma unroll
                for (int i = 0; i < 2; ++i) mma(d[2 * n + i], left[0], left[1], left[2], left[3], right[2 * i], right[2 * i + 1]);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = 16 * m + 8 * half + g, t = chunk * CHUNK + row;
            const float decay = expf(sum[CHUNK - 1] - sum[row]);
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const float *x = d[n] + 2 * half;
                *pair(deltas, 16 * m, half, n) = pack(x[0], x[1]);
                *pair(kept, 16 * m, half, n) = pack(x[0] * decay, x[1] * decay);
                if (a.record_d && t < width)
                    for (int e = 0; e < 2; ++e)
                        if (column + 8 * n + t2 + e < dv) a.record_d[(((i64)b * a.W + t) * a.nv + head) * dv + column + 8 * n + t2 + e] = x[e];
            }
        }
        sync();

        for (int k = 0; k <= m; ++k) {
            load_rows<64>(left, decayed, 16 * m, k, lane);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                load_right<64>(right, deltas, 16 * k, n0 + n, lane);
#pragma unroll
                for (int i = 0; i < 2; ++i) mma(o[2 * n + i], left[0], left[1], left[2], left[3], right[2 * i], right[2 * i + 1]);
            }
        }
        const float decay = expf(sum[CHUNK - 1]);
#pragma unroll
        for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
            for (int n = 0; n < 4; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) s[i][n][e] *= decay;
#pragma unroll
        for (int k = 0; k < CHUNK / 16; ++k)
#pragma unroll
            for (int i = 0; i < BLOCKS; ++i) {
                load_columns<DK>(left, keys, 16 * k, m + 4 * i, lane);
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    load_right<64>(right, kept, 16 * k, n0 + n, lane);
                    mma(s[i][2 * n], left[0], left[1], left[2], left[3], right[0], right[1]);
                    mma(s[i][2 * n + 1], left[0], left[1], left[2], left[3], right[2], right[3]);
                }
            }
        if (column < dv) {
            float* out = (float*)(chunk_head(a, b, chunk, head) + HEAD) + column / SLICE * (VALUES / 4);
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int n = 0; n < 4; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e) out[value_at(16 * m + 8 * half + g, 8 * n + t2) + e] = o[n][2 * half + e];
        }
        sync();
        if (STAGES == 1) load(chunk + 1);
    }
    copies_wait<0>();
    if (a.record_k) return;
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int row = 16 * (m + 4 * i) + 8 * (e / 2) + g, c = column + 8 * n + t2 + e % 2;
                if (row < dk && c < dv) state_of(a, a.write[b], head)[(i64)row * dv + c] = s[i][n][e];
            }
}

// -- what follows: the gated norm and the tail

// Move the tail of channels part, [begin, end) past `count` columns; no other thread may still need the old one.
DEVICE void advance_tail(const Gdn& a, int b, int count, int part, int begin, int end) {
    const Inputs inputs(a, b, part);
    for (int i = begin + thread(); i < end; i += threads()) {
        u16* out = a.tail + (i64)a.write[b] * (a.taps - 1) * channels_of(a) + part * a.nk * a.dk + i;
        // ascending rows: what is read lies at or after what is written
        for (int r = 0; r < a.taps - 1; ++r) out[r * channels_of(a)] = inputs.at(count - (int)a.taps + 1 + r, i);
    }
}

// A block a token, a warp a head: the gated norm; and the token's share of the row's tail.
DEVICE void finish(const Gdn& a) {
    after_predecessors();
    const int token = block_x(), b = token / (int)a.W, t = token % (int)a.W, warp = thread() / 32, lane = thread() % 32, dv = (int)a.dv;
    if (t < a.width[b])
        for (int head = warp; head < a.nv; head += threads() / 32) {
            const float* values = (const float*)(chunk_head(a, b, t / CHUNK, head) + HEAD);
            const i64 at = ((i64)token * a.nv + head) * dv + lane;
            float o[DK / SLICE], gate[DK / SLICE], square = 0;
#pragma unroll
            for (int i = 0; i < DK / SLICE; ++i) {
                const bool inside = SLICE * i + lane < dv;
                o[i] = inside ? values[i * (VALUES / 4) + value_at(t % CHUNK, lane)] : 0.0f;
                gate[i] = inside ? from_bf16(a.norm[SLICE * i + lane]) * silu(from_bf16(a.z[at + SLICE * i])) : 0.0f;
                square += o[i] * o[i];
            }
            const float inverse = inverse_root(sum_warp(square) / dv + (float)a.eps);
#pragma unroll
            for (int i = 0; i < DK / SLICE; ++i)
                if (SLICE * i + lane < dv) a.out[at + SLICE * i] = to_bf16(o[i] * inverse * gate[i]);
        }
    if (a.width[b] <= 0 || a.record_k) return;
    for (int part = 0; part < 3; ++part) {
        const int n = (int)(part == 2 ? a.nv * a.dv : a.nk * a.dk);
        for (int begin = t * threads(); begin < n; begin += (int)a.W * threads()) advance_tail(a, b, a.width[b], part, begin, minimum(n, begin + threads()));
    }
}

KERNEL(gdn_chunk, Gdn, 256, 2) { make_chunk(a); }
KERNEL(gdn_carry_32, Gdn, 128, 1) { carry<32, 2>(a); }
KERNEL(gdn_carry_64, Gdn, 256, 1) { carry<64, 2>(a); }
KERNEL(gdn_carry_less, Gdn, 128, 1) { carry<32, 1>(a); }
KERNEL(gdn_finish, Gdn, 256, 1) { finish(a); }
