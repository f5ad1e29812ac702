// Gated DeltaNet of a few columns, and the fold of recorded ones.
//
// Columns of a head's state are independent. Four lanes share two, lane p holding rows 16m + 4p .. + 3: the state never
// leaves its registers while tokens pass by, and sums over rows are two shuffles.
#include "gdn.cuh"

// Two columns of a state, `apart` from each other.
template <int DK> struct Columns {
    float s[2][DK / 16][4];

    // Only the first `live` are loaded and stored, the others zero.
    DEVICE void load(const float* state, int live, int apart, int dk, int dv, int p) {
#pragma unroll
        for (int c = 0; c < 2; ++c)
#pragma unroll
            for (int m = 0; m < DK / 16; ++m)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int row = 16 * m + 4 * p + e;
                    s[c][m][e] = c < live && row < dk ? state[(i64)row * dv + c * apart] : 0.0f;
                }
    }

    DEVICE void store(float* state, int live, int apart, int dk, int dv, int p) const {
#pragma unroll
        for (int c = 0; c < 2; ++c)
#pragma unroll
            for (int m = 0; m < DK / 16; ++m)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int row = 16 * m + 4 * p + e;
                    if (c < live && row < dk) state[(i64)row * dv + c * apart] = s[c][m][e];
                }
    }

    // One token: q and k hold DK floats; d becomes the deltas, out the outputs.
    DEVICE void step(const float* q, const float* k, const float (&v)[2], float decay, float beta, int p, float (&d)[2], float (&out)[2]) {
        // two sums a column side by side: one alone would be a chain of dependent additions
        float e[2][2] = {}, o[2][2] = {};
#pragma unroll
        for (int m = 0; m < DK / 16; ++m) {
            const Word4 kk = *(const Word4*)(k + 16 * m + 4 * p);
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                float(&x)[4] = s[c][m];
                x[0] *= decay, x[1] *= decay, x[2] *= decay, x[3] *= decay;
                e[c][0] += x[0] * from_bits(kk.x), e[c][1] += x[1] * from_bits(kk.y);
                e[c][0] += x[2] * from_bits(kk.z), e[c][1] += x[3] * from_bits(kk.w);
            }
        }
#pragma unroll
        for (int c = 0; c < 2; ++c) d[c] = beta * (v[c] - sum_quad(e[c][0] + e[c][1]));
#pragma unroll
        for (int m = 0; m < DK / 16; ++m) {
            const Word4 kk = *(const Word4*)(k + 16 * m + 4 * p), qq = *(const Word4*)(q + 16 * m + 4 * p);
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                float(&x)[4] = s[c][m];
                x[0] += from_bits(kk.x) * d[c], x[1] += from_bits(kk.y) * d[c], x[2] += from_bits(kk.z) * d[c], x[3] += from_bits(kk.w) * d[c];
                o[c][0] += x[0] * from_bits(qq.x), o[c][1] += x[1] * from_bits(qq.y);
                o[c][0] += x[2] * from_bits(qq.z), o[c][1] += x[3] * from_bits(qq.w);
            }
        }
#pragma unroll
        for (int c = 0; c < 2; ++c) out[c] = sum_quad(o[c][0] + o[c][1]);
    }

    static DEVICE float sum_quad(float v) {
        v += shuffle_xor(v, 1);
        return v + shuffle_xor(v, 2);
    }
};

// -- a few columns: everything in one launch, blocks (value heads, B) of 256 threads

// Latency is all: what is constant is loaded before the predecessors end, everything else at once after they did.
template <int DK> DEVICE void gdn_few(const Gdn& a) {
    DYNAMIC_SHARED(shared);
    __shared__ int last;
    const int head = block_x(), b = block_y(), ratio = (int)(a.nv / a.nk), key = head / ratio, warp = thread() / 32, lane = thread() % 32;
    const int W = (int)a.W, dk = (int)a.dk, dv = (int)a.dv, taps = (int)a.taps, each = 2 * DK + dv;
    const i64 channels = channels_of(a), keys = a.nk * a.dk;
    float *q = (float*)shared, *k = q + W * DK, *v = k + W * DK, *o = v + W * dv, *gated = o + W * dv, *gates = gated + W * dv;  // gates [W][2]
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
    const int p = lane % 4, apart = 8 * threads() / 32, lead = 8 * warp + lane / 4;
    auto live = [&](int c) { return c >= dv ? 0 : c + apart >= dv ? 1 : 2; };
    Columns<DK> columns;
    columns.load(state_of(a, read, head) + lead, fresh ? 0 : live(lead), apart, dk, dv, p);
    for (int i = thread(); i < width * dv; i += threads()) gated[i] = from_bf16(a.norm[i % dv]) * silu(from_bf16(a.z[((token + i / dv) * a.nv + head) * dv + i % dv]));
    for (int t = thread(); t < width; t += threads()) {
        const float x = from_bf16(a.gate_a[(token + t) * a.nv + head]) + bias, g = -rate * (x > 20.0f ? x : log1pf(expf(x)));
        gates[2 * t] = expf(g);
        gates[2 * t + 1] = sigmoid(from_bf16(a.gate_b[(token + t) * a.nv + head]));
        if (a.record_g) a.record_g[(token + t) * a.nv + head] = g;
    }

    u16 recent[TAPS] = {};  // of the thread's first channel: what comes before the next column
    for (int c = thread(); c < each; c += threads()) {
        const int part = part_of(c), own = c < 2 * DK ? c % DK : c - 2 * DK;
        float* row = part == 0 ? q + own : part == 1 ? k + own : v + own;
        const int stride = part == 2 ? dv : DK;
        if (c >= threads()) load_weights(w, c);
        const Inputs inputs(a, b, part);
        const bool real = inside(c);
        u16 x[TAPS];
#pragma unroll
        for (int j = 0; j < TAPS - 1; ++j) {
            const int t = j - TAPS + 1;
            x[j + 1] = real && t >= 1 - taps ? inputs.at(t, channel_of(c)) : (u16)0;
        }
        for (int t = 0; t < width; ++t) {
#pragma unroll
            for (int j = 0; j < TAPS - 1; ++j) x[j] = x[j + 1];
            x[TAPS - 1] = real ? inputs.at(t, channel_of(c)) : (u16)0;
            float sum = 0;
#pragma unroll
            for (int j = 0; j < TAPS; ++j) sum += w[j] * from_bf16(x[j]);
            row[t * stride] = silu(sum);
            if (a.record_c && real && (part == 2 || leads)) a.record_c[(token + t) * channels + part * keys + channel_of(c)] = x[TAPS - 1];
        }
        if (part == 2 && !a.record_k) put_tail(a, write, part, channel_of(c), x);
        if (c < threads())
#pragma unroll
            for (int j = 0; j < TAPS; ++j) recent[j] = x[j];
    }
    sync();
    for (int i = warp; i < 2 * width; i += threads() / 32) {
        float* x = (i % 2 ? k : q) + i / 2 * DK;
        float square = 0;
        for (int j = lane; j < DK; j += 32) square += x[j] * x[j];
        const float inverse = 1.0f / sqrtf(sum_warp(square) + 1e-6f) * (i % 2 ? 1.0f : 1.0f / sqrtf((float)dk));
        for (int j = lane; j < DK; j += 32) {
            x[j] *= inverse;
            if (i % 2 && a.record_k && leads && j < dk) a.record_k[((token + i / 2) * a.nk + key) * dk + j] = x[j];
        }
    }
    int ticket = 0;  // how many value heads of this key head had read its channels before
    if (!a.record_k && thread() == 0) ticket = atomic_add(a.tickets + b * a.nk + key, 1);
    sync();

    for (int c = lead; c - lane / 4 < dv; c += 2 * apart) {
        if (c != lead) columns.load(state_of(a, read, head) + c, fresh ? 0 : live(c), apart, dk, dv, p);
        for (int t = 0; t < width; ++t) {
            float values[2], d[2], out[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) values[i] = i < live(c) ? v[t * dv + c + i * apart] : 0.0f;
            columns.step(q + t * DK, k + t * DK, values, gates[2 * t], gates[2 * t + 1], p, d, out);
            if (p == 0)
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    if (i < live(c)) {
                        o[t * dv + c + i * apart] = out[i];
                        if (a.record_d) a.record_d[((token + t) * a.nv + head) * dv + c + i * apart] = d[i];
                    }
        }
        if (!a.record_k) columns.store(state_of(a, write, head) + c, live(c), apart, dk, dv, p);
    }
    if (thread() == 0) last = ticket == ratio - 1;
    sync();
    for (int t = warp; t < width; t += threads() / 32) {
        float square = 0;
        for (int i = lane; i < dv; i += 32) square += o[t * dv + i] * o[t * dv + i];
        const float inverse = 1.0f / sqrtf(sum_warp(square) / dv + (float)a.eps);
        for (int i = lane; i < dv; i += 32) a.out[((token + t) * a.nv + head) * dv + i] = to_bf16(o[t * dv + i] * inverse * gated[t * dv + i]);
    }
    if (a.record_k || !last) return;
    if (thread() < 2 * DK && inside(thread())) put_tail(a, write, part_of(thread()), channel_of(thread()), recent);
    if (thread() == 0) a.tickets[b * a.nk + key] = 0;
}

// -- fold: the first `accepted` recorded columns of a row enter its state; blocks (value heads, B)

KERNEL(gdn_fold, Gdn, 256, 1) {
    DYNAMIC_SHARED(shared);
    after_predecessors();
    const int head = block_x(), b = block_y(), key = head / (int)(a.nv / a.nk), dk = (int)a.dk, dv = (int)a.dv, W = (int)a.W;
    const int count = minimum(a.accepted[b], a.width[b]);
    if (count <= 0) return;
    const i64 token = (i64)b * a.W, channels = channels_of(a);
    const bool fresh = a.start[b] == 0;
    float *left = (float*)shared, *k = left + W + 1, *d = k + W * dk;  // left [W + 1]: decay from after column t to the last; from before all
    for (int t = thread(); t <= count; t += threads()) {  // the last of them adds up all columns
        float g = 0;
        for (int i = count - 1; i >= (t < count ? t + 1 : 0); --i) g += a.record_g[(token + i) * a.nv + head];
        left[t] = expf(g);
    }
    for (int i = thread(); i < count * dk; i += threads()) k[i] = a.record_k[((token + i / dk) * a.nk + key) * dk + i % dk];
    for (int i = thread(); i < count * dv; i += threads()) d[i] = a.record_d[((token + i / dv) * a.nv + head) * dv + i % dv];
    sync();
    const float* from = state_of(a, a.read[b], head);
    float* to = state_of(a, a.write[b], head);
    constexpr int TOGETHER = 8;  // elements whose loads are on their way at once
    for (int base = thread(); base < dk * dv; base += TOGETHER * threads()) {
        float x[TOGETHER];
#pragma unroll
        for (int j = 0; j < TOGETHER; ++j) {
            const int i = base + j * threads();
            x[j] = fresh || i >= dk * dv ? 0.0f : from[i] * left[count];
        }
#pragma unroll
        for (int j = 0; j < TOGETHER; ++j) {
            const int i = base + j * threads(), row = i / dv, c = i % dv;
            if (i >= dk * dv) break;
            for (int t = 0; t < count; ++t) x[j] += left[t] * k[t * dk + row] * d[t * dv + c];
            to[i] = x[j];
        }
    }
    // the tail: the block of a key head's first value head takes its channels too
    const bool leads = head % (a.nv / a.nk) == 0;
    const int taps = (int)a.taps - 1;
    for (int part = leads ? 0 : 2; part < 3; ++part) {
        const int n = part == 2 ? dv : dk;
        const i64 base = part * a.nk * dk + (i64)(part == 2 ? head : key) * n;
        for (int i = thread(); i < n; i += threads())
            for (int r = 0; r < taps; ++r) {  // ascending: what is read lies at or after what is written
                const int t = count - taps + r;
                const u16* source = t >= 0 ? a.record_c + (token + t) * channels : a.tail + ((i64)a.read[b] * taps + taps + t) * channels;
                a.tail[((i64)a.write[b] * taps + r) * channels + base + i] = t < 0 && fresh ? (u16)0 : source[base + i];
            }
    }
}


KERNEL(gdn_few_32, Gdn, 256, 2) { gdn_few<32>(a); }
KERNEL(gdn_few_64, Gdn, 256, 2) { gdn_few<64>(a); }
KERNEL(gdn_few_128, Gdn, 256, 2) { gdn_few<128>(a); }
