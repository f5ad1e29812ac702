// Attention over planes of bf16.
#include "attention.cuh"

ATTENTION(64, Bf16Plane, 1)
ATTENTION(128, Bf16Plane, 1)
ATTENTION(256, Bf16Plane, 1)
