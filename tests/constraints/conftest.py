"""A vocabulary of the 256 bytes, a stop id, a marker and one id that is nothing."""

from __future__ import annotations

import numpy as np
import pytest

from ninfer.constraints.vocab import TokenClasses, TokenIndex

STOP, MARKER, NOTHING = 256, 257, 258


@pytest.fixture(scope="session")
def byte_classes() -> TokenClasses:
    data = [bytes([i]) for i in range(256)] + [b"<eos>", b"</think>", b"<pad>"]
    return TokenClasses(data, np.arange(len(data)) < 256, {MARKER: b"</think>"}, (STOP,))


@pytest.fixture(scope="session")
def byte_index(byte_classes: TokenClasses) -> TokenIndex:
    return TokenIndex(byte_classes)
