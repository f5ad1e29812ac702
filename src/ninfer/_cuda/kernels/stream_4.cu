// Products of up to 4 columns where some of the formats are coded; see stream.cuh.
#include "stream.cuh"

#define WORK (stream<1, f.value>(a, job, shared))
STREAMS_CODED(stream_4, WORK)
STREAM_MIXED(stream_4_BF16_Q4_Q5, Q4, Q5, ALL, 1, WORK)
