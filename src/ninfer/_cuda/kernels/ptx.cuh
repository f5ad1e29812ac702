// The machine underneath: every instruction the language has no word for, and the words the kernels are written in.
// The kernels use nothing else of CUDA, so replacing this file is enough to run them elsewhere.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

#ifndef INFINITY
#define INFINITY __int_as_float(0x7F800000)
#endif

#define KERNEL(name, Args, threads, blocks) \
    extern "C" __global__ void __launch_bounds__(threads, blocks) name(const __grid_constant__ Args a)
// Blocks 2 i and 2 i + 1 run together, where there are such pairs.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define BLOCK_PAIRS 1
#define KERNEL_OF_PAIRS(name, Args, threads, blocks) \
    extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(threads, blocks) name(const __grid_constant__ Args a)
#endif
#define DEVICE __device__ __forceinline__
#define DEVICE_CALL __device__ __noinline__
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) u8 name[]

DEVICE int thread() { return threadIdx.x; }
DEVICE int threads() { return blockDim.x; }
DEVICE int block_x() { return blockIdx.x; }
DEVICE int block_y() { return blockIdx.y; }
DEVICE int block_z() { return blockIdx.z; }
DEVICE int grid_x() { return gridDim.x; }

DEVICE void sync() { __syncthreads(); }
DEVICE void sync_warp() { __syncwarp(); }
DEVICE void fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
DEVICE int atomic_add(int* p, int v) { return atomicAdd(p, v); }
DEVICE float shuffle_xor(float v, int mask) { return __shfl_xor_sync(~0u, v, mask); }
DEVICE int from_lane(int v, int lane) { return __shfl_sync(~0u, v, lane); }
DEVICE bool any_lane(bool v) { return __any_sync(~0u, v); }
DEVICE u32 most_of_lanes(u32 v) { return __reduce_max_sync(~0u, v); }
DEVICE u32 least_of_lanes(u32 v) { return __reduce_min_sync(~0u, v); }

// -- pairs of blocks
//
// A block may write into the other's shared memory when both have begun, and look at what was written there when both have
// said so; neither ends before.
DEVICE void pair_arrive() {
#if BLOCK_PAIRS
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
DEVICE void pair_wait() {
#if BLOCK_PAIRS
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// To where p is in the other block's shared memory.
DEVICE void store_other(float* p, float v) {
#if BLOCK_PAIRS
    u32 rank, other;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(other) : "r"((u32)__cvta_generic_to_shared(p)), "r"(rank ^ 1));
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(other), "f"(v) : "memory");
#endif
}

// -- kernels that overlap
//
// Every block of every kernel waits for the kernels before its own before it writes anything, reads what they write, or ends.
// What comes before the wait runs beside them. A product lets the next kernel in after its own wait, so all that was written
// before the last product is there for whatever has started; nothing newer may be read before a wait, as small kernels let
// the next one in at once, and several of them may be under way together.

// Lets the next kernel's blocks come in, into places that are free, once all blocks of this one have.
DEVICE void release_successors() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

DEVICE void await_predecessors() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// What small kernels do.
DEVICE void after_predecessors() {
    release_successors();
    await_predecessors();
}

// The same value; what is computed from it stays where it is written, so a loop's addresses do not all take registers.
DEVICE int here(int v) {
    asm volatile("" : "+r"(v));
    return v;
}

// Four floats, 16-byte aligned, as they are in device memory now.
DEVICE void load_fresh(float (&v)[4], const float* p) {
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "l"(p) : "memory");
}

DEVICE float load_fresh(const float* p) {
    float v;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
    return v;
}
DEVICE int load_fresh(const int* p) {
    int v;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

// -- numbers

DEVICE u32 bits(float v) { return __float_as_uint(v); }
DEVICE float from_bits(u32 v) { return __uint_as_float(v); }

// Two floats as bf16, `lo` in the low half.
DEVICE u32 pack(float lo, float hi) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}

// a * b + c on two bf16, rounded once.
DEVICE u32 fma2(u32 a, u32 b, u32 c) {
    u32 r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}

DEVICE float from_half(u16 v) {
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(v));
    return r;
}

// Either half of two.
DEVICE float low_half(u32 v) {
    float r;
    asm("{\n\t.reg .b16 l, h;\n\tmov.b32 {l, h}, %1;\n\tcvt.f32.f16 %0, l;\n\t}" : "=f"(r) : "r"(v));
    return r;
}
DEVICE float high_half(u32 v) {
    float r;
    asm("{\n\t.reg .b16 l, h;\n\tmov.b32 {l, h}, %1;\n\tcvt.f32.f16 %0, h;\n\t}" : "=f"(r) : "r"(v));
    return r;
}

DEVICE u16 to_half(float v) {
    u16 r;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(v));
    return r;
}

// 2^v within two units in the last place; what would be subnormal is 0.
DEVICE float power2(float v) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}

// a & b ^ c
DEVICE u32 and_xor(u32 a, u32 b, u32 c) {
    u32 r;
    asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}

// 1 / v and 1 / sqrt(v) within two units in the last place.
DEVICE float reciprocal(float v) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}
DEVICE float inverse_root(float v) {
    float r;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}

// a & b | c
DEVICE u32 and_or(u32 a, u32 b, u32 c) {
    u32 r;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}

// Four bytes picked from the eight of (a, b) by the nibbles of `selector`.
DEVICE u32 bytes(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }

// -- asynchronous copies into shared memory

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// 16 bytes, of which the first `valid` are read and the rest are zero. Both addresses are multiples of 16.
DEVICE void copy16(void* dst, const void* src, int valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(dst)), "l"(src), "r"(valid) : "memory");
}

// 16 bytes where `inside`, else zeros. Both addresses are multiples of 16.
DEVICE void copy16_if(void* dst, const void* src, bool inside) {
    asm volatile(
        "{\n\t.reg .pred out;\n\tsetp.eq.u32 out, %2, 0;\n\tcp.async.cg.shared.global [%0], [%1], 16, out;\n\t}" ::"r"(shared_address(dst)),
        "l"(src), "r"((u32)inside)
        : "memory");
}

// Both of what is not read again for long: the second-level cache gives it up first, and keeps what comes by more often,
// code among it. Older compilers make an instruction of it that Hopper refuses.
#if __CUDA_ARCH__ == 900 && (__CUDACC_VER_MAJOR__ > 13 || __CUDACC_VER_MAJOR__ == 13 && __CUDACC_VER_MINOR__ >= 5)
#define FIRST_GIVEN_UP 0x12F0000000000000ull
#endif

DEVICE void copy16_once(void* dst, const void* src, int valid) {
#ifdef FIRST_GIVEN_UP
    asm volatile(
        "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(shared_address(dst)), "l"(src), "r"(valid), "l"(FIRST_GIVEN_UP)
        : "memory");
#else
    copy16(dst, src, valid);
#endif
}

DEVICE void copy16_once_if(void* dst, const void* src, bool inside) {
#ifdef FIRST_GIVEN_UP
    asm volatile(
        "{\n\t.reg .pred out;\n\tsetp.eq.u32 out, %2, 0;\n\tcp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, out, %3;\n\t}" ::"r"(
            shared_address(dst)),
        "l"(src), "r"((u32)inside), "l"(FIRST_GIVEN_UP)
        : "memory");
#else
    copy16_if(dst, src, inside);
#endif
}

// 4 bytes, or zero. Both addresses are multiples of 4.
DEVICE void copy4(void* dst, const void* src, int valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(dst)), "l"(src), "r"(valid) : "memory");
}

DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Returns when all but this thread's `pending` newest groups have arrived.
template <int pending> DEVICE void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory"); }

// -- tensor cores

// c[16 x 8] += a[16 x 16] b[16 x 8]. With g = lane/4, t = lane%4: a0 = rows g, columns 2t, 2t+1; a1 = row g+8; a2, a3 =
// the same at columns + 8; b0 = rows 2t, 2t+1 of column g; b1 = rows + 8; c0, c1 = row g, columns 2t, 2t+1; c2, c3 = row g+8.
DEVICE void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// d = a b + c in the same places.
DEVICE void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, float c0, float c1, float c2, float c3) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(c0), "f"(c1), "f"(c2), "f"(c3));
}

// c[16 x 8] += a[16 x 32] b[32 x 8] in bytes, signed. With g = lane/4, t = lane%4: a0 = row g, columns 4t .. 4t+3; a1 = row
// g+8; a2, a3 = the same at columns + 16; b0 = rows 4t .. 4t+3 of column g; b1 = rows + 16; c as above.
DEVICE void mma(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// c[n][16 rows x 8] += a[16 x 16] b[16 x 8 N8] for each warp of four, b in shared memory as [k / 8][8 N8 columns][8] bf16,
// where panel_fetch has put it, `offset` bytes behind panel_at. Products are worked on while others are prepared: a batch of
// them lies between panel_begin and panel_commit, and until panel_wait says that it is done, its operands stay in their
// registers and b in its place.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define PANELS
DEVICE void panel_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void panel_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// All but the `pending` newest batches are done.
template <int pending> DEVICE void panel_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory"); }

// A place for b takes turns: filled by one panel_fetch, then left by all `warps`. One thread begins.
struct Panel {
    u64 arrived, left;
};
DEVICE void panel_expect(Panel* p, int warps) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n\tmbarrier.init.shared::cta.b64 [%1], %2;\n\tfence.proxy.async.shared::cta;" ::"r"(
                     shared_address(&p->arrived)),
                 "r"(shared_address(&p->left)), "r"(warps)
                 : "memory");
}
DEVICE void await_turn(u64* barrier, int odd) {
    u32 done;
    do asm volatile("{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, p;\n\t}"
                    : "=r"(done)
                    : "r"(shared_address(barrier)), "r"(odd)
                    : "memory");
    while (!done);
}
// Called by all threads: start copying for a turn, when the one before it is over; addresses and size are multiples of 16.
DEVICE void panel_fetch(void* dst, const void* src, int size, Panel* p, int turn) {
    if (thread() == 0) {
        if (turn > 0) await_turn(&p->left, turn - 1 & 1);
        asm volatile(
            "{\n\t.reg .b64 state;\n\tmbarrier.arrive.expect_tx.shared::cta.b64 state, [%2], %3;\n\t"
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %3, [%2];\n\t}" ::"r"(shared_address(dst)),
            "l"(src), "r"(shared_address(&p->arrived)), "r"(size)
            : "memory");
    }
}
DEVICE void panel_arrived(Panel* p, int turn) { await_turn(&p->arrived, turn & 1); }
DEVICE void panel_leave(Panel* p) {
    if (thread() % 32 == 0) asm volatile("{\n\t.reg .b64 state;\n\tmbarrier.arrive.shared::cta.b64 state, [%0];\n\t}" ::"r"(shared_address(&p->left)) : "memory");
}
#define C4(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define C16(n) C4(n), C4(n + 1), C4(n + 2), C4(n + 3)
using PanelAt = u32;
// Its address and the distance of the two halves of k; behind them comes that of eights of columns. All by 16.
template <int N8> DEVICE u32 panel_at(const void* b) { return (shared_address(b) & 0x3FFFF) >> 4 | (u32)(8 * N8) << 16; }
template <int N8> DEVICE void panel_mma(float (&c)[N8][4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b, int offset) {
    const u64 where = (u64)8 << 32 | (b + (u32)(offset / 16));
    if constexpr (N8 == 4)
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
            "{%16, %17, %18, %19}, %20, 1, 1, 1, 0;"
            : C16(0)
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(where));
    else if constexpr (N8 == 8)
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
            : C16(0), C16(4)
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(where));
    else
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "
            "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
            "{%64, %65, %66, %67}, %68, 1, 1, 1, 0;"
            : C16(0), C16(4), C16(8), C16(12)
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(where));
}
#undef C16
#undef C4
#endif

// Four 8 x 8 tiles of bf16; lane 8i + r gives the address of row r of tile i. r[i]: row lane/4, columns 2*(lane%4) and + 1.
DEVICE void load_tiles(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// The same, every tile transposed.
DEVICE void load_tiles_transposed(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}
