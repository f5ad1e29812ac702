// Block drafting: norms and rotation of heads, the context's keys and values, attention of a block over both.
#include "common.cuh"

constexpr int PAGE = 64, KEYS = 32, QUERIES = 32, WARPS = 4, OWN = QUERIES / WARPS;

struct Place {
    u16* out;
    const u16* x;
    i64 features, stride, first;
};

// A block a row: out[row, first : first + features] = x[row].
KERNEL(block_place, Place, 256, 1) {
    after_predecessors();
    u16* out = a.out + (i64)block_x() * a.stride + a.first;
    const u16* x = a.x + (i64)block_x() * a.features;
    for (i64 i = thread(); i < a.features; i += threads()) out[i] = x[i];
}

struct Norm {
    u16* out;
    const u16* x;
    const u16* norm;
    const int* index;  // or null: row i of out is row i of x
    double eps;
    i64 features;
};

// A block a row: norm0(x[index], norm).
KERNEL(block_norm, Norm, 256, 1) {
    __shared__ float room[32];
    after_predecessors();
    const int K = (int)a.features;
    const u16* x = a.x + (i64)(a.index ? a.index[block_x()] : block_x()) * K;
    u16* out = a.out + (i64)block_x() * K;
    float square = 0;
    for (int k = thread(); k < K; k += threads()) square += from_bf16(x[k]) * from_bf16(x[k]);
    const float inverse = 1.0f / sqrtf(sum_block(square, room) / K + (float)a.eps);
    for (int k = thread(); k < K; k += threads()) out[k] = to_bf16(from_bf16(x[k]) * inverse * from_bf16(a.norm[k]));
}

struct Rotate {
    u16* x;  // [tokens, heads, hd]
    const u16* norm;
    const int* start;
    const u64* rotary;  // [rot / 2]: frequency, an fp32, in the low half
    double eps;
    i64 tokens, W, heads, hd, rot;
};

// A warp a head of a token: norm0, then rotation by the ordinal.
KERNEL(block_rotate, Rotate, 128, 1) {
    DYNAMIC_SHARED(room);
    after_predecessors();
    const int warp = thread() / 32, lane = thread() % 32, hd = (int)a.hd, half = (int)a.rot / 2;
    const i64 number = (i64)block_x() * WARPS + warp;
    if (number >= a.tokens * a.heads) return;
    const int token = (int)(number / a.heads);
    float* row = (float*)room + warp * hd;
    u16* x = a.x + number * hd;
    float square = 0;
    for (int d = lane; d < hd; d += 32) {
        row[d] = from_bf16(x[d]);
        square += row[d] * row[d];
    }
    const float inverse = 1.0f / sqrtf(sum_warp(square) / hd + (float)a.eps);
    for (int d = lane; d < hd; d += 32) row[d] *= inverse * from_bf16(a.norm[d]);
    sync_warp();
    const float ordinal = (float)(a.start[token / a.W] + (int)(token % a.W));
    for (int d = lane; d < hd; d += 32) {
        float y = row[d];
        if (d < 2 * half) {
            const int j = d % half;
            const float angle = ordinal * from_bits((u32)a.rotary[j]), c = cosf(angle), s = sinf(angle);
            y = d < half ? row[j] * c - row[j + half] * s : row[j + half] * c + row[j] * s;
        }
        x[d] = to_bf16(y);
    }
}

struct Context {
    u16* keys;  // [pages, hk, PAGE, hd]
    u16* values;
    const int* blocks;  // [rows, length], or null: a row's pages lie one behind the other
    const int* rows;
    const int* start;
    i64 W, length, hk, hd;
};

// Where the keys and values of an ordinal's head begin.
DEVICE i64 context_place(const Context& c, int b, int ordinal, int head) {
    i64 page = (i64)c.rows[b] * c.length + ordinal / PAGE % c.length;
    if (c.blocks) page = c.blocks[page];
    return ((page * c.hk + head) * PAGE + ordinal % PAGE) * c.hd;
}

struct Append {
    Context context;
    const u16* k;  // [tokens, hk, hd]
    const u16* v;
    const int* width;
};

// A block a token.
KERNEL(block_append, Append, 128, 1) {
    after_predecessors();
    const Context& c = a.context;
    const int b = block_x() / (int)c.W, w = block_x() % (int)c.W, width = a.width[b];
    if (w >= width || w < width - (int)c.length * PAGE) return;
    const int features = (int)(c.hk * c.hd);
    for (int i = thread(); i < features; i += threads()) {
        const i64 to = context_place(c, b, c.start[b] + w, i / (int)c.hd) + i % c.hd;
        c.keys[to] = a.k[(i64)block_x() * features + i];
        c.values[to] = a.v[(i64)block_x() * features + i];
    }
}

struct Attention {
    Context context;
    u16* out;
    const u16* q;  // [tokens, hq, hd]
    const u16* k;  // [tokens, hk, hd]
    const u16* v;
    float* partial;  // [B, hk, tiles, splits, QUERIES, hd + 2]: sums, then the largest score and the sum of weights
    double scale;    // of a score, as a power of two
    i64 hq, window, causal, splits;
};

// QUERIES rows (a column's heads of one key head) and every `splits`-th run of KEYS ordinals: the context's, then the
// block's. A warp has OWN rows; a lane scores one key and sums every 64th feature pair.
template <int HD> DEVICE void attend(const Attention& a, u8* shared) {
    constexpr int PITCH = HD + 2, PAIRS = HD / 64;
    u16 *queries = (u16*)shared, *keys = queries + QUERIES * HD, *values = keys + KEYS * PITCH;
    float* weights = (float*)(values + KEYS * PITCH);
    const Context& c = a.context;
    const int W = (int)c.W, hd = (int)c.hd, ratio = (int)(a.hq / c.hk), splits = (int)a.splits, window = (int)a.window;
    const int tile = block_x(), g = block_y() / splits, split = block_y() % splits, b = block_z();
    const int warp = thread() / 32, lane = thread() % 32, start = c.start[b], rows = W * ratio, first = tile * QUERIES;
    for (int i = thread(); i < QUERIES * HD / 2; i += threads()) {
        const int row = first + i / (HD / 2), d = i % (HD / 2) * 2;
        const u16* from = a.q + (((i64)b * W + row / ratio) * a.hq + g * ratio + row % ratio) * hd + d;
        ((u32*)queries)[i] = row < rows && d < hd ? *(const u32*)from : 0;
    }
    float sums[OWN][2 * PAIRS] = {}, top[OWN], mass[OWN] = {};
#pragma unroll
    for (int i = 0; i < OWN; ++i) top[i] = -INFINITY;
    int low = maximum(0, start - (int)c.length * PAGE);
    if (window) low = maximum(low, start + first / ratio - window + 1);
    const int begin = minimum(low, start) / KEYS, context = (start + KEYS - 1) / KEYS - begin;
    for (int step = split; step < context + (W + KEYS - 1) / KEYS; step += splits) {
        const bool block = step >= context;
        const int from = block ? (step - context) * KEYS : (begin + step) * KEYS, end = block ? W : start;
        sync();
        for (int i = thread(); i < KEYS * HD / 2; i += threads()) {
            const int key = i / (HD / 2), d = i % (HD / 2) * 2, at = from + key;
            u32 k = 0, v = 0;
            if (at < end && d < hd && (block || at >= low)) {
                const i64 place = block ? (((i64)b * W + at) * c.hk + g) * hd : context_place(c, b, at, g);
                k = *(const u32*)((block ? a.k : c.keys) + place + d);
                v = *(const u32*)((block ? a.v : c.values) + place + d);
            }
            *(u32*)(keys + key * PITCH + d) = k;
            *(u32*)(values + key * PITCH + d) = v;
        }
        sync();
        float score[OWN] = {};
        const u32* own = (const u32*)(queries + warp * OWN * HD);
#pragma unroll 4
        for (int d = 0; d < HD / 2; ++d) {
            const u32 k = *(const u32*)(keys + lane * PITCH + 2 * d);
#pragma unroll
            for (int i = 0; i < OWN; ++i) {
                const u32 q = own[i * (HD / 2) + d];
                score[i] += ::low(q) * ::low(k) + high(q) * high(k);
            }
        }
        const int ordinal = block ? start + from + lane : from + lane;
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const int column = start + (first + warp * OWN + i) / ratio;
            bool seen = from + lane < end && (block || ordinal >= low) && !(a.causal && ordinal > column);
            if (window) seen = seen && ordinal - column < window && column - ordinal < window;
            const float s = seen ? score[i] * (float)a.scale : -INFINITY, best = fmaxf(top[i], max_warp(s));
            const float p = seen ? exp2f(s - best) : 0.0f, shrink = top[i] == -INFINITY ? 0.0f : exp2f(top[i] - best);
            mass[i] = mass[i] * shrink + sum_warp(p);
            top[i] = best;
#pragma unroll
            for (int j = 0; j < 2 * PAIRS; ++j) sums[i][j] *= shrink;
            weights[(warp * OWN + i) * KEYS + lane] = p;
        }
        sync_warp();
        for (int key = 0; key < KEYS; ++key)
#pragma unroll
            for (int j = 0; j < PAIRS; ++j) {
                const u32 v = *(const u32*)(values + key * PITCH + 2 * (lane + 32 * j));
#pragma unroll
                for (int i = 0; i < OWN; ++i) {
                    const float p = weights[(warp * OWN + i) * KEYS + key];
                    sums[i][2 * j] += p * ::low(v);
                    sums[i][2 * j + 1] += p * high(v);
                }
            }
        sync_warp();
    }
    const i64 unit = (((i64)b * c.hk + g) * ((rows + QUERIES - 1) / QUERIES) + tile) * splits + split;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        float* to = a.partial + (unit * QUERIES + warp * OWN + i) * (hd + 2);
#pragma unroll
        for (int j = 0; j < PAIRS; ++j) {
            const int d = 2 * (lane + 32 * j);
            if (d < hd) to[d] = sums[i][2 * j], to[d + 1] = sums[i][2 * j + 1];
        }
        if (lane == 0) to[hd] = top[i], to[hd + 1] = mass[i];
    }
}

#define ATTENTION(HD) \
    KERNEL(block_attention_##HD, Attention, 128, 1) { \
        DYNAMIC_SHARED(shared); \
        after_predecessors(); \
        attend<HD>(a, shared); \
    }
ATTENTION(64)
ATTENTION(128)
ATTENTION(256)

// A block a head of a token: merge the splits.
KERNEL(block_merge, Attention, 256, 1) {
    after_predecessors();
    const Context& c = a.context;
    const int W = (int)c.W, hd = (int)c.hd, ratio = (int)(a.hq / c.hk), b = block_x() / W, g = block_y() / ratio;
    const int row = block_x() % W * ratio + block_y() % ratio, tiles = (W * ratio + QUERIES - 1) / QUERIES;
    const i64 unit = (((i64)b * c.hk + g) * tiles + row / QUERIES) * a.splits, next = (i64)QUERIES * (hd + 2);
    const float* partial = a.partial + (unit * QUERIES + row % QUERIES) * (hd + 2);
    float top = -INFINITY, total = 0;
    for (int s = 0; s < a.splits; ++s) top = fmaxf(top, partial[s * next + hd]);
    for (int s = 0; s < a.splits; ++s)
        if (partial[s * next + hd] != -INFINITY) total += partial[s * next + hd + 1] * exp2f(partial[s * next + hd] - top);
    for (int d = thread(); d < hd; d += threads()) {
        float sum = 0;
        for (int s = 0; s < a.splits; ++s)
            if (partial[s * next + hd] != -INFINITY) sum += partial[s * next + d] * exp2f(partial[s * next + hd] - top);
        a.out[((i64)block_x() * a.hq + block_y()) * hd + d] = to_bf16(sum / total);
    }
}

struct Begin {
    int* tokens;  // [B, W]
    int* start;
    int* width;
    const int* decided;  // [B, columns]
    const int* kept;
    const int* row_start;
    i64 columns, W, mask;
};

// A block a row.
KERNEL(block_begin, Begin, 32, 1) {
    after_predecessors();
    const int b = block_x(), n = a.kept[b] + 1, last = a.decided[b * a.columns + n - 1];
    for (int i = thread(); i < a.W; i += threads()) a.tokens[b * a.W + i] = i ? (int)a.mask : maximum(0, last);
    if (thread() == 0) a.start[b] = a.row_start[b] + n, a.width[b] = n;
}

struct Convolve {
    u16* out;  // [tokens, H]
    const u16* x;
    const u16* base;   // [2, taps, H]
    const u16* delta;  // [tokens, 2, taps, groups]
    i64 side, columns, taps, H, groups, add;
};

// A block a row; a row reads those before it in its block of columns.
KERNEL(block_convolve, Convolve, 256, 1) {
    after_predecessors();
    const int row = block_x(), seen = minimum((int)a.taps, row % (int)a.columns + 1), width = (int)(a.H / a.groups);
    for (int h = thread(); h < a.H; h += threads()) {
        float total = a.add ? from_bf16(a.out[(i64)row * a.H + h]) : 0.0f;
        for (int tap = 0; tap < seen; ++tap) {
            const float base = from_bf16(a.base[(a.side * a.taps + tap) * a.H + h]);
            const float delta = from_bf16(a.delta[((i64)row * 2 * a.taps + a.side * a.taps + tap) * a.groups + h / width]);
            total += (base + delta) * from_bf16(a.x[(i64)(row - tap) * a.H + h]);
        }
        a.out[(i64)row * a.H + h] = to_bf16(total);
    }
}

// Word 0 of Philox4x32-10 (Salmon et al., 2011).
DEVICE u32 philox(u32 c0, u32 c1, u32 c2, u32 c3, u32 k0, u32 k1) {
    for (int round = 0; round < 10; ++round) {
        const u64 p = (u64)0xD2511F53u * c0, q = (u64)0xCD9E8D57u * c2;
        const u32 old1 = c1, old3 = c3;
        c0 = (u32)(q >> 32) ^ old1 ^ k0, c1 = (u32)q;
        c2 = (u32)(p >> 32) ^ old3 ^ k1, c3 = (u32)p;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return c0;
}

struct Select {
    int* token;  // [K, B]
    int* out_ids;  // [B, K, count]
    float* q;
    const int* ids;  // [K * B, stride]
    const float* scores;
    const u16* gamma;  // [K * B, rank]
    const u16* predecessor;  // [rows, rank]
    const u16* successor;
    const int* tokens;  // [B, columns]
    const int* start;
    const float* real;  // [B, 5]
    const u32* seed;    // [B, 2]
    i64 stride, count, rank, rows, columns, B, K;
};

// A block a row: a warp scores a candidate, then one thread decides.
KERNEL(block_select, Select, 256, 1) {
    __shared__ float scores[32];
    __shared__ int chosen_token;
    after_predecessors();
    const int b = block_x(), warp = thread() / 32, lane = thread() % 32, count = (int)a.count;
    const float temperature = a.real[5 * b];
    if (thread() == 0) chosen_token = a.tokens[b * a.columns];
    for (int i = 0; i < a.K; ++i) {
        const i64 at = i * a.B + b;
        sync();
        const i64 previous = minimum(maximum(chosen_token, 0), (int)a.rows - 1);
        for (int c = warp; c < count; c += threads() / 32) {
            const int token = a.ids[at * a.stride + c];
            const i64 row = minimum(maximum(token, 0), (int)a.rows - 1);
            float sum = 0;
            for (int r = lane; r < a.rank; r += 32)
                sum += from_bf16(a.predecessor[previous * a.rank + r]) * from_bf16(a.gamma[at * a.rank + r]) * from_bf16(a.successor[row * a.rank + r]);
            sum = sum_warp(sum);
            if (lane == 0) scores[c] = token < 0 ? -INFINITY : a.scores[at * a.stride + c] + sum;
        }
        sync();
        if (thread() == 0) {
            float *q = a.q + (b * a.K + i) * count, mass = 0, below = 0;
            int best = 0;
            for (int c = 1; c < count; ++c)
                if (scores[c] > scores[best]) best = c;
            for (int c = 0; c < count; ++c) {
                q[c] = temperature > 0 ? expf((scores[c] - scores[best]) / temperature) : (float)(c == best);
                mass += q[c];
                a.out_ids[(b * a.K + i) * count + c] = a.ids[at * a.stride + c];
            }
            int chosen = best;
            if (temperature > 0) {
                const u32 word = philox((u32)(a.start[b] + 1 + i), 0, 5, 0, a.seed[2 * b], a.seed[2 * b + 1]);
                const float u = (float)(word >> 8) * 5.9604644775390625e-8f * mass;
                for (int c = 0; c < count; ++c) {
                    if (q[c] > 0) chosen = c;
                    below += q[c];
                    if (below > u) break;
                }
                for (int c = 0; c < count; ++c) q[c] /= mass;
            }
            chosen_token = a.ids[at * a.stride + chosen];
            a.token[at] = chosen_token;
        }
    }
}
