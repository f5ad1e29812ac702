// Products of one column; see single.cuh.
#include "single.cuh"

STREAMS(stream_1, single<f.value>(a, job, shared))
