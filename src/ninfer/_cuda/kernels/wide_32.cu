// Products of up to 32 columns; see wide.cuh.
#include "wide.cuh"

KERNEL(wide_32, Stream, 512, 1) { wide<4>(a); }
