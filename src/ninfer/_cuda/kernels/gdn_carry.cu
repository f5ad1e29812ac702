// Gated DeltaNet of many columns: the state from chunk to chunk, and what follows.
#include "gdn_chunk.cuh"

// Blocks (slices of COLUMNS columns, value heads, B), four warps for 32 columns, STAGES chunks in shared memory.
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

KERNEL(gdn_carry_32, Gdn, 128, 1) { carry<32, 2>(a); }
KERNEL(gdn_carry_64, Gdn, 256, 1) { carry<64, 2>(a); }
KERNEL(gdn_carry_less, Gdn, 128, 1) { carry<32, 1>(a); }
KERNEL(gdn_finish, Gdn, 256, 1) { finish(a); }
