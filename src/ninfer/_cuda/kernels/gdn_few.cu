// Gated DeltaNet of a few columns at once.
//
// With the state S that columns t = 0, 1, .. find, L_t the decay of columns up to t and L_tj that of columns after j:
//     d_t = beta_t (v_t - L_t S^T k_t - sum over j < t of L_tj (k_j . k_t) d_j)
//     o_t = L_t S^T q_t + sum over j <= t of L_tj (k_j . q_t) d_j
// so the state is read once for all of them, and what remains is a triangle of numbers for each column of values.
#include "gdn_step.cuh"

constexpr int PAIRS = 32 * WARPS / WIDE;  // threads that have a column of values

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

template <int N> DEVICE float dot(const float (&x)[N], const float* y) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) sum += x[i] * y[i];
    return sum;
}

template <int N> DEVICE void loads(float (&x)[N], const float* p) {
#pragma unroll
    for (int i = 0; i < N; i += 4) load4((float(&)[4])x[i], p + i);
}

// A block's shared memory.
template <int N> struct Room {
    float* state;    // [DK][WIDE]
    float* columns;  // [2][DK][N]: queries, keys
    float* values;   // [N][WIDE], then the deltas
    float* pairs;    // [2][N][N]: L_tj (k_j . q_t) for j <= t, beta_t L_tj (k_j . k_t) for j < t
    float* squares;  // [WARPS][N]
    float* gates;    // [5][N]: log decay, beta, decay up to and after a column; then whether this block comes last
    float* sums;     // [2 halves of the rows][2][N][WIDE]: S^T q_t, S^T k_t; in the state's place where that is not needed again

    DEVICE Room(u8* shared, bool apart) : state((float*)shared) {
        columns = state + DK * WIDE, values = columns + 2 * DK * N, pairs = values + N * WIDE;
        squares = pairs + 2 * N * N, gates = squares + WARPS * N, sums = apart ? gates + 5 * N : state;
    }
};

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
#pragma unroll
        for (int t = 0; t < N; ++t) {
            const float k = room.columns[(DK + r) * N + t] * room.gates[3 * N + t];
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

// A block of 256 threads a value head of a row; N columns at a time.
//
// Latency is all: what the predecessors do not write is loaded before they end, everything else at once after they did.
template <int N> DEVICE void few(const Gdn& a) {
    DYNAMIC_SHARED(shared);
    const int head = block_x(), b = block_y(), ratio = (int)a.nv / (int)a.nk, key = head / ratio, warp = thread() / 32, lane = thread() % 32;
    const int nv = (int)a.nv, dk = (int)a.dk, dv = (int)a.dv, width = a.width[b];
    const int channels = (int)channels_of(a), keys = (int)(a.nk * a.dk);
    const Room<N> room(shared, !a.record_k || a.W > N);
    const float rate = expf(a.a_log[head]), bias = a.dt_bias[head];
    const i64 write = a.write[b];
    const bool leads = head % ratio == 0;

    // A thread convolves a channel of q or k and one of v.
    Channel mine[2];
    if (width > 0) {
        const float* state = a.start[b] == 0 ? nullptr : state_of(a, a.read[b], head);
        if (dk % 4 == 0 && dv % 4 == 0) load_state<true>(room.state, state, dk, dv);
        else load_state<false>(room.state, state, dk, dv);
#pragma unroll
        for (int i = 0; i < 2; ++i) mine[i].begin(a, head, key, b, thread() + i * threads());
    }
    after_predecessors();
    if (width <= 0) return;

    const int column = thread() % WIDE, part = thread() / WIDE;  // of values; part of the columns, and queries or keys
    const float norm = column < dv ? from_bf16(a.norm[column]) : 0.0f;
#pragma unroll 1
    for (int first = 0; first < width; first += N) {
        const int token = b * (int)a.W + first, count = minimum(N, width - first);
        const bool last = first + N >= width;
        // all loads are on their way before the first is used
        u16 z[N / PAIRS], inputs[2][N];
        const int own = token + minimum(thread(), count - 1);
        const u16 gate_a = a.gate_a[own * nv + head], gate_b = a.gate_b[own * nv + head];
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int t = 0; t < N; ++t) inputs[i][t] = t < count ? mine[i].column(a, token + t) : (u16)0;
#pragma unroll
        for (int i = 0; i < N / PAIRS; ++i) {
            const int t = part * (N / PAIRS) + i;
            z[i] = t < count && column < dv ? a.z[((token + t) * nv + head) * dv + column] : (u16)0;
        }
        auto convolve = [&](float(&y)[N], int i) {
            Channel& c = mine[i];
#pragma unroll
            for (int t = 0; t < N; ++t) {
                y[t] = 0;
                if (t >= count) continue;
                c.put(inputs[i][t]);
                y[t] = c.convolved();
                if (a.record_c && c.real && (c.kind == 2 || leads))
                    a.record_c[(token + t) * channels + c.kind * keys + c.channel] = inputs[i][t];
            }
        };
        float x[N], squares[N];
        if (thread() < WIDE) {
            convolve(x, 1);
#pragma unroll
            for (int t = 0; t < N; ++t) room.values[t * WIDE + thread()] = x[t];
        }
        convolve(x, 0);
#pragma unroll
        for (int t = 0; t < N; ++t) squares[t] = x[t] * x[t];
        const float square = sum_lanes(squares, lane);
        if (lane < N) room.squares[warp * N + lane] = square;
        if (thread() < N) {
            const float y = from_bf16(gate_a) + bias, g = thread() < count ? -rate * (y > 20.0f ? y : log1pf(expf(y))) : 0.0f;
            room.gates[thread()] = g;
            room.gates[N + thread()] = thread() < count ? sigmoid(from_bf16(gate_b)) : 0.0f;
            if (a.record_g && thread() < count) a.record_g[own * nv + head] = g;
        }
        sync();
        // keys and queries of length one, and these divided by the root of it
#pragma unroll
        for (int t = 0; t < N; ++t) {
            float sum = 1e-6f;
#pragma unroll
            for (int w = 0; w < WARPS / 2; ++w) sum += room.squares[(part * WARPS / 2 + w) * N + t];
            x[t] *= inverse_root(sum) * (part ? 1.0f : inverse_root((float)dk));
            if (a.record_k && part && leads && column < dk && t < count) a.record_k[((token + t) * (int)a.nk + key) * dk + column] = x[t];
        }
#pragma unroll
        for (int t = 0; t < N; t += 4) store4(room.columns + thread() * N + t, (const float(&)[4])x[t]);
        if (thread() < N) {
            float until = 0, after = 0;
            for (int t = 0; t < N; ++t) (t <= thread() ? until : after) += room.gates[t];
            room.gates[2 * N + thread()] = expf(until), room.gates[3 * N + thread()] = expf(after);
        }
        copies_wait<0>();
        sync();

        // the triangles: a warp has every eighth of their rows
#pragma unroll 1
        for (int row = warp; row < 2 * N; row += WARPS) {
            const int t = row % N, of_keys = row / N;
            float sum[N] = {};
#pragma unroll
            for (int i = lane; i < DK; i += 32) {
                float k[N];
                loads(k, room.columns + (DK + i) * N);
                const float y = room.columns[(of_keys * DK + i) * N + t];
#pragma unroll
                for (int j = 0; j < N; ++j) sum[j] += k[j] * y;
            }
            const float product = sum_lanes(sum, lane);
            if (lane < N) {
                float decay = 0;
                for (int i = lane + 1; i <= t; ++i) decay += room.gates[i];
                const float scale = of_keys ? room.gates[N + t] : 1.0f;
                room.pairs[row * N + lane] = lane < t || lane == t && !of_keys ? scale * expf(decay) * product : 0.0f;
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
        sync();

        // every thread has the deltas of its column of values, and the outputs of some of the columns
        float d[N], o[N / PAIRS];
#pragma unroll
        for (int t = 0; t < N; ++t) {
            float triangle[N];
            loads(triangle, room.pairs + (N + t) * N);
            const float* sum = room.sums + (N + t) * WIDE + column;
            d[t] = room.gates[N + t] * (room.values[t * WIDE + column] - room.gates[2 * N + t] * (sum[0] + sum[2 * N * WIDE]));
#pragma unroll
            for (int j = 0; j < t; ++j) d[t] -= triangle[j] * d[j];
        }
        float outputs[N / PAIRS];
#pragma unroll
        for (int i = 0; i < N / PAIRS; ++i) {
            const int t = part * (N / PAIRS) + i;
            const float* sum = room.sums + t * WIDE + column;
            o[i] = room.gates[2 * N + t] * (sum[0] + sum[2 * N * WIDE]) + dot(d, room.pairs + t * N);
            outputs[i] = o[i] * o[i];
        }
        const float total = sum_lanes(outputs, lane);
        if (lane < N / PAIRS) room.squares[warp * N + lane] = total;
        sync();
        const bool updates = !last || !a.record_k;
#pragma unroll
        for (int t = 0; t < N; ++t) {
            if (t % PAIRS != part) continue;
            if (updates) room.values[t * WIDE + column] = d[t];
            if (a.record_d && column < dv && t < count) a.record_d[((token + t) * nv + head) * dv + column] = d[t];
        }
#pragma unroll
        for (int i = 0; i < N / PAIRS; ++i) {
            const int t = part * (N / PAIRS) + i;
            float sum = 0;
#pragma unroll
            for (int w = 0; w < WARPS / PAIRS; ++w) sum += room.squares[(part * (WARPS / PAIRS) + w) * N + i];
            const float inverse = inverse_root(sum * reciprocal((float)dv) + (float)a.eps);
            if (t < count && column < dv) a.out[((token + t) * nv + head) * dv + column] = to_bf16(o[i] * inverse * norm * silu(from_bf16(z[i])));
        }
        if (!updates) return;
        sync();
        update(room, last ? state_of(a, write, head) : nullptr, dk, dv);
        sync();
    }

    // the head that reads its key head's channels last replaces what was there before
    if (a.record_k) return;
    if (thread() < WIDE && mine[1].kind == 2) mine[1].put_tail(a, write);
    if (thread() == 0) room.gates[4 * N] = atomic_add(a.tickets + b * a.nk + key, 1) == ratio - 1;
    sync();
    if (room.gates[4 * N] == 0) return;
    if (mine[0].real) mine[0].put_tail(a, write);
    if (thread() == 0) a.tickets[b * a.nk + key] = 0;
}

KERNEL(gdn_few_4, Gdn, 256, 4) { few<4>(a); }
KERNEL(gdn_few_8, Gdn, 256, 4) { few<8>(a); }
