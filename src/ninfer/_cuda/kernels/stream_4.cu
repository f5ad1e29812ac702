// Products of up to 4 columns; see stream.cuh.
#include "stream.cuh"

STREAMS(4)
