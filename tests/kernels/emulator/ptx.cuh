// The kernels' machine, on the host: every thread of a block is a fiber, blocks run one after another, or some by turns.
//
// A fiber runs until it waits for others: at a barrier or in an operation of its whole warp. Asynchronous copies happen
// when they are waited for and not before, shared memory starts as NaN, fibers run in either order: what a kernel forgot
// to wait for shows.
#pragma once
#include <cmath>
#include <cstdint>

#include <cstdlib>
#include <cstring>
#include <vector>



using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

#define KERNEL(name, Args, threads, blocks) extern "C" void name(const Args& a)
#define BLOCK_PAIRS 1
#define KERNEL_OF_PAIRS(name, Args, threads, blocks) \
    extern "C" const int name##_of_pairs = 1;        \
    extern "C" void name(const Args& a)
#define DEVICE inline
#define DEVICE_CALL inline
#define DYNAMIC_SHARED(name) u8* name = emulator::dynamic_shared
#define __shared__ static
#define __restrict__

namespace emulator {

// Its bytes are read when it starts, and there when it is waited for.
struct Copy {
    void* dst;
    u8 bytes[16];
    int size;

    Copy(void* dst, const void* src, int size, int valid) : dst(dst), bytes{}, size(size) {
        if (valid) std::memcpy(bytes, src, valid);
    }
};

struct Warp {
    alignas(16) u32 slot[2][32][12];
    int arrived[2] = {0, 0};
};

struct Fiber {
    void* stack_pointer = nullptr;
    std::vector<u8> stack;
    bool done = false, waited = false;
    int parity = 0, arrivals = 0;  // arrivals: at the barrier of a pair
    std::vector<Copy> open;
    std::vector<std::vector<Copy>> groups;
};

inline int thread, block_size, block[3], grid[3];
inline u8* dynamic_shared;
inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline int barrier_arrived, barrier_generation;
inline long events;  // arrivals anywhere: a round of all threads without one never ends

inline bool patient, looked;  // several blocks are under way; one of this block's threads looks for what others do

void yield();
[[noreturn]] void fail(const char* message);

// A thread looks whether another block has done something; other blocks may, before it looks again.
inline void look() {
    if (!patient) return;
    looked = true;
    yield();
}

// The pair's other block: its shared memory, if it has begun and not ended; threads of either that have arrived, in all.
u8* other_shared();
long pair_arrivals(int other);
void pair_arrived();

inline void barrier() {
    int generation = barrier_generation;
    ++events;
    if (++barrier_arrived == block_size) {
        barrier_arrived = 0;
        ++barrier_generation;
        return;
    }
    while (barrier_generation == generation) yield();
}

// Give `n` words to the warp; afterwards every lane's words are readable until the warp's operation after next.
inline u32 (*exchange(const u32* words, int n))[12] {
    Fiber& f = fibers[thread];
    Warp& w = warps[thread / 32];
    int parity = f.parity;
    f.parity ^= 1;
    ++events;
    if (w.arrived[parity] == 32) w.arrived[parity] = 0;
    std::memcpy(w.slot[parity][thread % 32], words, 4 * n);
    ++w.arrived[parity];
    while (w.arrived[parity] % 32) yield();
    return w.slot[parity];
}

inline void aligned(const void* p, int n, const char* what) {
    if ((uintptr_t)p % n) fail(what);
}

inline void arrive(const Copy& c) { std::memcpy(c.dst, c.bytes, c.size); }

// Returns when the kernels before this one have ended: until then, memory is what it was before the last product.
inline bool predecessors_ended;
inline void await() {
    fibers[thread].waited = true;
    while (!predecessors_ended) yield();
}

}  // namespace emulator

DEVICE int thread() { return emulator::thread; }
DEVICE int threads() { return emulator::block_size; }
DEVICE int block_x() { return emulator::block[0]; }
DEVICE int block_y() { return emulator::block[1]; }
DEVICE int block_z() { return emulator::block[2]; }
DEVICE int grid_x() { return emulator::grid[0]; }

DEVICE void sync() { emulator::barrier(); }
DEVICE void sync_warp() { emulator::exchange(nullptr, 0); }
DEVICE void fence() {}
DEVICE void pair_arrive() {
    ++emulator::fibers[thread()].arrivals;
    emulator::pair_arrived();
}
DEVICE void pair_wait() {
    const long wanted = (long)emulator::fibers[thread()].arrivals * threads();
    while (emulator::pair_arrivals(0) < wanted) emulator::yield();
    while (emulator::pair_arrivals(1) < wanted) emulator::look();
}
DEVICE void store_other(float* p, float v) {
    u8* other = emulator::other_shared();
    if (!other) emulator::fail("a write into a block that is not there");
    std::memcpy(other + ((u8*)p - emulator::dynamic_shared), &v, 4);
}
DEVICE int atomic_add(int* p, int v) {
    int old = *p;
    *p += v;
    return old;
}
DEVICE void release_successors() {}
DEVICE void await_predecessors() { emulator::await(); }
DEVICE void after_predecessors() { emulator::await(); }
DEVICE int here(int v) { return v; }
DEVICE void load_fresh(float (&v)[4], const float* p) {
    emulator::aligned(p, 16, "load_fresh from a misaligned address");
    std::memcpy(v, p, 16);
}
DEVICE float load_fresh(const float* p) { return *p; }
DEVICE int load_fresh(const int* p) {
    emulator::look();
    return *p;
}

DEVICE u32 bits(float v) {
    u32 r;
    std::memcpy(&r, &v, 4);
    return r;
}
DEVICE float from_bits(u32 v) {
    float r;
    std::memcpy(&r, &v, 4);
    return r;
}
DEVICE float shuffle_xor(float v, int mask) {
    u32 w = bits(v);
    return from_bits(emulator::exchange(&w, 1)[thread() % 32 ^ mask][0]);
}
DEVICE int from_lane(int v, int lane) {
    u32 w = (u32)v;
    return (int)emulator::exchange(&w, 1)[lane][0];
}

DEVICE u32 most_of_lanes(u32 v) {
    auto all = emulator::exchange(&v, 1);
    for (int i = 0; i < 32; ++i) v = all[i][0] > v ? all[i][0] : v;
    return v;
}
DEVICE u32 least_of_lanes(u32 v) { return ~most_of_lanes(~v); }
DEVICE bool any_lane(bool v) {
    u32 w = v;
    auto all = emulator::exchange(&w, 1);
    for (int i = 0; i < 32; ++i) w |= all[i][0];
    return w;
}

// Round to nearest, ties to even, from double: one rounding of an exact product or sum.
DEVICE u32 round_bf16(double v) {
    if (v != v) return 0x7FC0;
    float f = (float)v;
    u32 b = bits(f);
    if ((b & 0xFFFF) == 0x8000 && (double)f != v)  // a tie that v itself is not
        return (b >> 16) + (std::fabs(v) > std::fabs((double)f));
    return (b + 0x7FFF + (b >> 16 & 1)) >> 16;
}
DEVICE u32 pack(float lo, float hi) { return round_bf16(lo) | round_bf16(hi) << 16; }
DEVICE u32 fma2(u32 a, u32 b, u32 c) {
    auto one = [](u32 x, u32 y, u32 z) {
        return round_bf16((double)from_bits(x << 16) * from_bits(y << 16) + from_bits(z << 16));
    };
    return one(a & 0xFFFF, b & 0xFFFF, c & 0xFFFF) | one(a >> 16, b >> 16, c >> 16) << 16;
}
DEVICE u32 and_xor(u32 a, u32 b, u32 c) { return a & b ^ c; }
DEVICE u32 and_or(u32 a, u32 b, u32 c) { return a & b | c; }
DEVICE float from_half(u16 v) {
    int e = v >> 10 & 31, m = v & 1023;
    float f = e == 0 ? std::ldexp((float)m, -24) : e == 31 ? (m ? NAN : INFINITY) : std::ldexp((float)(m + 1024), e - 25);
    return v >> 15 ? -f : f;
}
DEVICE float low_half(u32 v) { return from_half((u16)v); }
DEVICE float high_half(u32 v) { return from_half((u16)(v >> 16)); }
DEVICE u16 to_half(float v) {  // of a number >= 0
    if (v == 0.0f) return 0;
    int e;
    std::frexp(v, &e);
    e = e - 1 < -14 ? -14 : e - 1;
    int word = ((e + 14) << 10) + (int)std::nearbyint(std::ldexp((double)v, 10 - e));
    return word > 0x7C00 ? 0x7C00 : word;
}
DEVICE float reciprocal(float v) { return 1.0f / v; }
DEVICE float inverse_root(float v) { return 1.0f / std::sqrt(v); }
DEVICE float power2(float v) { return std::exp2(v); }
DEVICE u32 bytes(u32 a, u32 b, u32 selector) {
    u64 all = a | (u64)b << 32;
    u32 r = 0;
    for (int i = 0; i < 4; ++i) r |= (u32)(all >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return r;
}

DEVICE void copy16(void* dst, const void* src, int valid) {
    emulator::aligned(dst, 16, "copy16 to a misaligned address");
    emulator::aligned(src, 16, "copy16 from a misaligned address");
    emulator::fibers[thread()].open.push_back({dst, src, 16, valid});
}
DEVICE void copy4(void* dst, const void* src, int valid) {
    emulator::aligned(dst, 4, "copy4 to a misaligned address");
    emulator::aligned(src, 4, "copy4 from a misaligned address");
    emulator::fibers[thread()].open.push_back({dst, src, 4, valid});
}
DEVICE void copy16_if(void* dst, const void* src, bool inside) { copy16(dst, inside ? src : (void*)0, inside ? 16 : 0); }
DEVICE void copy16_once(void* dst, const void* src, int valid) { copy16(dst, src, valid); }
DEVICE void copy16_once_if(void* dst, const void* src, bool inside) { copy16_if(dst, src, inside); }
DEVICE void copies_commit() {
    auto& f = emulator::fibers[thread()];
    f.groups.push_back(std::move(f.open));
    f.open.clear();
}
template <int pending> DEVICE void copies_wait() {
    auto& groups = emulator::fibers[thread()].groups;
    while ((int)groups.size() > pending) {
        for (auto& c : groups.front()) emulator::arrive(c);
        groups.erase(groups.begin());
    }
}

DEVICE void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    u32 words[6] = {a0, a1, a2, a3, b0, b1};
    auto all = emulator::exchange(words, 6);
    int lane = thread() % 32, g = lane / 4, t = lane % 4;
    auto half = [](u32 pair, int i) { return from_bits(i ? pair & 0xFFFF0000u : pair << 16); };
    for (int i = 0; i < 4; ++i) {
        int row_high = i / 2, column = 2 * t + i % 2;
        double sum = c[i];
        for (int k = 0; k < 16; ++k) {
            float a = half(all[4 * g + k % 8 / 2][row_high + 2 * (k / 8)], k % 2);
            float b = half(all[4 * column + k % 8 / 2][4 + k / 8], k % 2);
            sum += (double)a * b;
        }
        c[i] = (float)sum;
    }
}
DEVICE void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, float c0, float c1, float c2, float c3) {
    d[0] = c0, d[1] = c1, d[2] = c2, d[3] = c3;
    mma(d, a0, a1, a2, a3, b0, b1);
}
DEVICE void mma(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    u32 words[6] = {a0, a1, a2, a3, b0, b1};
    auto all = emulator::exchange(words, 6);
    int lane = thread() % 32, g = lane / 4, t = lane % 4;
    auto byte = [](u32 word, int i) { return (int)(signed char)(word >> 8 * i); };
    for (int i = 0; i < 4; ++i) {
        int row_high = i / 2, column = 2 * t + i % 2;
        for (int k = 0; k < 32; ++k)
            c[i] += byte(all[4 * g + k % 16 / 4][row_high + 2 * (k / 16)], k % 4) * byte(all[4 * column + k % 16 / 4][4 + k / 16], k % 4);
    }
}
DEVICE void tiles(u32 (&r)[4], const void* row, bool transposed) {
    emulator::aligned(row, 16, "load_tiles from a misaligned address");
    u32 words[2] = {(u32)(uintptr_t)row, (u32)((uintptr_t)row >> 32)};
    auto all = emulator::exchange(words, 2);
    int lane = thread() % 32;
    auto at = [&](int tile, int i, int j) {
        auto p = (const u16*)(uintptr_t)(all[8 * tile + i][0] | (u64)all[8 * tile + i][1] << 32);
        return p[j];
    };
    for (int i = 0; i < 4; ++i) {
        int x = lane / 4, y = 2 * (lane % 4);
        r[i] = transposed ? at(i, y, x) | (u32)at(i, y + 1, x) << 16 : at(i, x, y) | (u32)at(i, x, y + 1) << 16;
    }
    sync_warp();  // others may write the rows only when every lane has read them
}
DEVICE void load_tiles(u32 (&r)[4], const void* row) { tiles(r, row, false); }
DEVICE void load_tiles_transposed(u32 (&r)[4], const void* row) { tiles(r, row, true); }
