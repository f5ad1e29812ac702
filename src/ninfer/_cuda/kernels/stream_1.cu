// Products of one column; see single.cuh.
#include "single.cuh"

#define SINGLE(name, known) \
    KERNEL(stream_1##name, Stream, 512, 1) { single_jobs<known>(a); }
SINGLE(, FORMATS)
SINGLE(_BF16, BF16)
SINGLE(_Q4, Q4)
SINGLE(_Q5, Q5)
SINGLE(_Q6, Q6)
SINGLE(_Q8, Q8)
SINGLE(_NVFP4, NVFP4)
SINGLE(_FP8, FP8)
