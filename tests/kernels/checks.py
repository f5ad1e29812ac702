"""What the tests of CUDA Ops compare with."""

from __future__ import annotations

import numpy as np
from ops.harness import Array, Lab

from ninfer.device import Buffer


def close(got: Array, want: Array, relative: float = 4e-3) -> None:
    """Finite, and within a relative L2 error (4e-3 is what rounding operands and results to bf16 costs)."""
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    error = np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)
    assert error <= relative, f"{error:.2e} > {relative:.1e}"


def poison(lab: Lab, nbytes: int) -> Buffer:
    """Scratch that holds NaN of every type."""
    return lab.put(np.full(nbytes, 0xFF), "u8")
