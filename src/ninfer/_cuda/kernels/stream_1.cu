// Products of one column; see single.cuh.
#include "single.cuh"

#define WORK single<f.value>(a, job, shared)
STREAMS(stream_1, WORK)
// Small kernels come after these, for which a quarter of the registers is left; or half, where fewer than 512 threads could
// do without them.
STREAM_MIXED(stream_1_BF16_Q4_Q5, Q4, Q5, 256, 2, WORK)
STREAM_MIXED(stream_1_BF16_Q6, Q6, BF16, 256, 2, WORK)
STREAM_MIXED(stream_1_BF16_Q8, Q8, BF16, LEAVING, 1, WORK)
STREAM_MIXED(stream_1_BF16_NVFP4, NVFP4, BF16, 256, 2, WORK)
STREAM_MIXED(stream_1_BF16_FP8, FP8, BF16, LEAVING, 1, WORK)
