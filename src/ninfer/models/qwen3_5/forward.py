"""The fixed call order of one forward pass, over a workspace planned once.

A pass reads tokens and leaves the residual stream in ``Workspace.x``::

    x = embedding[token]
    each layer:  x += mixer(norm1(x));  x += ffn(norm1(x))
    hidden = norm1(x);  logits = hidden W_head^T

Nothing here looks into a buffer or allocates one, so a pass of given ``(B, W)`` is the same sequence of device work
every time and can be recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ninfer.contract import Buffer, Device, Scope
from ninfer.models.qwen3_5.config import Dense, TextConfig
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


def plan_workspace(config: TextConfig, scope: Scope, device: Device, tokens: int, context: int) -> Workspace:
    """The workspace of passes with ``B*W <= tokens`` over at most ``context`` cached positions."""
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
    if not isinstance(ffn, Dense):
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
        product=rows(ffn.width if isinstance(ffn, Dense) else ffn.shared_width),
        routing=routing,
        scratch=scope.buffer("workspace", (scratch,), "u8"),
    )


def forward(
    ops: Ops,
    model: Model,
    ws: Workspace,
    rows: Rows,
    kv: Sequence[KVPlanes],
    state: Sequence[GdnState],
    record: Sequence[GdnRecord] | None = None,
) -> None:
    """Run the rows through all layers; the residual of token ``i`` ends in ``ws.x[i]``.

    kv, state, record: one entry per full-attention or linear-attention layer, in layer order. Keys and values are
    appended at once; the recurrent state advances in place, or stays untouched and is recorded where ``record`` is
    given (``fold`` commits it).
    """
    x = ws.x.head(rows.B * rows.W, model.config.hidden_size)
    ops.embed(x, model.embedding, rows.tokens)
    full = linear = 0
    for block in model.blocks:
        if isinstance(block.mixer, AttentionWeights):
            _attention(ops, model.config, block, block.mixer, ws, x, rows, kv[full])
            full += 1
        else:
            _gdn(ops, model.config, block, block.mixer, ws, x, rows, state[linear], record[linear] if record else None)
            linear += 1
        _ffn(ops, model.config, block, ws, x)


def fold(
    ops: Ops,
    config: TextConfig,
    state: Sequence[GdnState],
    record: Sequence[GdnRecord],
    accepted: Buffer,
    rows: Rows,
) -> None:
    """Advance the recurrent state by the first ``accepted`` i32 [B] columns of a recorded pass."""
    assert config.gdn is not None or not state
    for layer, columns in zip(state, record, strict=True):
        ops.gdn_fold(layer, columns, accepted, rows, config.gdn)  # type: ignore[arg-type]


def hidden(ops: Ops, model: Model, ws: Workspace, index: Buffer | None, out: Buffer) -> None:
    """Final hidden states act [n, H] of the last pass's tokens ``index`` i32 [n], or of its first n tokens."""
    x = ws.x if index is not None else ws.x.head(*out.shape)
    ops.final_norm(out, x, model.final_norm, index, model.config.eps)


def logits(ops: Ops, model: Model, hidden: Buffer, out: Buffer) -> None:
    """Logits f32 [n, V] over the first V stored rows of the head, from final hidden states [n, H]."""
    ops.head(out, hidden, model.head)


def _attention(
    ops: Ops, config: TextConfig, block: Block, w: AttentionWeights, ws: Workspace, x: Buffer, rows: Rows, kv: KVPlanes
) -> None:
    s, T = config.attention, x.shape[0]
    assert s is not None
    q, gate, out = (lane.head(T, s.hq * s.hd) for lane in (ws.query, ws.gate, ws.mixed))
    k, v = (lane.head(T, s.hk * s.hd) for lane in (ws.key, ws.value))
    ops.norm_project((q, k, v, gate), x, block.input_norm, (w.query, w.key, w.value, w.gate), config.eps, ws.scratch)
    ops.attention_prepare(q, k, v, w.query_norm, w.key_norm, kv, rows, s, config.eps)
    ops.attention(out, q, gate, kv, rows, s, ws.scratch)
    ops.project_add(x, out, w.output)


def _gdn(
    ops: Ops,
    config: TextConfig,
    block: Block,
    w: GdnWeights,
    ws: Workspace,
    x: Buffer,
    rows: Rows,
    state: GdnState,
    record: GdnRecord | None,
) -> None:
    g, T = config.gdn, x.shape[0]
    assert g is not None
    q, k = (lane.head(T, g.nk * g.dk) for lane in (ws.query, ws.key))
    v, z, out = (lane.head(T, g.nv * g.dv) for lane in (ws.value, ws.gate, ws.mixed))
    a, b = (lane.head(T, g.nv) for lane in (ws.a, ws.b))
    weights = (w.query, w.key, w.value, w.z, w.a, w.b)
    ops.norm_project((q, k, v, z, a, b), x, block.input_norm, weights, config.eps, ws.scratch)
    ops.gdn(
        out, (q, k, v), z, a, b, w.convolution, w.a_log, w.dt_bias, w.norm, state, record, rows, g, config.eps,
        ws.scratch,
    )  # fmt: skip
    ops.project_add(x, out, w.output)


def _ffn(ops: Ops, config: TextConfig, block: Block, ws: Workspace, x: Buffer) -> None:
    if isinstance(block.ffn, DenseWeights):
        _swiglu(ops, config, block.ffn, ws, x, x, block.post_norm)
    else:
        _moe(ops, config, block, block.ffn, ws, x)


def _swiglu(
    ops: Ops,
    config: TextConfig,
    w: DenseWeights,
    ws: Workspace,
    x: Buffer,
    u: Buffer,
    norm: Buffer | None,
    scale: Buffer | None = None,
) -> None:
    product = ws.product.head(x.shape[0], w.gate.rows)
    ops.norm_swiglu(product, u, norm, w.gate, w.up, config.eps, ws.scratch)
    ops.project_add(x, product, w.down, scale)


def _moe(ops: Ops, config: TextConfig, block: Block, w: MoeWeights, ws: Workspace, x: Buffer) -> None:
    r, T, k = ws.routing, x.shape[0], config.ffn.selected  # type: ignore[union-attr]
    assert r is not None
    u, ids, weights, shared = r.u.head(*x.shape), r.ids.head(T, k), r.weights.head(T, k), r.shared.head(T)
    product = r.product.head(T, k, w.bank.gate[0].rows)
    ops.moe_route(u, ids, weights, shared, x, block.post_norm, w.router, w.shared_score, config.eps)
    ops.moe_swiglu(product, u, ids, w.bank)
    ops.moe_down_add(x, product, ids, weights, w.bank)
    _swiglu(ops, config, w.shared, ws, x, u, None, shared)
