// Products of one column; see single.cuh.
#include "single.cuh"

STREAMS(stream_1, single<f.value>(a, job, shared))

// Rows of bf16 beside those of another format: the inputs of Gated DeltaNet, whose step comes after them.
#define BESIDE_BF16(F)                                         \
    KERNEL(stream_1_##F##_BF16, Stream, LEAVING, 1) {          \
        DYNAMIC_SHARED(shared);                                \
        const Job& job = own_job(a);                           \
        if ((int)job.format == BF16) single<BF16>(a, job, shared);\
        else single<F>(a, job, shared);                        \
    }
BESIDE_BF16(Q4)
BESIDE_BF16(Q5)
BESIDE_BF16(Q6)
BESIDE_BF16(Q8)
BESIDE_BF16(NVFP4)
BESIDE_BF16(FP8)
