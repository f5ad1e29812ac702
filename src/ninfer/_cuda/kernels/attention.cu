// Gated attention over paged keys and values.
#include "common.cuh"

constexpr int PAGE = 64, WARPS = 4;

struct Prepare {
    u16* q;
    u16* k;
    const u16* v;
    const u16* query_norm;
    const u16* key_norm;
    u16* keys;    // [pages, hk, PAGE, hd]
    u16* values;
    const int* blocks;  // [rows, row_blocks]
    const int* start;
    const int* width;
    const int* table;
    const int* positions;  // [3, tokens]
    const u64* rotary;     // [rot / 2]: frequency, an fp32, below; axis above
    double eps;
    i64 tokens, W, row_blocks, hq, hk, hd, rot;
};

// A warp a head of a token: norm and rotate q and k, append k and v.
KERNEL(attention_prepare, Prepare, 128, 1) {
    DYNAMIC_SHARED(room);
    after_predecessors();
    const int warp = thread() / 32, lane = thread() % 32, hd = (int)a.hd, half = (int)a.rot / 2;
    const int heads = (int)(a.hq + 2 * a.hk), number = block_x() * WARPS + warp;
    if (number >= a.tokens * heads) return;
    const int token = number / heads, head = number % heads, b = token / (int)a.W, w = token % (int)a.W;
    float* row = (float*)room + warp * hd;
    u16* out = nullptr;
    const bool query = head < a.hq, value = head >= a.hq + a.hk;
    const int g = head - (int)a.hq - (value ? (int)a.hk : 0);
    const u16* in = query ? a.q + ((i64)token * a.hq + head) * hd : (value ? a.v : a.k) + ((i64)token * a.hk + g) * hd;
    if (query) {
        out = a.q + ((i64)token * a.hq + head) * hd;
    } else if (w < a.width[b]) {
        const int p = a.start[b] + w, page = a.blocks[a.table[b] * a.row_blocks + p / PAGE];
        out = (value ? a.values : a.keys) + (((i64)page * a.hk + g) * PAGE + p % PAGE) * hd;
    }
    if (value) {
        for (int d = lane; out && d < hd; d += 32) out[d] = in[d];
        return;
    }
    const u16* norm = query ? a.query_norm : a.key_norm;
    float square = 0;
    for (int d = lane; d < hd; d += 32) {
        row[d] = from_bf16(in[d]);
        square += row[d] * row[d];
    }
    const float inverse = 1.0f / sqrtf(sum_warp(square) / hd + (float)a.eps);
    for (int d = lane; d < hd; d += 32) row[d] *= inverse * (1.0f + from_bf16(norm[d]));
    sync_warp();
    if (!out) return;
    for (int d = lane; d < hd; d += 32) {
        float y = row[d];
        if (d < 2 * half) {
            const int j = d % half;
            const float angle = (float)a.positions[(a.rotary[j] >> 32) * a.tokens + token] * from_bits((u32)a.rotary[j]);
            const float c = cosf(angle), s = sinf(angle);
            y = d < half ? row[j] * c - row[j + half] * s : row[j + half] * c + row[j] * s;
        }
        out[d] = to_bf16(y);
    }
}

struct Attention {
    u16* out;
    const u16* q;
    const u16* gate;
    const u16* keys;
    const u16* values;
    const int* blocks;
    const int* start;
    const int* width;
    const int* table;
    float* partial;  // [units, 16, hd + 2]: sums, then the largest score and the sum of weights
    double scale;    // of a score, as a power of two
    i64 W, row_blocks, hq, hk, hd, splits;
};

// Rows of 2 HD bytes; pieces of 16 trade places so that eight rows meet every bank once.
template <int HD> DEVICE u8* piece(u8* tile, int row, int p) {
    return tile + row * 2 * HD + 16 * (p ^ (HD == 32 ? row >> 1 & 3 : row & 7));
}

// A page of rows of hd features at src; zero beyond hd and from row `valid` on.
template <int HD> DEVICE void load_page(u8* tile, const u16* src, int hd, int valid) {
    constexpr int pieces = HD / 8;
    for (int i = thread(); i < PAGE * pieces; i += threads()) {
        const int row = i / pieces, p = i % pieces;
        const bool inside = row < valid && 8 * p < hd;
        if (hd % 8 == 0) copy16(piece<HD>(tile, row, p), inside ? src + row * hd + 8 * p : src, inside ? 16 : 0);
        else *(Word4*)piece<HD>(tile, row, p) = inside ? load8(src + row * hd, 8 * p, hd, false) : Word4{0, 0, 0, 0};
    }
}

// The query rows of one key head are (column, head) pairs. With KEYS = PAGE a warp takes 16 of them and all keys of a page;
// with KEYS = 16 the warps of a block share out a page's keys for the same 16 rows and merge what they have at the end.
// blocks: (row tiles, key heads * splits, B); a split takes a run of pages.
template <int HD, int KEYS> DEVICE void attention(const Attention& a) {
    DYNAMIC_SHARED(shared);
    after_predecessors();
    constexpr int M = KEYS == PAGE ? 16 * WARPS : 16;
    u8 *const queries = shared, *const keys = queries + M * 2 * HD, *const values = keys + PAGE * 2 * HD;
    const int warp = thread() / 32, lane = thread() % 32, hd = (int)a.hd, W = (int)a.W;
    const int b = block_z(), head = block_y() / (int)a.splits, split = block_y() % (int)a.splits, ratio = (int)(a.hq / a.hk);
    const int first = block_x() * M, rows = W * ratio;
    const int start = a.start[b], width = a.width[b];
    const int last = minimum(minimum(rows, first + M) - 1, width * ratio - 1);  // real query row
    const int end = last < first ? 0 : start + last / ratio + 1;                // ordinals that any row here sees
    const int pages = (end + PAGE - 1) / PAGE, run = (pages + (int)a.splits - 1) / (int)a.splits;
    const int page_begin = split * run, page_end = minimum(pages, page_begin + run);

    for (int i = thread(); i < M * HD / 8; i += threads()) {
        const int row = first + i / (HD / 8), d = i % (HD / 8) * 8;
        Word4 v = {0, 0, 0, 0};
        if (row < rows && d < hd) {
            const i64 token = (i64)b * W + row / ratio;
            v = load8(a.q + (token * a.hq + head * ratio + row % ratio) * hd, d, hd, hd % 8 == 0);
        }
        *(Word4*)piece<HD>(queries, i / (HD / 8), d / 8) = v;
    }
    auto load = [&](const u16* plane, u8* tile, int page) {
        if (page < page_end) {
            const int id = a.blocks[a.table[b] * a.row_blocks + page];
            load_page<HD>(tile, plane + ((i64)id * a.hk + head) * PAGE * hd, hd, end - page * PAGE);
        }
        copies_commit();
    };
    load(a.keys, keys, page_begin);
    load(a.values, values, page_begin);

    const int own = KEYS == PAGE ? 16 * warp : 0, key_begin = KEYS == PAGE ? 0 : 16 * warp;
    int limit[2];  // the last ordinal that row lane/4 and row lane/4 + 8 see
#pragma unroll
    for (int i = 0; i < 2; ++i) limit[i] = start + minimum((first + own + lane / 4 + 8 * i) / ratio, width - 1);
    float sums[HD / 8][4] = {}, largest[2] = {-INFINITY, -INFINITY}, weight[2] = {0, 0};

    for (int page = page_begin; page < page_end; ++page) {
        copies_wait<1>();
        sync();
        float s[KEYS / 8][4] = {};
#pragma unroll
        for (int k = 0; k < HD / 16; ++k) {
            u32 q[4];
            load_tiles(q, piece<HD>(queries, own + lane % 16, 2 * k + lane / 16));
#pragma unroll
            for (int n = 0; n < KEYS / 16; ++n) {
                u32 r[4];
                load_tiles(r, piece<HD>(keys, key_begin + 16 * n + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
                mma(s[2 * n], q[0], q[1], q[2], q[3], r[0], r[1]);
                mma(s[2 * n + 1], q[0], q[1], q[2], q[3], r[2], r[3]);
            }
        }
        sync();
        load(a.keys, keys, page + 1);

#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float top = largest[i];
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
                for (int j = 2 * i; j < 2 * i + 2; ++j) {
                    const int ordinal = page * PAGE + key_begin + 8 * n + lane % 4 * 2 + j % 2;
                    s[n][j] = ordinal <= limit[i] ? s[n][j] * (float)a.scale : -INFINITY;
                    top = fmaxf(top, s[n][j]);
                }
            top = fmaxf(top, shuffle_xor(top, 1));
            top = fmaxf(top, shuffle_xor(top, 2));
            const float base = top == -INFINITY ? 0.0f : top, factor = exp2f(largest[i] - base);
            largest[i] = top;
            weight[i] *= factor;
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
                for (int j = 2 * i; j < 2 * i + 2; ++j) s[n][j] = exp2f(s[n][j] - base), weight[i] += s[n][j];
#pragma unroll
            for (int n = 0; n < HD / 8; ++n) sums[n][2 * i] *= factor, sums[n][2 * i + 1] *= factor;
        }

        copies_wait<1>();
        sync();
#pragma unroll
        for (int k = 0; k < KEYS / 16; ++k) {
            const u32 p0 = pack(s[2 * k][0], s[2 * k][1]), p1 = pack(s[2 * k][2], s[2 * k][3]);
            const u32 p2 = pack(s[2 * k + 1][0], s[2 * k + 1][1]), p3 = pack(s[2 * k + 1][2], s[2 * k + 1][3]);
#pragma unroll
            for (int n = 0; n < HD / 16; ++n) {
                u32 r[4];
                load_tiles_transposed(r, piece<HD>(values, key_begin + 16 * k + lane % 16, 2 * n + lane / 16));
                mma(sums[2 * n], p0, p1, p2, p3, r[0], r[1]);
                mma(sums[2 * n + 1], p0, p1, p2, p3, r[2], r[3]);
            }
        }
        sync();
        load(a.values, values, page + 1);
    }
    copies_wait<0>();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        weight[i] += shuffle_xor(weight[i], 1);
        weight[i] += shuffle_xor(weight[i], 2);
    }

    auto store = [&](int row, int d, float sum) {
        const i64 token = (i64)b * W + (first + row) / ratio;
        const i64 at = (token * a.hq + head * ratio + (first + row) % ratio) * hd + d;
        a.out[at] = to_bf16(sum * sigmoid(from_bf16(a.gate[at])));
    };
    if constexpr (KEYS == PAGE) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = own + lane / 4 + 8 * i;
            const float inverse = weight[i] > 0 ? 1.0f / weight[i] : 0.0f;
            if (first + row < rows)
#pragma unroll
                for (int n = 0; n < HD / 8; ++n)
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        const int d = 8 * n + lane % 4 * 2 + j;
                        if (d < hd) store(row, d, sums[n][2 * i + j] * inverse);
                    }
        }
    } else {
        // merge the warps: every one brings its sums to the largest score of all
        __shared__ float tops[WARPS][16], weights[WARPS][16];
        float* room = (float*)keys;  // [WARPS][16][HD], over keys and values
        sync();
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (lane % 4 == 0) tops[warp][lane / 4 + 8 * i] = largest[i], weights[warp][lane / 4 + 8 * i] = weight[i];
        sync();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = lane / 4 + 8 * i;
            float top = -INFINITY;
            for (int w = 0; w < WARPS; ++w) top = fmaxf(top, tops[w][row]);
            const float factor = largest[i] == -INFINITY ? 0.0f : exp2f(largest[i] - top);
#pragma unroll
            for (int n = 0; n < HD / 8; ++n)
#pragma unroll
                for (int j = 0; j < 2; ++j) room[(warp * 16 + row) * HD + 8 * n + lane % 4 * 2 + j] = sums[n][2 * i + j] * factor;
        }
        sync();
        const i64 unit = ((i64)(b * (int)a.hk + head) * ((rows + 15) / 16) + block_x()) * a.splits + split;
        for (int i = thread(); i < 16 * hd; i += threads()) {
            const int row = i / hd, d = i % hd;
            if (first + row >= rows) break;
            float top = -INFINITY, total = 0, sum = 0;
            for (int w = 0; w < WARPS; ++w) top = fmaxf(top, tops[w][row]);
            for (int w = 0; w < WARPS; ++w) {
                sum += room[(w * 16 + row) * HD + d];
                total += tops[w][row] == -INFINITY ? 0.0f : weights[w][row] * exp2f(tops[w][row] - top);
            }
            if (a.splits == 1) {
                store(row, d, total > 0 ? sum / total : 0.0f);
            } else {
                float* partial = a.partial + (unit * 16 + row) * (hd + 2);
                partial[d] = sum;
                if (d == 0) partial[hd] = top, partial[hd + 1] = total;
            }
        }
    }
}

// A block a head of a token: merge the splits, apply the gate.
KERNEL(attention_merge, Attention, 256, 1) {
    after_predecessors();
    const int W = (int)a.W, hd = (int)a.hd, ratio = (int)(a.hq / a.hk);
    const int token = block_x(), b = token / W, row = token % W * ratio + block_y() % ratio, head = block_y() / ratio;
    const int tiles = (W * ratio + 15) / 16;
    const float* partial = a.partial + (((i64)(b * (int)a.hk + head) * tiles + row / 16) * a.splits * 16 + row % 16) * (hd + 2);
    const i64 next = 16 * (hd + 2);
    float top = -INFINITY, total = 0;
    for (int s = 0; s < a.splits; ++s) top = fmaxf(top, partial[s * next + hd]);
    for (int s = 0; s < a.splits; ++s) {
        const float own = partial[s * next + hd];
        total += own == -INFINITY ? 0.0f : partial[s * next + hd + 1] * exp2f(own - top);
    }
    for (int d = thread(); d < hd; d += threads()) {
        float sum = 0;
        for (int s = 0; s < a.splits; ++s) {
            const float own = partial[s * next + hd];
            if (own != -INFINITY) sum += partial[s * next + d] * exp2f(own - top);
        }
        const i64 at = ((i64)token * a.hq + block_y()) * hd + d;
        a.out[at] = to_bf16((total > 0 ? sum / total : 0.0f) * sigmoid(from_bf16(a.gate[at])));
    }
}

KERNEL(attention_rows_32, Attention, 128, 1) { attention<32, PAGE>(a); }
KERNEL(attention_rows_64, Attention, 128, 1) { attention<64, PAGE>(a); }
KERNEL(attention_rows_128, Attention, 128, 1) { attention<128, PAGE>(a); }
KERNEL(attention_rows_256, Attention, 128, 2) { attention<256, PAGE>(a); }
KERNEL(attention_keys_32, Attention, 128, 1) { attention<32, 16>(a); }
KERNEL(attention_keys_64, Attention, 128, 1) { attention<64, 16>(a); }
KERNEL(attention_keys_128, Attention, 128, 1) { attention<128, 16>(a); }
KERNEL(attention_keys_256, Attention, 128, 2) { attention<256, 16>(a); }
