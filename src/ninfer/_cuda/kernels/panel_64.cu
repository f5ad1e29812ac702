// Products of 64 columns at a time; see panel.cuh.
#include "panel.cuh"

PANEL(BF16, 8)
PANEL(Q4, 8)
PANEL(Q5, 8)
PANEL(Q6, 8)
PANEL(Q8, 8)
PANEL(NVFP4, 8)
PANEL(FP8, 8)
