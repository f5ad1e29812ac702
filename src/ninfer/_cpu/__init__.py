"""Ops and Device on the host: NumPy and Numba."""
