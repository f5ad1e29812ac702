// Products of up to 16 columns; see stream.cuh.
#include "stream.cuh"

STREAMS(stream_16, (stream<4, f.value>(a, job, shared)))
