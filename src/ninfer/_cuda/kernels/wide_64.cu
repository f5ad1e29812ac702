// Products of up to 64 columns; see wide.cuh.
#include "wide.cuh"

KERNEL(wide_64, Stream, 512, 1) { wide<8>(a); }
