// Attention over planes of bf16.
#include "attention.cuh"

ATTENTION(64, Bf16Plane)
ATTENTION(128, Bf16Plane)
ATTENTION(256, Bf16Plane)
