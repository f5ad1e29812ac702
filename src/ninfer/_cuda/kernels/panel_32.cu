// Products of 32 columns at a time; see panel.cuh.
#include "panel.cuh"

PANEL(BF16, 4)
PANEL(Q4, 4)
PANEL(Q5, 4)
PANEL(Q6, 4)
PANEL(Q8, 4)
PANEL(NVFP4, 4)
PANEL(FP8, 4)
