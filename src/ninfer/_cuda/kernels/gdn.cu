// Gated DeltaNet: causal convolution, gates, delta-rule recurrence, gated norm.
//
// Columns of a head's state are independent. Four lanes share a column, lane p holding rows 16m + 4p .. + 3: the state
// never leaves its registers while tokens pass by, and sums over rows are two shuffles.
#include "common.cuh"

struct Gdn {
    u16* out;        // [tokens, nv * dv]
    const u16* qkv[3];
    const u16* z;
    const u16* gate_a;  // [tokens, nv]
    const u16* gate_b;
    const u16* convolution;  // [taps, channels]
    const float* a_log;
    const float* dt_bias;
    const u16* norm;  // [dv]
    float* state;     // [slots, nv, dk, dv]
    u16* tail;        // [slots, taps - 1, channels]
    float* record_k;  // [tokens, nk, dk] or null
    float* record_d;  // [tokens, nv, dv]
    float* record_g;  // [tokens, nv]
    u16* record_c;    // [tokens, channels]
    const int* start;
    const int* width;
    const int* read;
    const int* write;
    const int* accepted;  // fold: columns to fold
    float* mixed;         // [tokens, channels]: what the convolution gave; then the heads' outputs in place of v
    float* gates;         // [tokens, nv, 2]: decay, beta
    int* tickets;         // [B, nk], zero between launches
    double eps;
    i64 W, nk, nv, dk, dv, taps;
};

DEVICE i64 channels_of(const Gdn& a) { return 2 * a.nk * a.dk + a.nv * a.dv; }

// Where a row's convolution inputs are: its columns, and before them its tail, or zeros.
struct Inputs {
    const u16* columns;  // of its part, [W, n]
    const u16* tail;     // of its part, [taps - 1, channels]; null: zeros
    i64 n, channels;
    int taps;

    DEVICE Inputs(const Gdn& a, int b, int part) : n(part == 2 ? a.nv * a.dv : a.nk * a.dk), channels(channels_of(a)), taps((int)a.taps) {
        columns = a.qkv[part] + b * a.W * n;
        tail = a.start[b] == 0 ? nullptr : a.tail + (i64)a.read[b] * (taps - 1) * channels + part * a.nk * a.dk;
    }

    DEVICE u16 at(int t, int i) const {
        const u16* p = t >= 0 ? columns + t * n : tail ? tail + (taps - 1 + t) * channels : nullptr;
        return p ? p[i] : (u16)0;
    }

    // silu of the convolution at column t; `weights` are the part's.
    DEVICE float convolved(const u16* weights, int t, int i) const {
        float sum = 0;
#pragma unroll 4
        for (int j = 0; j < taps; ++j) sum += from_bf16(weights[j * channels + i]) * from_bf16(at(t - taps + 1 + j, i));
        return silu(sum);
    }
};

DEVICE const u16* part_weights(const Gdn& a, int part) { return a.convolution + part * a.nk * a.dk; }

// Move the tail of channels part, [begin, end) past `count` columns; no other thread may still need the old one.
DEVICE void advance_tail(const Gdn& a, int b, int count, int part, int begin, int end) {
    const Inputs inputs(a, b, part);
    for (int i = begin + thread(); i < end; i += threads()) {
        u16* out = a.tail + (i64)a.write[b] * (a.taps - 1) * channels_of(a) + part * a.nk * a.dk + i;
        // ascending rows: what is read lies at or after what is written
        for (int r = 0; r < a.taps - 1; ++r) out[r * channels_of(a)] = inputs.at(count - (int)a.taps + 1 + r, i);
    }
}

DEVICE float log_decay(const Gdn& a, i64 token, int head) {
    const float x = from_bf16(a.gate_a[token * a.nv + head]) + a.dt_bias[head];
    return -expf(a.a_log[head]) * (x > 20.0f ? x : log1pf(expf(x)));
}

template <int DK> struct Column {
    float s[DK / 16][4];

    DEVICE void load(const float* state, int dk, int dv, int p) {
#pragma unroll
        for (int m = 0; m < DK / 16; ++m)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int row = 16 * m + 4 * p + e;
                s[m][e] = state && row < dk ? state[(i64)row * dv] : 0.0f;
            }
    }

    DEVICE void store(float* state, int dk, int dv, int p) const {
#pragma unroll
        for (int m = 0; m < DK / 16; ++m)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int row = 16 * m + 4 * p + e;
                if (row < dk) state[(i64)row * dv] = s[m][e];
            }
    }

    // One token; q and k hold DK floats. Returns the output, and the delta in `d`.
    DEVICE float step(const float* q, const float* k, float v, float decay, float beta, int p, float& d) {
        // four sums side by side: one alone would be a chain of dependent additions
        float e[4] = {0, 0, 0, 0}, o[4] = {0, 0, 0, 0};
#pragma unroll
        for (int m = 0; m < DK / 16; ++m) {
            const Word4 kk = *(const Word4*)(k + 16 * m + 4 * p);
            s[m][0] *= decay, s[m][1] *= decay, s[m][2] *= decay, s[m][3] *= decay;
            e[0] += s[m][0] * from_bits(kk.x), e[1] += s[m][1] * from_bits(kk.y);
            e[2] += s[m][2] * from_bits(kk.z), e[3] += s[m][3] * from_bits(kk.w);
        }
        float error = (e[0] + e[1]) + (e[2] + e[3]);
        error += shuffle_xor(error, 1);
        error += shuffle_xor(error, 2);
        d = beta * (v - error);
#pragma unroll
        for (int m = 0; m < DK / 16; ++m) {
            const Word4 kk = *(const Word4*)(k + 16 * m + 4 * p), qq = *(const Word4*)(q + 16 * m + 4 * p);
            s[m][0] += from_bits(kk.x) * d, s[m][1] += from_bits(kk.y) * d, s[m][2] += from_bits(kk.z) * d, s[m][3] += from_bits(kk.w) * d;
            o[0] += s[m][0] * from_bits(qq.x), o[1] += s[m][1] * from_bits(qq.y);
            o[2] += s[m][2] * from_bits(qq.z), o[3] += s[m][3] * from_bits(qq.w);
        }
        float out = (o[0] + o[1]) + (o[2] + o[3]);
        out += shuffle_xor(out, 1);
        return out + shuffle_xor(out, 2);
    }
};

DEVICE float* state_of(const Gdn& a, i64 slot, int head) { return a.state + (slot * a.nv + head) * a.dk * a.dv; }

// A head's outputs of one token become its gated norm; a warp.
DEVICE void finish_head(const Gdn& a, const float* o, i64 token, int head, int lane) {
    const int dv = (int)a.dv;
    float square = 0;
    for (int i = lane; i < dv; i += 32) square += o[i] * o[i];
    const float inverse = 1.0f / sqrtf(sum_warp(square) / dv + (float)a.eps);
    for (int i = lane; i < dv; i += 32) {
        const i64 at = (token * a.nv + head) * dv + i;
        a.out[at] = to_bf16(o[i] * inverse * from_bf16(a.norm[i]) * silu(from_bf16(a.z[at])));
    }
}

// -- a few columns: everything in one launch, blocks (value heads, B)

template <int DK> DEVICE void gdn_few(const Gdn& a) {
    DYNAMIC_SHARED(shared);
    __shared__ int last;
    after_predecessors();
    const int head = block_x(), b = block_y(), ratio = (int)(a.nv / a.nk), key = head / ratio;
    const int W = (int)a.W, dk = (int)a.dk, dv = (int)a.dv, width = a.width[b], warp = thread() / 32, lane = thread() % 32, warps = threads() / 32;
    if (width <= 0) return;
    const bool fresh = a.start[b] == 0, leads = head % ratio == 0;
    float *q = (float*)shared, *k = q + W * DK, *v = k + W * DK, *o = v + W * dv, *gates = o + W * dv;  // gates [W][2]
    const i64 token = (i64)b * W;

    // the first columns' state is on its way while the convolution runs
    const int p = lane % 4, lead = 8 * warp + lane / 4;
    Column<DK> column;
    column.load(fresh || lead >= dv ? nullptr : state_of(a, a.read[b], head) + lead, dk, dv, p);

    const int each = 2 * DK + dv;
    for (int i = thread(); i < width * each; i += threads()) {
        const int t = i / each, c = i % each, part = c < DK ? 0 : c < 2 * DK ? 1 : 2;
        const int own = c - part * DK, channel = part == 2 ? head * dv + own : key * dk + own;
        const bool inside = part == 2 || own < dk;
        float* row = part == 0 ? q + t * DK : part == 1 ? k + t * DK : v + t * dv;
        row[own] = inside ? Inputs(a, b, part).convolved(part_weights(a, part), t, channel) : 0.0f;
        if (a.record_c && inside && (part == 2 || leads))
            a.record_c[(token + t) * channels_of(a) + part * a.nk * dk + channel] = a.qkv[part][(token + t) * (part == 2 ? a.nv * dv : a.nk * dk) + channel];
    }
    for (int t = thread(); t < width; t += threads()) {
        const float g = log_decay(a, token + t, head);
        gates[2 * t] = expf(g);
        gates[2 * t + 1] = sigmoid(from_bf16(a.gate_b[(token + t) * a.nv + head]));
        if (a.record_g) a.record_g[(token + t) * a.nv + head] = g;
    }
    sync();
    for (int i = warp; i < 2 * width; i += warps) {
        float* x = (i % 2 ? k : q) + i / 2 * DK;
        float square = 0;
        for (int j = lane; j < DK; j += 32) square += x[j] * x[j];
        const float inverse = 1.0f / sqrtf(sum_warp(square) + 1e-6f) * (i % 2 ? 1.0f : 1.0f / sqrtf((float)dk));
        for (int j = lane; j < DK; j += 32) {
            x[j] *= inverse;
            if (i % 2 && a.record_k && leads && j < dk) a.record_k[((token + i / 2) * a.nk + key) * dk + j] = x[j];
        }
    }
    if (!a.record_k && thread() == 0) {
        fence();
        last = atomic_add(a.tickets + b * a.nk + key, 1) == ratio - 1;
    }
    sync();

    for (int c = lead; c - lane / 4 < dv; c += 8 * warps) {
        const bool inside = c < dv;
        if (c != lead) column.load(fresh || !inside ? nullptr : state_of(a, a.read[b], head) + c, dk, dv, p);
        for (int t = 0; t < width; ++t) {
            float d;
            const float out = column.step(q + t * DK, k + t * DK, inside ? v[t * dv + c] : 0.0f, gates[2 * t], gates[2 * t + 1], p, d);
            if (inside && p == 0) {
                o[t * dv + c] = out;
                if (a.record_d) a.record_d[((token + t) * a.nv + head) * dv + c] = d;
            }
        }
        if (!a.record_k && inside) column.store(state_of(a, a.write[b], head) + c, dk, dv, p);
    }
    sync();
    for (int t = warp; t < width; t += warps) finish_head(a, o + t * dv, token + t, head, lane);
    if (a.record_k) return;
    advance_tail(a, b, width, 2, head * dv, (head + 1) * dv);
    if (last) {  // the value heads of this key head have all read its channels
        for (int part = 0; part < 2; ++part) advance_tail(a, b, width, part, key * dk, (key + 1) * dk);
        if (thread() == 0) a.tickets[b * a.nk + key] = 0;
    }
}

// -- many columns: convolution and gates of all tokens, the recurrence, the gated norm

// A block a token.
KERNEL(gdn_prepare, Gdn, 256, 1) {
    after_predecessors();
    const int token = block_x(), b = token / (int)a.W, t = token % (int)a.W, warp = thread() / 32, lane = thread() % 32;
    if (t >= a.width[b]) return;
    const int keys = (int)(a.nk * a.dk), dk = (int)a.dk;
    float* y = a.mixed + token * channels_of(a);
    for (int i = thread(); i < channels_of(a); i += threads()) {
        const int part = i < keys ? 0 : i < 2 * keys ? 1 : 2, channel = i - part * keys;
        const Inputs inputs(a, b, part);
        y[i] = inputs.convolved(part_weights(a, part), t, channel);
        if (a.record_c) a.record_c[token * channels_of(a) + i] = inputs.at(t, channel);
    }
    for (int j = thread(); j < a.nv; j += threads()) {
        const float g = log_decay(a, token, j);
        a.gates[(token * a.nv + j) * 2] = expf(g);
        a.gates[(token * a.nv + j) * 2 + 1] = sigmoid(from_bf16(a.gate_b[token * a.nv + j]));
        if (a.record_g) a.record_g[token * a.nv + j] = g;
    }
    sync();
    for (int h = warp; h < 2 * a.nk; h += threads() / 32) {
        float* x = y + h * dk;
        const bool key = h >= a.nk;
        float square = 0;
        for (int j = lane; j < dk; j += 32) square += x[j] * x[j];
        const float inverse = 1.0f / sqrtf(sum_warp(square) + 1e-6f) * (key ? 1.0f : 1.0f / sqrtf((float)dk));
        for (int j = lane; j < dk; j += 32) {
            x[j] *= inverse;
            if (key && a.record_k) a.record_k[(token * a.nk + h - a.nk) * dk + j] = x[j];
        }
    }
}

constexpr int COLUMNS = 32, BATCH = 16;

// blocks (slices of COLUMNS columns, value heads, B), four warps; tokens in batches, the next one on its way.
template <int DK> DEVICE void gdn_scan(const Gdn& a) {
    DYNAMIC_SHARED(shared);
    after_predecessors();
    constexpr int FLOATS = BATCH * (2 * DK + COLUMNS + 2);
    const int head = block_y(), b = block_z(), key = head / (int)(a.nv / a.nk), dk = (int)a.dk, dv = (int)a.dv;
    const int width = a.width[b], warp = thread() / 32, lane = thread() % 32, p = lane % 4;
    if (width <= 0) return;
    const int first = block_x() * COLUMNS, own = 8 * warp + lane / 4, c = first + own;
    const bool inside = c < dv;
    const i64 token = (i64)b * a.W, channels = channels_of(a), values = 2 * a.nk * dk + (i64)head * dv;
    float* room = (float*)shared;  // [2][q BATCH x DK, k, v BATCH x COLUMNS, gates BATCH x 2]
    auto load = [&](int begin) {
        float* to = room + begin / BATCH % 2 * FLOATS;
        const int count = minimum(BATCH, width - begin);
        const float* from = a.mixed + (token + begin) * channels;
        for (int i = thread(); i < count * (2 * DK + COLUMNS); i += threads()) {
            const int t = i / (2 * DK + COLUMNS), j = i % (2 * DK + COLUMNS);
            const float* row = from + t * channels;
            if (j < 2 * DK) {
                const int part = j / DK, d = j % DK;
                copy4(to + part * BATCH * DK + t * DK + d, d < dk ? row + (part * a.nk + key) * dk + d : row, d < dk ? 4 : 0);
            } else {
                const int d = first + j - 2 * DK;
                copy4(to + 2 * BATCH * DK + t * COLUMNS + j - 2 * DK, d < dv ? row + values + d : row, d < dv ? 4 : 0);
            }
        }
        for (int i = thread(); i < 2 * count; i += threads())
            copy4(to + BATCH * (2 * DK + COLUMNS) + i, a.gates + ((token + begin + i / 2) * a.nv + head) * 2 + i % 2, 4);
    };

    Column<DK> column;
    column.load(a.start[b] == 0 || !inside ? nullptr : state_of(a, a.read[b], head) + c, dk, dv, p);
    load(0), copies_commit();
    for (int begin = 0; begin < width; begin += BATCH) {
        if (begin + BATCH < width) load(begin + BATCH);
        copies_commit();
        copies_wait<1>();
        sync();
        const float *q = room + begin / BATCH % 2 * FLOATS, *k = q + BATCH * DK, *v = k + BATCH * DK, *gates = v + BATCH * COLUMNS;
        for (int t = 0; t < minimum(BATCH, width - begin); ++t) {
            float d;
            const float out = column.step(q + t * DK, k + t * DK, v[t * COLUMNS + own], gates[2 * t], gates[2 * t + 1], p, d);
            if (inside && p == 0) {
                a.mixed[(token + begin + t) * channels + values + c] = out;
                if (a.record_d) a.record_d[((token + begin + t) * a.nv + head) * dv + c] = d;
            }
        }
        sync();
    }
    copies_wait<0>();
    if (!a.record_k && inside) column.store(state_of(a, a.write[b], head) + c, dk, dv, p);
}

// A block a token; that of a row's first column also advances the row's tail.
KERNEL(gdn_finish, Gdn, 256, 1) {
    after_predecessors();
    const int token = block_x(), b = token / (int)a.W, t = token % (int)a.W, warp = thread() / 32, lane = thread() % 32;
    if (t < a.width[b])
        for (int j = warp; j < a.nv; j += threads() / 32)
            finish_head(a, a.mixed + token * channels_of(a) + 2 * a.nk * a.dk + j * a.dv, token, j, lane);
    if (t == 0 && a.width[b] > 0 && !a.record_k) {
        const int keys = (int)(a.nk * a.dk);
        for (int part = 0; part < 3; ++part) advance_tail(a, b, a.width[b], part, 0, part == 2 ? (int)(a.nv * a.dv) : keys);
    }
}

// -- fold: the first `accepted` recorded columns of a row enter its state; blocks (value heads, B)

KERNEL(gdn_fold, Gdn, 256, 1) {
    DYNAMIC_SHARED(weights);
    after_predecessors();
    const int head = block_x(), b = block_y(), key = head / (int)(a.nv / a.nk), dk = (int)a.dk, dv = (int)a.dv;
    const int count = minimum(a.accepted[b], a.width[b]);
    if (count <= 0) return;
    const i64 token = (i64)b * a.W, channels = channels_of(a);
    float* weight = (float*)weights;  // [W + 1]: decay from after column t to the last
    if (thread() == 0) {
        float g = 0;
        for (int t = count - 1; t >= 0; --t) weight[t] = expf(g), g += a.record_g[(token + t) * a.nv + head];
        weight[a.W] = expf(g);
    }
    sync();
    const bool fresh = a.start[b] == 0;
    const float* from = state_of(a, a.read[b], head);
    float* to = state_of(a, a.write[b], head);
    for (int i = thread(); i < dk * dv; i += threads()) {
        const int row = i / dv, c = i % dv;
        float sum = fresh ? 0.0f : from[i] * weight[a.W];
        for (int t = 0; t < count; ++t)
            sum += weight[t] * a.record_k[((token + t) * a.nk + key) * dk + row] * a.record_d[((token + t) * a.nv + head) * dv + c];
        to[i] = sum;
    }
    // the tail: the block of a key head's first value head takes its channels too
    const bool leads = head % (a.nv / a.nk) == 0;
    const int taps = (int)a.taps - 1;
    for (int part = leads ? 0 : 2; part < 3; ++part) {
        const int n = part == 2 ? dv : dk;
        const i64 base = part * a.nk * dk + (i64)(part == 2 ? head : key) * n;
        for (int i = thread(); i < n; i += threads())
            for (int r = 0; r < taps; ++r) {
                const int t = count - taps + r;
                const u16* source = t >= 0 ? a.record_c + (token + t) * channels : a.tail + ((i64)a.read[b] * taps + taps + t) * channels;
                a.tail[((i64)a.write[b] * taps + r) * channels + base + i] = t < 0 && fresh ? (u16)0 : source[base + i];
            }
    }
}

KERNEL(gdn_few_32, Gdn, 512, 1) { gdn_few<32>(a); }
KERNEL(gdn_few_64, Gdn, 512, 1) { gdn_few<64>(a); }
KERNEL(gdn_few_128, Gdn, 512, 1) { gdn_few<128>(a); }
KERNEL(gdn_scan_32, Gdn, 128, 1) { gdn_scan<32>(a); }
KERNEL(gdn_scan_64, Gdn, 128, 1) { gdn_scan<64>(a); }
KERNEL(gdn_scan_128, Gdn, 128, 1) { gdn_scan<128>(a); }
