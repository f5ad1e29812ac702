// Products of up to 8 columns; see stream.cuh.
#include "stream.cuh"

STREAMS(8)
