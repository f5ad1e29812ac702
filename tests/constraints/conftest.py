"""Small vocabularies: the 256 bytes, and the bytes with tokens that span punctuation and parts of characters."""

from __future__ import annotations

import numpy as np
import pytest

from ninfer.constraints.vocab import TokenClasses, TokenIndex

STOP, MARKER = 256, 257
HAN, SMILE = "中".encode(), "😀".encode()
LONGER = [
    b'":"', b'","', b'"a', b'b"', b'a":', b'"}', b'"]', b"ab", b"abc", b"\\n", b"\\n\\", b'\\"', b"u000", b"\\u00",
    b"1f", HAN[:2], HAN[2:] + b"x", b"x" + HAN[:1], "é".encode(), SMILE[:3], SMILE[1:], b"\n\n", b".\n", b"</",
    b"think", b"<a", b"12", b"-1", b"true,", b"null}", b"{}", b"[[", b" ",
]  # fmt: skip


def classes(longer: list[bytes]) -> TokenClasses:
    """Ids 0..255 are bytes, then a stop id, a marker, an id that is nothing, and ``longer``."""
    data = [bytes([i]) for i in range(256)] + [b"<eos>", b"</think>", b"<pad>", *longer]
    ids = np.arange(len(data))
    return TokenClasses(data, (ids < 256) | (ids > 258), {MARKER: b"</think>"}, (STOP,))


@pytest.fixture(scope="session")
def byte_index() -> TokenIndex:
    return TokenIndex(classes([]))


@pytest.fixture(scope="session")
def small_index() -> TokenIndex:
    """Byte tokens and longer ones."""
    return TokenIndex(classes(LONGER))
