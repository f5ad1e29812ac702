"""Drafts are the plain argmax of their logits: sampling without options, in memory of its own. Logits may be those of
some tokens alone; then what is found by place is told by id."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ninfer.device import Buffer, Device
from ninfer.ops import Ops, SampleOut, SampleRows
from ninfer.program.frame import ALTERNATIVES
from ninfer.program.scope import Scopes


@dataclass(frozen=True, slots=True)
class Argmax:
    """Parameters and by-products of up to ``rows`` samples at temperature 0. candidates: likeliest ids that are asked
    for, kept with their scores in alt_ids and alt_logprobs, ``ALTERNATIVES`` places a row. vocabulary: logits of a row;
    ids i32 [vocabulary]: the tokens they are of, where they are not all. token, places: what was found before it has
    been told by id."""

    rows: int
    candidates: int
    vocabulary: int
    ids: Buffer | None
    real: Buffer
    whole: Buffer
    seed: Buffer
    index: Buffer
    purpose: Buffer
    logprob: Buffer
    alt_ids: Buffer
    alt_logprobs: Buffer
    token: Buffer | None
    places: Buffer | None

    @classmethod
    def place(cls, scope: Scopes, rows: int, vocabulary: int, ids: Buffer | None, candidates: int = 0) -> Argmax:
        def buffer(size: int, dtype: str = "i32") -> Buffer:
            return scope.buffer("drafting", (size,), dtype)

        return cls(
            rows,
            candidates,
            vocabulary if ids is None else ids.shape[0],
            ids,
            real=buffer(5 * rows, "f32"),
            whole=buffer(4 * rows),
            seed=buffer(2 * rows, "u32"),
            index=buffer(rows, "i64"),
            purpose=buffer(rows),
            logprob=buffer(rows, "f32"),
            alt_ids=buffer(rows * ALTERNATIVES),
            alt_logprobs=buffer(rows * ALTERNATIVES, "f32"),
            token=None if ids is None else buffer(rows),
            places=None if ids is None else buffer(rows * ALTERNATIVES),
        )

    def fill_constants(self, device: Device) -> None:
        """Memory starts as zeros; what must not be zero."""
        whole = device.host((4 * self.rows,), "i32")
        whole[:] = np.tile([0, self.candidates or -1, 0, 0], self.rows)
        device.upload(self.whole, whole)
        done = device.event()
        done.record()
        done.wait()

    def logits(self, memory: Buffer, n: int) -> Buffer:
        """Room for the logits f32 [n, vocabulary] of ``n`` drafts, in memory for those of as many tokens."""
        return memory.head(n, self.vocabulary)

    def __call__(self, ops: Ops, token: Buffer, logits: Buffer, masks: Buffer, counts: Buffer, scratch: Buffer) -> None:
        """token i32 [n] = the argmax of each row of logits f32 [n, vocabulary]. masks, counts: read by nobody."""
        n, V = logits.shape
        found = token if self.token is None else self.token.head(n)
        places = self.alt_ids if self.places is None else self.places
        rows = SampleRows(
            n, 1, self.real.head(n, 5), self.whole.head(n, 4), self.seed.head(n, 2), self.index.head(n, 1),
            self.purpose.head(n, 1), everything=False,
        )  # fmt: skip
        out = SampleOut(
            found.head(n, 1), self.logprob.head(n, 1), places.head(n, 1, ALTERNATIVES),
            self.alt_logprobs.head(n, 1, ALTERNATIVES),
        )  # fmt: skip
        ops.sample(out, logits, masks.head(n, 1, -(-V // 32)), counts.head(counts.shape[0], V), rows, scratch)
        if self.ids is not None:
            ops.gather(token.head(n), self.ids, found)
            if self.candidates:
                ops.gather(self.alt_ids.head(n * ALTERNATIVES), self.ids, places.head(n * ALTERNATIVES))
