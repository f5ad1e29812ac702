// Products of up to 16 columns; see stream.cuh. A kernel a format, since one for all of them would hold the registers of
// the largest; each takes rows in bf16 beside its own.
#include "stream.cuh"

STREAM(BF16, 16)
STREAM(FP32, 16)
STREAM(Q4, 16)
STREAM(Q5, 16)
STREAM(Q6, 16)
STREAM(Q8, 16)
STREAM(NVFP4, 16)
STREAM(FP8, 16)
