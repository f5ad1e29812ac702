// Runs a kernel's blocks one after another and the threads of a block as fibers. x86-64.
#include "ptx.cuh"

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
    f.parity = 0;
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

static const char* run_block(bool backwards) {
    for (auto& f : fibers) prepare(f);
    for (auto& w : warps) w.arrived[0] = w.arrived[1] = 0;
    barrier_arrived = 0;
    predecessors_ended = regions.empty();
    if (!predecessors_ended) go_back();
    int alive = block_size;
    while (alive) {
        long before = events;
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

// Launch; returns null or what went wrong. `order` 1 runs threads and blocks from the last to the first.
extern "C" const char* emulator_launch(void (*kernel)(const void*), const int* grid, int block, int shared, const void* args,
                                       int order) {
    using namespace emulator;
    emulator::kernel = kernel;
    kernel_args = args;
    block_size = block;
    failure = nullptr;
    std::memcpy(emulator::grid, grid, 12);
    fibers.resize(block);
    warps.assign((block + 31) / 32, {});
    std::vector<u8> room(shared + 256);
    dynamic_shared = (u8*)(((uintptr_t)room.data() + 127) / 128 * 128);
    long blocks = (long)grid[0] * grid[1] * grid[2];
    for (long i = 0; i < blocks; ++i) {
        long id = order ? blocks - 1 - i : i;
        emulator::block[0] = id % grid[0];
        emulator::block[1] = id / grid[0] % grid[1];
        emulator::block[2] = id / grid[0] / grid[1];
        std::memset(room.data(), 0xFF, room.size());
        if (auto error = run_block(order)) return error;
        for (int j = 0; j < 64; ++j)
            if (dynamic_shared[shared + j] != 0xFF) return "a write beyond shared memory";
    }
    return nullptr;
}
