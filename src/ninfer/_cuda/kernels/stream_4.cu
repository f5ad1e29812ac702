// Products of up to 4 columns; see stream.cuh.
#include "stream.cuh"

STREAMS(stream_4, (stream<1, f.value>(a, job, shared)))
