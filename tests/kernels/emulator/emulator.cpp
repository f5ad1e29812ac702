// Runs a kernel's blocks one after another, or as many together as asked for, and the threads of a block as fibers. x86-64.
//
// Blocks that run together take turns where all that a block can do is to look for what others do. What is __shared__ by
// declaration is one for all of them, so such kernels may keep there only what is the same in all.
#include "ptx.cuh"

#include <memory>

namespace emulator {

static void* scheduler;
static void (*kernel)(const void*);
static const void* kernel_args;
static const char* failure;

// Save the callee's registers on this stack, store it in *save, go on on the other.
extern "C" void emulator_switch(void** save, void* to);
asm(R"(
.text
.globl emulator_switch
emulator_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
)");

void yield() { emulator_switch(&fibers[thread].stack_pointer, scheduler); }

void fail(const char* message) {
    failure = message;
    fibers[thread].done = true;
    yield();
    std::abort();
}

static void entry() {
    kernel(kernel_args);
    Fiber& f = fibers[thread];
    if (!f.groups.empty() || !f.open.empty()) {
        for (auto& group : f.groups)
            if (!group.empty()) failure = "a thread ended with copies on their way";
        if (!f.open.empty()) failure = "a thread ended with copies not committed";
    }
    f.done = true;
    yield();
    std::abort();
}

static void prepare(Fiber& f) {
    const size_t size = 64 << 10;
    if (f.stack.empty()) f.stack.resize(size);
    auto top = (uintptr_t)(f.stack.data() + size) / 16 * 16;
    auto words = (void**)top;
    words[-1] = nullptr;
    words[-2] = (void*)entry;
    for (int i = 3; i <= 8; ++i) words[-i] = nullptr;
    f.stack_pointer = words - 8;
    f.done = f.waited = false;
    f.parity = f.arrivals = 0;
    f.open.clear();
    f.groups.clear();
}

// Memory that kernels write, as a kernel finds it that starts as early as it may.
struct Region {
    u8* at;
    const u8* past;
    size_t size;
    std::vector<u8> now;
};
static std::vector<Region> regions;

static void go_back() {
    for (auto& r : regions) {
        r.now.assign(r.at, r.at + r.size);
        std::memcpy(r.at, r.past, r.size);
    }
}

static void return_to_now() {
    for (auto& r : regions) {
        if (std::memcmp(r.at, r.past, r.size)) failure = "a write before the kernels before this one have ended";
        std::memcpy(r.at, r.now.data(), r.size);
    }
}

// A block that is not running.
struct Block {
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    std::vector<u8> room;
    u8* shared;
    int at[3], barrier_arrived, barrier_generation, alive;

    void begin(long id, int size) {
        fibers.resize(block_size), warps.assign((block_size + 31) / 32, {}), room.assign(size + 256, 0xFF);
        barrier_arrived = barrier_generation = 0, alive = block_size;
        shared = (u8*)(((uintptr_t)room.data() + 127) / 128 * 128);
        at[0] = id % grid[0], at[1] = id / grid[0] % grid[1], at[2] = id / grid[0] / grid[1];
        for (auto& f : fibers) prepare(f);
    }
    // Trade places with the one that runs.
    void exchange() {
        std::swap(fibers, emulator::fibers), std::swap(warps, emulator::warps), std::swap(shared, dynamic_shared);
        std::swap(barrier_arrived, emulator::barrier_arrived), std::swap(barrier_generation, emulator::barrier_generation);
        for (int i = 0; i < 3; ++i) std::swap(at[i], block[i]);
    }
};

static std::vector<std::unique_ptr<Block>> places;  // stacks are kept from launch to launch
static std::vector<std::unique_ptr<Block>> running;
static std::vector<long> arrivals;  // at the barriers of pairs, of each block of a launch

static long own_block() { return block[0] + (long)grid[0] * (block[1] + (long)grid[1] * block[2]); }
long pair_arrivals(int other) { return arrivals[own_block() ^ other]; }
void pair_arrived() { ++arrivals[own_block()], ++events; }
u8* other_shared() {
    for (auto& b : running)  // the one of them that runs has no shared memory of its own meanwhile
        if (b->shared && (b->at[0] ^ 1) == block[0] && b->at[1] == block[1] && b->at[2] == block[2] && pair_arrivals(1)) return b->shared;
    return nullptr;
}

// Go on with the block that runs until it has ended (no thread is left alive) or only looks for others.
static const char* run_block(bool backwards, int& alive) {
    while (alive) {
        long before = events;
        looked = false;
        bool waiting = !predecessors_ended;
        for (int i = 0; i < block_size; ++i) {
            thread = backwards ? block_size - 1 - i : i;
            if (fibers[thread].done) continue;
            emulator_switch(&scheduler, fibers[thread].stack_pointer);
            if (failure) return failure;
            if (fibers[thread].done) --alive, ++events;
            if (!predecessors_ended && fibers[thread].done && !fibers[thread].waited) return "a thread ended before the kernels before it";
            waiting = waiting && fibers[thread].waited;
        }
        if (waiting) {
            return_to_now();
            if (failure) return failure;
            predecessors_ended = true;
            ++events;
        }
        if (events == before && looked) return nullptr;
        if (events == before) return "threads wait for others that never come";
    }
    return nullptr;
}

}  // namespace emulator

// From now on, what is read before a kernel waits for the kernels before it is `past` instead of what is at `at`; n regions.
extern "C" void emulator_past(int n, u8* const* at, const u8* const* past, const long* sizes) {
    emulator::regions.clear();
    for (int i = 0; i < n; ++i) emulator::regions.push_back({at[i], past[i], (size_t)sizes[i], {}});
}

// Launch; returns null or what went wrong. `order` 1 runs threads and blocks from the last to the first. So many blocks
// run `together`.
extern "C" const char* emulator_launch(void (*kernel)(const void*), const int* grid, int block, int shared, const void* args,
                                       int order, int together) {
    using namespace emulator;
    emulator::kernel = kernel;
    kernel_args = args;
    block_size = block;
    failure = nullptr;
    patient = together > 1;
    std::memcpy(emulator::grid, grid, 12);
    const long blocks = (long)grid[0] * grid[1] * grid[2];
    running.clear();
    arrivals.assign(blocks, 0);
    long next = 0, idle = 0;
    while (next < blocks || !running.empty()) {
        if (next < blocks && (int)running.size() < together) {
            if (places.empty()) places.push_back(std::make_unique<Block>());
            running.push_back(std::move(places.back()));
            places.pop_back();
            running.back()->begin(order ? blocks - 1 - next : next, shared);
            ++next;
            predecessors_ended = regions.empty();
            if (!predecessors_ended) go_back();
            running.front().swap(running.back());  // the newest first
        }
        const long before = events;
        for (size_t i = 0; i < running.size();) {
            Block& b = *running[i];
            b.exchange();
            auto error = run_block(order, b.alive);
            b.exchange();
            if (error) return error;
            if (!predecessors_ended) return "a block looks for others before the kernels before it have ended";
            if (b.alive) {
                ++i;
                if ((int)running.size() < together && next < blocks) break;  // others may begin
                continue;
            }
            for (int j = 0; j < 64; ++j)
                if (b.shared[shared + j] != 0xFF) return "a write beyond shared memory";
            places.push_back(std::move(running[i]));
            running.erase(running.begin() + i);
            if (next < blocks) break;
        }
        if (events != before) idle = 0;
        else if (++idle > 100000) return "blocks wait for others that never come";
    }
    return nullptr;
}
