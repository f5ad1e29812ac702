// One row at a time: embedding, norms, weights decoded for a dense product, and the activation between two of them.
#include "codes.cuh"

struct Embed {
    const int* tokens;
    u16* out;
    i64 columns, rows, segments;
    const Segment* segment;  // tile: first row of the matrix that the segment holds
};

// A block a token.
KERNEL(embed, Embed, 256, 1) {
    after_predecessors();
    int token = a.tokens[block_x()];
    if (token < 0 || token >= a.rows) token = 0;
    int i = 0;
    while (i + 1 < a.segments && token >= a.segment[i + 1].tile) ++i;
    const Segment& s = a.segment[i];
    const int row = (int)(s.first + token - s.tile);
    u16* out = a.out + block_x() * a.columns;
    with_format((int)s.format, [&](auto f) {
        for (int k = 8 * thread(); k < a.columns; k += 8 * threads()) {
            float v[8];
            decode8<f.value>(v, s, row, k);
            for (int j = 0; j < minimum(8, (int)a.columns - k); ++j) out[k + j] = to_bf16(v[j]);
        }
    });
}

struct Dense {
    u16* out;  // [rows, columns] bf16
    i64 columns, first, rows;
    Segment segment;
};

// Rows [first, first + rows) of a stored matrix; a block's threads take eight columns each.
KERNEL(dense, Dense, 256, 1) {
    after_predecessors();
    const int each = ((int)a.columns + 7) / 8;
    const bool vectors = a.columns % 8 == 0;
    with_format((int)a.segment.format, [&](auto f) {
        for (i64 i = (i64)block_x() * threads() + thread(); i < a.rows * each; i += (i64)grid_x() * threads()) {
            const int row = (int)(i / each), k = (int)(i % each) * 8;
            float v[8];
            decode8<f.value>(v, a.segment, (int)a.first + row, k);
            u16* out = a.out + row * a.columns + k;
            if (vectors) *(Word4*)out = {pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7])};
            else
                for (int j = 0; j < minimum(8, (int)a.columns - k); ++j) out[j] = to_bf16(v[j]);
        }
    });
}

struct Norm {
    u16* out;
    const u16* x;
    const u16* norm;
    const int* index;  // or null: row i of out is row i of x
    double eps;
    i64 columns, first, stride;  // features; where row i of out begins: first + i * stride
};

// A block a row: norm1(x[index], norm).
KERNEL(final_norm, Norm, 256, 1) {
    __shared__ float room[32];
    after_predecessors();
    const int K = (int)a.columns;
    const bool vectors = K % 8 == 0;
    const u16* x = a.x + (i64)(a.index ? a.index[block_x()] : block_x()) * K;
    u16* out = a.out + a.first + (i64)block_x() * a.stride;
    float square = 0;
    for (int k = 8 * thread(); k < K; k += 8 * threads()) {
        float f[8];
        unpack8(f, load8(x, k, K, vectors));
#pragma unroll
        for (int i = 0; i < 8; ++i) square += f[i] * f[i];
    }
    const float inverse = 1.0f / sqrtf(sum_block(square, room) / K + (float)a.eps);
    for (int k = 8 * thread(); k < K; k += 8 * threads()) {
        float f[8], w[8];
        unpack8(f, load8(x, k, K, vectors));
        unpack8(w, load8(a.norm, k, K, vectors));
        for (int i = 0; i < minimum(8, K - k); ++i) out[k + i] = to_bf16(f[i] * inverse * (1.0f + w[i]));
    }
}

struct Product {
    u16* out;         // [tokens, out_stride], from column out_first
    const float* gate;  // [tokens, columns]
    const float* up;
    i64 tokens, columns, out_first, out_stride;
};

// out = silu(gate) * up.
KERNEL(product, Product, 256, 1) {
    after_predecessors();
    for (i64 i = (i64)block_x() * threads() + thread(); i < a.tokens * a.columns; i += (i64)grid_x() * threads()) {
        const i64 token = i / a.columns, column = i % a.columns;
        a.out[token * a.out_stride + a.out_first + column] = to_bf16(silu(a.gate[i]) * a.up[i]);
    }
}

struct Add {
    u16* x;         // [tokens, columns]
    const float* y;  // [tokens, width]: columns [first, first + width) of what is added
    const float* scale;  // [tokens] or null
    i64 tokens, columns, first, width;
};

// x += scale * y.
KERNEL(add, Add, 256, 1) {
    after_predecessors();
    for (i64 i = (i64)block_x() * threads() + thread(); i < a.tokens * a.width; i += (i64)grid_x() * threads()) {
        const i64 token = i / a.width;
        u16* x = a.x + token * a.columns + a.first + i % a.width;
        *x = to_bf16(from_bf16(*x) + (a.scale ? a.scale[token] : 1.0f) * a.y[i]);
    }
}

struct Move {
    u16* dst;
    const u16* src;
    const int* index;
    i64 words;  // of a row, 16 bits each
};

// A block a row: dst[index] = src where index is not negative.
KERNEL(scatter, Move, 256, 1) {
    after_predecessors();
    const int row = a.index[block_x()];
    if (row < 0) return;
    for (i64 i = thread(); i < a.words; i += threads()) a.dst[row * a.words + i] = a.src[block_x() * a.words + i];
}

// A block a row: dst = src[index].
KERNEL(gather, Move, 256, 1) {
    after_predecessors();
    const i64 row = a.index[block_x()];
    if (row < 0) return;
    for (i64 i = thread(); i < a.words; i += threads()) a.dst[block_x() * a.words + i] = a.src[row * a.words + i];
}

struct Operands {
    const u16* x;
    const u16* norm;
    u8* out;      // [columns, padded] bf16, or null
    u8* codes;    // [columns, 2, padded], or null
    float* powers;  // [columns, padded / 64] of codes
    double eps;
    i64 K, padded;
};

// One block a column: norm1(x, norm), or x, padded with zeros to a multiple of 128, in operand order and in fixed point.
KERNEL(operands, Operands, 512, 4) {
    __shared__ float room[32];
    after_predecessors();
    const int K = (int)a.K;
    const u16* x = a.x + (i64)block_x() * K;
    float inverse = 1.0f;
    if (a.norm) {
        float square = 0;
        for (int k = 8 * thread(); k < K; k += 8 * threads()) {
            float f[8];
            unpack8(f, load8(x, k, K, K % 8 == 0));
#pragma unroll
            for (int i = 0; i < 8; ++i) square += f[i] * f[i];
        }
        inverse = 1.0f / sqrtf(sum_block(square, room) / K + (float)a.eps);
    }
    for (int first = 0; first < a.padded; first += 8 * threads()) {
        const int k = first + 8 * thread();
        const Word4 v = normed8(x, a.norm, k, K, inverse);
        if (a.out && k < a.padded) *(Word4*)(a.out + ((i64)block_x() * a.padded + k) * 2) = operand_order(v);
        if (a.codes) {
            float f[8], scale;
            u64 high, low;
            unpack8(f, v);
            fix8(high, low, scale, f);
            if (k >= a.padded) continue;
            u8* own = a.codes + (i64)block_x() * 2 * a.padded + k;
            *(u64*)own = high, *(u64*)(own + a.padded) = low;
            if (k % 64 == 0) a.powers[block_x() * (a.padded / 64) + k / 64] = scale;
        }
    }
}

struct Draft {
    int* index;      // [B]
    int* start;      // [S, B]
    int* width;      // [S, B]
    int* positions;  // [S, 3, B]
    const int* accepted;
    const int* row_start;
    const int* row_positions;  // [3, B * W]
    i64 B, W, S, limit;
};

// A thread a row: its last true column, and the columns that drafting adds behind it.
KERNEL(draft_rows, Draft, 32, 1) {
    after_predecessors();
    const int b = (int)block_x() * threads() + thread(), B = (int)a.B;
    if (b >= B) return;
    const int n = a.accepted[b];
    a.index[b] = b * (int)a.W + n;
    for (int s = 0; s < a.S; ++s) {
        const i64 ordinal = (i64)a.row_start[b] + n + 1 + s;
        a.start[s * B + b] = (int)(ordinal < a.limit ? ordinal : a.limit - 1);
        a.width[s * B + b] = ordinal < a.limit;
        for (int axis = 0; axis < 3; ++axis)
            a.positions[(3 * s + axis) * B + b] = a.row_positions[((i64)axis * B + b) * a.W + n] + 1 + s;
    }
}

struct Panels {
    const u16* x;
    const u16* norm;
    u16* out;  // [padded / 8][room][8]
    double eps;
    i64 K, padded, room, width;
};

// Blocks (columns, parts of `width`, a multiple of 64): norm1(x, norm), or x, padded with zeros, in the order that wide.cuh
// takes columns in. A norm needs the whole column, so then there is one part.
KERNEL(panels, Panels, 512, 1) {
    DYNAMIC_SHARED(shared);
    __shared__ float room[32];
    after_predecessors();
    const int K = (int)a.K, column = block_x(), begin = block_y() * (int)a.width, end = minimum(begin + (int)a.width, (int)a.padded);
    const u16* x = a.x + (i64)column * K;
    u16* own = (u16*)shared;  // [width], and then the norm's
    float square = 0;
#pragma unroll 2
    for (int k = begin + 8 * thread(); k < end; k += 8 * threads()) {
        const Word4 v = load8(x, k, K, K % 8 == 0);
        *(Word4*)(own + k - begin) = v;
        if (a.norm) *(Word4*)(own + a.width + k) = load8(a.norm, k, K, K % 8 == 0);
        float f[8];
        unpack8(f, v);
#pragma unroll
        for (int i = 0; i < 8; ++i) square += f[i] * f[i];
    }
    if (a.norm) {
        const float inverse = 1.0f / sqrtf(sum_block(square, room) / K + (float)a.eps);
        for (int k = 8 * thread(); k < end; k += 8 * threads()) *(Word4*)(own + k) = normed8(own, own + a.width, k, end, inverse);
    }
    sync();
    for (int i = thread(); i < (end - begin) / 8; i += threads()) {
        const u16* from = own + i / 8 * 64 + i % 8 / 4 * 8 + i % 4;  // an eight of a lane, a pair of it
        u32 v[4];
#pragma unroll
        for (int t = 0; t < 4; ++t) v[t] = from[16 * t] | (u32)from[16 * t + 4] << 16;
        *(Word4*)(a.out + ((begin / 8 + i) * a.room + column) * 8) = {v[0], v[1], v[2], v[3]};
    }
}
