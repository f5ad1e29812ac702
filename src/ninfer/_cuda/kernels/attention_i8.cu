// Attention over planes of int8.
#include "attention.cuh"

ATTENTION(64, Int8Plane, 2)
ATTENTION(128, Int8Plane, 2)
ATTENTION(256, Int8Plane, 2)
