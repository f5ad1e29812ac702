"""The argmax that drafts are made with, over every token or over some."""

from __future__ import annotations

import numpy as np
import pytest
from ops.harness import Lab

from ninfer._cpu.device import CpuDevice
from ninfer.program.argmax import Argmax
from ninfer.program.frame import ALTERNATIVES

V, ROWS = 500, 6


class Scope:
    def __init__(self, lab: Lab) -> None:
        self.lab = lab

    def buffer(self, name: str, shape: tuple[int, ...], dtype: str):
        return self.lab.empty(*shape, dtype=dtype)


@pytest.mark.parametrize("proposed", [None, 64, 300])
@pytest.mark.parametrize("candidates", [0, 16])
def test_what_is_found_is_told_by_id(proposed: int | None, candidates: int) -> None:
    rng, lab = np.random.default_rng(proposed or 1), Lab(CpuDevice(threads=1))
    ids = rng.permutation(V)[:proposed] if proposed else np.arange(V)
    argmax = Argmax.place(Scope(lab), ROWS, V, lab.put(ids, "i32") if proposed else None, candidates)
    argmax.fill_constants(lab.device)
    memory = lab.put(rng.normal(size=(ROWS, V)))
    masks, counts = lab.empty(ROWS, 1, (V + 31) // 32, dtype="u32"), lab.put(np.ones((ROWS, V)), "i32")
    scratch = lab.scratch(lab.ops.sample_scratch(ROWS, V))
    for n in (1, 4, ROWS):
        logits = argmax.logits(memory, n)
        scores = rng.integers(0, 30, logits.shape).astype(np.float32)  # with ties: the first of equals wins
        lab.device.upload(logits, scores)
        token = lab.empty(n, dtype="i32")
        argmax(lab.ops, token, logits, masks, counts, scratch)
        assert lab.get(token).tolist() == ids[scores.argmax(axis=1)].tolist()
        order = np.argsort(-scores, axis=1, kind="stable")[:, :candidates]
        found = lab.get(argmax.alt_ids).reshape(ROWS, ALTERNATIVES)[:n, :candidates]
        assert found.tolist() == ids[order].tolist()
        kept = lab.get(argmax.alt_logprobs).reshape(ROWS, ALTERNATIVES)[:n, :candidates]
        best = np.take_along_axis(scores, order, axis=1)
        assert np.allclose(np.diff(kept, axis=1), np.diff(best, axis=1), atol=1e-4)
    lab.device.close()
