// Gated attention over paged keys and values: softmax(q k^T) v, a page of 64 ordinals at a time, on matrix instructions.
#pragma once
#include "kv.cuh"

struct Attention {
    u16* out;
    const u16* q;
    const u16* gate;
    const void* keys;
    const void* values;
    const u16* key_scales;
    const u16* value_scales;
    const int* blocks;
    const int* start;
    const int* width;
    const int* table;
    float* partial;  // [units, 16, hd + 2]: sums, then the largest score and the sum of weights
    double scale;    // of a score, as a power of two
    i64 W, row_blocks, hq, hk, hd, splits;
    u16* panels;  // attention_merge: `out` is put here as well, in panels of `room` columns; or null
    i64 room;
    // Columns that are not in the planes yet, with queries that are not prepared; or null. Then keys and values are written.
    const u16* k;  // [tokens, hk, hd]
    const u16* v;
    const u16* query_norm;
    const u16* key_norm;
    const int* positions;  // [3, tokens]
    const u64* rotary;     // [rot / 2]: frequency, an fp32, below; axis above
    double eps;
    i64 tokens, rot;
};

// s = q k^T for 16 query rows from `own` and KEYS keys from `begin`.
template <int HD, int KEYS, class Plane> DEVICE void score(float (&s)[KEYS / 8][4], u8* queries, int own, u8* keys, int begin, int groups, int lane) {
    u32 q[4], r[4];
    if constexpr (!Plane::SCALES) {
#pragma unroll
        for (int k = 0; k < HD / 16; ++k) {
            load_rows<HD>(q, queries, own, k, lane);
#pragma unroll
            for (int n = 0; n < KEYS / 16; ++n) {
                Plane::keys(r, keys, begin + 16 * n, k, lane);
                mma(s[2 * n], q[0], q[1], q[2], q[3], r[0], r[1]);
                mma(s[2 * n + 1], q[0], q[1], q[2], q[3], r[2], r[3]);
            }
        }
    } else {
#pragma unroll
        for (int n = 0; n < KEYS / 16; ++n)
#pragma unroll
            for (int g = 0; g < HD / SCALED; ++g) {
                float part[2][4] = {};
#pragma unroll
                for (int k = g * SCALED / 16; k < (g + 1) * SCALED / 16; ++k) {
                    load_rows<HD>(q, queries, own, k, lane);
                    Plane::keys(r, keys, begin + 16 * n, k, lane);
                    mma(part[0], q[0], q[1], q[2], q[3], r[0], r[1]);
                    mma(part[1], q[0], q[1], q[2], q[3], r[2], r[3]);
                }
                if (g < groups)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const float scale = Plane::scale(keys, groups, begin + 16 * n + i / 2 * 8 + lane % 4 * 2 + i % 2, g);
                        s[2 * n + i / 2][i % 2] += part[i / 2][i % 2] * scale;
                        s[2 * n + i / 2][2 + i % 2] += part[i / 2][2 + i % 2] * scale;
                    }
            }
    }
}

// sums += p v for the weights `p` of KEYS keys from `begin`.
template <int HD, int KEYS, class Plane> DEVICE void weigh(float (&sums)[HD / 8][4], const float (&p)[KEYS / 8][4], u8* values, int begin, int groups, int lane) {
#pragma unroll
    for (int k = 0; k < KEYS / 16; ++k) {
        u32 a[4], r[4];
#pragma unroll
        for (int n = 0; n < HD / 16; ++n) {
            if constexpr (Plane::SCALES) {
                if (n % (SCALED / 16) == 0) {
                    const int g = n / (SCALED / 16), row = begin + 16 * k + lane % 4 * 2;
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const float even = g < groups ? Plane::scale(values, groups, row + 8 * i, g) : 0.0f;
                        const float odd = g < groups ? Plane::scale(values, groups, row + 8 * i + 1, g) : 0.0f;
                        a[2 * i] = pack(p[2 * k + i][0] * even, p[2 * k + i][1] * odd);
                        a[2 * i + 1] = pack(p[2 * k + i][2] * even, p[2 * k + i][3] * odd);
                    }
                }
            } else if (n == 0) {
#pragma unroll
                for (int i = 0; i < 4; ++i) a[i] = pack(p[2 * k + i / 2][i % 2 * 2], p[2 * k + i / 2][i % 2 * 2 + 1]);
            }
            Plane::values(r, values, begin + 16 * k, n, lane);
            mma(sums[2 * n], a[0], a[1], a[2], a[3], r[0], r[1]);
            mma(sums[2 * n + 1], a[0], a[1], a[2], a[3], r[2], r[3]);
        }
    }
}

// Cosine and sine of what turns a pair of features of a token.
DEVICE Float2 angle_of(const int* positions, u64 rotary, i64 tokens, i64 token) {
    const float angle = (float)positions[(rotary >> 32) * tokens + token] * from_bits((u32)rotary);
    return {cosf(angle), sinf(angle)};
}

// A row of queries or keys, eight features a lane: its norm, rotated. angles: of its token, [half].
DEVICE Word4 rotate_row(Word4 in, Word4 norm, const Float2* angles, int hd, int half, float eps, int lane) {
    float f[8], w[8], square = 0;
    unpack8(f, in), unpack8(w, norm);
#pragma unroll
    for (int i = 0; i < 8; ++i) square += f[i] * f[i];
    const float inverse = 1.0f / sqrtf(sum_warp(square) / hd + eps);
    const int d = 8 * lane, other = lane + (d < half ? half : -half) / 8;
    const Float2* own = angles + (d < half ? d : d - half);
#pragma unroll
    for (int i = 0; i < 8; ++i) f[i] *= inverse * (1.0f + w[i]);
    float y[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float pair = from_bits((u32)from_lane((int)bits(f[i]), other & 31));
        y[i] = f[i];
        if (d < 2 * half) y[i] = d < half ? f[i] * own[i].x - pair * own[i].y : f[i] * own[i].x + pair * own[i].y;
    }
    return {pack(y[0], y[1]), pack(y[2], y[3]), pack(y[4], y[5]), pack(y[6], y[7])};
}

// A row of keys or values, eight features a lane, at its place in a plane and as row `row` of a tile, if there is one.
template <int HD, class Plane> DEVICE void put_row(void* plane, u16* scales, i64 place, u8* tile, int row, Word4 v, int hd, int lane) {
    const bool inside = 8 * lane < hd;
    if constexpr (!Plane::SCALES) {
        if (inside) *(Word4*)((u16*)plane + place * hd + 8 * lane) = v;
        if (tile && 8 * lane < HD) Plane::put_query(tile, row, lane, v);
    } else {
        const int groups = (hd + SCALED - 1) / SCALED, group = lane / (SCALED / 8);
        float f[8], top = 0;
        unpack8(f, v);
#pragma unroll
        for (int i = 0; i < 8; ++i) top = fmaxf(top, fabsf(f[i]));
#pragma unroll
        for (int mask = 1; mask < SCALED / 8; mask *= 2) top = fmaxf(top, shuffle_xor(top, mask));
        const u16 scale = scale_of(top);
        const float inverse = inverse_of(from_half(scale));
        u64 codes = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) codes |= (u64)code_of(f[i], inverse) << 8 * i;
        if (inside) *(u64*)((u8*)plane + place * hd + 8 * lane) = codes;
        if (tile && 8 * lane < HD) *(u64*)(Plane::place(tile, row, lane / 2) + lane % 2 * 8) = codes;
        if (!inside || lane % (SCALED / 8)) return;
        scales[place * groups + group] = scale;
        if (tile) ((u16*)(tile + Plane::CODES))[row * groups + group] = scale;
    }
}

template <bool FIRST, class A, class B> struct Either {
    using Type = A;
};
template <class A, class B> struct Either<false, A, B> {
    using Type = B;
};

// The query rows of one key head are (column, head) pairs. With KEYS = PAGE a warp takes 16 of them and all keys of a page;
// with KEYS = 16 the warps of a block share out a page's keys for the same 16 rows and merge what they have at the end.
// blocks: (row tiles, key heads * splits, B); a split takes a run of pages. The last tiles, which see most, go first.
//
// With two STAGES of pages, a page's room is filled again as soon as every warp has left it; with one,
// the keys are fetched while the values are used and the other way around. int8 pages that every warp reads whole are widened
// once, into a tile of bf16, first keys, then values.
template <int HD, int KEYS, int STAGES, class Plane> DEVICE void attention(const Attention& a) {
    DYNAMIC_SHARED(shared);
    constexpr int M = KEYS == PAGE ? 16 * WARPS : 16;
    constexpr bool WIDENS = Plane::SCALES && KEYS == PAGE;
    using Operand = typename Either<WIDENS, Bf16Plane<HD>, Plane>::Type;
    u8 *const queries = shared, *const stages = queries + M * 2 * HD;  // [STAGES]: keys, values
    u8* const wide = stages + 2 * STAGES * Plane::BYTES;
    const int warp = thread() / 32, lane = thread() % 32, hd = (int)a.hd, W = (int)a.W, groups = (hd + SCALED - 1) / SCALED;
    const int b = block_z(), head = block_y() / (int)a.splits, split = block_y() % (int)a.splits, ratio = (int)(a.hq / a.hk);
    const int tile = grid_x() - 1 - block_x(), first = tile * M, rows = W * ratio;
    const int start = a.start[b], width = a.width[b];
    const int last = minimum(minimum(rows, first + M) - 1, width * ratio - 1);  // real query row
    const int end = last < first ? 0 : start + last / ratio + 1;                // ordinals that any row here sees
    const int pages = (end + PAGE - 1) / PAGE, run = (pages + (int)a.splits - 1) / (int)a.splits;
    const int page_begin = split * run, page_end = minimum(pages, page_begin + run);
    const i64 unit = ((i64)(b * (int)a.hk + head) * ((rows + 15) / 16) + tile) * a.splits + split;
    const bool prepares = KEYS < PAGE && a.k;
    // the kernels just before do not write what was there before this round
    const bool early = page_begin < page_end && (prepares || (page_begin + 1) * PAGE <= start);
    const int* const blocks = a.blocks + (i64)a.table[b] * a.row_blocks;
    const int first_block = page_begin < page_end ? blocks[page_begin] : 0;
    Float2* const angles = (Float2*)(stages + 2 * STAGES * Plane::BYTES);  // [W][rot / 2], of columns that are new
    const int half = (int)a.rot / 2;
    Word4 query_norm = {}, key_norm = {};
    if (prepares) {
        if (8 * lane < hd) query_norm = *(const Word4*)(a.query_norm + 8 * lane), key_norm = *(const Word4*)(a.key_norm + 8 * lane);
#pragma unroll 1
        for (int i = thread(); i < W * half; i += threads()) angles[i] = angle_of(a.positions, a.rotary[i % half], a.tokens, b * W + i / half);
    }
    if (!early) after_predecessors();
    if (KEYS < PAGE && a.splits > 1 && page_begin >= page_end) {  // nothing to add
        if (thread() < 16) a.partial[(unit * 16 + thread()) * (hd + 2) + hd] = -INFINITY;
        return;
    }

    auto place_of = [&](int page) { return ((i64)(page == page_begin ? first_block : blocks[page]) * a.hk + head) * PAGE; };
    auto load = [&](const void* plane, const u16* scales, u8* to, int page) {
        if (page < page_end) Plane::load(to, plane, scales, place_of(page), hd, (prepares && page == page_begin ? minimum(end, start) : end) - page * PAGE);
        copies_commit();
    };
    auto keys_of = [&](int page) { return stages + (page - page_begin) % STAGES * 2 * Plane::BYTES; };
    auto load_keys = [&](int page) { load(a.keys, a.key_scales, keys_of(page), page); };
    auto load_values = [&](int page) { load(a.values, a.value_scales, keys_of(page) + Plane::BYTES, page); };
    load_keys(page_begin);
    load_values(page_begin);
    if (early) after_predecessors();
    if (prepares) {
        // New keys and values of this block's pages, those of the first also into its tiles, and the block's queries: a warp a
        // row, the next one on its way.
        const int new_begin = maximum(0, page_begin * PAGE - start), fresh = maximum(0, minimum(width, page_end * PAGE - start) - new_begin);
        auto row_of = [&](int i) {
            const bool query = i >= 2 * fresh;
            const int row = first + i - 2 * fresh, w = new_begin + (query ? 0 : i % fresh);
            const i64 column = (i64)b * W;
            const u16* from = query ? a.q + ((column + row / ratio) * a.hq + head * ratio + row % ratio) * hd : (i < fresh ? a.k : a.v) + ((column + w) * a.hk + head) * hd;
            return (query && row >= rows) || 8 * lane >= hd ? Word4{0, 0, 0, 0} : *(const Word4*)(from + 8 * lane);
        };
        Word4 next = row_of(warp);
        copies_wait<0>();
        sync();  // the tiles and the angles are there
#pragma unroll 1
        for (int i = warp; i < 2 * fresh + M; i += WARPS) {
            Word4 v = next;
            if (i + WARPS < 2 * fresh + M) next = row_of(i + WARPS);
            const bool query = i >= 2 * fresh, value = !query && i >= fresh;
            const int row = i - 2 * fresh, w = query ? minimum((first + row) / ratio, W - 1) : new_begin + i % fresh;
            if (!value) v = rotate_row(v, query ? query_norm : key_norm, angles + w * half, hd, half, (float)a.eps, lane);
            if (query) {
                if (8 * lane < HD) Operand::put_query(queries, row, lane, v);
                continue;
            }
            const int page = (start + w) / PAGE, at = (start + w) % PAGE;
            u8* tile = page == page_begin ? keys_of(page) + (value ? Plane::BYTES : 0) : nullptr;
            put_row<HD, Plane>((void*)(value ? a.values : a.keys), (u16*)(value ? a.value_scales : a.key_scales), place_of(page) + at, tile, at, v, hd, lane);
        }
        sync();  // before other pages are read
    }
    if (STAGES == 2) load_keys(page_begin + 1);
    for (int i = thread(); i < M * HD / 8 && !prepares; i += threads()) {
        const int row = first + i / (HD / 8), d = i % (HD / 8) * 8;
        Word4 v = {0, 0, 0, 0};
        if (row < rows && d < hd) {
            const i64 token = (i64)b * W + row / ratio;
            v = load8(a.q + (token * a.hq + head * ratio + row % ratio) * hd, d, hd, hd % 8 == 0);
        }
        Operand::put_query(queries, i / (HD / 8), d / 8, v);
    }

    const int own = KEYS == PAGE ? 16 * warp : 0, key_begin = KEYS == PAGE ? 0 : 16 * warp;
    int limit[2];  // the last ordinal that row lane/4 and row lane/4 + 8 see
#pragma unroll
    for (int i = 0; i < 2; ++i) limit[i] = start + minimum((first + own + lane / 4 + 8 * i) / ratio, width - 1);
    const float scale = (float)a.scale;
    float sums[HD / 8][4] = {}, largest[2] = {-INFINITY, -INFINITY}, weight[2] = {0, 0};

    for (int page = page_begin; page < page_end; ++page) {
        u8 *const keys = keys_of(page), *const values = keys + Plane::BYTES;
        copies_wait<STAGES>();
        sync();
        if (STAGES == 2) load_values(page + 1);
        if constexpr (WIDENS) {
            Plane::widen_page(wide, keys, groups);
            sync();
        }
        float s[KEYS / 8][4] = {};
        score<HD, KEYS, Operand>(s, queries, own, WIDENS ? wide : keys, key_begin, groups, here(lane));
        if (STAGES == 1) {
            sync();
            load_keys(page + 1);
        }

        if (page * PAGE + key_begin + KEYS - 1 > start + first / ratio)  // some row here may not see some key
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    if (page * PAGE + key_begin + 8 * n + lane % 4 * 2 + j % 2 > limit[j / 2]) s[n][j] = -INFINITY;
        float factor[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float top = largest[i];
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n) top = fmaxf(top, fmaxf(s[n][2 * i], s[n][2 * i + 1]));
            top = fmaxf(top, shuffle_xor(top, 1));
            top = fmaxf(top, shuffle_xor(top, 2));
            const float base = top == -INFINITY ? 0.0f : top * scale;
            factor[i] = power2(largest[i] * scale - base);
            largest[i] = top;
            weight[i] *= factor[i];
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
                for (int j = 2 * i; j < 2 * i + 2; ++j) s[n][j] = power2(s[n][j] * scale - base), weight[i] += s[n][j];
        }
        if (any_lane(factor[0] != 1.0f || factor[1] != 1.0f))
#pragma unroll
            for (int n = 0; n < HD / 8; ++n)
#pragma unroll
                for (int j = 0; j < 4; ++j) sums[n][j] *= factor[j / 2];

        copies_wait<STAGES>();
        sync();
        if (STAGES == 2) load_keys(page + 2);
        if constexpr (WIDENS) {
            Plane::widen_page(wide, values, groups);
            sync();
        }
        weigh<HD, KEYS, Operand>(sums, s, WIDENS ? wide : values, key_begin, groups, here(lane));
        if (STAGES == 1) {
            sync();
            load_values(page + 1);
        }
    }
    copies_wait<0>();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        largest[i] *= scale;
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
                        const int d = Operand::feature(n, lane % 4 * 2 + j);
                        if (d < hd) store(row, d, sums[n][2 * i + j] * inverse);
                    }
        }
    } else {
        // merge the warps: every one brings its sums to the largest score of all
        __shared__ float tops[WARPS][16], weights[WARPS][16];
        float* room = (float*)shared;  // [WARPS][16][HD], over everything
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
            const float factor = largest[i] == -INFINITY ? 0.0f : power2(largest[i] - top);
#pragma unroll
            for (int n = 0; n < HD / 8; ++n)
#pragma unroll
                for (int j = 0; j < 2; ++j) room[(warp * 16 + row) * HD + Operand::feature(n, lane % 4 * 2 + j)] = sums[n][2 * i + j] * factor;
        }
        sync();
        for (int i = thread(); i < 16 * hd; i += threads()) {
            const int row = i / hd, d = i % hd;
            if (first + row >= rows) break;
            float top = -INFINITY, total = 0, sum = 0;
            for (int w = 0; w < WARPS; ++w) top = fmaxf(top, tops[w][row]);
            for (int w = 0; w < WARPS; ++w) {
                sum += room[(w * 16 + row) * HD + d];
                total += tops[w][row] == -INFINITY ? 0.0f : weights[w][row] * power2(tops[w][row] - top);
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

#define ATTENTION(HD, PLANE, KEYS_STAGES)                                                                     \
    KERNEL(attention_rows_##HD, Attention, 128, HD == 256 ? 2 : 1) { attention<HD, PAGE, 1, PLANE<HD>>(a); }  \
    KERNEL(attention_keys_##HD, Attention, 128, HD == 256 ? 2 : 1) { attention<HD, 16, KEYS_STAGES, PLANE<HD>>(a); }
