"""Drafting with the model's own multi-token-prediction module, inside the round that decided the tokens before.

Column ``t`` of the module joins the final hidden of token ``t`` with token ``t + 1``; its logits are for token
``t + 2``. So when a round has decided, one pass over its columns makes the module's history true up to the anchor, the
last of them gives the first draft, and every further draft feeds the module its own output. Drafts are the plain
argmax: no mask, no penalty, no random number.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ninfer.contract import Buffer, Device
from ninfer.ops import Rows, SampleOut, SampleRows
from ninfer.program.frame import ALTERNATIVES
from ninfer.program.scope import Scopes
from ninfer.program.text import PlacedModel


@dataclass(frozen=True, slots=True)
class DraftMemory:
    """window: drafts of a round. limit: ordinals of a sequence. joined act [T, H]: the module's output over a round's
    columns. own act [2, rows, H]: its output of two steps in turn. index i32 [rows]; start, width i32 and positions of
    the columns behind a round. none, one: i32 [rows] of 0 and 1. plain, sampled: sampling without options."""

    window: int
    limit: int
    joined: Buffer
    own: Buffer
    index: Buffer
    start: Buffer
    width: Buffer
    positions: Buffer
    none: Buffer
    one: Buffer
    plain: dict[str, Buffer]
    logprob: Buffer
    alt_ids: Buffer
    alt_logprobs: Buffer

    @classmethod
    def place(
        cls, scope: Scopes, device: Device, hidden_size: int, rows: int, window: int, columns: int, limit: int
    ) -> DraftMemory:
        def buffer(*shape: int, dtype: str = "i32") -> Buffer:
            return scope.buffer("drafting", shape, dtype)

        act, behind = device.activation, max(window - 1, 1)
        return cls(
            window,
            limit,
            joined=buffer(columns, hidden_size, dtype=act),
            own=buffer(2, rows, hidden_size, dtype=act),
            index=buffer(rows),
            start=buffer(behind * rows),
            width=buffer(behind * rows),
            positions=buffer(behind * 3 * rows),
            none=buffer(rows),
            one=buffer(rows),
            plain={
                "real": buffer(5 * rows, dtype="f32"),
                "whole": buffer(4 * rows),
                "seed": buffer(2 * rows, dtype="u32"),
                "index": buffer(rows, dtype="i64"),
                "purpose": buffer(rows),
            },
            logprob=buffer(rows, dtype="f32"),
            alt_ids=buffer(rows * ALTERNATIVES),
            alt_logprobs=buffer(rows * ALTERNATIVES, dtype="f32"),
        )

    def fill_constants(self, device: Device) -> None:
        """Memory starts as zeros; what must not be zero."""
        rows = self.one.shape[0]
        whole = device.host((4 * rows,), "i32")
        whole[:] = np.tile([0, -1, 0, 0], rows)
        one = device.host((rows,), "i32")
        one[:] = 1
        device.upload(self.plain["whole"], whole)
        device.upload(self.one, one)
        done = device.event()
        done.record()
        done.wait()

    def sample_rows(self, B: int) -> SampleRows:
        p = self.plain
        return SampleRows(
            B, 1, p["real"].head(B, 5), p["whole"].head(B, 4), p["seed"].head(B, 2), p["index"].head(B, 1),
            p["purpose"].head(B, 1),
        )  # fmt: skip

    def sample_out(self, B: int, token: Buffer) -> SampleOut:
        return SampleOut(
            token.head(B, 1), self.logprob.head(B, 1), self.alt_ids.head(B, 1, ALTERNATIVES),
            self.alt_logprobs.head(B, 1, ALTERNATIVES),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Drafting:
    """Submits drafting work. logits, counts, masks, scratch: of the round that has been decided; free by then."""

    device: Device
    model: PlacedModel
    memory: DraftMemory
    logits: Buffer
    masks: Buffer
    counts: Buffer
    scratch: Buffer

    def align(self, rows: Rows, tokens: Buffer, table: Buffer, hidden: Buffer, out: Buffer) -> None:
        """Append the columns of ``rows``: hidden act [T, H], and tokens i32 [T], each the one behind its column's."""
        own = Rows(rows.B, rows.W, rows.start, rows.width, rows.read, rows.write, table, tokens, rows.positions)
        self.model.draft(own, hidden, out)

    def draft(self, rows: Rows, table: Buffer, decided: Buffer, accepted: Buffer, hidden: Buffer, out: Buffer) -> None:
        """Align what was just decided and draft on. decided i32 [B*W], accepted i32 [B], hidden act [B*W, H].

        out i32 [window, B]: the drafts, by position."""
        m, ops, B = self.memory, self.device.ops, rows.B
        behind = m.start.shape[0] // m.one.shape[0]
        start, width = m.start.head(behind, B), m.width.head(behind, B)
        positions = m.positions.head(behind, 3, B)
        joined = m.joined.head(*hidden.shape)
        self.align(rows, decided, table, hidden, joined)
        ops.draft_rows(m.index.head(B), start, width, positions, accepted, rows, m.limit)
        step = m.own.slice(0, 1).head(B, hidden.shape[1])
        ops.gather(step, joined, m.index.head(B))
        for s in range(m.window):
            token = out.slice(s, s + 1)
            self.model.logits(step, self.logits.slice(0, B))
            ops.sample(
                m.sample_out(B, token), self.logits.slice(0, B), self.masks.head(B, 1, self.masks.shape[-1]),
                self.counts, m.sample_rows(B), self.scratch,
            )  # fmt: skip
            if s + 1 < m.window:
                own = Rows(
                    B, 1, start.slice(s, s + 1).head(B), width.slice(s, s + 1).head(B), rows.read, rows.write, table,
                    token.head(B), positions.slice(s, s + 1).head(3, B),
                )  # fmt: skip
                following = m.own.slice((s + 1) % 2, (s + 1) % 2 + 1).head(B, hidden.shape[1])
                self.model.draft(own, step, following)
                step = following
