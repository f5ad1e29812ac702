// Gated DeltaNet of a few columns, and the fold of recorded ones.
//
// A block holds a head's state in registers while tokens pass by: every lane four columns, every warp some of the rows.
#include "gdn.cuh"

constexpr int WARPS = 8, ROWS = DK / WARPS, WIDE = 128;

// A thread's part of a state: rows ROWS * warp and on, four columns from 4 * lane. VECTORS: rows are whole quads. What is
// executed once must also be fetched once, so code is kept short: no second path, few loops unrolled.
template <bool VECTORS> struct Part {
    float s[ROWS][4];

    DEVICE void load(const float* state, int dk, int dv, int warp, int lane) {
        const float* from = state + (i64)warp * ROWS * dv + 4 * lane;
#pragma unroll
        for (int r = 0; r < ROWS; ++r, from += dv) {
            const bool inside = state && warp * ROWS + r < dk;
            if constexpr (VECTORS) {
                const Word4 x = inside && 4 * lane < dv ? *(const Word4*)from : Word4{0, 0, 0, 0};
                s[r][0] = from_bits(x.x), s[r][1] = from_bits(x.y), s[r][2] = from_bits(x.z), s[r][3] = from_bits(x.w);
            } else {
                for (int c = 0; c < 4; ++c) s[r][c] = inside && 4 * lane + c < dv ? from[c] : 0.0f;
            }
        }
    }

    DEVICE void store(float* state, int dk, int dv, int warp, int lane) const {
        float* to = state + (i64)warp * ROWS * dv + 4 * lane;
#pragma unroll
        for (int r = 0; r < ROWS; ++r, to += dv) {
            if (warp * ROWS + r >= dk) continue;
            if constexpr (VECTORS) {
                if (4 * lane < dv) *(Word4*)to = {bits(s[r][0]), bits(s[r][1]), bits(s[r][2]), bits(s[r][3])};
            } else {
                for (int c = 0; c < 4; ++c)
                    if (4 * lane + c < dv) to[c] = s[r][c];
            }
        }
    }

    // s <- decay * s + k d^T, k [DK].
    DEVICE void add(float decay, const float* k, const float (&d)[4], int warp) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int c = 0; c < 4; ++c) s[r][c] = s[r][c] * decay + k[warp * ROWS + r] * d[c];
    }

    // Its part of s^T x into parts [WARPS][WIDE].
    DEVICE void read(float* parts, const float* x, int warp, int lane) const {
        float sum[4] = {};
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int c = 0; c < 4; ++c) sum[c] += s[r][c] * x[warp * ROWS + r];
        *(Word4*)(parts + warp * WIDE + 4 * lane) = {bits(sum[0]), bits(sum[1]), bits(sum[2]), bits(sum[3])};
    }
};

// What the warps left at `parts`, summed, of four columns.
DEVICE void sum_parts(float (&sum)[4], const float* parts, int lane) {
    sum[0] = sum[1] = sum[2] = sum[3] = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        const Word4 x = *(const Word4*)(parts + w * WIDE + 4 * lane);
        sum[0] += from_bits(x.x), sum[1] += from_bits(x.y), sum[2] += from_bits(x.z), sum[3] += from_bits(x.w);
    }
}

// -- a few columns: everything in one launch, blocks (value heads, B) of 256 threads

// Latency is all: what is constant is loaded before the predecessors end, everything else at once after they did.
template <bool VECTORS> DEVICE void few(const Gdn& a) {
    DYNAMIC_SHARED(shared);
    __shared__ int last;
    const int head = block_x(), b = block_y(), ratio = (int)(a.nv / a.nk), key = head / ratio, warp = thread() / 32, lane = thread() % 32;
    const int W = (int)a.W, dk = (int)a.dk, dv = (int)a.dv, taps = (int)a.taps, each = 2 * DK + dv;
    const i64 channels = channels_of(a), keys = a.nk * a.dk;
    float *errors = (float*)shared, *outputs = errors + WARPS * WIDE, *q = outputs + WARPS * WIDE, *k = q + W * DK;
    float *v = k + W * DK, *o = v + W * dv, *gated = o + W * dv, *gates = gated + W * dv;  // gates [W][2]
    const float rate = expf(a.a_log[head]), bias = a.dt_bias[head];

    // channel c of this head: q, k, v one after another
    auto part_of = [&](int c) { return c < DK ? 0 : c < 2 * DK ? 1 : 2; };
    auto channel_of = [&](int c) { return c < 2 * DK ? key * dk + c % DK : head * dv + c - 2 * DK; };
    auto inside = [&](int c) { return c < each && (c >= 2 * DK || c % DK < dk); };
    auto load_weights = [&](float (&w)[TAPS], int c) {
#pragma unroll
        for (int j = 0; j < TAPS; ++j) {
            const int tap = j - TAPS + taps;
            w[j] = tap >= 0 && inside(c) ? from_bf16(a.convolution[tap * channels + part_of(c) * keys + channel_of(c)]) : 0.0f;
        }
    };
    float w[TAPS];
    load_weights(w, thread());
    after_predecessors();
    const int width = a.width[b];
    const i64 read = a.read[b], write = a.write[b], token = (i64)b * W;
    const bool fresh = a.start[b] == 0, leads = head % ratio == 0;
    if (width <= 0) return;

    // the first columns' state is on its way while the convolution runs
    Part<VECTORS> part;
    part.load(fresh ? nullptr : state_of(a, read, head), dk, dv, warp, lane);
#pragma unroll 1
    for (int i = thread(); i < width * dv; i += threads()) gated[i] = from_bf16(a.norm[i % dv]) * silu(from_bf16(a.z[((token + i / dv) * a.nv + head) * dv + i % dv]));
#pragma unroll 1
    for (int t = thread(); t < width; t += threads()) {
        const float x = from_bf16(a.gate_a[(token + t) * a.nv + head]) + bias, g = -rate * (x > 20.0f ? x : log1pf(expf(x)));
        gates[2 * t] = expf(g);
        gates[2 * t + 1] = sigmoid(from_bf16(a.gate_b[(token + t) * a.nv + head]));
        if (a.record_g) a.record_g[(token + t) * a.nv + head] = g;
    }

    u16 recent[TAPS] = {};  // of the thread's first channel: what comes before the next column
#pragma unroll 1
    for (int c = thread(); c < each; c += threads()) {
        const int kind = part_of(c), own = c < 2 * DK ? c % DK : c - 2 * DK;
        float* row = kind == 0 ? q + own : kind == 1 ? k + own : v + own;
        const int stride = kind == 2 ? dv : DK;
        if (c >= threads()) load_weights(w, c);
        const Inputs inputs(a, b, kind);
        const bool real = inside(c);
        u16 x[TAPS];
#pragma unroll
        for (int j = 0; j < TAPS - 1; ++j) {
            const int t = j - TAPS + 1;
            x[j + 1] = real && t >= 1 - taps ? inputs.at(t, channel_of(c)) : (u16)0;
        }
#pragma unroll 1
        for (int t = 0; t < width; ++t) {
#pragma unroll
            for (int j = 0; j < TAPS - 1; ++j) x[j] = x[j + 1];
            x[TAPS - 1] = real ? inputs.at(t, channel_of(c)) : (u16)0;
            float sum = 0;
#pragma unroll
            for (int j = 0; j < TAPS; ++j) sum += w[j] * from_bf16(x[j]);
            row[t * stride] = silu(sum);
            if (a.record_c && real && (kind == 2 || leads)) a.record_c[(token + t) * channels + kind * keys + channel_of(c)] = x[TAPS - 1];
        }
        if (kind == 2 && !a.record_k) put_tail(a, write, kind, channel_of(c), x);
        if (c < threads())
#pragma unroll
            for (int j = 0; j < TAPS; ++j) recent[j] = x[j];
    }
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
    sync();

#pragma unroll 1
    for (int t = 0; t < width; ++t) {
        float d[4], out[4];
        const float decay = gates[2 * t], beta = gates[2 * t + 1];
        part.read(errors, k + t * DK, warp, lane);
        sync();
        sum_parts(d, errors, lane);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const int column = 4 * lane + c;
            d[c] = beta * ((column < dv ? v[t * dv + column] : 0.0f) - decay * d[c]);
            if (a.record_d && warp == 0 && column < dv) a.record_d[((token + t) * a.nv + head) * dv + column] = d[c];
        }
        part.add(decay, k + t * DK, d, warp);
        part.read(outputs, q + t * DK, warp, lane);
        sync();
        if (warp != t % WARPS) continue;
        sum_parts(out, outputs, lane);
        for (int c = 0; c < 4; ++c)
            if (4 * lane + c < dv) o[t * dv + 4 * lane + c] = out[c];
    }
    if (!a.record_k) part.store(state_of(a, write, head), dk, dv, warp, lane);
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
    if (thread() < 2 * DK && inside(thread())) put_tail(a, write, part_of(thread()), channel_of(thread()), recent);
    if (thread() == 0) a.tickets[b * a.nk + key] = 0;
}

// -- fold: the first `accepted` recorded columns of a row enter its state; blocks (value heads, B)

template <bool VECTORS> DEVICE void fold(const Gdn& a) {
    DYNAMIC_SHARED(shared);
    after_predecessors();
    const int head = block_x(), b = block_y(), key = head / (int)(a.nv / a.nk), dk = (int)a.dk, dv = (int)a.dv, W = (int)a.W;
    const int warp = thread() / 32, lane = thread() % 32;
    const int count = minimum(a.accepted[b], a.width[b]);
    if (count <= 0) return;
    const i64 token = (i64)b * a.W, channels = channels_of(a);
    const bool fresh = a.start[b] == 0;
    float *left = (float*)shared, *k = left + W + 1, *d = k + W * DK;  // left [W + 1]: decay from after column t to the last; from before all
#pragma unroll 1
    for (int t = thread(); t <= count; t += threads()) {  // the last of them adds up all columns
        float g = 0;
#pragma unroll 1
        for (int i = count - 1; i >= (t < count ? t + 1 : 0); --i) g += a.record_g[(token + i) * a.nv + head];
        left[t] = expf(g);
    }
#pragma unroll 1
    for (int i = thread(); i < count * DK; i += threads()) k[i] = i % DK < dk ? a.record_k[((token + i / DK) * a.nk + key) * dk + i % DK] : 0.0f;
#pragma unroll 1
    for (int i = thread(); i < count * dv; i += threads()) d[i] = a.record_d[((token + i / dv) * a.nv + head) * dv + i % dv];
    sync();
    Part<VECTORS> part;
    part.load(fresh ? nullptr : state_of(a, a.read[b], head), dk, dv, warp, lane);
#pragma unroll 1
    for (int t = 0; t < count; ++t) {
        float x[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) x[c] = 4 * lane + c < dv ? left[t] * d[t * dv + 4 * lane + c] : 0.0f;
        part.add(t ? 1.0f : left[count], k + t * DK, x, warp);
    }
    part.store(state_of(a, a.write[b], head), dk, dv, warp, lane);
    // the tail: the block of a key head's first value head takes its channels too
    const bool leads = head % (a.nv / a.nk) == 0;
    const int taps = (int)a.taps - 1;
    for (int part = leads ? 0 : 2; part < 3; ++part) {
        const int n = part == 2 ? dv : dk;
        const i64 base = part * a.nk * dk + (i64)(part == 2 ? head : key) * n;
#pragma unroll 1
        for (int i = thread(); i < n; i += threads())
            for (int r = 0; r < taps; ++r) {  // ascending: what is read lies at or after what is written
                const int t = count - taps + r;
                const u16* source = t >= 0 ? a.record_c + (token + t) * channels : a.tail + ((i64)a.read[b] * taps + taps + t) * channels;
                a.tail[((i64)a.write[b] * taps + r) * channels + base + i] = t < 0 && fresh ? (u16)0 : source[base + i];
            }
    }
}


KERNEL(gdn_few, Gdn, 256, 2) { few<true>(a); }
KERNEL(gdn_few_odd, Gdn, 256, 2) { few<false>(a); }
KERNEL(gdn_fold, Gdn, 256, 2) { fold<true>(a); }
KERNEL(gdn_fold_odd, Gdn, 256, 2) { fold<false>(a); }
