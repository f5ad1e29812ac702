// Gated DeltaNet of a few columns at once.
//
// With the state S that columns t = 0, 1, .. find, L_t the decay of columns up to t and L_tj that of columns after j:
//     d_t = beta_t (v_t - L_t S^T k_t - sum over j < t of L_tj (k_j . k_t) d_j)
//     o_t = L_t S^T q_t + sum over j <= t of L_tj (k_j . q_t) d_j
// so the state is read once for all of them, and what remains is a triangle of numbers for each column of values.
//
// Products are of bf16, two to a number: x = high + low is within 2^-17 of itself.
#include "gdn_step.cuh"

constexpr int N = 8, INPUTS = TAPS - 1 + N;  // columns at a time, and what they are convolved from
constexpr int LONG = DK + 8;  // rows of queries or keys, so that tiles meet every bank once

// Lane l has the sum over lanes of x[l % n].
template <int n> DEVICE float sum_lanes(float (&x)[n], int lane) {
#pragma unroll
    for (int half = n / 2; half; half /= 2)
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const bool upper = lane & half;
            const float kept = upper ? x[i + half] : x[i], given = upper ? x[i] : x[i + half];
            x[i] = kept + shuffle_xor(given, half);
        }
#pragma unroll
    for (int mask = n; mask < 32; mask *= 2) x[0] += shuffle_xor(x[0], mask);
    return x[0];
}

// A block's shared memory; OWN: its features of values, all of a head's or half of them.
template <int OWN> struct Room {
    static constexpr bool half = OWN < WIDE;
    static constexpr int rows = half ? DK - 16 : DK;  // of the state; in the smaller room its last ones are in registers

    float* state;    // [rows][OWN], columns in places of their row
    u16* x;          // [2][2 N][LONG]: high and low parts of queries, then keys, not yet of length one; before that, inputs:
    u16* keys_in;    // [INPUTS][2 DK], of queries and keys
    u16* values_in;  // [INPUTS][OWN]
    float* values;   // [N][OWN], then the deltas, where queries and keys have been
    float* pairs;    // [2][N][N]: L_tj (k_j . q_t) for j <= t, beta_t L_tj (k_j . k_t) for j < t
    float* squares;  // [WARPS][N]
    float* totals;   // [WIDE / 8][N], of a head's features, eight at a time
    float* gates;    // [6][N]: log decay, beta, decay up to and after a column, factors of its query and its key
    float* keys;     // [DK][N] as they are, where the state is updated here

    DEVICE explicit Room(u8* shared) : state((float*)shared), x((u16*)(state + rows * OWN)), keys_in(x), values_in(x + INPUTS * 2 * DK), values((float*)x) {
        pairs = (float*)(x + 4 * N * LONG), squares = pairs + 2 * N * N, totals = squares + WARPS * N;
        gates = totals + 2 * WARPS * N, keys = gates + 6 * N;
    }
};

// Whose features a block has: of a value head and its key head, `own` of values from `base`.
struct Part {
    int head, key, base, own;
    DEVICE int value(const Gdn& a) const { return head * (int)a.dv + base; }  // the first, among those of all heads
};

// What columns [begin, end) of the row are convolved from, of q, k and v, on their way to the places of columns
// `first` - (TAPS - 1) and on. Negative ones are before the row's; zeros are beyond its `width`.
template <int each, int OWN> DEVICE void fetch_inputs(const Gdn& a, const Room<OWN>& room, const Part& p, int b, int width, int first, int begin, int end) {
    constexpr int row = (2 * DK + OWN) / each;
#pragma unroll 1
    for (int i = thread(); i < (end - begin) * row; i += threads()) {
        const int t = begin + i / row, piece = i % row * each, kind = piece / DK, own = piece % DK, size = kind == 2 ? p.own : (int)a.dk;
        const Inputs inputs(a, b, kind);
        const u16* from = t < width ? inputs.column(t, kind == 2 ? p.value(a) : p.key * size) : nullptr;
        const int at = t - first + TAPS - 1;
        u16* to = kind == 2 ? room.values_in + at * OWN + own : room.keys_in + at * 2 * DK + piece;
        if (each == 8) copy16_if(to, from ? from + own : a.qkv[0], from && own < size);
        else *to = from && own < size ? from[own] : (u16)0;
    }
    copies_commit();
}

// A channel's weights, of the last TAPS columns: zeros for those before the first tap.
DEVICE void load_taps(float (&w)[TAPS], const Gdn& a, int kind, int channel, bool real) {
    const u16* weights = part_weights(a, kind) + (real ? channel : 0);
#pragma unroll
    for (int j = 0; j < TAPS; ++j) {
        const int tap = j - TAPS + (int)a.taps;
        w[j] = real && tap >= 0 ? from_bf16(weights[maximum(tap, 0) * channels_of(a)]) : 0.0f;
    }
}

// A channel of columns [0, n), those before `count`, from `in` to out(t, value); its inputs are recorded at `kept`, if there.
template <int n, class Out> DEVICE void convolve(const float (&w)[TAPS], const u16* in, int stride, int count, u16* kept, int channels, Out out) {
    float x[TAPS];
#pragma unroll
    for (int j = 0; j < TAPS - 1; ++j) x[j + 1] = from_bf16(in[j * stride]);
#pragma unroll
    for (int t = 0; t < n; ++t) {
        float sum = 0;
        if (t < count) {
            const u16 column = in[(t + TAPS - 1) * stride];
#pragma unroll
            for (int j = 0; j < TAPS; ++j) {
                x[j] = j < TAPS - 1 ? x[j + 1] : from_bf16(column);
                sum += w[j] * x[j];
            }
            sum = silu(sum);
            if (kept) kept[t * channels] = column;
        }
        out(t, sum);
    }
}

// 16 rows times 8 columns, of numbers in two parts each: high times high, low times both, high times low.
struct Product {
    float parts[3][4] = {};
    DEVICE void add(const u32 (&high)[4], const u32 (&low)[4], const u32 (&b_high)[2], const u32 (&b_low)[2]) {
        mma(parts[0], high[0], high[1], high[2], high[3], b_high[0], b_high[1]);
        mma(parts[1], low[0], low[1], low[2], low[3], b_high[0], b_high[1]);
        mma(parts[1], low[0], low[1], low[2], low[3], b_low[0], b_low[1]);
        mma(parts[2], high[0], high[1], high[2], high[3], b_low[0], b_low[1]);
    }
    DEVICE float operator[](int i) const { return parts[0][i] + (parts[1][i] + parts[2][i]); }
};

// Rows [0, 16) of queries and keys, channels [k, k + 16), of a part.
DEVICE void load_rows(u32 (&r)[4], const u16* x, int k, int lane) { load_tiles(r, x + lane % 16 * LONG + k + lane / 16 * 8); }

// The triangles, by one warp.
template <int OWN> DEVICE void put_pairs(const Room<OWN>& room, int lane) {
    const u16 *high = room.x, *low = high + 2 * N * LONG;
    Product sums;
#pragma unroll 4
    for (int k = 0; k < DK; k += 16) {
        u32 a_high[4], a_low[4], b[4];
        load_rows(a_high, high, k, lane), load_rows(a_low, low, k, lane);
        load_tiles(b, (lane < 16 ? high : low) + (N + lane % 8) * LONG + k + lane / 8 % 2 * 8);
        sums.add(a_high, a_low, {b[0], b[1]}, {b[2], b[3]});
    }
    const int t = lane / 4;
    const float *g = room.gates, *factors = g + 4 * N;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        const int j = lane % 4 * 2 + e;
        float decay = 0;
#pragma unroll 1
        for (int i = j + 1; i <= t; ++i) decay += g[i];
        const float scale = expf(decay) * factors[N + j];
        room.pairs[t * N + j] = j <= t ? scale * factors[t] * sums[e] : 0.0f;
        room.pairs[(N + t) * N + j] = j < t ? scale * factors[N + t] * g[N + t] * sums[2 + e] : 0.0f;
    }
}

// S <- L S + sum over t of what is left of k_t d_t^T, in its place and in device memory where there is any.
template <int OWN> DEVICE void update(const Room<OWN>& room, float* state, int dk, int dv, int own) {
    constexpr int quads = OWN / 4;
    const int column = thread() % quads * 4, rows = column < own ? dk : 0;
    const float decay = room.gates[3 * N - 1];
#pragma unroll 1
    for (int r = thread() / quads; r < DK; r += 32 * WARPS / quads) {
        float x[4], *place = room.state + r * OWN + state_column(r, column);
        load4(x, place);
#pragma unroll
        for (int c = 0; c < 4; ++c) x[c] *= decay;
#pragma unroll 1
        for (int t = 0; t < N; ++t) {
            const float k = room.keys[r * N + t] * room.gates[3 * N + t];
            float d[4];
            load4(d, room.values + t * OWN + column);
#pragma unroll
            for (int c = 0; c < 4; ++c) x[c] += k * d[c];
        }
        store4(place, x);
        if (!state || r >= rows) continue;
        if (dv % 4 == 0) store_quad<true>(state + (i64)r * dv, x, column, own);
        else store_quad<false>(state + (i64)r * dv, x, column, own);
    }
}

// The row's last inputs take the place of what was there before it, of a channel.
DEVICE void put_tail(const Gdn& a, int b, int kind, int channel, int width) {
    const Inputs inputs(a, b, kind);
    const int taps = (int)a.taps - 1;
    u16* to = a.tail + (i64)a.write[b] * (taps * inputs.channels) + kind * (int)a.nk * (int)a.dk + channel;
    u16 x[TAPS - 1];
#pragma unroll
    for (int j = 0; j < TAPS - 1; ++j) x[j] = j < taps ? inputs.at(width - taps + j, channel) : (u16)0;
#pragma unroll
    for (int j = 0; j < TAPS - 1; ++j)
        if (j < taps) to[j * inputs.channels] = x[j];
}

// A block of 256 threads a value head of a row; or two of them, if OWN is half of it, of up to N columns that are recorded. Those
// find room beside the blocks of a product.
//
// Latency is all, that of code too: what the predecessors do not write is loaded before they end, everything else at once
// after they did, and what can be a loop is one.
template <int OWN> DEVICE void few(const Gdn& a) {
    DYNAMIC_SHARED(shared);
    constexpr bool half = Room<OWN>::half;
    constexpr int sides = 1 + half, rows = Room<OWN>::rows, tiles = OWN / (8 * WARPS), features = 2 * tiles, parts = 32 * WARPS / OWN;  // parts: of a channel of values
    const int side = block_x() % sides, head = block_x() / sides, b = block_y(), ratio = (int)a.nv / (int)a.nk, key = head / ratio;
    const int warp = thread() / 32, lane = thread() % 32;
    const int nv = (int)a.nv, nk = (int)a.nk, dk = (int)a.dk, dv = (int)a.dv, channels = channels_of(a);
    const int width = a.width[b], start = a.start[b], slot = a.read[b];  // asked for before the first of them is used
    const float a_log = a.a_log[head], bias = a.dt_bias[head];
    const Room<OWN> room(shared);
    const Part p{head, key, side * OWN, maximum(0, minimum(OWN, dv - side * OWN))};
    const bool leads = head % ratio == 0 && side == 0;
    // To begin with, a thread has a channel of queries (part 0) or keys (part 1), and one of values; later it has a column
    // of a few features of values, as products of tiles leave them.
    const int part = thread() / DK, own = thread() % DK, value = thread() % OWN, column = lane / 4;
    auto feature = [&](int i) { return 8 * tiles * warp + i / 2 * 8 + lane % 4 * 2 + i % 2; };
    auto fetch = [&](int first, int begin, int end) {
        if (dk % 8 == 0 && dv % 8 == 0) fetch_inputs<8>(a, room, p, b, width, first, begin, end);
        else fetch_inputs<1>(a, room, p, b, width, first, begin, end);
    };
    float taps[2][TAPS], rest[4] = {};  // rest: of rows of the state beyond those in shared memory
    u16 norm[features];
    if (width > 0) {
        const float* state = start == 0 ? nullptr : state_of(a, slot, head) + p.base;
        if (dk % 4 == 0 && dv % 4 == 0) load_state<true, true, OWN, rows>(room.state, state, dk, dv, p.own);
        else load_state<false, true, OWN, rows>(room.state, state, dk, dv, p.own);
        if constexpr (half) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int r = rows + i / 2 * 8 + lane % 4 * 2 + i % 2, c = 8 * warp + lane / 4;
                if (state && r < dk && c < p.own) rest[i] = state[r * dv + c];
            }
        }
        fetch(0, 1 - TAPS, 0);
        load_taps(taps[0], a, part, key * dk + own, own < dk);
        load_taps(taps[1], a, 2, p.value(a) + value, value < p.own);
    }
#pragma unroll
    for (int i = 0; i < features; ++i) norm[i] = a.norm[minimum(p.base + feature(i), dv - 1)];
    after_predecessors();
    if (a.panels && thread() < p.own)  // padding is no number that is left there by chance
#pragma unroll 1
        for (int t = maximum(width, 0); t < a.W; ++t) a.panels[panel_place(p.value(a) + thread(), b * (int)a.W + t, (int)a.room)] = 0;
    if (width <= 0) return;
    if constexpr (half) pair_arrive();

#pragma unroll 1
    for (int first = 0; first < width; first += N) {
        const int token = b * (int)a.W + first, count = minimum(N, width - first);
        const bool last = first + N >= width, updates = !half && (!last || !a.record_k);
        // all loads are on their way before the first is used
        const int mine = (token + minimum(thread(), count - 1)) * nv + head, at = ((token + column) * nv + head) * dv + p.base;
        const u16 gate_a = a.gate_a[mine], gate_b = a.gate_b[mine];
        fetch(first, first ? first + 1 - TAPS : 0, first + N);
        u16 z[features];
#pragma unroll
        for (int i = 0; i < features; ++i) z[i] = column < count && feature(i) < p.own ? a.z[at + feature(i)] : (u16)0;
        if (thread() < N) {
            const float y = from_bf16(gate_a) + bias, g = thread() < count ? -expf(a_log) * (y > 20.0f ? y : log1pf(expf(y))) : 0.0f;
            room.gates[thread()] = g;
            room.gates[N + thread()] = thread() < count ? sigmoid(from_bf16(gate_b)) : 0.0f;
            if (a.record_g && side == 0 && thread() < count) a.record_g[mine] = g;
        }
        copies_wait<0>();
        sync();

        u16* kept = a.record_c + token * channels;
        constexpr int each = N / parts;  // columns of a channel of values
        const int begin = thread() / OWN * each;
        float y[N], squares[N], v[each];
        convolve<N>(
            taps[0], room.keys_in + thread(), 2 * DK, count, a.record_c && leads && own < dk ? kept + (part * nk + key) * dk + own : nullptr, channels,
            [&](int t, float value) { y[t] = value, squares[t] = value * value; });
        const float square = sum_lanes(squares, lane);
        if (lane < N) room.squares[warp * N + lane] = square;
        convolve<each>(
            taps[1], room.values_in + begin * OWN + value, OWN, count - begin,
            a.record_c && value < p.own ? kept + begin * channels + 2 * nk * dk + p.value(a) + value : nullptr, channels,
            [&](int t, float value) { v[t] = value; });
        sync();
        if (thread() < 2 * N) {
            const int kind = thread() / N;
            float sum = 1e-6f;
#pragma unroll
            for (int w = 0; w < WARPS / 2; ++w) sum += room.squares[(kind * (WARPS / 2) + w) * N + thread() % N];
            room.gates[4 * N + thread()] = inverse_root(sum) * (kind ? 1.0f : inverse_root((float)dk));
        } else if (warp == WARPS - 1 && lane < N) {
            float until = 0, after = 0;
#pragma unroll 1
            for (int t = 0; t < N; ++t) (t <= lane ? until : after) += room.gates[t];
            room.gates[2 * N + lane] = expf(until), room.gates[3 * N + lane] = expf(after);
        }
#pragma unroll
        for (int t = 0; t < N; ++t) {
            u16* to = room.x + (part * N + t) * LONG + own;
            to[0] = to_bf16(y[t]);
            to[2 * N * LONG] = to_bf16(y[t] - from_bf16(to_bf16(y[t])));
        }
        sync();
        if (part == 1 && (updates || a.record_k))
#pragma unroll
            for (int t = 0; t < N; ++t) {
                const float k = y[t] * room.gates[5 * N + t];
                if (updates) room.keys[own * N + t] = k;
                if (a.record_k && leads && own < dk && t < count) a.record_k[((token + t) * nk + key) * dk + own] = k;
            }
        if (warp == 0) put_pairs(room, lane);
        // S^T q_t and S^T k_t, of a few features a warp
        Product sums[tiles];
        auto multiply = [&](int k, auto entry) {
            u32 high[4], low[4];
            load_rows(high, room.x, k, lane), load_rows(low, room.x + 2 * N * LONG, k, lane);
#pragma unroll
            for (int j = 0; j < tiles; ++j) {
                u32 s_high[2], s_low[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const Float2 s = entry(j, i);
                    s_high[i] = pack(s.x, s.y);
                    s_low[i] = pack(s.x - ::low(s_high[i]), s.y - ::high(s_high[i]));
                }
                sums[j].add(high, low, s_high, s_low);
            }
        };
#pragma unroll 2
        for (int k = 0; k < rows; k += 16)
            multiply(k, [&](int j, int i) {
                const int r = k + 8 * i + lane % 4 * 2;
                const float* s = room.state + r * OWN + state_column(r, 8 * (tiles * warp + j) + lane / 4);
                return Float2{s[0], s[OWN]};
            });
        if constexpr (half) multiply(rows, [&](int, int i) { return Float2{rest[2 * i], rest[2 * i + 1]}; });
        sync();
#pragma unroll
        for (int t = 0; t < each; ++t) room.values[(begin + t) * OWN + value] = v[t];
        sync();

        const float beta = room.gates[N + column], decay = room.gates[2 * N + column], of_q = decay * room.gates[4 * N + column], of_k = decay * room.gates[5 * N + column];
        float d[features], o[features];
#pragma unroll
        for (int i = 0; i < features; ++i) {
            o[i] = of_q * sums[i / 2][i % 2];
            d[i] = beta * (room.values[column * OWN + feature(i)] - of_k * sums[i / 2][2 + i % 2]);
        }
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const float with_q = room.pairs[column * N + j], with_k = room.pairs[(N + column) * N + j];
#pragma unroll
            for (int i = 0; i < features; ++i) {
                const float earlier = from_bits((u32)from_lane((int)bits(d[i]), 4 * j + lane % 4));
                d[i] -= with_k * earlier, o[i] += with_q * earlier;
            }
        }
#pragma unroll
        for (int i = 0; i < features; ++i) {
            if (updates) room.values[column * OWN + feature(i)] = d[i];
            if (a.record_d && feature(i) < p.own && column < count) a.record_d[at + feature(i)] = d[i];
        }
        if constexpr (half) pair_wait();  // the other has begun
#pragma unroll
        for (int j = 0; j < tiles; ++j) {
            float part = o[2 * j] * o[2 * j] + o[2 * j + 1] * o[2 * j + 1];
            part += shuffle_xor(part, 1), part += shuffle_xor(part, 2);
            float* place = room.totals + ((side * WARPS + warp) * tiles + j) * N + column;
            if (lane % 4) continue;
            *place = part;
            if constexpr (half) store_other(place, part);
        }
        if constexpr (half) pair_arrive(), pair_wait();
        else sync();
        float total = 0;
#pragma unroll
        for (int i = 0; i < 2 * WARPS; ++i) total += room.totals[i * N + column];
        const float inverse = inverse_root(total * reciprocal((float)dv) + (float)a.eps);
#pragma unroll
        for (int i = 0; i < features; ++i)
            if (column < count && feature(i) < p.own) {
                const u16 v = to_bf16(o[i] * inverse * from_bf16(norm[i]) * silu(from_bf16(z[i])));
                a.out[at + feature(i)] = v;
                if (a.panels) a.panels[panel_place(here(p.value(a)) + feature(i), token + column, (int)a.room)] = v;  // places take no registers
            }
        if (!updates) return;
        update(room, last ? state_of(a, a.write[b], head) + p.base : nullptr, dk, dv, p.own);
        sync();
    }

    // of the heads that read a key head's channels, the last replaces what was there before
    if (a.record_k) return;
    if (thread() < p.own) put_tail(a, b, 2, p.value(a) + thread(), width);
    if (thread() == 0) room.gates[0] = atomic_add(a.tickets + b * nk + key, 1) == ratio - 1;
    sync();
    if (room.gates[0] == 0) return;
    if (own < dk) put_tail(a, b, part, key * dk + own, width);
    if (thread() == 0) a.tickets[b * nk + key] = 0;
}

KERNEL(gdn_few, Gdn, 256, 4) { few<WIDE>(a); }
#if BLOCK_PAIRS
KERNEL_OF_PAIRS(gdn_few_pair, Gdn, 256, 4) { few<WIDE / 2>(a); }
#endif
