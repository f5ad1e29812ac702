// Products of up to 8 columns; see stream.cuh.
#include "stream.cuh"

STREAMS(stream_8, (stream<2, f.value>(a, job, shared)))
