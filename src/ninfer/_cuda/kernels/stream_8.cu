// Products of up to 8 columns; see stream.cuh.
#include "stream.cuh"

#define WORK (stream<2, f.value>(a, job, shared))
STREAMS(stream_8, WORK)
STREAM_MIXED(stream_8_BF16_Q4_Q5, Q4, Q5, ALL, 1, WORK)
STREAM_MIXED(stream_8_BF16_FP8, FP8, BF16, LEAVING, 1, WORK)
