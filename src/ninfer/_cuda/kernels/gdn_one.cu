// Gated DeltaNet of one column.
//
// A block holds a head's state: every lane four columns, every warp some of the rows, so a thread touches nothing but its
// own. What is executed once must also be fetched once, so code is kept short.
#include "gdn_step.cuh"

// Channel c of a head's q, k and v: 2 DK, then dv. kind: the part, or -1 beyond; own: where in it. Keys narrower than DK
// are padded by channels that are not real.
struct Channel {
    int kind, own, channel;
    bool real;
    u64 w, x;  // four bf16, the oldest lowest: weights, and the inputs of the column last put

    // Weights, and what was there before the first column, which the kernels before this one do not touch. Every load is on
    // its way before the first is used.
    DEVICE void begin(const Gdn& a, int head, int key, int b, int c) {
        kind = c < DK ? 0 : c < 2 * DK ? 1 : c < 2 * DK + (int)a.dv ? 2 : -1;
        own = kind == 2 ? c - 2 * DK : c % DK;
        real = kind == 2 || kind >= 0 && own < (int)a.dk;
        channel = kind == 2 ? head * (int)a.dv + own : key * (int)a.dk + own;
        const int taps = (int)a.taps, channels = channels_of(a), at = real ? kind * (int)(a.nk * a.dk) + channel : 0;
        const u16* tail = a.tail + (i64)a.read[b] * (taps - 1) * channels + at;
        const bool fresh = a.start[b] == 0;
        u16 weight[TAPS], before[TAPS];
#pragma unroll
        for (int j = 0; j < TAPS; ++j) weight[j] = a.convolution[maximum(j - TAPS + taps, 0) * channels + at];
#pragma unroll
        for (int j = 0; j < TAPS - 1; ++j) before[j] = tail[maximum(j - TAPS + taps, 0) * channels];
        w = x = 0;
#pragma unroll
        for (int j = 0; j < TAPS; ++j) {
            const bool inside = real && j >= TAPS - taps;
            w |= (u64)(inside ? weight[j] : (u16)0) << 16 * j;
            if (j < TAPS - 1) x |= (u64)(inside && !fresh ? before[j] : (u16)0) << 16 * (j + 1);
        }
    }

    DEVICE u16 column(const Gdn& a, i64 token) const {
        const int n = kind == 2 ? (int)(a.nv * a.dv) : (int)(a.nk * a.dk);
        return real ? a.qkv[kind][token * n + channel] : (u16)0;
    }
    DEVICE void put(u16 column) { x = x >> 16 | (u64)column << 48; }

    DEVICE float convolved() const {
        float sum = 0;
#pragma unroll
        for (int j = 0; j < TAPS; ++j) sum += from_bf16((u16)(w >> 16 * j)) * from_bf16((u16)(x >> 16 * j));
        return silu(sum);
    }

    DEVICE void put_tail(const Gdn& a, i64 slot) const {
        const int taps = (int)a.taps, channels = channels_of(a);
        u16* out = a.tail + slot * (taps - 1) * channels + kind * (int)(a.nk * a.dk) + channel;
#pragma unroll
        for (int j = 1; j < TAPS; ++j)
            if (j > TAPS - taps) out[(j - 1 - TAPS + taps) * channels] = (u16)(x >> 16 * j);
    }
};

// The sum over warps of what each left at `parts` [WARPS][WIDE], of four columns.
DEVICE void sum_parts(float (&sum)[4], const float* parts, int column) {
    sum[0] = sum[1] = sum[2] = sum[3] = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        float x[4];
        load4(x, parts + w * WIDE + column);
        sum[0] += x[0], sum[1] += x[1], sum[2] += x[2], sum[3] += x[3];
    }
}

// A block of 256 threads a value head of a row.
//
// Latency is all: what the predecessors do not write is loaded before they end, everything else at once after they did.
template <bool VECTORS> DEVICE void one(const Gdn& a) {
    DYNAMIC_SHARED(shared);
    const int head = block_x(), b = block_y(), ratio = (int)a.nv / (int)a.nk, key = head / ratio, warp = thread() / 32, lane = thread() % 32;
    const int nv = (int)a.nv, dk = (int)a.dk, dv = (int)a.dv, column = 4 * lane, first = warp * ROWS;
    float *room = (float*)shared, *parts = room + DK * WIDE, *outputs = parts + WARPS * WIDE, *q = outputs + WARPS * WIDE, *k = q + DK;
    float *v = k + DK, *gated = v + dv, *gates = gated + dv;  // gates [2], then whether this block is the last of its key head
    const float rate = expf(a.a_log[head]), bias = a.dt_bias[head];
    const bool given = a.width[b] > 0, leads = head % ratio == 0;
    const int write = a.write[b];

    // A thread convolves two channels of this head's q, k, v, one after another.
    Channel mine[2];
    if (given) {
        load_state<VECTORS>(room, a.start[b] == 0 ? nullptr : state_of(a, a.read[b], head), dk, dv, dv);
#pragma unroll
        for (int i = 0; i < 2; ++i) mine[i].begin(a, head, key, b, thread() + i * threads());
    }
    after_predecessors();
    if (!given) return;
    const u16 gate_a = a.gate_a[b * nv + head], gate_b = a.gate_b[b * nv + head];
    const u16 z = thread() < dv ? a.z[(b * nv + head) * dv + thread()] : (u16)0;
    u16 columns[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) columns[i] = mine[i].column(a, b);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        Channel& c = mine[i];
        if (c.kind < 0) continue;
        c.put(columns[i]);
        (c.kind == 0 ? q : c.kind == 1 ? k : v)[c.own] = c.convolved();
        if (a.record_c && c.real && (c.kind == 2 || leads)) a.record_c[b * channels_of(a) + c.kind * (int)(a.nk * a.dk) + c.channel] = columns[i];
    }
    if (thread() == 0) {
        const float x = from_bf16(gate_a) + bias, g = -rate * (x > 20.0f ? x : log1pf(expf(x)));
        gates[0] = expf(g), gates[1] = sigmoid(from_bf16(gate_b));
        if (a.record_g) a.record_g[b * nv + head] = g;
    }
    if (thread() < dv) gated[thread()] = from_bf16(a.norm[thread()]) * silu(from_bf16(z));
#pragma unroll
    for (int i = 0; i < 2; ++i)
        if (mine[i].kind == 2 && !a.record_k) mine[i].put_tail(a, write);
    sync();
    if (warp < 2) {
        float *x = warp ? k : q, y[4];
        load4(y, x + column);
        const float square = sum_warp(y[0] * y[0] + y[1] * y[1] + y[2] * y[2] + y[3] * y[3]);
        const float inverse = inverse_root(square + 1e-6f) * (warp ? 1.0f : inverse_root((float)dk));
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            y[c] *= inverse;
            if (warp && a.record_k && leads && column + c < dk) a.record_k[(b * (int)a.nk + key) * dk + column + c] = y[c];
        }
        store4(x + column, y);
    }
    int ticket = 0;  // how many value heads of this key head had read its channels before
    if (!a.record_k && thread() == 0) ticket = atomic_add(a.tickets + b * a.nk + key, 1);
    copies_wait<0>();
    sync();

    float *own = room + first * WIDE + column, d[4], sum[4] = {0, 0, 0, 0};
#pragma unroll 2
    for (int r = 0; r < ROWS; r += 4) {
        float kk[4];
        load4(kk, k + first + r);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float x[4];
            load4(x, own + (r + i) * WIDE);
#pragma unroll
            for (int c = 0; c < 4; ++c) sum[c] += x[c] * kk[i];
        }
    }
    store4(parts + warp * WIDE + column, sum);
    sync();
    const float decay = gates[0], beta = gates[1];
    sum_parts(d, parts, column);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        d[c] = beta * ((column + c < dv ? v[column + c] : 0.0f) - decay * d[c]);
        if (a.record_d && warp == 0 && column + c < dv) a.record_d[(b * nv + head) * dv + column + c] = d[c];
        sum[c] = 0;
    }
    float* to = a.record_k ? nullptr : state_of(a, write, head);
    const int rows = column < dv ? dk - first : 0;
#pragma unroll 1
    for (int r = 0; r < ROWS; r += 4) {
        float kk[4], qq[4];
        load4(kk, k + first + r), load4(qq, q + first + r);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float x[4];
            load4(x, own + (r + i) * WIDE);
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                x[c] = x[c] * decay + kk[i] * d[c];
                sum[c] += x[c] * qq[i];
            }
            if (to && r + i < rows) store_quad<VECTORS>(to + (i64)(first + r + i) * dv, x, column, dv);
        }
    }
    store4(outputs + warp * WIDE + column, sum);
    if (thread() == 0) gates[2] = ticket == ratio - 1;
    sync();
    if (warp == 0) {
        float square = 0;
        sum_parts(sum, outputs, column);
#pragma unroll
        for (int c = 0; c < 4; ++c) square += column + c < dv ? sum[c] * sum[c] : 0.0f;
        const float inverse = inverse_root(sum_warp(square) * reciprocal((float)dv) + (float)a.eps);
#pragma unroll
        for (int c = 0; c < 4; ++c)
            if (column + c < dv) a.out[(b * nv + head) * dv + column + c] = to_bf16(sum[c] * inverse * gated[column + c]);
    }
    if (a.record_k || gates[2] == 0) return;
    if (mine[0].kind < 2 && mine[0].real) mine[0].put_tail(a, write);
    if (thread() == 0) a.tickets[b * a.nk + key] = 0;
}

KERNEL(gdn_one, Gdn, 256, 4) { one<true>(a); }
KERNEL(gdn_one_odd, Gdn, 256, 3) { one<false>(a); }
