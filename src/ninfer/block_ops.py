"""Operations of block drafting: a companion model reads residuals of the text model, keeps keys and values of its own
and drafts a whole block of tokens in one pass.

Conventions as in ``ninfer.ops``. A block has ``W`` columns a row, all of them real; column 0 holds the last decided
token. ``norm0(x, w) = rms(x) * w``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ninfer.device import Buffer
from ninfer.ops import AttentionShape, Rows


@dataclass(frozen=True, slots=True)
class ContextKV:
    """Keys and values of one layer over tokens that are decided, act ``(pages, hk, 64, hd)`` each.

    Ordinal ``p`` of a row lives on page ``(p >> 6) mod length`` of the row's ``length`` pages, at ``[page, head, p &
    63]``. blocks: i32 ``(rows, length)``, the page ids of ``rows.table``; None where the pages of ``rows.write`` or
    ``rows.read`` lie one behind the other, from ``slot * length`` on. A row that is shorter than its history keeps its
    end.
    """

    k: Buffer
    v: Buffer
    length: int
    blocks: Buffer | None = None


@dataclass(frozen=True, slots=True)
class Candidates:
    """Candidates of ``K`` drafts of ``B`` rows, row ``i * B + b`` of a buffer for draft i of row b: ids i32 and scores
    f32 [K * B, stride], of which the first ``count`` count; gamma act [K * B, rank]. predecessor, successor bf16 [R,
    rank]."""

    ids: Buffer
    scores: Buffer
    count: int
    gamma: Buffer
    predecessor: Buffer
    successor: Buffer


@dataclass(frozen=True, slots=True)
class Chain:
    """What a walk needs of its ``B`` rows: tokens i32 [B, columns], whose first is the anchor; start i32 [B], the
    anchor's sequence index; real f32 [B, 5], whose first is the temperature; seed u32 [B, 2]."""

    B: int
    tokens: Buffer
    start: Buffer
    real: Buffer
    seed: Buffer


@dataclass(frozen=True, slots=True)
class Selection:
    """token i32 [K, B]; ids i32 and q f32 [B, K, count]: what each was drawn from."""

    token: Buffer
    ids: Buffer
    q: Buffer


class BlockOps(Protocol):
    """The block operations of one device."""

    def place(self, out: Buffer, x: Buffer, first: int) -> None:
        """out[:, first : first + H] = x; out act [T, N], x act [T, H]."""
        ...

    def norm0(self, out: Buffer, x: Buffer, norm: Buffer, index: Buffer | None, eps: float) -> None:
        """out act [n, H] = norm0(x[index], norm); index i32 [n], or all rows in order where it is None. norm: bf16."""
        ...

    def rotate(self, x: Buffer, norm: Buffer, rows: Rows, shape: AttentionShape, eps: float) -> None:
        """Normalise each head of x act [T, n*hd] in place with norm0 and rotate it: all ``rot`` features of column w of
        a row by its ordinal ``start + w``, whatever ``rows.positions`` says."""
        ...

    def append(self, kv: ContextKV, k: Buffer, v: Buffer, rows: Rows) -> None:
        """Write k and v act [T, hk*hd] of the real columns at their ordinals, into the pages of ``rows.table`` or
        ``rows.write``. Of more columns than a row can hold the last stay."""
        ...

    def attention(
        self,
        out: Buffer,
        q: Buffer,
        k: Buffer,
        v: Buffer,
        kv: ContextKV,
        rows: Rows,
        shape: AttentionShape,
        window: int | None,
        causal: bool,
        scratch: Buffer,
    ) -> None:
        """out act [T, hq*hd] = softmax(q k^T / sqrt(hd)) v over the context of a row (ordinals below ``start``, in the
        pages of ``rows.table`` or ``rows.read``) and the block's own k, v act [T, hk*hd] at ``start`` and on.

        A column sees ordinals less than ``window`` away from its own, or all; causal: of the block, none behind it.
        scratch: u8 of ``attention_scratch`` bytes."""
        ...

    def attention_scratch(self, tokens: int, context: int, shape: AttentionShape) -> int:
        """Scratch bytes ``attention`` needs for up to ``tokens`` tokens over up to ``context`` ordinals."""
        ...

    def convolve(
        self, out: Buffer, x: Buffer, base: Buffer, delta: Buffer, side: int, columns: int, *, add: bool
    ) -> None:
        """out[i] (+)= sum over taps t <= i of (base[side, t] + delta[i][side, t]) * x[i - t], within each block of
        ``columns`` rows; out, x act [T, H]; base bf16 [2, taps, H]; delta act [T, 2 * taps * G], a number for each of G
        groups of neighbouring channels."""
        ...

    def select(self, out: Selection, candidates: Candidates, rows: Chain) -> None:
        """Walk each row's drafts: of a draft's candidates c, scored ``s(c) = score(c) + sum_r pred[previous, r] *
        gamma[r] * succ[c, r]``, the largest at temperature 0 (the first of equals), and then q is 1 there; else a draw
        from ``q = softmax(s / temperature)`` with purpose 5 at ``index + i`` (the first whose cumulative sum exceeds
        it). ``previous`` is the token chosen before, at first the row's anchor."""
        ...

    def begin(
        self, tokens: Buffer, start: Buffer, width: Buffer, decided: Buffer, kept: Buffer, rows: Rows, mask: int
    ) -> None:
        """The block behind ``n = kept[b] + 1`` columns of ``rows`` that are history, kept i32 [B].

        start i32 [B] = rows.start + n, its first ordinal; width i32 [B] = n. tokens i32 [B, W]: the token that was
        decided last, column n - 1 of decided i32 [B, rows.W] (0 where none was), and ``mask`` behind it."""
        ...
