// Products of up to 16 columns; see stream.cuh.
#include "stream.cuh"

STREAMS(16)
