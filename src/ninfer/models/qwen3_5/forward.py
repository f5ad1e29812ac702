"""The fixed call order of one forward pass, over a workspace planned once.

A pass reads tokens and leaves the residual stream in ``Workspace.x``::

    x = embedding[token]
    each layer:  x += mixer(norm1(x));  x += ffn(norm1(x))
    hidden = norm1(x);  logits = hidden W_head^T

Nothing here looks into a buffer or allocates one, so a pass of given ``(B, W)`` is the same sequence of device work
every time and can be recorded.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ninfer.device import Buffer, Device, Scope
from ninfer.models.qwen3_5.config import Moe, TextConfig
from ninfer.models.qwen3_5.weights import AttentionWeights, Block, DenseWeights, GdnWeights, Model, MoeWeights
from ninfer.ops import GdnRecord, GdnState, KVPlanes, Ops, Rows


@dataclass(frozen=True, slots=True)
class Routing:
    """Buffers of a mixture of experts: normalised input [T, H], chosen experts [T, k] and their weights, the shared
    expert's gate [T], the experts' products [T, k, I]."""

    u: Buffer
    ids: Buffer
    weights: Buffer
    shared: Buffer
    product: Buffer


@dataclass(frozen=True, slots=True)
class Workspace:
    """Buffers of one pass, reused by every layer; each holds ``tokens`` rows of the widest layer kind that uses it."""

    x: Buffer
    query: Buffer
    key: Buffer
    value: Buffer
    gate: Buffer
    a: Buffer
    b: Buffer
    mixed: Buffer
    product: Buffer
    routing: Routing | None
    scratch: Buffer
    stem: Buffer | None
    """Input of the MTP module [T, 2H]."""


def plan_workspace(
    config: TextConfig, scope: Scope, device: Device, tokens: int, context: int, mtp: bool = False
) -> Workspace:
    """The workspace of passes with ``B*W <= tokens`` over at most ``context`` cached positions. mtp: ``draft`` runs."""
    H, s, g, ffn = config.hidden_size, config.attention, config.gdn, config.ffn
    queries, keys = (s.hq * s.hd, s.hk * s.hd) if s else (1, 1)
    nv, gdn_keys, gdn_values = (g.nv, g.nk * g.dk, g.nv * g.dv) if g else (1, 1, 1)
    scratch = max(
        device.ops.norm_scratch(tokens, H),
        device.ops.attention_scratch(tokens, context, s) if s else 0,
        device.ops.gdn_scratch(tokens, g) if g else 0,
        1,
    )

    def rows(*shape: int, dtype: str = device.activation) -> Buffer:
        return scope.buffer("workspace", (tokens, *shape), dtype)

    routing = None
    if isinstance(ffn, Moe):
        k = ffn.selected
        routing = Routing(rows(H), rows(k, dtype="i32"), rows(k, dtype="f32"), rows(dtype="f32"), rows(k, ffn.width))
    return Workspace(
        x=rows(H),
        query=rows(max(queries, gdn_keys)),
        key=rows(max(keys, gdn_keys)),
        value=rows(max(keys, gdn_values)),
        gate=rows(max(queries, gdn_values)),
        a=rows(nv),
        b=rows(nv),
        mixed=rows(max(queries, gdn_values)),
        product=rows(ffn.shared_width if isinstance(ffn, Moe) else ffn.width),
        routing=routing,
        scratch=scope.buffer("workspace", (scratch,), "u8"),
        stem=rows(2 * H) if mtp else None,
    )


@dataclass(frozen=True, slots=True)
class _Pass:
    """What every layer of one pass shares; ``x`` is the residual stream [T, H]."""

    ops: Ops
    config: TextConfig
    ws: Workspace
    rows: Rows
    x: Buffer

    @property
    def tokens(self) -> int:
        return self.x.shape[0]


def forward(
    ops: Ops,
    model: Model,
    ws: Workspace,
    rows: Rows,
    kv: Sequence[KVPlanes],
    state: Sequence[GdnState],
    record: Sequence[GdnRecord] | None = None,
    features: Buffer | None = None,
    taps: Sequence[int] = (),
) -> None:
    """Run the rows through all layers; the residual of token ``i`` ends in ``ws.x[i]``.

    kv, state, record: one entry per full-attention or linear-attention layer, in layer order. Keys and values are
    appended at once; the recurrent state advances in place, or stays untouched and is recorded where ``record`` is
    given (``fold`` commits it). features act [columns, len(taps) * H]: gets the residuals behind the layers ``taps``,
    side by side.
    """
    p = _Pass(ops, model.config, ws, rows, ws.x.head(rows.B * rows.W, model.config.hidden_size))
    planes, states, records = iter(kv), iter(state), iter(record) if record else itertools.repeat(None)
    ops.embed(p.x, model.embedding, rows.tokens)
    for layer, block in enumerate(model.blocks):
        if isinstance(block.mixer, AttentionWeights):
            _attention(p, block, block.mixer, next(planes))
        else:
            _gdn(p, block, block.mixer, next(states), next(records))
        tapped, last = features is not None and layer in taps, layer + 1 == len(model.blocks)
        _ffn(p, block, None if tapped or last else model.blocks[layer + 1].input_norm)
        if features is not None and tapped:
            side = features.head(p.tokens, features.shape[1])
            ops.block.place(side, p.x, taps.index(layer) * model.config.hidden_size)


def draft(ops: Ops, model: Model, ws: Workspace, rows: Rows, kv: KVPlanes, hidden: Buffer, out: Buffer | None) -> None:
    """Run the MTP module: out act [T, H], whose logits are for the token two behind each column's hidden. Without
    ``out`` only as far as its keys and values.

    Column ``t`` joins the final hidden of token ``t`` (hidden act [T, H]) with token ``t + 1`` (``rows.tokens``) at the
    ordinal and rotary position of token ``t``, and appends to the module's own keys and values::

        y = [norm1(embedding[x_{t+1}]), norm1(h_t)] W^T;  y += attention(norm1(y));  y += ffn(norm1(y));  out = norm1(y)
    """
    mtp, eps = model.mtp, model.config.eps
    assert mtp is not None
    assert ws.stem is not None
    assert isinstance(mtp.block.mixer, AttentionWeights)
    T, H = rows.B * rows.W, model.config.hidden_size
    p = _Pass(ops, model.config, ws, rows, ws.x.head(T, H))
    stem = ws.stem.head(T, 2 * H)
    ops.embed(p.x, model.embedding, rows.tokens)
    ops.norm_pair(stem, p.x, hidden, mtp.embedding_norm, mtp.hidden_norm, eps)
    ops.norm_project((p.x,), stem, None, (mtp.projection,), eps, ws.scratch)
    if out is None:
        _append(p, mtp.block.input_norm, mtp.block.mixer, kv)
        return
    _attention(p, mtp.block, mtp.block.mixer, kv)
    _ffn(p, mtp.block, None)
    ops.final_norm(out, p.x, mtp.final_norm, None, eps)


def fold(
    ops: Ops,
    config: TextConfig,
    state: Sequence[GdnState],
    record: Sequence[GdnRecord],
    accepted: Buffer,
    rows: Rows,
) -> None:
    """Advance the recurrent state by the first ``accepted`` i32 [B] columns of a recorded pass."""
    if config.gdn is not None:
        ops.gdn_fold(list(zip(state, record, strict=True)), accepted, rows, config.gdn)


def hidden(ops: Ops, model: Model, ws: Workspace, index: Buffer | None, out: Buffer) -> None:
    """Final hidden states act [n, H] of the last pass's tokens ``index`` i32 [n], or of its first n tokens."""
    x = ws.x if index is not None else ws.x.head(*out.shape)
    ops.final_norm(out, x, model.final_norm, index, model.config.eps)


def logits(ops: Ops, model: Model, hidden: Buffer, out: Buffer) -> None:
    """Logits f32 [n, V] over the first V stored rows of the head, from final hidden states [n, H]."""
    ops.head(out, hidden, model.head)


def propose(ops: Ops, model: Model, hidden: Buffer, out: Buffer) -> None:
    """``logits`` for drafting: f32 [n, V], or over the rows of the head that the model drafts with, if it has one."""
    ops.head(out, hidden, model.proposal.head if model.proposal else model.head)


def _append(p: _Pass, norm: Buffer, w: AttentionWeights, kv: KVPlanes) -> None:
    """Keys and values alone. The queries that are prepared with them are whatever the last pass left."""
    s, eps, ws = p.config.attention, p.config.eps, p.ws
    assert s is not None
    q, k, v = ws.query.head(p.tokens, s.hq * s.hd), *(lane.head(p.tokens, s.hk * s.hd) for lane in (ws.key, ws.value))
    p.ops.norm_project((k, v), p.x, norm, (w.key, w.value), eps, ws.scratch)
    p.ops.attention_prepare(q, k, v, w.query_norm, w.key_norm, kv, p.rows, s, eps)


def _attention(p: _Pass, block: Block, w: AttentionWeights, kv: KVPlanes) -> None:
    s, eps, ws = p.config.attention, p.config.eps, p.ws
    assert s is not None
    q, gate, out = (lane.head(p.tokens, s.hq * s.hd) for lane in (ws.query, ws.gate, ws.mixed))
    k, v = (lane.head(p.tokens, s.hk * s.hd) for lane in (ws.key, ws.value))
    p.ops.norm_project((q, k, v, gate), p.x, block.input_norm, (w.query, w.key, w.value, w.gate), eps, ws.scratch)
    p.ops.attend(out, q, k, v, gate, w.query_norm, w.key_norm, kv, p.rows, s, eps, ws.scratch)
    p.ops.project_add(p.x, out, w.output, norm=_dense_norm(block))


def _gdn(p: _Pass, block: Block, w: GdnWeights, state: GdnState, record: GdnRecord | None) -> None:
    g, eps, ws = p.config.gdn, p.config.eps, p.ws
    assert g is not None
    q, k = (lane.head(p.tokens, g.nk * g.dk) for lane in (ws.query, ws.key))
    v, z, out = (lane.head(p.tokens, g.nv * g.dv) for lane in (ws.value, ws.gate, ws.mixed))
    a, b = (lane.head(p.tokens, g.nv) for lane in (ws.a, ws.b))
    weights = (w.query, w.key, w.value, w.z, w.a, w.b)
    p.ops.norm_project((q, k, v, z, a, b), p.x, block.input_norm, weights, eps, ws.scratch)
    constants = (w.convolution, w.a_log, w.dt_bias, w.norm)
    p.ops.gdn(out, (q, k, v), z, a, b, *constants, state, record, p.rows, g, eps, ws.scratch)
    p.ops.project_add(p.x, out, w.output, norm=_dense_norm(block))


def _dense_norm(block: Block) -> Buffer | None:
    """The norm of the product that takes what a mixer leaves; a mixture of experts norms by itself."""
    return block.post_norm if isinstance(block.ffn, DenseWeights) else None


def _ffn(p: _Pass, block: Block, next_norm: Buffer | None) -> None:
    """next_norm: of the mixer that reads ``x`` next, if it is one that does."""
    if isinstance(block.ffn, DenseWeights):
        _swiglu(p, p.x, block.post_norm, block.ffn, None, next_norm)
    else:
        _moe(p, block.post_norm, block.ffn, next_norm)


def _swiglu(
    p: _Pass, u: Buffer, norm: Buffer | None, w: DenseWeights, scale: Buffer | None, next_norm: Buffer | None
) -> None:
    product = p.ws.product.head(p.tokens, w.gate.rows)
    p.ops.norm_swiglu(product, u, norm, w.gate, w.up, p.config.eps, p.ws.scratch)
    p.ops.project_add(p.x, product, w.down, scale, next_norm)


def _moe(p: _Pass, norm: Buffer, w: MoeWeights, next_norm: Buffer | None) -> None:
    ffn, r = p.config.ffn, p.ws.routing
    assert r is not None
    assert isinstance(ffn, Moe)
    u, shared = r.u.head(*p.x.shape), r.shared.head(p.tokens)
    ids, weights = (buffer.head(p.tokens, ffn.selected) for buffer in (r.ids, r.weights))
    product = r.product.head(p.tokens, ffn.selected, ffn.width)
    p.ops.moe_route(u, ids, weights, shared, p.x, norm, w.router, w.shared_score, p.config.eps)
    p.ops.moe_swiglu(product, u, ids, w.bank)
    p.ops.moe_down_add(p.x, product, ids, weights, w.bank)
    _swiglu(p, u, None, w.shared, shared, next_norm)
