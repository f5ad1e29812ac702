"""Loops over stored words, compiled by Numba and parallel over pieces. Imported when a conversion starts."""

from __future__ import annotations

# mypy: allow-untyped-defs
import numba as nb
import numpy as np

from ninfer.native import jit

_PIECE = 1 << 16
_parallel = jit(parallel=True)


@_parallel
def expand(words, out):
    """bfloat16 words (uint16) -> the same numbers as binary32 words (uint32). Both flat, of equal length."""
    for piece in nb.prange((words.size + _PIECE - 1) // _PIECE):
        for i in range(piece * _PIECE, min(words.size, (piece + 1) * _PIECE)):
            out[i] = np.uint32(words[i]) << np.uint32(16)


@_parallel
def largest(words, mask):
    """The largest ``word & mask`` of a flat unsigned array; with the sign masked, the order of float magnitudes."""
    pieces = (words.size + _PIECE - 1) // _PIECE
    found = np.zeros(max(pieces, 1), words.dtype)
    for piece in nb.prange(pieces):
        best = words[piece * _PIECE] & mask
        for i in range(piece * _PIECE, min(words.size, (piece + 1) * _PIECE)):
            best = max(best, words[i] & mask)
        found[piece] = best
    return found.max()
