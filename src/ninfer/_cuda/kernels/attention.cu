// Gated attention: what comes before the softmax, and after one that was split.
#include "attention.cuh"

struct Prepare {
    u16* q;
    u16* k;
    const u16* v;
    const u16* query_norm;
    const u16* key_norm;
    void* keys;    // [pages, hk, PAGE, hd]: bf16, or int8 where there are scales
    void* values;
    u16* key_scales;  // [pages, hk, PAGE, ceil(hd / SCALED)], fp16; or null
    u16* value_scales;
    const int* blocks;  // [rows, row_blocks]
    const int* start;
    const int* width;
    const int* table;
    const int* positions;  // [3, tokens]
    const u64* rotary;     // [rot / 2]: frequency, an fp32, below; axis above
    double eps;
    i64 tokens, W, row_blocks, hq, hk, hd, rot;
};

// Features of a row of hd as int8 codes; a warp.
DEVICE void put_codes(u8* codes, u16* scales, const float* row, int hd, int lane) {
    for (int g = 0; g < hd; g += SCALED) {
        const int d = g + lane;
        const float low = d < hd ? row[d] : 0.0f, high = d + 32 < hd ? row[d + 32] : 0.0f;
        const u16 scale = scale_of(max_warp(fmaxf(fabsf(low), fabsf(high))));
        const float inverse = inverse_of(from_half(scale));
        if (lane == 0) scales[g / SCALED] = scale;
        if (d < hd) codes[d] = code_of(low, inverse);
        if (d + 32 < hd) codes[d + 32] = code_of(high, inverse);
    }
}

// A warp a head of a token: norm and rotate q and k, append k and v. All that the predecessors do not write is ready before
// they end.
KERNEL(attention_prepare, Prepare, 128, 1) {
    DYNAMIC_SHARED(room);  // of a warp: [hd] what comes in, [hd] its norm and then what goes out, [rot / 2] cosines, sines
    const int warp = thread() / 32, lane = thread() % 32, hd = (int)a.hd, half = (int)a.rot / 2;
    const int heads = (int)(a.hq + 2 * a.hk), number = block_x() * WARPS + warp;
    const bool inside = number < a.tokens * heads;
    const int token = inside ? number / heads : 0, head = number % heads, b = token / (int)a.W, w = token % (int)a.W;
    const bool query = head < a.hq, value = head >= a.hq + a.hk, works = inside && (query || w < a.width[b]);
    float *row = (float*)room + warp * 3 * hd, *rotated = row + hd, *cosines = rotated + hd, *sines = cosines + half;
    i64 place = 0;
    if (works && !value) {
        const u16* norm = query ? a.query_norm : a.key_norm;
        for (int d = lane; d < hd; d += 32) rotated[d] = 1.0f + from_bf16(norm[d]);
        for (int j = lane; j < half; j += 32) {
            const Float2 turn = angle_of(a.positions, a.rotary[j], a.tokens, token);
            cosines[j] = turn.x, sines[j] = turn.y;
        }
    }
    const int g = head - (int)a.hq - (value ? (int)a.hk : 0);
    if (works && !query) {
        const int p = a.start[b] + w, page = a.blocks[a.table[b] * a.row_blocks + p / PAGE];
        place = ((i64)page * a.hk + g) * PAGE + p % PAGE;
    }
    after_predecessors();
    if (!works) return;
    const u16* in = query ? a.q + ((i64)token * a.hq + head) * hd : (value ? a.v : a.k) + ((i64)token * a.hk + g) * hd;
    float square = 0;
    for (int d = lane; d < hd; d += 32) {
        row[d] = from_bf16(in[d]);
        square += row[d] * row[d];
    }
    if (!value) {
        const float inverse = 1.0f / sqrtf(sum_warp(square) / hd + (float)a.eps);
        for (int d = lane; d < hd; d += 32) row[d] *= inverse * rotated[d];
    }
    sync_warp();
    for (int d = lane; d < hd; d += 32) {
        float y = row[d];
        if (!value && d < 2 * half) {
            const int j = d % half;
            y = d < half ? row[j] * cosines[j] - row[j + half] * sines[j] : row[j + half] * cosines[j] + row[j] * sines[j];
        }
        rotated[d] = from_bf16(to_bf16(y));
    }
    sync_warp();
    if (query) {
        u16* out = a.q + ((i64)token * a.hq + head) * hd;
        for (int d = lane; d < hd; d += 32) out[d] = to_bf16(rotated[d]);
        return;
    }
    void* plane = value ? a.values : a.keys;
    if (a.key_scales) {
        u16* scales = (value ? a.value_scales : a.key_scales) + place * ((hd + SCALED - 1) / SCALED);
        put_codes((u8*)plane + place * hd, scales, rotated, hd, lane);
    } else {
        for (int d = lane; d < hd; d += 32) ((u16*)plane)[place * hd + d] = to_bf16(rotated[d]);
    }
}

// A block a head of a token, a thread a feature: merge the splits, apply the gate. All that it reads of the first splits is
// asked for at once: it waits behind the weights of the next product.
KERNEL(attention_merge, Attention, 256, 1) {
    DYNAMIC_SHARED(shared);  // [splits]: the largest score of a split, then what its sums count; [splits]: its weights
    __shared__ float room[32];
    constexpr int BATCH = 16;
    const int W = (int)a.W, hd = (int)a.hd, ratio = (int)(a.hq / a.hk), splits = (int)a.splits;
    const int token = block_x(), b = token / W, row = token % W * ratio + block_y() % ratio, head = block_y() / ratio;
    const int tiles = (W * ratio + 15) / 16, own = minimum(thread(), hd - 1);
    const i64 out = ((i64)token * a.hq + block_y()) * hd;
    const float* partial = a.partial + (((i64)(b * (int)a.hk + head) * tiles + row / 16) * splits * 16 + row % 16) * (hd + 2);
    const i64 next = 16 * (hd + 2);
    float *factors = (float*)shared, *weights = factors + splits, top = -INFINITY, total = 0, used = 0, sums[BATCH];
    auto load = [&](int begin) {
#pragma unroll
        for (int i = 0; i < BATCH; ++i) sums[i] = partial[minimum(begin + i, splits - 1) * next + own];
    };
    after_predecessors();
    const u16 gate = a.gate[out + own];
    load(0);
    for (int s = thread(); s < splits; s += threads()) {
        factors[s] = partial[s * next + hd], weights[s] = partial[s * next + hd + 1];
        top = fmaxf(top, factors[s]);
        if (factors[s] != -INFINITY) used = s + 1;  // those with pages come first
    }
    top = max_block(top, room);
    used = max_block(used, room);
    for (int s = thread(); s < splits; s += threads()) {
        factors[s] = factors[s] == -INFINITY ? 0.0f : power2(factors[s] - top);
        if (factors[s] > 0) total += weights[s] * factors[s];
    }
    total = sum_block(total, room);  // also: every factor is there
    const float inverse = total > 0 ? 1.0f / total : 0.0f;
    float sum = 0;
#pragma unroll 1
    for (int begin = 0; begin < (int)used; begin += BATCH) {
        if (begin) load(begin);
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
            if (begin + i < (int)used && factors[begin + i] > 0) sum += sums[i] * factors[begin + i];  // unused ones may be anything
    }
    if (thread() >= hd) return;
    const u16 v = to_bf16(sum * inverse * sigmoid(from_bf16(gate)));
    a.out[out + thread()] = v;
    if (a.panels) a.panels[panel_place(block_y() * hd + thread(), token, (int)a.room)] = v;
}
