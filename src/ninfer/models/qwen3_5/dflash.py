"""The block-drafting companion: what it keeps of a sequence, and the call order of its two passes.

The text model's pass leaves the residuals of the tapped layers (features). Columns that are decided become context, in
order and once::

    c = norm0(f W_features^T);  each layer:  k = rope(norm0(c W_k^T), ordinal),  v = c W_v^T

A block is the last decided token followed by mask tokens, and row i of its output is for the token at its own ordinal::

    y = embedding[token];  each layer:  y += attention(norm0(y));  y += swiglu(norm0(y));  out = norm0(y)

where attention sees the context and the block itself. Nothing of a block is kept.

A DFlash2 companion convolves what enters and what leaves each sublayer over the rows of the block, and its selector
chooses along a chain of candidates instead of each draft's likeliest token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ninfer.block_ops import Candidates, Chain, ContextKV, Selection
from ninfer.device import Buffer, Device, Scope
from ninfer.models.qwen3_5.config import DFlashConfig
from ninfer.models.qwen3_5.state import PAGE_TOKENS
from ninfer.models.qwen3_5.weights import ConvolutionWeights, DFlashWeights, Model
from ninfer.ops import Matrix, Ops, Rows


@dataclass(frozen=True, slots=True)
class DraftWorkspace:
    """features act [columns, taps * H] of a text pass; context act [columns, H]; key, value act [columns, hk*hd]. Of a
    block: x and u act [T, H], query and mixed act [T, hq*hd], product act [T, width]."""

    features: Buffer
    context: Buffer
    normed: Buffer
    key: Buffer
    value: Buffer
    x: Buffer
    u: Buffer
    query: Buffer
    mixed: Buffer
    product: Buffer
    scratch: Buffer
    chain: ChainWorkspace | None


@dataclass(frozen=True, slots=True)
class ChainWorkspace:
    """Of a DFlash2 companion: delta act [T, 2 * taps * groups], sub act [T, H]: what enters or leaves a sublayer, gamma
    act [T, rank]."""

    delta: Buffer
    sub: Buffer
    gamma: Buffer


def plan_workspace(
    config: DFlashConfig, hidden: int, scope: Scope, device: Device, columns: int, tokens: int, context: int
) -> DraftWorkspace:
    """columns: of the widest text pass. tokens: of the widest block pass. context: ordinals of a sequence."""
    s = config.attention

    def rows(n: int, features: int) -> Buffer:
        return scope.buffer("drafting", (n, features), device.activation)

    scratch = max(1, device.ops.block.attention_scratch(tokens, context, s))
    both, chain = max(columns, tokens), None
    if (c := config.chain) is not None:
        chain = ChainWorkspace(rows(tokens, 2 * c.taps * hidden // c.group), rows(tokens, hidden), rows(tokens, c.rank))
    return DraftWorkspace(
        features=rows(columns, len(config.taps) * hidden),
        context=rows(columns, hidden),
        normed=rows(columns, hidden),
        key=rows(both, s.hk * s.hd),
        value=rows(both, s.hk * s.hd),
        x=rows(tokens, hidden),
        u=rows(tokens, hidden),
        query=rows(tokens, s.hq * s.hd),
        mixed=rows(tokens, s.hq * s.hd),
        product=rows(tokens, config.width),
        scratch=scope.buffer("drafting", (scratch,), "u8"),
        chain=chain,
    )


def ring_pages(window: int, unit: int, context: int) -> int:
    """Pages of a row that holds what a window of tokens needs, before and after a unit of ``unit`` tokens that may be
    taken back; no more than a whole ``context``."""
    return -(-min(window + unit, context) // PAGE_TOKENS)


def allocate_context(
    config: DFlashConfig, scope: Scope, device: Device, pages: int, rows: int, blocks_per_row: int, slots: int,
    ring: int,
) -> list[ContextKV]:  # fmt: skip
    """Context of each layer: ``pages`` pages over one block table for layers that see everything, and ``ring`` pages of
    every slot for those with a window."""
    s, act = config.attention, device.activation
    page = (s.hk, PAGE_TOKENS, s.hd)
    table = scope.buffer("kv", (rows, blocks_per_row), "i32") if config.full_layers else None

    def planes(window: int | None) -> ContextKV:
        if window is None:
            k, v = (scope.buffer("kv", (pages, *page), act) for _ in range(2))
            return ContextKV(k, v, blocks_per_row, table)
        k, v = (scope.buffer("state", (slots, ring, *page), act) for _ in range(2))
        return ContextKV(k, v, ring)

    return [planes(window) for window in config.windows]


def append(ops: Ops, draft: DFlashWeights, ws: DraftWorkspace, rows: Rows, kv: Sequence[ContextKV]) -> None:
    """The real columns of ``rows`` become context, from the features that the last text pass left."""
    config, block = draft.config, ops.block
    T, H = rows.B * rows.W, ws.context.shape[1]
    c, normed, k, v = (b.head(T, b.shape[1]) for b in (ws.context, ws.normed, ws.key, ws.value))
    features = ws.features.head(T, ws.features.shape[1])
    ops.norm_project((c,), features, None, (draft.features,), config.eps, ws.scratch)
    block.norm0(normed.head(T, H), c, draft.context_norm, None, config.eps)
    for layer, planes in zip(draft.layers, kv, strict=True):
        ops.norm_project((k, v), normed, None, (layer.context_key, layer.context_value), config.eps, ws.scratch)
        block.rotate(k, layer.key_norm, rows, config.attention, config.eps)
        block.append(planes, k, v, rows)


def draft(
    ops: Ops, model: Model, ws: DraftWorkspace, rows: Rows, kv: Sequence[ContextKV], index: Buffer, out: Buffer
) -> None:
    """Run the block ``rows.tokens`` i32 [B*W] at ``rows.start``; out act [n, H]: its outputs ``index`` i32 [n]."""
    own = model.dflash
    assert own is not None
    config, block, T = own.config, ops.block, rows.B * rows.W
    x, u, q, mixed, product, k, v = (
        b.head(T, b.shape[1]) for b in (ws.x, ws.u, ws.query, ws.mixed, ws.product, ws.key, ws.value)
    )
    ops.embed(x, model.embedding, rows.tokens)
    for layer, planes, window, causal in zip(own.layers, kv, config.windows, config.causal, strict=True):
        block.norm0(u, x, layer.input_norm, None, config.eps)
        entering = _enter(ops, layer.attention_conv, ws, u, rows.W)
        ops.norm_project((q, k, v), entering, None, (layer.query, layer.key, layer.value), config.eps, ws.scratch)
        block.rotate(q, layer.query_norm, rows, config.attention, config.eps)
        block.rotate(k, layer.key_norm, rows, config.attention, config.eps)
        block.attention(mixed, q, k, v, planes, rows, config.attention, window, causal, ws.scratch)
        _leave(ops, layer.attention_conv, ws, x, mixed, layer.output, rows.W)
        block.norm0(u, x, layer.post_norm, None, config.eps)
        entering = _enter(ops, layer.mlp_conv, ws, u, rows.W)
        ops.norm_swiglu(product, entering, None, layer.ffn.gate, layer.ffn.up, config.eps, ws.scratch)
        _leave(ops, layer.mlp_conv, ws, x, product, layer.ffn.down, rows.W)
    block.norm0(out, x, own.final_norm, index, config.eps)


def select(
    ops: Ops, draft: DFlashWeights, ws: DraftWorkspace, hidden: Buffer, ids: Buffer, scores: Buffer, rows: Chain,
    out: Selection,
) -> None:  # fmt: skip
    """Choose drafts among the candidates ids i32, scores f32 [n, stride] of block outputs ``hidden`` act [n, H]."""
    chain, selector = draft.config.chain, draft.selector
    assert chain is not None
    assert selector is not None
    assert ws.chain is not None
    gamma = ws.chain.gamma.head(hidden.shape[0], chain.rank)
    ops.norm_project((gamma,), hidden, None, (selector.projection,), draft.config.eps, ws.scratch)
    books = selector.predecessor, selector.successor
    ops.block.select(out, Candidates(ids, scores, chain.candidates, gamma, *books), rows)


def _enter(ops: Ops, conv: ConvolutionWeights | None, ws: DraftWorkspace, u: Buffer, columns: int) -> Buffer:
    """What a sublayer reads for its normed input ``u``; keeps what ``_leave`` adds to the kernel."""
    if conv is None or ws.chain is None:
        return u
    T, H = u.shape
    delta, entering = ws.chain.delta.head(T, conv.projection.rows), ws.chain.sub.head(T, H)
    ops.norm_project((delta,), u, None, (conv.projection,), 0.0, ws.scratch)
    ops.block.convolve(entering, u, conv.base, delta, 0, columns, add=False)
    return entering


def _leave(
    ops: Ops, conv: ConvolutionWeights | None, ws: DraftWorkspace, x: Buffer, y: Buffer, weight: Matrix, columns: int
) -> None:
    """x += what leaves a sublayer whose last projection is ``weight``."""
    if conv is None or ws.chain is None:
        ops.project_add(x, y, weight)
        return
    T, H = x.shape
    delta, leaving = ws.chain.delta.head(T, conv.projection.rows), ws.chain.sub.head(T, H)
    ops.norm_project((leaving,), y, None, (weight,), 0.0, ws.scratch)
    ops.block.convolve(x, leaving, conv.base, delta, 1, columns, add=True)
