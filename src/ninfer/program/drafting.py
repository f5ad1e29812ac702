"""Drafting with the model's own multi-token-prediction module, inside the round that decided the tokens before.

Column ``t`` of the module joins the final hidden of token ``t`` with token ``t + 1``; its logits are for token
``t + 2``. So when a round has decided, one pass over its columns makes the module's history true up to the anchor, the
last of them gives the first draft, and every further draft feeds the module its own output. Drafts are the plain
argmax: no mask, no penalty, no random number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from ninfer.device import Buffer, Device
from ninfer.ops import Drafts, Rows
from ninfer.program.argmax import Argmax
from ninfer.program.scope import Scopes

if TYPE_CHECKING:
    from ninfer.program.memory import Memory


class Drafting(Protocol):
    """What drafts behind the units of a Program. Every method submits device work that follows a unit's."""

    whole: ClassVar[bool]
    """Whether ``draft`` makes all the drafts of a round or none."""

    def prompt(self, width: int) -> None:
        """A wide unit of prompt tokens has run."""
        ...

    def forced(self, width: int) -> None:
        """A wide unit of forced tokens has run; what it left in ``Memory.hidden`` stays."""
        ...

    def proposed(self, drafts: Drafts) -> Drafts:
        """The drafts of a round that is verified, with the distributions they were drawn from."""
        ...

    def decided(self, B: int, W: int, first: bool, drafts: bool) -> None:
        """A round of ``W`` columns has been decided: they become history of what drafts. first: it was the token behind
        a prompt, whose column already is. drafts: some are made next."""
        ...

    def draft(self, B: int, ahead: int) -> None:
        """Leave ``ahead`` drafts behind what was decided in the output frame, i32 [ahead, B]."""
        ...


@dataclass(frozen=True, slots=True)
class DraftMemory:
    """window: drafts of a round. limit: ordinals of a sequence. joined act [T, H]: the module's output over a round's
    columns. own act [2, rows, H]: its output of two steps in turn. index i32 [rows]; start, width i32 and positions of
    the columns behind a round. none: i32 [rows] of 0."""

    window: int
    limit: int
    joined: Buffer
    own: Buffer
    index: Buffer
    start: Buffer
    width: Buffer
    positions: Buffer
    none: Buffer
    argmax: Argmax

    @classmethod
    def place(
        cls, scope: Scopes, device: Device, hidden_size: int, rows: int, window: int, columns: int, limit: int,
        vocabulary: int, ids: Buffer | None,
    ) -> DraftMemory:  # fmt: skip
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
            argmax=Argmax.place(scope, rows, vocabulary, ids),
        )

    def behind(self, B: int) -> tuple[Buffer, Buffer, Buffer]:
        """start, width i32 [n, B] and positions i32 [n, 3, B] of the columns behind a round of ``B`` rows."""
        n = self.start.shape[0] // self.none.shape[0]
        return self.start.head(n, B), self.width.head(n, B), self.positions.head(n, 3, B)

    def output(self, step: int, B: int) -> Buffer:
        """The module's output act [B, H] that draft ``step`` is made from."""
        side = step % 2
        return self.own.slice(side, side + 1).head(B, self.own.shape[2])

    def drafting(self, device: Device, memory: Memory) -> MtpDrafting:
        self.argmax.fill_constants(device)
        return MtpDrafting(device, memory, self)


@dataclass(frozen=True, slots=True)
class MtpDrafting:
    """Implements Drafting. ``memory``: of the units; logits, masks, counts and scratch are free once a round is
    decided."""

    device: Device
    memory: Memory
    own: DraftMemory
    whole: ClassVar[bool] = False

    def prompt(self, width: int) -> None:
        """At the prompt's end the token behind the last one is not known yet: that column is written again when it has
        been decided."""
        self.memory.model.hidden(None, self.memory.hidden.slice(0, width))
        self.forced(width)

    def forced(self, width: int) -> None:
        """Append the columns of a wide unit; the frame has the tokens behind them."""
        m, tokens = self.memory, self.memory.input.fields["wide_tokens"].slice(1, width + 1)
        self._align(m.input.wide_rows(width), tokens, m.hidden.slice(0, width), None)

    def join(self) -> None:
        """Append the last executed column of one row, whose successor is in the frame."""
        fields, hidden, rows = self.memory.input.fields, self.memory.hidden.slice(0, 1), self.memory.input.rows(1)
        self.device.ops.gather(hidden, self.memory.stored, fields["read"].head(1))
        self._align(rows, rows.tokens, hidden, None)

    def proposed(self, drafts: Drafts) -> Drafts:
        return drafts

    def decided(self, B: int, W: int, first: bool, drafts: bool) -> None:
        m, memory, rows = self.own, self.memory, self.memory.input.rows(B, W)
        if not drafts:
            self._align(rows, memory.output.fields["token"].head(B * W), memory.hidden.slice(0, B * W), None)
            return
        accepted = m.none.head(B) if W == 1 else memory.output.fields["accepted"].head(B)
        hidden, joined = memory.hidden.slice(0, B * W), m.joined.slice(0, B * W)
        start, width, positions = m.behind(B)
        self._align(rows, memory.output.fields["token"].head(B * W), hidden, joined)
        self.device.ops.draft_rows(m.index.head(B), start, width, positions, accepted, rows, m.limit)
        self.device.ops.gather(m.output(0, B), joined, m.index.head(B))

    def draft(self, B: int, ahead: int) -> None:
        m, memory, rows = self.own, self.memory, self.memory.input.rows(B)
        logits = m.argmax.logits(memory.logits, B)
        table, out = memory.input.fields["draft_table"].head(B), memory.output.fields["drafts"].head(ahead, B)
        start, width, positions = m.behind(B)
        for s in range(ahead):
            token = out.slice(s, s + 1)
            memory.model.propose(m.output(s, B), logits)
            m.argmax(self.device.ops, token, logits, memory.masks, memory.counts, memory.scratch)
            if s + 1 < ahead:
                own = Rows(
                    B, 1, start.slice(s, s + 1).head(B), width.slice(s, s + 1).head(B), rows.read, rows.write, table,
                    token.head(B), positions.slice(s, s + 1).head(3, B),
                )  # fmt: skip
                memory.model.draft(own, m.output(s, B), m.output(s + 1, B))

    def _align(self, rows: Rows, tokens: Buffer, hidden: Buffer, out: Buffer | None) -> None:
        """Append the columns of ``rows``: hidden act [T, H], and tokens i32 [T], each the one behind its column's. out:
        for what is drafted from them, if anything."""
        table = self.memory.input.fields["draft_table"].head(rows.B)
        own = Rows(rows.B, rows.W, rows.start, rows.width, rows.read, rows.write, table, tokens, rows.positions)
        self.memory.model.draft(own, hidden, out)
