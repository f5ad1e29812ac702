// Products of one column; see single.cuh.
#include "single.cuh"

STREAMS(stream_1, single<f.value>(a, job, shared))

// Formats that recipes put side by side, in the inputs of mixers. Small kernels come after them, for which a quarter of the
// registers is left; or half, where fewer than 512 threads could do without them.
#define BESIDE(name, F, G, threads, blocks)                                          \
    KERNEL(stream_1_##name, Stream, threads, blocks) {                               \
        DYNAMIC_SHARED(shared);                                                      \
        const Job& job = own_job(a);                                                 \
        if ((int)job.format == F) single<F>(a, job, shared);                         \
        else if (G == BF16 || (int)job.format == BF16) single<BF16>(a, job, shared); \
        else single<G>(a, job, shared);                                              \
    }
BESIDE(BF16_Q4_Q5, Q4, Q5, 256, 2)
BESIDE(BF16_Q6, Q6, BF16, 256, 2)
BESIDE(BF16_Q8, Q8, BF16, LEAVING, 1)
BESIDE(BF16_NVFP4, NVFP4, BF16, 256, 2)
BESIDE(BF16_FP8, FP8, BF16, LEAVING, 1)
