// Gated DeltaNet: the first `accepted` recorded columns of every row enter its state, in many layers at once.
//
// It costs what the states do, read and written once. A block takes 64 rows of a head's state into registers: all it reads
// is asked for at once, and enough blocks are at it on a multiprocessor to keep the memory busy.
#include "gdn.cuh"

constexpr int LAYERS = 64;  // of a launch, at most: their addresses are arguments
constexpr int WARPS = 8, ROWS = 8, HEIGHT = WARPS * ROWS, PIECES = DK / HEIGHT, WIDE = 128;
constexpr int COLUMN = HEIGHT + WIDE;  // floats of a recorded column in shared memory: of its key, then its delta

struct FoldLayer {
    float* state;    // [slots, nv, dk, dv]
    u16* tail;       // [slots, taps - 1, channels]
    const float* k;  // [tokens, nk, dk]
    const float* d;  // [tokens, nv, dv]
    const float* g;  // [tokens, nv]
    const u16* c;    // [tokens, channels]
};

struct Fold {
    const int* start;
    const int* width;
    const int* read;
    const int* write;
    const int* accepted;
    i64 W, nk, nv, dk, dv, taps;
    FoldLayer layers[LAYERS];
};

// The tail of row b of a layer: its channels are dealt out over the blocks.
DEVICE void fold_tail(const Fold& a, const FoldLayer& layer, int b, int count, bool fresh, int read, int write) {
    const int channels = (int)(2 * a.nk * a.dk + a.nv * a.dv), taps = (int)a.taps - 1;
    const u16 *recorded = layer.c + b * a.W * channels, *old = layer.tail + (i64)(read * taps) * channels;
    u16* tail = layer.tail + (i64)(write * taps) * channels;
#pragma unroll 1
    for (int i = block_x() * threads() + thread(); i < channels; i += grid_x() * threads()) {
        u16 x[TAPS - 1] = {};  // all of them before one is written: `old` may be `tail`
#pragma unroll
        for (int r = 0; r < TAPS - 1; ++r) {
            const int t = count - taps + r;
            const u16* from = t >= 0 ? recorded + t * channels : old + (taps + t) * channels;
            if (r < taps && (t >= 0 || !fresh)) x[r] = from[i];
        }
#pragma unroll
        for (int r = 0; r < TAPS - 1; ++r)
            if (r < taps) tail[r * channels + i] = x[r];
    }
}

// On their way to shared memory: of the first `count` columns the keys' rows from `begin` and the deltas, and log decays.
template <bool VECTORS> DEVICE void fetch_columns(float* columns, float* g, const Fold& a, const FoldLayer& layer, int b, int count, int head, int begin) {
    constexpr int N = VECTORS ? 4 : 1;
    const int nk = (int)a.nk, nv = (int)a.nv, dk = (int)a.dk, dv = (int)a.dv;
    const i64 token = b * a.W;
    const float *k = layer.k + (token * nk + head / (nv / nk)) * dk, *d = layer.d + (token * nv + head) * dv;
#pragma unroll 1
    for (int i = N * thread(); i < count * COLUMN; i += N * threads()) {
        const int t = i / COLUMN, j = i % COLUMN, at = j < HEIGHT ? begin + j : j - HEIGHT, size = j < HEIGHT ? dk : dv;
        const float* from = (j < HEIGHT ? k + t * (nk * dk) : d + t * (nv * dv)) + (at < size ? at : 0);
        if constexpr (VECTORS) copy16(columns + i, from, at < size ? 16 : 0);
        else copy4(columns + i, from, at < size ? 4 : 0);
    }
#pragma unroll 1
    for (int t = thread(); t < count; t += threads()) copy4(g + t, layer.g + (token + t) * nv + head, 4);
    copies_commit();
}

// Blocks (value heads x PIECES, B, layers) of 256 threads; a thread has four columns of eight rows. VECTORS: keys and deltas
// are whole quads.
template <bool VECTORS> DEVICE void fold(const Fold& a) {
    DYNAMIC_SHARED(shared);
    after_predecessors();
    const int b = block_y(), count = minimum(a.accepted[b], a.width[b]);
    if (count <= 0) return;
    const int start = a.start[b], read = a.read[b], write = a.write[b];
    const FoldLayer& layer = a.layers[block_z()];
    const int W = (int)a.W, nv = (int)a.nv, dk = (int)a.dk, dv = (int)a.dv, head = block_x() / PIECES, begin = block_x() % PIECES * HEIGHT;
    const int warp = thread() / 32, column = thread() % 32 * 4, row = begin + warp * ROWS, rows = column < dv ? dk - row : 0;
    float *columns = (float*)shared, *g = columns + W * COLUMN, *left = g + W;  // left [W + 1]: see below
    float x[ROWS][4] = {};
    if (start != 0) {
        const float* from = layer.state + (i64)(read * nv + head) * (dk * dv) + row * dv;
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
            if (r < rows) load_quad<VECTORS>(x[r], from + r * dv, column, dv);
    }
    fetch_columns<VECTORS>(columns, g, a, layer, b, count, head, begin);
    copies_wait<0>();
    sync();

    // what is left at the end of what column t brings, and behind them of what was there before
#pragma unroll 1
    for (int t = thread(); t <= count; t += threads()) {
        float sum = 0;
#pragma unroll 1
        for (int i = count - 1; i >= (t < count ? t + 1 : 0); --i) sum += g[i];
        left[t] = expf(sum);
    }
    sync();
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int c = 0; c < 4; ++c) x[r][c] *= left[count];
#pragma unroll 1
    for (int t = 0; t < count; ++t) {
        const float* own = columns + t * COLUMN;
        float k[ROWS / 4][4], d[4];
        load4(k[0], own + warp * ROWS), load4(k[1], own + warp * ROWS + 4), load4(d, own + HEIGHT + column);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const float y = left[t] * d[c];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) x[r][c] += k[r / 4][r % 4] * y;
        }
    }
    float* to = layer.state + (i64)(write * nv + head) * (dk * dv) + row * dv;
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
        if (r < rows) store_quad<VECTORS>(to + r * dv, x[r], column, dv);
    fold_tail(a, layer, b, count, start == 0, read, write);
}

KERNEL(gdn_fold, Fold, 256, 4) { fold<true>(a); }
KERNEL(gdn_fold_odd, Fold, 256, 4) { fold<false>(a); }
