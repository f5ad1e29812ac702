// Products of up to 8 columns; see stream.cuh. A kernel a format, since one for all of them would hold the registers of
// the largest; each takes rows in bf16 beside its own.
#include "stream.cuh"

STREAM(BF16, 8)
STREAM(FP32, 8)
STREAM(Q4, 8)
STREAM(Q5, 8)
STREAM(Q6, 8)
STREAM(Q8, 8)
STREAM(NVFP4, 8)
STREAM(FP8, 8)
