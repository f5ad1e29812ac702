// Gated DeltaNet of a few columns.
//
// A block holds a head's state in shared memory while tokens pass by: every lane four columns, every warp some of the rows,
// so a thread touches nothing but its own. What is executed once must also be fetched once, so code is kept short.
#include "gdn.cuh"

constexpr int WARPS = 8, ROWS = DK / WARPS, WIDE = 128;

// A state [DK][WIDE] in shared memory, as one thread sees it.
template <bool VECTORS> struct State {
    float* own;  // of its first row
    int first, column, rows;

    DEVICE State(float* room, int dk, int dv, int warp, int lane) : own(room + warp * ROWS * WIDE + 4 * lane), first(warp * ROWS), column(4 * lane) {
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
#pragma unroll 2
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
    const u16* columns;  // its inputs, every n
    i64 n;
    float w[TAPS];
    u16 x[TAPS];  // the inputs of the current column, oldest first

    DEVICE void load_weights(const Gdn& a, int head, int c) {
        kind = c < DK ? 0 : c < 2 * DK ? 1 : c < 2 * DK + a.dv ? 2 : -1;
        own = kind == 2 ? c - 2 * DK : c % DK;
        real = kind == 2 || kind >= 0 && own < a.dk;
        channel = kind == 2 ? head * (int)a.dv + own : head / (int)(a.nv / a.nk) * (int)a.dk + own;
#pragma unroll
        for (int j = 0; j < TAPS; ++j) {
            const int tap = j - TAPS + (int)a.taps;
            w[j] = real && tap >= 0 ? from_bf16(part_weights(a, kind)[tap * channels_of(a) + channel]) : 0.0f;
        }
    }

    DEVICE void load_inputs(const Gdn& a, int b) {
        const Inputs inputs(a, b, maximum(kind, 0));
        columns = inputs.columns + channel, n = inputs.n;
#pragma unroll
        for (int j = 0; j < TAPS; ++j) {
            const int t = j - TAPS + 1;
            x[j] = real && t > -(int)a.taps ? inputs.at(t, channel) : (u16)0;
        }
    }

    DEVICE void advance(int t) {
#pragma unroll
        for (int j = 0; j < TAPS - 1; ++j) x[j] = x[j + 1];
        x[TAPS - 1] = real ? columns[t * n] : (u16)0;
    }

    DEVICE float convolved() const {
        float sum = 0;
#pragma unroll
        for (int j = 0; j < TAPS; ++j) sum += w[j] * from_bf16(x[j]);
        return silu(sum);
    }
};

// A block of 256 threads a value head of a row.
//
// Latency is all: what is constant is loaded before the predecessors end, everything else at once after they did.
template <bool VECTORS> DEVICE void few(const Gdn& a) {
    DYNAMIC_SHARED(shared);
    __shared__ int last;
    const int head = block_x(), b = block_y(), ratio = (int)(a.nv / a.nk), key = head / ratio, warp = thread() / 32, lane = thread() % 32;
    const int W = (int)a.W, dk = (int)a.dk, dv = (int)a.dv;
    const i64 channels = channels_of(a), keys = a.nk * a.dk;
    float *room = (float*)shared, *parts = room + DK * WIDE, *q = parts + (W > 1 ? 4 : 2) * WARPS * WIDE, *k = q + W * DK;
    float *v = k + W * DK, *o = v + W * dv, *gated = o + W * dv, *gates = gated + W * dv;  // gates [W][2]
    const float rate = expf(a.a_log[head]), bias = a.dt_bias[head];

    // A thread convolves two channels of this head's q, k, v, one after another.
    Channel mine[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) mine[i].load_weights(a, head, thread() + i * threads());
    // So is the state, which was written before them; what they wrote is asked for at once when they have ended.
    const int width = a.width[b];
    const i64 read = a.read[b], write = a.write[b], token = (i64)b * W;
    const bool fresh = a.start[b] == 0, leads = head % ratio == 0;
    State<VECTORS> state(room, dk, dv, warp, lane);
    if (width > 0) state.load(fresh ? nullptr : state_of(a, read, head), dv);
    after_predecessors();
    if (width <= 0) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) mine[i].load_inputs(a, b);
    const int own = minimum(thread(), width - 1);
    const u16 gate_a = a.gate_a[(token + own) * a.nv + head], gate_b = a.gate_b[(token + own) * a.nv + head];
    if (thread() < width) {
        const float x = from_bf16(gate_a) + bias, g = -rate * (x > 20.0f ? x : log1pf(expf(x)));
        gates[2 * own] = expf(g);
        gates[2 * own + 1] = sigmoid(from_bf16(gate_b));
        if (a.record_g) a.record_g[(token + own) * a.nv + head] = g;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        Channel& c = mine[i];
        if (c.kind < 0) continue;
        float* row = c.kind == 0 ? q + c.own : c.kind == 1 ? k + c.own : v + c.own;
        const int stride = c.kind == 2 ? dv : DK;
#pragma unroll 1
        for (int t = 0; t < width; ++t) {
            if (t) c.advance(t);
            row[t * stride] = c.convolved();
            if (a.record_c && c.real && (c.kind == 2 || leads)) a.record_c[(token + t) * channels + c.kind * keys + c.channel] = c.x[TAPS - 1];
        }
        if (c.kind == 2 && !a.record_k) put_tail(a, write, c.kind, c.channel, c.x);
    }
#pragma unroll 1
    for (int i = thread(); i < width * dv; i += threads()) gated[i] = from_bf16(a.norm[i % dv]) * silu(from_bf16(a.z[((token + i / dv) * a.nv + head) * dv + i % dv]));
    sync();
#pragma unroll 1
    for (int i = warp; i < 2 * width; i += threads() / 32) {
        float* x = (i % 2 ? k : q) + i / 2 * DK;
        float square = 0;
        for (int j = lane; j < DK; j += 32) square += x[j] * x[j];
        const float inverse = inverse_root(sum_warp(square) + 1e-6f) * (i % 2 ? 1.0f : inverse_root((float)dk));
        for (int j = lane; j < DK; j += 32) {
            x[j] *= inverse;
            if (i % 2 && a.record_k && leads && j < dk) a.record_k[((token + i / 2) * a.nk + key) * dk + j] = x[j];
        }
    }
    int ticket = 0;  // how many value heads of this key head had read its channels before
    if (!a.record_k && thread() == 0) ticket = atomic_add(a.tickets + b * a.nk + key, 1);
    copies_wait<0>();
    sync();

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
            if (a.record_d && warp == 0 && column < dv) a.record_d[((token + t) * a.nv + head) * dv + column] = d[c];
        }
        if (t) sum_outputs(t - 1);
        const bool done = t + 1 == width;
        state.advance(decay, k + t * DK, d, q + t * DK, outputs(t), k + (done ? t : t + 1) * DK, done ? nullptr : errors(t + 1), done && !a.record_k ? state_of(a, write, head) : nullptr, dv);
    }
    sync();
    sum_outputs(width - 1);
    if (thread() == 0) last = ticket == ratio - 1;
    sync();
#pragma unroll 1
    for (int t = warp; t < width; t += threads() / 32) {
        float square = 0;
        for (int i = lane; i < dv; i += 32) square += o[t * dv + i] * o[t * dv + i];
        const float inverse = inverse_root(sum_warp(square) / dv + (float)a.eps);
        for (int i = lane; i < dv; i += 32) a.out[((token + t) * a.nv + head) * dv + i] = to_bf16(o[t * dv + i] * inverse * gated[t * dv + i]);
    }
    if (a.record_k || !last) return;
    if (mine[0].kind < 2 && mine[0].real) put_tail(a, write, mine[0].kind, mine[0].channel, mine[0].x);
    if (thread() == 0) a.tickets[b * a.nk + key] = 0;
}

KERNEL(gdn_few, Gdn, 256, 3) { few<true>(a); }
KERNEL(gdn_few_odd, Gdn, 256, 3) { few<false>(a); }
