"""Sampling Ops over NumPy arrays, and the float64 distribution they must follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from ops.harness import Lab

from ninfer.ops import Drafts, SampleOut, SampleRows

Array = npt.NDArray[Any]

PLAIN = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "presence": 0.0, "frequency": 0.0, "top_k": 0}
FIRST, DECODE, ACCEPTANCE, CORRECTION, BONUS = range(5)


def pack_mask(legal: Array) -> Array:
    """uint32 words of boolean ids [..., V]."""
    words = -(-legal.shape[-1] // 32)
    padded = np.zeros((*legal.shape[:-1], 32 * words), bool)
    padded[..., : legal.shape[-1]] = legal
    return np.packbits(padded, axis=-1, bitorder="little").view(np.uint32)


def distribution(logits: Array, legal: Array, counts: Array, params: dict[str, float]) -> tuple[list[int], Array]:
    """float64 (ids, probabilities) that may be drawn, in candidate order."""
    z = logits.astype(np.float64) - np.where(counts > 0, params["presence"] + params["frequency"] * counts, 0.0)
    ids = sorted(np.flatnonzero(legal).tolist(), key=lambda v: (-np.float32(z[v]), v))
    if params["temperature"] == 0:
        return ids[:1], np.ones(1)
    if params["top_k"]:
        ids = ids[: int(params["top_k"])]
    w = np.exp((z[ids] - z[ids[0]]) / params["temperature"])
    goal, kept = params["top_p"] * w.sum(), 1
    while kept < len(ids) and w[kept] >= params["min_p"] and (params["top_p"] >= 1 or w[:kept].sum() < goal):
        kept += 1
    return ids[:kept], w[:kept] / w[:kept].sum()


@dataclass
class Result:
    token: Array
    logprob: Array
    alt_ids: Array
    alt_logprobs: Array
    accepted: Array | None = None


@dataclass
class Case:
    """Inputs of ``B`` rows x ``W`` positions. logits [B, W, V], legal [B, W, V] or None, counts [lanes, V]; one dict of
    parameters a row; drafts, where given, is (count [B], tokens [B, W-1], ids and q [B, W-1, C] or None)."""

    logits: Array
    params: list[dict[str, float]]
    counts: Array
    legal: Array | None = None
    alternatives: int = -1
    lanes: list[int] | None = None
    seed: Array | None = None
    index: Array | None = None
    purpose: int = DECODE
    drafts: tuple[Array, Array, Array | None, Array | None] | None = None

    def arrays(self) -> dict[str, Array]:
        B, W, V = self.logits.shape
        names = ("temperature", "top_p", "min_p", "presence", "frequency")
        legal = np.ones((B, W, V), bool) if self.legal is None else self.legal
        lanes = self.lanes or [0] * B
        return {
            "logits": self.logits.astype(np.float32).reshape(B * W, V),
            "masks": pack_mask(legal),
            "counts": self.counts.astype(np.int32),
            "real": np.array([[p[name] for name in names] for p in self.params], np.float32),
            "whole": np.array(
                [[p["top_k"], self.alternatives, self.legal is not None, lane] for p, lane in zip(self.params, lanes)],
                np.int32,
            ),
            "seed": np.zeros((B, 2), np.uint32) if self.seed is None else self.seed.astype(np.uint32),
            "index": np.arange(B * W).reshape(B, W) if self.index is None else self.index.astype(np.int64),
            "purpose": np.full((B, W), self.purpose, np.int32),
        }


def run(lab: Lab, case: Case) -> Result:
    """Sample, or verify where the case has drafts. Outputs start poisoned."""
    B, W, V = case.logits.shape
    a = case.arrays()
    out = SampleOut(
        lab.put(np.full((B, W), -9), "i32"), lab.put(np.full((B, W), np.nan)),
        lab.put(np.full((B, W, 20), -9), "i32"), lab.put(np.full((B, W, 20), np.nan)),
    )  # fmt: skip
    rows = SampleRows(
        B, W, lab.put(a["real"]), lab.put(a["whole"], "i32"), lab.put(a["seed"], "u32"), lab.put(a["index"], "i64"),
        lab.put(a["purpose"], "i32"),
    )  # fmt: skip
    scratch = lab.put(np.full(lab.ops.sample_scratch(B * W, V), 0xAB), "u8")
    shared = (lab.put(a["logits"]), lab.put(a["masks"], "u32"), lab.put(a["counts"], "i32"), rows)
    accepted = None
    if case.drafts is None:
        lab.ops.sample(out, *shared, scratch)
    else:
        count, tokens, ids, q = case.drafts
        drafts = Drafts(
            lab.put(count, "i32"), lab.put(tokens, "i32"), None if ids is None else lab.put(ids, "i32"),
            None if q is None else lab.put(q),
        )  # fmt: skip
        accepted = lab.put(np.full(B, -9), "i32")
        lab.ops.accept(out, accepted, *shared, drafts, scratch)
    return Result(
        *(lab.get(buffer) for buffer in (out.token, out.logprob, out.alt_ids, out.alt_logprobs)),
        accepted=None if accepted is None else lab.get(accepted),
    )
