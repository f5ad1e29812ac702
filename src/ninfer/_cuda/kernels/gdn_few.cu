// Gated DeltaNet of a few columns at once.
//
// With the state S that columns t = 0, 1, .. find, L_t the decay of columns up to t and L_tj that of columns after j:
//     d_t = beta_t (v_t - L_t S^T k_t - sum over j < t of L_tj (k_j . k_t) d_j)
//     o_t = L_t S^T q_t + sum over j <= t of L_tj (k_j . q_t) d_j
// so the state is read once for all of them, and what remains is a triangle of numbers for each column of values.
#include "gdn_step.cuh"

constexpr int HALVES = 32 * WARPS / WIDE;  // threads that have a column of values: each has some of the outputs

// Lane l has the sum over lanes of x[l % N].
template <int N> DEVICE float sum_lanes(float (&x)[N], int lane) {
#pragma unroll
    for (int half = N / 2; half; half /= 2)
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const bool upper = lane & half;
            const float kept = upper ? x[i + half] : x[i], given = upper ? x[i] : x[i + half];
            x[i] = kept + shuffle_xor(given, half);
        }
#pragma unroll
    for (int mask = N; mask < 32; mask *= 2) x[0] += shuffle_xor(x[0], mask);
    return x[0];
}

template <int N> DEVICE void loads(float (&x)[N], const float* p) {
#pragma unroll
    for (int i = 0; i < N; i += 4) load4((float(&)[4])x[i], p + i);
}

// A block's shared memory. Some of it has two uses, one after another.
template <int N> struct Room {
    static constexpr int INPUTS = TAPS - 1 + N;  // columns of a convolution
    float* state;      // [DK][WIDE]
    float* columns;    // [2][DK][N]: queries, keys
    u16* keys_in;      // [INPUTS][2 DK]: what queries and keys are convolved from; then values, pairs and squares
    float* values;     // [N][WIDE], then the deltas
    float* pairs;      // [2][N][N]: L_tj (k_j . q_t) for j <= t, beta_t L_tj (k_j . k_t) for j < t
    float* squares;    // [WARPS][N / HALVES]
    u16* values_in;    // [INPUTS][WIDE]
    float* gates;      // [8][N]: log decay, beta, decay up to and after a column; factors of its query and key, and the same
                       // times the decay up to it
    float* sums;       // [2 halves of the rows][2][N][WIDE]: S^T q_t, S^T k_t; in the state's place where that is not needed again

    DEVICE Room(u8* shared, bool apart) : state((float*)shared) {
        columns = state + DK * WIDE, keys_in = (u16*)(columns + 2 * DK * N);
        values = (float*)keys_in, pairs = values + N * WIDE, squares = pairs + 2 * N * N;
        values_in = keys_in + INPUTS * 2 * DK, gates = (float*)(values_in + INPUTS * WIDE), sums = apart ? gates + 8 * N : state;
    }
};

// What columns [begin, end) of the row are convolved from, of a head's q, k and v, on their way to the places of columns
// `first` - (TAPS - 1) and on. Negative ones are before the row's; zeros are beyond its `width`.
template <int N> DEVICE void fetch_inputs(const Gdn& a, const Room<N>& room, int head, int key, int b, int width, int first, int begin, int end) {
    const int dk = (int)a.dk, dv = (int)a.dv;
    const bool vectors = dk % 8 == 0 && dv % 8 == 0;
    const int each = vectors ? 8 : 1, row = 3 * DK / each;
#pragma unroll 1
    for (int i = thread(); i < (end - begin) * row; i += threads()) {
        const int t = begin + i / row, piece = i % row * each, kind = piece / DK, own = piece % DK, size = kind == 2 ? dv : dk;
        const Inputs inputs(a, b, kind);
        const u16* from = t < width ? inputs.column(t, (kind == 2 ? head : key) * size) : nullptr;
        const int at = t - first + TAPS - 1;
        u16* to = kind == 2 ? room.values_in + at * WIDE + own : room.keys_in + at * 2 * DK + piece;
        if (vectors) copy16_if(to, from ? from + own : a.qkv[0], from && own < size);
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

// A channel of `count` columns, from `in`, to out(t, value); its inputs are recorded at `kept`, if there.
template <int N, class Out> DEVICE void convolve(const float (&w)[TAPS], const u16* in, int stride, int count, u16* kept, int channels, Out out) {
    float x[TAPS];
#pragma unroll
    for (int j = 0; j < TAPS - 1; ++j) x[j + 1] = from_bf16(in[j * stride]);
#pragma unroll 2
    for (int t = 0; t < N; ++t) {
        const u16 column = in[(t + TAPS - 1) * stride];
        float sum = 0;
#pragma unroll
        for (int j = 0; j < TAPS; ++j) {
            x[j] = j < TAPS - 1 ? x[j + 1] : from_bf16(column);
            sum += w[j] * x[j];
        }
        out(t, silu(sum));
        if (kept && t < count) kept[t * channels] = column;
    }
}

// S <- L S + sum over t of what is left of k_t d_t^T, in its place and in device memory where there is any.
template <int N> DEVICE void update(const Room<N>& room, float* state, int dk, int dv) {
    const int column = thread() % 32 * 4, rows = column < dv ? dk : 0;
    const float decay = room.gates[3 * N - 1];
#pragma unroll 1
    for (int r = thread() / 32; r < DK; r += WARPS) {
        float x[4], *own = room.state + r * WIDE + column;
        load4(x, own);
#pragma unroll
        for (int c = 0; c < 4; ++c) x[c] *= decay;
#pragma unroll 1
        for (int t = 0; t < N; ++t) {
            const float k = room.columns[(DK + r) * N + t] * room.gates[5 * N + t] * room.gates[3 * N + t];
            float d[4];
            load4(d, room.values + t * WIDE + column);
#pragma unroll
            for (int c = 0; c < 4; ++c) x[c] += k * d[c];
        }
        store4(own, x);
        if (!state || r >= rows) continue;
        if (dv % 4 == 0) store_quad<true>(state + (i64)r * dv, x, column, dv);
        else store_quad<false>(state + (i64)r * dv, x, column, dv);
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

// A block of 256 threads a value head of a row; N columns at a time.
//
// Latency is all, that of code too: what the predecessors do not write is loaded before they end, everything else at once
// after they did, and what can be a loop is one.
template <int N> DEVICE void few(const Gdn& a) {
    DYNAMIC_SHARED(shared);
    const int head = block_x(), b = block_y(), ratio = (int)a.nv / (int)a.nk, key = head / ratio, warp = thread() / 32, lane = thread() % 32;
    const int nv = (int)a.nv, nk = (int)a.nk, dk = (int)a.dk, dv = (int)a.dv, width = a.width[b], channels = channels_of(a);
    const Room<N> room(shared, !a.record_k || a.W > N);
    const float rate = expf(a.a_log[head]), bias = a.dt_bias[head];
    const bool leads = head % ratio == 0;
    // a thread has a channel of queries (part 0) or keys (part 1), and a column of values or a part of it
    const int part = thread() / WIDE, own = thread() % WIDE;
    float taps[2][TAPS];
    if (width > 0) {
        const float* state = a.start[b] == 0 ? nullptr : state_of(a, a.read[b], head);
        if (dk % 4 == 0 && dv % 4 == 0) load_state<true>(room.state, state, dk, dv);
        else load_state<false>(room.state, state, dk, dv);
        fetch_inputs(a, room, head, key, b, width, 0, 1 - TAPS, 0);
        load_taps(taps[0], a, part, key * dk + own, own < dk);
        load_taps(taps[1], a, 2, head * dv + own, own < dv);
    }
    const float norm = own < dv ? from_bf16(a.norm[own]) : 0.0f;
    after_predecessors();
    if (width <= 0) return;

#pragma unroll 1
    for (int first = 0; first < width; first += N) {
        const int token = b * (int)a.W + first, count = minimum(N, width - first);
        const bool last = first + N >= width, updates = !last || !a.record_k;
        // all loads are on their way before the first is used
        fetch_inputs(a, room, head, key, b, width, first, first ? first + 1 - TAPS : 0, first + N);
        u16 z[N / HALVES];
        const int mine = (token + minimum(thread(), count - 1)) * nv + head;
        const u16 gate_a = a.gate_a[mine], gate_b = a.gate_b[mine];
#pragma unroll
        for (int i = 0; i < N / HALVES; ++i) {
            const int t = part * (N / HALVES) + i;
            z[i] = t < count && own < dv ? a.z[((token + t) * nv + head) * dv + own] : (u16)0;
        }
        if (thread() < N) {
            const float y = from_bf16(gate_a) + bias, g = thread() < count ? -rate * (y > 20.0f ? y : log1pf(expf(y))) : 0.0f;
            room.gates[thread()] = g;
            room.gates[N + thread()] = thread() < count ? sigmoid(from_bf16(gate_b)) : 0.0f;
            if (a.record_g && thread() < count) a.record_g[mine] = g;
        }
        copies_wait<0>();
        sync();
        u16* kept = a.record_c + token * channels;
        convolve<N>(
            taps[0], room.keys_in + thread(), 2 * DK, count, a.record_c && leads && own < dk ? kept + (part * nk + key) * dk + own : nullptr, channels,
            [&](int t, float y) { room.columns[thread() * N + t] = y; });
        sync();
        if (part == 0)
            convolve<N>(
                taps[1], room.values_in + own, WIDE, count, a.record_c && own < dv ? kept + 2 * nk * dk + head * dv + own : nullptr, channels,
                [&](int t, float y) { room.values[t * WIDE + own] = y; });
        else if (thread() < WIDE + N) {
            float until = 0, after = 0;
#pragma unroll 1
            for (int t = 0; t < N; ++t) (t <= own ? until : after) += room.gates[t];
            room.gates[2 * N + own] = expf(until), room.gates[3 * N + own] = expf(after);
        }
        // the triangles, but for the lengths of the keys of other columns: a warp has every eighth of their rows
#pragma unroll 1
        for (int row = warp; row < 2 * N; row += WARPS) {
            const int t = row % N, of_keys = row / N;
            float sum[N] = {}, square = 0;
#pragma unroll 2
            for (int i = lane; i < DK; i += 32) {
                float k[N];
                loads(k, room.columns + (DK + i) * N);
                const float y = room.columns[(of_keys * DK + i) * N + t];
                square += y * y;
#pragma unroll
                for (int j = 0; j < N; ++j) sum[j] += k[j] * y;
            }
            const float product = sum_lanes(sum, lane), inverse = inverse_root(sum_warp(square) + 1e-6f) * (of_keys ? 1.0f : inverse_root((float)dk));
            if (lane < N) {
                float decay = 0;
#pragma unroll 1
                for (int i = lane + 1; i <= t; ++i) decay += room.gates[i];
                const float scale = inverse * (of_keys ? room.gates[N + t] : 1.0f);
                room.pairs[row * N + lane] = lane < t || lane == t && !of_keys ? scale * expf(decay) * product : 0.0f;
                if (lane == 0) room.gates[4 * N + row] = inverse;
            }
        }
        // the state: a thread has half the rows of two of its columns, for queries or for keys
        const int half = warp % 2, pair = warp / 2 % 2 * 64 + 2 * lane;
        float sums[2][N] = {};
#pragma unroll 4
        for (int r = half * (DK / 2); r < (half + 1) * (DK / 2); ++r) {
            float y[N];
            loads(y, room.columns + (part * DK + r) * N);
            const Float2 s = *(const Float2*)(room.state + r * WIDE + pair);
#pragma unroll
            for (int t = 0; t < N; ++t) sums[0][t] += s.x * y[t], sums[1][t] += s.y * y[t];
        }
        sync();
#pragma unroll
        for (int t = 0; t < N; ++t) *(Float2*)(room.sums + ((half * 2 + part) * N + t) * WIDE + pair) = {sums[0][t], sums[1][t]};
        if (thread() < 2 * N * N) room.pairs[thread()] *= room.gates[5 * N + thread() % N];
        else if (thread() < 2 * N * N + 2 * N) {
            const int row = thread() - 2 * N * N;
            room.gates[6 * N + row] = room.gates[4 * N + row] * room.gates[2 * N + row % N];
        }
        if (a.record_k && leads && part && own < dk)
#pragma unroll 2
            for (int t = 0; t < count; ++t) a.record_k[((token + t) * nk + key) * dk + own] = room.columns[thread() * N + t] * room.gates[5 * N + t];
        sync();

        // every thread has the deltas of its column of values, and the outputs of some of the columns
        float d[N], o[N / HALVES], squares[N / HALVES];
        const float* sum = room.sums + own;
#pragma unroll
        for (int t = 0; t < N; ++t) {
            float triangle[N];
            loads(triangle, room.pairs + (N + t) * N);
            d[t] = room.gates[N + t] * (room.values[t * WIDE + own] - room.gates[7 * N + t] * (sum[(N + t) * WIDE] + sum[(3 * N + t) * WIDE]));
#pragma unroll
            for (int j = 0; j < t; ++j) d[t] -= triangle[j] * d[j];
        }
#pragma unroll
        for (int i = 0; i < N / HALVES; ++i) {
            const int t = part * (N / HALVES) + i;
            float triangle[N];
            loads(triangle, room.pairs + t * N);
            o[i] = room.gates[6 * N + t] * (sum[t * WIDE] + sum[(2 * N + t) * WIDE]);
#pragma unroll
            for (int j = 0; j < N; ++j) o[i] += triangle[j] * d[j];
            squares[i] = o[i] * o[i];
        }
        const float total = sum_lanes(squares, lane);
        if (lane < N / HALVES) room.squares[warp * (N / HALVES) + lane] = total;
        sync();
#pragma unroll
        for (int t = 0; t < N; ++t) {
            if (t % HALVES != part) continue;
            if (updates) room.values[t * WIDE + own] = d[t];
            if (a.record_d && own < dv && t < count) a.record_d[((token + t) * nv + head) * dv + own] = d[t];
        }
#pragma unroll
        for (int i = 0; i < N / HALVES; ++i) {
            const int t = part * (N / HALVES) + i;
            float square = 0;
#pragma unroll
            for (int w = 0; w < WARPS / HALVES; ++w) square += room.squares[(part * (WARPS / HALVES) + w) * (N / HALVES) + i];
            const float inverse = inverse_root(square * reciprocal((float)dv) + (float)a.eps);
            if (t < count && own < dv) a.out[((token + t) * nv + head) * dv + own] = to_bf16(o[i] * inverse * norm * silu(from_bf16(z[i])));
        }
        if (!updates) return;
        sync();
        update(room, last ? state_of(a, a.write[b], head) : nullptr, dk, dv);
        sync();
    }

    // of the heads that read a key head's channels, the last replaces what was there before
    if (a.record_k) return;
    if (part == 0 && own < dv) put_tail(a, b, 2, head * dv + own, width);
    if (thread() == 0) room.gates[0] = atomic_add(a.tickets + b * nk + key, 1) == ratio - 1;
    sync();
    if (room.gates[0] == 0) return;
    if (own < dk) put_tail(a, b, part, key * dk + own, width);
    if (thread() == 0) a.tickets[b * nk + key] = 0;
}

KERNEL(gdn_few_4, Gdn, 256, 4) { few<4>(a); }
KERNEL(gdn_few_8, Gdn, 256, 4) { few<8>(a); }
