// Gated DeltaNet of a few columns.
//
// A block holds a head's state while tokens pass by: every lane four columns, every warp some of the rows, so a thread
// touches nothing but its own. What is executed once must also be fetched once, so code is kept short.
#include "gdn.cuh"

constexpr int WARPS = 8, ROWS = DK / WARPS, WIDE = 128;

// A state [DK][WIDE] in shared memory, as one thread sees it.
template <bool VECTORS> struct Stored {
    static constexpr bool ONE = true;  // column
    float* own;                        // of its first row
    int first, column, rows;

    DEVICE Stored(float* room, int dk, int dv, int warp, int lane) : own(room + warp * ROWS * WIDE + 4 * lane), first(warp * ROWS), column(4 * lane) {
        rows = column < dv ? maximum(0, minimum(ROWS, dk - first)) : 0;
    }

    // From global memory, on its way until copies_wait<0>; zeros without any.
    DEVICE void load(const float* state, int dv) {
#pragma unroll 4
        for (int r = 0; r < ROWS; ++r) {
            const float* row = state + (i64)(first + r) * dv;
            float* to = own + r * WIDE;
            if (VECTORS && state && r < rows) copy16(to, row + column, 16);
            else {
                float x[4] = {0, 0, 0, 0};
                if (state && r < rows) load_quad<VECTORS>(x, row, column, dv);
                store4(to, x);
            }
        }
        copies_commit();
    }

    // Its part of s^T k into parts [WARPS][WIDE].
    DEVICE void read(float* parts, const float* k) const {
        float sum[4] = {0, 0, 0, 0};
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
        store4(parts + first / ROWS * WIDE + column, sum);
    }

    // s <- decay * s + k d^T, to global memory where there is any; its parts of s^T q and s^T next into outputs and errors.
    DEVICE void advance(float decay, const float* k, const float (&d)[4], const float* q, float* outputs, const float* next, float* errors, float* state, int dv) const {
        float sum[4] = {0, 0, 0, 0}, error[4] = {0, 0, 0, 0};
#pragma unroll 1
        for (int r = 0; r < ROWS; r += 4) {
            float kk[4], qq[4], nn[4];
            load4(kk, k + first + r), load4(qq, q + first + r), load4(nn, next + first + r);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float x[4];
                load4(x, own + (r + i) * WIDE);
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    x[c] = x[c] * decay + kk[i] * d[c];
                    sum[c] += x[c] * qq[i], error[c] += x[c] * nn[i];
                }
                if (!state) store4(own + (r + i) * WIDE, x);
                else if (r + i < rows) store_quad<VECTORS>(state + (i64)(first + r + i) * dv, x, column, dv);
            }
        }
        store4(outputs + first / ROWS * WIDE + column, sum);
        if (errors) store4(errors + first / ROWS * WIDE + column, error);
    }
};

// The same in registers, where several columns pass by: shared memory would be read and written for each of them.
template <bool VECTORS> struct Held {
    static constexpr bool ONE = false;
    float s[ROWS][4];
    int first, column, rows;

    DEVICE Held(float*, int dk, int dv, int warp, int lane) : first(warp * ROWS), column(4 * lane) {
        rows = column < dv ? maximum(0, minimum(ROWS, dk - first)) : 0;
    }

    DEVICE void load(const float* state, int dv) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            s[r][0] = s[r][1] = s[r][2] = s[r][3] = 0;
            if (state && r < rows) load_quad<VECTORS>(s[r], state + (i64)(first + r) * dv, column, dv);
        }
    }

    DEVICE void read(float* parts, const float* k) const {
        float sum[4] = {0, 0, 0, 0};
#pragma unroll
        for (int r = 0; r < ROWS; r += 4) {
            float kk[4];
            load4(kk, k + first + r);
#pragma unroll
            for (int i = 0; i < 16; ++i) sum[i % 4] += s[r + i / 4][i % 4] * kk[i / 4];
        }
        store4(parts + first / ROWS * WIDE + column, sum);
    }

    DEVICE void advance(float decay, const float* k, const float (&d)[4], const float* q, float* outputs, const float* next, float* errors, float* state, int dv) {
        float sum[4] = {0, 0, 0, 0}, error[4] = {0, 0, 0, 0};
#pragma unroll
        for (int r = 0; r < ROWS; r += 4) {
            float kk[4], qq[4], nn[4];
            load4(kk, k + first + r), load4(qq, q + first + r), load4(nn, next + first + r);
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                float& x = s[r + i / 4][i % 4];
                x = x * decay + kk[i / 4] * d[i % 4];
                sum[i % 4] += x * qq[i / 4], error[i % 4] += x * nn[i / 4];
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
            if (state && r < rows) store_quad<VECTORS>(state + (i64)(first + r) * dv, s[r], column, dv);
        store4(outputs + first / ROWS * WIDE + column, sum);
        if (errors) store4(errors + first / ROWS * WIDE + column, error);
    }
};

// What the warps left at `parts`, summed, of four columns.
DEVICE void sum_parts(float (&sum)[4], const float* parts, int lane) {
    sum[0] = sum[1] = sum[2] = sum[3] = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        float x[4];
        load4(x, parts + w * WIDE + 4 * lane);
        sum[0] += x[0], sum[1] += x[1], sum[2] += x[2], sum[3] += x[3];
    }
}

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
        const int taps = (int)a.taps, channels = (int)channels_of(a), at = real ? kind * (int)(a.nk * a.dk) + channel : 0;
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
        const int taps = (int)a.taps, channels = (int)channels_of(a);
        u16* out = a.tail + slot * (taps - 1) * channels + kind * (int)(a.nk * a.dk) + channel;
#pragma unroll
        for (int j = 1; j < TAPS; ++j)
            if (j > TAPS - taps) out[(j - 1 - TAPS + taps) * channels] = (u16)(x >> 16 * j);
    }
};

// A block of 256 threads a value head of a row.
//
// Latency is all: what the predecessors do not write is loaded before they end, everything else at once after they did.
template <bool VECTORS, template <bool> class State> DEVICE void few(const Gdn& a) {
    DYNAMIC_SHARED(shared);
    const int head = block_x(), b = block_y(), ratio = (int)a.nv / (int)a.nk, key = head / ratio, warp = thread() / 32, lane = thread() % 32;
    const int W = State<VECTORS>::ONE ? 1 : (int)a.W, nv = (int)a.nv, dk = (int)a.dk, dv = (int)a.dv;
    const int all = (int)channels_of(a), keys = (int)(a.nk * a.dk), token = b * W;
    float *room = (float*)shared, *parts = room + (W > 1 ? 0 : DK * WIDE), *q = parts + (W > 1 ? 4 : 2) * WARPS * WIDE, *k = q + W * DK;
    float *v = k + W * DK, *o = v + W * dv, *gated = o + W * dv, *gates = gated + W * dv;  // gates [W][2]
    const float rate = expf(a.a_log[head]), bias = a.dt_bias[head];
    const int width = State<VECTORS>::ONE ? minimum(a.width[b], 1) : a.width[b];
    const i64 write = a.write[b];
    const bool leads = head % ratio == 0;

    // A thread convolves two channels of this head's q, k, v, one after another.
    Channel mine[2];
    State<VECTORS> state(room, dk, dv, warp, lane);
    if (width > 0) {
        state.load(a.start[b] == 0 ? nullptr : state_of(a, a.read[b], head), dv);
#pragma unroll
        for (int i = 0; i < 2; ++i) mine[i].begin(a, head, key, b, thread() + i * threads());
    }
    // the warps' sums for the errors and the outputs of a column; the next column's lie apart
    auto errors = [&](int t) { return parts + t % 2 * 2 * WARPS * WIDE; };
    auto outputs = [&](int t) { return errors(t) + WARPS * WIDE; };
    auto sum_outputs = [&](int t) {
        if (warp != t % WARPS) return;
        float out[4];
        sum_parts(out, outputs(t), lane);
        for (int c = 0; c < 4; ++c)
            if (4 * lane + c < dv) o[t * dv + 4 * lane + c] = out[c];
    };

    after_predecessors();
    if (width <= 0) return;
    // all loads of a batch of columns are on their way before the first is used
    constexpr int BATCH = State<VECTORS>::ONE ? 1 : 4;
    const int own = minimum(thread(), width - 1);
    const u16 gate_a = a.gate_a[(token + own) * nv + head], gate_b = a.gate_b[(token + own) * nv + head];
    auto load_z = [&](u16(&z)[BATCH], int first) {
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            const int i = first + j * threads();
            z[j] = i < width * dv ? a.z[((token + i / dv) * nv + head) * dv + i % dv] : (u16)0;
        }
    };
    u16 z[BATCH];
    load_z(z, thread());
#pragma unroll 1
    for (int first = 0; first < width; first += BATCH) {
        u16 columns[2][BATCH];
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int j = 0; j < BATCH; ++j) columns[i][j] = first + j < width ? mine[i].column(a, token + first + j) : (u16)0;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            Channel& c = mine[i];
            if (c.kind < 0) continue;
            float* row = c.kind == 0 ? q + c.own : c.kind == 1 ? k + c.own : v + c.own;
            const int stride = c.kind == 2 ? dv : DK;
#pragma unroll
            for (int j = 0; j < BATCH; ++j) {
                const int t = first + j;
                if (t >= width) continue;
                c.put(columns[i][j]);
                row[t * stride] = c.convolved();
                if (a.record_c && c.real && (c.kind == 2 || leads)) a.record_c[(token + t) * all + c.kind * keys + c.channel] = columns[i][j];
            }
        }
    }
    if (thread() < width) {
        const float x = from_bf16(gate_a) + bias, g = -rate * (x > 20.0f ? x : log1pf(expf(x)));
        gates[2 * own] = expf(g);
        gates[2 * own + 1] = sigmoid(from_bf16(gate_b));
        if (a.record_g) a.record_g[(token + own) * nv + head] = g;
    }
#pragma unroll 1
    for (int first = thread(); first < width * dv; first += BATCH * threads()) {
        if (first > thread()) load_z(z, first);
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            const int i = first + j * threads();
            if (i < width * dv) gated[i] = from_bf16(a.norm[i % dv]) * silu(from_bf16(z[j]));
        }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)
        if (mine[i].kind == 2 && !a.record_k) mine[i].put_tail(a, write);
    sync();
#pragma unroll 1
    for (int i = warp; i < 2 * width; i += threads() / 32) {
        float* x = (i % 2 ? k : q) + i / 2 * DK;
        float y[4];
        load4(y, x + 4 * lane);
        const float square = sum_warp(y[0] * y[0] + y[1] * y[1] + y[2] * y[2] + y[3] * y[3]);
        const float inverse = inverse_root(square + 1e-6f) * (i % 2 ? 1.0f : inverse_root((float)dk));
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            y[c] *= inverse;
            if (i % 2 && a.record_k && leads && 4 * lane + c < dk) a.record_k[((token + i / 2) * (int)a.nk + key) * dk + 4 * lane + c] = y[c];
        }
        store4(x + 4 * lane, y);
    }
    int ticket = 0;  // how many value heads of this key head had read its channels before
    if (!a.record_k && thread() == 0) ticket = atomic_add(a.tickets + b * a.nk + key, 1);
    copies_wait<0>();
    sync();

    state.read(errors(0), k);
#pragma unroll 1
    for (int t = 0; t < width; ++t) {
        sync();
        float d[4];
        const float decay = gates[2 * t], beta = gates[2 * t + 1];
        sum_parts(d, errors(t), lane);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const int column = 4 * lane + c;
            d[c] = beta * ((column < dv ? v[t * dv + column] : 0.0f) - decay * d[c]);
            if (a.record_d && warp == 0 && column < dv) a.record_d[((token + t) * nv + head) * dv + column] = d[c];
        }
        if (t) sum_outputs(t - 1);
        const bool done = t + 1 == width;
        float* to = done && !a.record_k ? state_of(a, write, head) : nullptr;
        state.advance(decay, k + t * DK, d, q + t * DK, outputs(t), k + (done ? t : t + 1) * DK, done ? nullptr : errors(t + 1), to, dv);
    }
    sync();
    sum_outputs(width - 1);
    if (thread() == 0) gates[0] = ticket == ratio - 1;
    sync();
#pragma unroll 1
    for (int t = warp; t < width; t += threads() / 32) {
        float own[4], square = 0;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            own[c] = 4 * lane + c < dv ? o[t * dv + 4 * lane + c] : 0.0f;
            square += own[c] * own[c];
        }
        const float inverse = inverse_root(sum_warp(square) * reciprocal((float)dv) + (float)a.eps);
#pragma unroll
        for (int c = 0; c < 4; ++c)
            if (4 * lane + c < dv) a.out[((token + t) * nv + head) * dv + 4 * lane + c] = to_bf16(own[c] * inverse * gated[t * dv + 4 * lane + c]);
    }
    if (a.record_k || gates[0] == 0) return;
    if (mine[0].kind < 2 && mine[0].real) mine[0].put_tail(a, write);
    if (thread() == 0) a.tickets[b * a.nk + key] = 0;
}

KERNEL(gdn_one, Gdn, 256, 4) { few<true, Stored>(a); }
KERNEL(gdn_one_odd, Gdn, 256, 3) { few<false, Stored>(a); }
KERNEL(gdn_few, Gdn, 256, 2) { few<true, Held>(a); }
KERNEL(gdn_few_odd, Gdn, 256, 2) { few<false, Held>(a); }
