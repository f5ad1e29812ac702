"""The kernel that measures read bandwidth reads every word, as often as it says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ops.harness import Lab

from ninfer._cuda.products import pack


@pytest.mark.parametrize(("tiles", "blocks", "rounds"), [(1, 1, 1), (5, 2, 1), (5, 3, 3), (3, 4, 2)])
def test_every_word_is_read(device: Any, rng: np.random.Generator, tiles: int, blocks: int, rounds: int) -> None:
    lab = Lab(device)
    words = rng.integers(0, 2**32, (tiles * 8 * 32, 4), np.uint64).astype(np.uint32)
    data, out = lab.put(words, "u32"), lab.put(np.full((blocks, 32), 7), "u32")
    function = device.function("sweep", "sweep")
    device.launch(function, blocks, 32, pack(out, data, tiles, rounds))
    seen = np.bitwise_xor.reduce(lab.get(out), axis=None)
    assert seen == (np.bitwise_xor.reduce(words, axis=None) if rounds % 2 else 0)
