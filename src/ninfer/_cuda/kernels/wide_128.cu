// Products of up to 128 columns; see wide.cuh.
#include "wide.cuh"

KERNEL(wide_128, Stream, 256, 1) { wide<16>(a); }
