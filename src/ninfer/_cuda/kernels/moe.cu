// Mixture of experts: which experts a token takes, and their products. A slot is one (token, choice) pair.
#include "experts.cuh"

struct Route {
    int* ids;        // [tokens, k]
    float* weights;  // [tokens, k]
    float* shared;   // [tokens]
    const float* logits;  // [tokens, experts]
    const float* score;   // [tokens]
    i64 tokens, experts, k;
};

// A number that orders as the float does, and back; no float is 0.
DEVICE u32 ordinal(float v) {
    const u32 b = bits(v + 0.0f);
    return b >> 31 ? ~b : b | 0x80000000u;
}
DEVICE float from_ordinal(u32 v) { return from_bits(v >> 31 ? v & 0x7FFFFFFFu : ~v); }

// A warp a token; of equal logits the lower id comes first.
KERNEL(route, Route, 128, 1) {
    DYNAMIC_SHARED(shared);
    after_predecessors();
    const int token = block_x() * 4 + thread() / 32, lane = thread() % 32, experts = (int)a.experts, k = (int)a.k;
    if (token >= a.tokens) return;
    u32* left = (u32*)shared + thread() / 32 * (experts + k);  // what a lane has of them is its own
    float *parts = (float*)(left + experts), top = 0, total = 0;
    const float score = a.score[token];
#pragma unroll 8
    for (int e = lane; e < experts; e += 32) left[e] = ordinal(a.logits[token * a.experts + e]);
#pragma unroll 1
    for (int i = 0; i < k; ++i) {
        u32 best = 0, id = ~0u;
#pragma unroll 8
        for (int e = lane; e < experts; e += 32)
            if (left[e] > best) best = left[e], id = e;
        const u32 most = most_of_lanes(best);
        id = least_of_lanes(best == most ? id : experts - 1);  // no id is above the last
        const float logit = from_ordinal(most);
        if (i == 0) top = logit;
        const float part = expf(logit - top);
        total += part;
        if (lane == id % 32) left[id] = 0;
        if (lane == 0) a.ids[token * a.k + i] = id, parts[i] = part;
    }
    sync_warp();
    for (int i = lane; i < k; i += 32) a.weights[token * a.k + i] = parts[i] / total;
    if (lane == 0) a.shared[token] = sigmoid(score);
}

struct Experts {
    u16* out;         // swiglu: [slots, rows]; down: [tokens, rows]
    const u16* x;     // swiglu: [tokens, K]; down: [slots, K]; for many tokens in operand order and padded
    const int* ids;   // [slots]
    const float* weights;  // [slots]
    const Segment* first;   // a segment an expert: gate, or down
    const Segment* second;  // up
    int* order;        // [experts + 1] offsets, then the slots of every expert, how many batches, and of each (expert, first)
    float* products;   // many, down: [slots, rows]
    i64 slots, k, experts, rows, K, stage;
};

constexpr int FEW = 8, MANY = 4, NT = 4;  // warps of a block, and eights of columns

// The work of `count` threads, of which this one is number `own`.
DEVICE void put_column(u8* x, const u16* from, int K, int padded, int own, int count) {
    for (int k = 8 * own; k < padded; k += 8 * count) *(Word4*)(x + 2 * k) = operand_order(load8(from, k, K, K % 8 == 0));
}

// Few tokens: blocks (16 rows of gate and up, slots); the warps share out K.
KERNEL(experts_few_swiglu, Experts, 256, 2) {
    DYNAMIC_SHARED(shared);
    __shared__ float sums[FEW][32];
    after_predecessors();
    const int slot = block_y(), expert = a.ids[slot], warp = thread() / 32, lane = thread() % 32;
    const int K = (int)a.K, padded = (K + 127) / 128 * 128, begin = 16 * block_x(), left = (int)a.rows - begin;
    const Segment *gate = a.first + expert, *up = a.second + expert;
    const Rows16 rows[2] = {{gate, (int)gate->first + begin, left}, {up, (int)up->first + begin, left}};
    u8* x = shared + FEW * STAGES * a.stage;
    put_column(x, a.x + slot / a.k * K, K, padded, thread(), threads());
    sync();
    float total[2][1][4] = {};
    walk_sums(total, rows, shared + warp * STAGES * a.stage, (int)a.stage, x, K, warp, FEW);
    if (lane % 4 == 0)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[warp][8 * i + lane / 4] = total[i / 2][0][i % 2 * 2];
    sync();
    if (warp == 0) {
        float sum = 0;
        for (int w = 0; w < FEW; ++w) sum += sums[w][lane];
        const Rows16 r = lane < 16 ? rows[0] : rows[1];
        sum *= row_factor(*r.segment, r.row + minimum(lane % 16, left - 1));
        const float other = shuffle_xor(sum, 16);
        if (lane < minimum(16, left)) a.out[slot * a.rows + begin + lane] = to_bf16(silu(sum) * other);
    }
}

// Few tokens: blocks (32 rows, tokens); the warps share out the slots.
KERNEL(experts_few_down, Experts, 256, 2) {
    DYNAMIC_SHARED(shared);
    __shared__ float sums[FEW][32];
    after_predecessors();
    const int token = block_y(), warp = thread() / 32, lane = thread() % 32;
    const int K = (int)a.K, padded = (K + 127) / 128 * 128, begin = 32 * block_x(), left = (int)a.rows - begin;
    u8* x = shared + FEW * STAGES * a.stage + warp * 2 * padded;
    float own = 0;  // row `lane`
    for (int s = warp; s < a.k; s += FEW) {
        const i64 slot = token * a.k + s;
        const Segment* down = a.first + a.ids[slot];
        const int first = (int)down->first + begin;
        Rows16 rows[2] = {{down, first, left}, {down, first + 16, left - 16}};
        if (left <= 16) rows[1] = {down, first, 1};
        put_column(x, a.x + slot * K, K, padded, lane, 32);
        sync_warp();
        float total[2][1][4] = {};
        walk_sums(total, rows, shared + warp * STAGES * a.stage, (int)a.stage, x, K, 0, 1);
        if (lane % 4 == 0)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[warp][8 * i + lane / 4] = total[i / 2][0][i % 2 * 2];
        sync_warp();
        own += a.weights[slot] * row_factor(*down, first + minimum(lane, left - 1)) * sums[warp][lane];
        sync_warp();
    }
    sums[warp][lane] = own;
    sync();
    if (warp == 0 && lane < left) {
        float sum = 0;
        for (int w = 0; w < FEW; ++w) sum += sums[w][lane];
        u16* out = a.out + token * a.rows + begin + lane;
        *out = to_bf16(from_bf16(*out) + sum);
    }
}

// Many tokens: the slots of every expert, in any order (a slot's products do not depend on its neighbours), and batches of
// as many as are worked on together. One block.
KERNEL(experts_sort, Experts, 1024, 1) {
    DYNAMIC_SHARED(shared);
    after_predecessors();
    int *count = (int*)shared, *batch = count + a.experts;  // [experts]
    int *slots = a.order + a.experts + 1, *batches = slots + a.slots;
    for (int e = thread(); e < a.experts; e += threads()) count[e] = 0;
    sync();
    for (int i = thread(); i < a.slots; i += threads()) atomic_add(count + a.ids[i], 1);
    sync();
    if (thread() == 0) {
        int total = 0, all = 0;
        for (int e = 0; e < a.experts; ++e) {
            const int own = count[e];
            a.order[e] = count[e] = total, batch[e] = all;
            total += own, all += (own + 8 * NT - 1) / (8 * NT);
        }
        a.order[a.experts] = total, batches[0] = all;
    }
    sync();
    for (int e = thread(); e < a.experts; e += threads()) {
        const int end = e + 1 < a.experts ? count[e + 1] : (int)a.slots;
        for (int first = count[e], i = batch[e]; first < end; first += 8 * NT, ++i) batches[1 + 2 * i] = e, batches[2 + 2 * i] = first;
    }
    sync();
    for (int i = thread(); i < a.slots; i += threads()) slots[atomic_add(count + a.ids[i], 1)] = i;
}

// blocks (row tiles, batches)
template <bool SWIGLU_RESULT> DEVICE void experts_many(const Experts& a) {
    DYNAMIC_SHARED(shared);
    after_predecessors();
    const int *slots = a.order + a.experts + 1, *batches = slots + a.slots;
    if (block_y() >= batches[0]) return;
    const int expert = batches[1 + 2 * block_y()], first = batches[2 + 2 * block_y()], columns = minimum(8 * NT, a.order[expert + 1] - first);
    const int warp = thread() / 32, lane = thread() % 32;
    const int K = (int)a.K, padded = (K + 127) / 128 * 128, height = SWIGLU_RESULT ? 16 : 32;
    const int begin = (MANY * block_x() + warp) * height, left = (int)a.rows - begin;
    const Segment *gate = a.first + expert, *up = SWIGLU_RESULT ? a.second + expert : gate;
    Rows16 rows[2] = {{gate, (int)gate->first + begin, left}, {up, (int)up->first + begin + (SWIGLU_RESULT ? 0 : 16), SWIGLU_RESULT ? left : left - 16}};
#pragma unroll
    for (int h = 0; h < 2; ++h)
        if (rows[h].count < 1) rows[h].row = (int)(rows[h].segment->first + rows[h].segment->rows) - 1, rows[h].count = 0;
    float total[2][NT][4] = {};
    panel_sums<NT>(total, rows, shared + warp * STAGES * a.stage, (int)a.stage, shared + MANY * STAGES * a.stage, 0, K, columns,
                   [&](int c) { return a.x + (SWIGLU_RESULT ? slots[first + c] / a.k : (i64)slots[first + c]) * padded; });
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = 8 * (i / 2) + lane / 4, column = 8 * n + lane % 4 * 2 + i % 2;
            if (column >= columns) continue;
            const i64 at = (i64)slots[first + column] * a.rows + begin + row;
            if (SWIGLU_RESULT) {
                const float g = total[0][n][i] * row_factor(*gate, rows[0].row + minimum(row, maximum(rows[0].count - 1, 0)));
                const float u = total[1][n][i] * row_factor(*up, rows[1].row + minimum(row, maximum(rows[1].count - 1, 0)));
                if (row < rows[0].count) a.out[at] = to_bf16(silu(g) * u);
            } else {
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    if (row < rows[h].count) a.products[at + 16 * h] = total[h][n][i] * row_factor(*gate, rows[h].row + row);
            }
        }
}

KERNEL(experts_many_swiglu, Experts, 128, 2) { experts_many<true>(a); }
KERNEL(experts_many_down, Experts, 128, 2) { experts_many<false>(a); }

// A block a token: x += the products of its slots, weighted, in slot order.
KERNEL(experts_add, Experts, 256, 1) {
    after_predecessors();
    for (int i = thread(); i < a.rows; i += threads()) {
        float sum = 0;
        for (int s = 0; s < a.k; ++s) sum += a.weights[block_x() * a.k + s] * a.products[(block_x() * a.k + s) * a.rows + i];
        u16* out = a.out + block_x() * a.rows + i;
        *out = to_bf16(from_bf16(*out) + sum);
    }
}
