"""Drafting with a block-drafting companion, inside the round that decided the tokens before.

The columns that were kept become the companion's context, and one pass over the block behind them drafts every further
token at once. The block always has the length it was trained with; only its first drafts are verified. Drafts are the
plain argmax, or drawn along a chain of candidates; then the very distributions they were drawn from are kept, by lane,
until the drafts are verified.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ninfer.block_ops import Chain, Selection
from ninfer.device import Buffer, Device
from ninfer.ops import Drafts, Rows
from ninfer.program.argmax import Argmax
from ninfer.program.frame import ALTERNATIVES
from ninfer.program.scope import Scopes
from ninfer.program.text import BlockShape

if TYPE_CHECKING:
    from ninfer.program.memory import Memory


@dataclass(frozen=True, slots=True)
class Proposals:
    """Distributions of drafts: ids i32 and q f32 [rows, window * candidates]. ``kept``: by lane; ``made``: of the batch
    that has drafted; ``verified``: of the batch that is verified."""

    candidates: int
    kept: tuple[Buffer, Buffer]
    made: tuple[Buffer, Buffer]
    verified: tuple[Buffer, Buffer]

    @classmethod
    def place(cls, scope: Scopes, rows: int, window: int, candidates: int) -> Proposals:
        def pair() -> tuple[Buffer, Buffer]:
            ids, q = (scope.buffer("drafting", (rows, window * candidates), dtype) for dtype in ("i32", "f32"))
            return ids, q

        return cls(candidates, pair(), pair(), pair())


@dataclass(frozen=True, slots=True)
class BlockMemory:
    """window: drafts of a round. tokens i32 [rows * columns]; start, width i32 [rows]: the block, and the columns kept
    before it. drafted i32 [window * B] for each batch size B: block rows that drafts come from, by position. out act
    [window * rows, H]: their outputs. none: i32 [rows] of 0."""

    window: int
    shape: BlockShape
    tokens: Buffer
    start: Buffer
    width: Buffer
    drafted: tuple[Buffer, ...]
    out: Buffer
    none: Buffer
    argmax: Argmax
    proposals: Proposals | None

    @classmethod
    def place(
        cls, scope: Scopes, device: Device, hidden_size: int, rows: int, window: int, shape: BlockShape,
        vocabulary: int, ids: Buffer | None,
    ) -> BlockMemory:  # fmt: skip
        def buffer(*size: int, dtype: str = "i32") -> Buffer:
            return scope.buffer("drafting", size, dtype)

        return cls(
            window,
            shape,
            tokens=buffer(rows * shape.columns),
            start=buffer(rows),
            width=buffer(rows),
            drafted=tuple([buffer(window * B) for B in range(1, rows + 1)]),
            out=buffer(window * rows, hidden_size, dtype=device.activation),
            none=buffer(rows),
            argmax=Argmax.place(scope, window * rows, vocabulary, ids, shape.candidates),
            proposals=Proposals.place(scope, rows, window, shape.candidates) if shape.candidates else None,
        )

    def drafting(self, device: Device, memory: Memory) -> BlockDrafting:
        for B, buffer in enumerate(self.drafted, 1):
            rows = device.host(buffer.shape, "i32")
            rows[:] = (np.arange(1, self.window + 1)[:, None] + self.shape.columns * np.arange(B)).reshape(-1)
            device.upload(buffer, rows)
            self.argmax.fill_constants(device)  # which waits, so the rows may go
        return BlockDrafting(device, memory, self)


@dataclass(frozen=True, slots=True)
class BlockDrafting:
    """Implements Drafting. ``memory``: of the units; logits, masks, counts and scratch are free once a round is
    decided."""

    device: Device
    memory: Memory
    own: BlockMemory
    whole: ClassVar[bool] = True

    def prompt(self, width: int) -> None:
        rows = self.memory.input.wide_rows(width)
        self.memory.model.append(self._context(rows, rows.width))

    forced = prompt

    def decided(self, B: int, W: int, first: bool, drafts: bool) -> None:
        m, memory, rows = self.own, self.memory, self.memory.input.rows(B, W)
        fields, start, width = memory.output.fields, m.start.head(B), m.width.head(B)
        kept = m.none.head(B) if W == 1 else fields["accepted"].head(B)
        tokens = m.tokens.head(B, m.shape.columns)
        self.device.ops.block.begin(tokens, start, width, fields["token"].head(B, W), kept, rows, m.shape.mask)
        if not first:
            memory.model.append(self._context(rows, width))

    def draft(self, B: int, ahead: int) -> None:
        m, memory, rows = self.own, self.memory, self.memory.input.rows(B)
        start, width, tokens = m.start.head(B), m.width.head(B), m.tokens.head(B, m.shape.columns)
        table, count = memory.input.fields["draft_table"].head(B), B * ahead
        block = Rows(
            B, m.shape.columns, start, width, rows.write, rows.write, table, tokens.head(B * m.shape.columns),
            rows.positions,
        )  # fmt: skip
        out, logits = m.out.slice(0, count), m.argmax.logits(memory.logits, count)
        memory.model.block(block, m.drafted[B - 1], out)
        memory.model.propose(out, logits)
        drafts = memory.output.fields["drafts"].head(count)
        m.argmax(self.device.ops, drafts, logits, memory.masks, memory.counts, memory.scratch)
        if m.proposals is not None:
            self._select(m.proposals, out, tokens, start, drafts.head(ahead, B))

    def _select(self, own: Proposals, hidden: Buffer, tokens: Buffer, start: Buffer, drafts: Buffer) -> None:
        """Drafts among the likeliest candidates; what they were drawn from is kept for their lanes."""
        m, given, (K, B) = self.own, self.memory.input.fields, drafts.shape
        ids, scores = (b.head(K * B, ALTERNATIVES) for b in (m.argmax.alt_ids, m.argmax.alt_logprobs))
        rows = Chain(B, tokens, start, given["real"].head(B, 5), given["seed"].head(B, 2))
        made = Selection(drafts, *(b.head(B, K, own.candidates) for b in own.made))
        self.memory.model.select(hidden, ids, scores, rows, made)
        for kept, new in zip(own.kept, own.made):
            self.device.ops.scatter(kept, new.slice(0, B), given["lanes"].head(B))

    def proposed(self, drafts: Drafts) -> Drafts:
        own = self.own.proposals
        if own is None:
            return drafts
        (B, n), C = drafts.tokens.shape, own.candidates
        wanted = self.memory.input.fields["proposed"].head(B * n)
        for found, kept in zip(own.verified, own.kept):
            everything = kept.head(kept.shape[0] * self.own.window, C)
            self.device.ops.gather(found.head(B * n, C), everything, wanted)
        ids, q = (b.head(B, n, C) for b in own.verified)
        return Drafts(drafts.count, drafts.tokens, ids, q)

    def _context(self, rows: Rows, width: Buffer) -> Rows:
        table = self.memory.input.fields["draft_table"].head(rows.B)
        return Rows(rows.B, rows.W, rows.start, width, rows.read, rows.write, table, rows.tokens, rows.positions)
