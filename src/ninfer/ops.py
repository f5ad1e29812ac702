"""The Op contract: semantic operations of the model, written into buffers the caller gives.

Every Op is destination-passing and stream-ordered: it allocates nothing, returns nothing and never waits. Activations
are ``[T, features]`` with ``T = B*W`` tokens in row-major order (row ``b``, column ``w`` is token ``b*W + w``). ``act``
is the device's activation type (f32 on the CPU, bf16 on CUDA). Everything that differs between requests arrives in
buffers (:class:`Rows`, :class:`SampleRows`), so one recording of a ``(B, W)`` pass serves every request. A column
``w >= width[b]`` is padding: it may compute anything but writes no KV, no state and no record.

Matrices are ``[N, K]`` and ``y = x W^T``. ``rms(x) = x / sqrt(mean(x^2) + eps)``; ``norm1(x, w) = rms(x) * (1 + w)``;
``norm0(x, w) = rms(x) * w``; ``sg`` is the logistic function; ``silu(x) = x * sg(x)``. Statistics, gates, softmax and
accumulation are fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ninfer.device import Buffer

if TYPE_CHECKING:
    from ninfer.block_ops import BlockOps


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored matrix object: ``shape`` [N, K] in a number ``format`` of the artifact, ``data`` u8 [bytes]."""

    format: str
    shape: tuple[int, int]
    data: Buffer


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows ``[begin, end)`` of a stored matrix."""

    parent: Stored
    begin: int
    end: int


class Matrix(Protocol):
    """A device's prepared view of a weight matrix ``[rows, cols]`` made of row segments; made by ``Ops.matrix``."""

    @property
    def rows(self) -> int: ...

    @property
    def cols(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Stored bytes that one full read touches."""
        ...


@dataclass(frozen=True, slots=True)
class Rows:
    """Row metadata of one unit: int32 device buffers, filled by one upload before the unit.

    start [B]: cache ordinal of column 0. width [B]: real columns, 1..W. read, write [B]: state slots (equal when the
    state is advanced in place). table [B]: row of the block table. tokens [B*W]. positions [3, B*W]: rotary axes.
    """

    B: int
    W: int
    start: Buffer
    width: Buffer
    read: Buffer
    write: Buffer
    table: Buffer
    tokens: Buffer
    positions: Buffer


@dataclass(frozen=True, slots=True)
class KVPlanes:
    """Paged keys and values of one full-attention layer.

    k, v: ``(pages, hk, 64, hd)`` in f32, bf16 or i8. blocks: int32 ``(rows, L)``, page id of each 64-token block.
    Position ``p`` of a row lives at ``[blocks[table, p >> 6], head, p & 63]``.

    k_scale, v_scale: f16 ``(pages, hk, 64, ceil(hd/64))``, for i8 planes alone: one scale for every 64 features. A row
    is rounded to bf16 first; then, for the features x of a group, ``s = f16(max|x| / 127)``, saturating at the largest
    f16, and ``code = clamp(rint(x * (1 / s)), -127, 127)`` in fp32, 0 where s is 0. What is read is ``code * s``.
    """

    k: Buffer
    v: Buffer
    blocks: Buffer
    k_scale: Buffer | None = None
    v_scale: Buffer | None = None


@dataclass(frozen=True, slots=True)
class GdnState:
    """Recurrent state of one Gated DeltaNet layer. s: f32 ``(slots, nv, dk, dv)``; tail: act ``(slots, taps-1, C)``,
    oldest row first, ``C = 2*nk*dk + nv*dv``."""

    s: Buffer
    tail: Buffer


@dataclass(frozen=True, slots=True)
class GdnRecord:
    """What a verified column leaves behind so that any prefix can be folded into the state later.

    k: f32 ``[T, nk, dk]`` after the L2 norm; d: f32 ``[T, nv, dv]`` (the delta); g: f32 ``[T, nv]`` (log decay);
    c: act ``[T, C]`` (convolution input).
    """

    k: Buffer
    d: Buffer
    g: Buffer
    c: Buffer


@dataclass(frozen=True, slots=True)
class GdnShape:
    """Geometry of a Gated DeltaNet layer; ``taps`` is the convolution width."""

    nk: int
    nv: int
    dk: int
    dv: int
    taps: int

    @property
    def channels(self) -> int:
        return 2 * self.nk * self.dk + self.nv * self.dv


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Geometry of a gated attention layer. ``axes`` gives the rotary axis (0 T, 1 H, 2 W) of each of the ``rot/2``
    pairs; pair ``j`` couples features ``j`` and ``j + rot/2`` of a head."""

    hq: int
    hk: int
    hd: int
    rot: int
    theta: float
    axes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Bank:
    """The routed experts of one layer: three matrices each."""

    gate: tuple[Matrix, ...]
    up: tuple[Matrix, ...]
    down: tuple[Matrix, ...]


@dataclass(frozen=True, slots=True)
class SampleRows:
    """Sampling inputs of ``B`` rows x ``W`` positions.

    real f32 [B, 5]: temperature, top_p, min_p, presence, frequency. whole i32 [B, 4]: top_k (0 = all), number of
    log-prob alternatives (-1 none), mask enabled (0/1), row of ``counts``. seed u32 [B, 2]: low, high word.
    index i64 [B, W]: sequence index of the token being decided. purpose i32 [B, W]: RNG purpose. everything: some row
    may draw from the whole vocabulary (top_k 0 at a temperature above 0); without, a device may leave out what only
    such rows need.
    """

    B: int
    W: int
    real: Buffer
    whole: Buffer
    seed: Buffer
    index: Buffer
    purpose: Buffer
    everything: bool = True


@dataclass(frozen=True, slots=True)
class SampleOut:
    """Sampling outputs. token i32 [B, W]; -1 where no id is legal, -2 where a candidate logit is not finite.

    logprob f32 [B, W]; alt_ids i32 [B, W, 20] and alt_logprobs f32 [B, W, 20], filled up to each row's request.
    """

    token: Buffer
    logprob: Buffer
    alt_ids: Buffer
    alt_logprobs: Buffer


@dataclass(frozen=True, slots=True)
class Drafts:
    """Drafted tokens of ``B`` rows of a verification pass of ``W`` columns: draft ``j`` was the input of column
    ``j + 1`` and is tested against column ``j``.

    count i32 [B]: drafts of each row, 0..W-1. tokens i32 [B, W-1]. ids i32 and q f32 [B, W-1, C], C <= 20: the
    distribution each draft was drawn from, over distinct candidate ids; None where a draft was certain.
    """

    count: Buffer
    tokens: Buffer
    ids: Buffer | None = None
    q: Buffer | None = None


class Ops(Protocol):
    """Operations of one device. Shapes are the contract; format and shape dispatch lives inside an Op."""

    @property
    def block(self) -> BlockOps:
        """Operations of block drafting."""
        ...

    # memory
    @property
    def shared_bytes(self) -> int:
        """Bytes of the area that Ops work in beside their scratch, one after the other; 0 where they need none."""
        ...

    def use(self, area: Buffer) -> None:
        """Work in ``area`` u8 [shared_bytes], whatever it holds, until ``leave``. Comes before anything is recorded: an
        Op that needs an area and has none raises InvariantError, and so does ``use`` while there is another."""
        ...

    def leave(self, area: Buffer) -> None:
        """Forget ``area``, which no unfinished work and no recording may name any more; nothing for another one."""
        ...

    # weights
    def matrix(self, segments: Sequence[Segment]) -> Matrix:
        """Prepare a matrix whose rows are the segments in order; all segments have the same K."""
        ...

    # projections
    def embed(self, out: Buffer, table: Matrix, tokens: Buffer) -> None:
        """out act [T, H] = rows ``tokens`` i32 [T] of the table. Ids outside the table read row 0."""
        ...

    def norm_project(
        self,
        outs: Sequence[Buffer],
        x: Buffer,
        norm: Buffer | None,
        weights: Sequence[Matrix],
        eps: float,
        scratch: Buffer,
    ) -> None:
        """outs[i] act [T, N_i] = u W_i^T with u = norm1(x, norm), or u = x where norm is None. norm: bf16 [K].
        scratch: u8 of ``norm_scratch`` bytes."""
        ...

    def norm_scratch(self, tokens: int, cols: int) -> int:
        """Scratch bytes ``norm_project`` and ``norm_swiglu`` need for up to ``tokens`` tokens of ``cols`` features."""
        ...

    def project_add(
        self, x: Buffer, y: Buffer, weight: Matrix, scale: Buffer | None = None, norm: Buffer | None = None
    ) -> None:
        """x act [T, H] += s * (y W^T); y act [T, K]; scale f32 [T], or 1 everywhere. norm: bf16 [H], a hint that
        the next Op takes ``norm1(x, norm)``, for which a device may make ready; no result depends on it."""
        ...

    def norm_swiglu(
        self, out: Buffer, x: Buffer, norm: Buffer | None, gate: Matrix, up: Matrix, eps: float, scratch: Buffer
    ) -> None:
        """out act [T, I] = silu(u G^T) * (u U^T), u and scratch as in norm_project."""
        ...

    def final_norm(self, out: Buffer, x: Buffer, norm: Buffer, index: Buffer | None, eps: float) -> None:
        """out act [n, H] = norm1(x[index], norm); index i32 [n], or all rows in order where it is None."""
        ...

    def norm_pair(self, out: Buffer, a: Buffer, b: Buffer, norm_a: Buffer, norm_b: Buffer, eps: float) -> None:
        """out act [T, 2H] = [norm1(a, norm_a), norm1(b, norm_b)], a and b act [T, H] side by side."""
        ...

    def head(self, logits: Buffer, hidden: Buffer, weight: Matrix) -> None:
        """logits f32 [n, V] = hidden [n, H] times the first V rows of the weight."""
        ...

    # gated attention
    def attention_prepare(
        self,
        q: Buffer,
        k: Buffer,
        v: Buffer,
        query_norm: Buffer,
        key_norm: Buffer,
        kv: KVPlanes,
        rows: Rows,
        shape: AttentionShape,
        eps: float,
    ) -> None:
        """Normalise q [T, hq*hd] in place and k [T, hk*hd] with norm1 per head, rotate both, append k and v to the
        planes. Angle of pair j: fp32 product of the integer position on axis ``axes[j]`` and the fp32-rounded
        ``theta^(-2j/rot)``."""
        ...

    def attention(
        self, out: Buffer, q: Buffer, gate: Buffer, kv: KVPlanes, rows: Rows, shape: AttentionShape, scratch: Buffer
    ) -> None:
        """out act [T, hq*hd] = softmax(q k^T / sqrt(hd)) v * sg(gate), causal by cache ordinal: column w of a row sees
        ordinals 0..start+w. Query head h reads key head h // (hq/hk). scratch: u8 of ``attention_scratch`` bytes."""
        ...

    def attend(
        self,
        out: Buffer,
        q: Buffer,
        k: Buffer,
        v: Buffer,
        gate: Buffer,
        query_norm: Buffer,
        key_norm: Buffer,
        kv: KVPlanes,
        rows: Rows,
        shape: AttentionShape,
        eps: float,
        scratch: Buffer,
    ) -> None:
        """``attention_prepare``, then ``attention``. What q holds afterwards is not defined."""
        ...

    def attention_scratch(self, tokens: int, context: int, shape: AttentionShape) -> int:
        """Scratch bytes ``attention`` needs for up to ``tokens`` tokens at up to ``context`` ordinals."""
        ...

    # Gated DeltaNet
    def gdn(
        self,
        out: Buffer,
        qkv: Sequence[Buffer],
        z: Buffer,
        a: Buffer,
        b: Buffer,
        convolution: Buffer,
        a_log: Buffer,
        dt_bias: Buffer,
        norm: Buffer,
        state: GdnState,
        record: GdnRecord | None,
        rows: Rows,
        shape: GdnShape,
        eps: float,
        scratch: Buffer,
    ) -> None:
        """out act [T, nv*dv]: causal convolution, gates, delta-rule recurrence and gated norm0 of one layer.

        qkv: q [T, nk*dk], k [T, nk*dk], v [T, nv*dv] before the convolution (act); z act [T, nv*dv]; a, b act [T, nv];
        convolution bf16 [taps, C], oldest tap first; a_log, dt_bias f32 [nv]; norm bf16 [dv]. The state is read at
        ``rows.read``. Without a record the new state is written at ``rows.write``; with one the state stays untouched
        and every real column is recorded. A row with ``start == 0`` begins from zero state whatever its slot holds.
        Value head j uses key head j // (nv/nk)::

            y[t] = silu(sum_j w[j] * c[t - taps + 1 + j])
            q = l2(q) / sqrt(dk);  k = l2(k);  l2(x) = x / sqrt(sum x^2 + 1e-6)
            g = -exp(a_log) * softplus(a + dt_bias);  beta = sg(b)
            S *= exp(g);  d = beta * (v - S^T k);  S += k d^T;  o = S^T q;  out = norm0(o, norm) * silu(z)
        """
        ...

    def gdn_scratch(self, tokens: int, shape: GdnShape) -> int: ...

    def gdn_fold(
        self, layers: Sequence[tuple[GdnState, GdnRecord]], accepted: Buffer, rows: Rows, shape: GdnShape
    ) -> None:
        """In every layer, advance the state at ``rows.read`` by the first ``accepted`` i32 [B] columns of its record
        into ``rows.write``. 0 columns change nothing, N of them: S <- e^{G_N} S + sum_t e^{G_N - G_t} k_t d_t^T; tail
        <- last taps-1 inputs. No state or record is that of two layers."""
        ...

    # mixture of experts
    def moe_route(
        self,
        u: Buffer,
        ids: Buffer,
        weights: Buffer,
        shared: Buffer,
        x: Buffer,
        norm: Buffer,
        router: Matrix,
        shared_score: Matrix,
        eps: float,
    ) -> None:
        """u act [T, H] = norm1(x, norm); ids i32 [T, k]: the k largest router logits, ties to the lower id, descending;
        weights f32 [T, k]: softmax over the selected logits; shared f32 [T] = sg(u . shared_score)."""
        ...

    def moe_swiglu(self, out: Buffer, u: Buffer, ids: Buffer, bank: Bank) -> None:
        """out act [T, k, I] = silu(gate_e u) * (up_e u) for each selected expert."""
        ...

    def moe_down_add(self, x: Buffer, h: Buffer, ids: Buffer, weights: Buffer, bank: Bank) -> None:
        """x act [T, H] += sum over slots, in slot order, of weights * down_e(h)."""
        ...

    # sampling
    def sample(
        self, out: SampleOut, logits: Buffer, masks: Buffer, counts: Buffer, rows: SampleRows, scratch: Buffer
    ) -> None:
        """Draw one token per position from logits f32 [B*W, V]; masks u32 [B, W, ceil(V/32)]; counts i32 [lanes, V].

        Order: mask; penalties ``z -= presence*[n>0] + frequency*n``; temperature 0 takes the argmax; top-k; weights
        ``exp((z - max)/T)``; min-p cuts below ``min_p`` times the largest; top-p keeps the shortest prefix that reaches
        ``top_p`` of the total before min-p; draw with Philox4x32-10. Ties go to the smaller id. Log-probabilities are
        the log-softmax of the penalised, masked logits at temperature 1.
        """
        ...

    def accept(
        self,
        out: SampleOut,
        accepted: Buffer,
        logits: Buffer,
        masks: Buffer,
        counts: Buffer,
        rows: SampleRows,
        drafts: Drafts,
        scratch: Buffer,
    ) -> None:
        """Verify drafts against the distributions ``p`` that ``sample`` would draw from (Leviathan et al., 2023).

        accepted i32 [B]: drafts kept, ``n``. Columns 0..n-1 of ``out`` are the kept drafts, column n the token that
        follows them; what later columns hold means nothing. Column ``w`` sees the counts plus the row's first ``w``
        drafts, and the mask of its own. A draft ``d`` is kept where ``u * q(d) < p(d)`` with ``u`` of purpose 2
        (``q(d) = 1`` for a certain draft), at temperature 0 where it is the argmax. The first that is not is replaced
        by a draw from ``max(p - q, 0)`` with purpose 3, or from ``p`` where rounding leaves nothing of that; after the
        last a token is drawn from ``p`` with ``rows.purpose``. A column that cannot be decided holds -1 or -2 as in
        ``sample`` and ends the row.
        """
        ...

    def draft_rows(
        self, index: Buffer, start: Buffer, width: Buffer, positions: Buffer, accepted: Buffer, rows: Rows, limit: int
    ) -> None:
        """Where drafting goes on after ``n = accepted[b]`` drafts were kept, accepted i32 [B].

        index i32 [B] = b*W + n, the row's last true column. start, width i32 [S, B] and positions i32 [S, 3, B]: the
        s-th column behind it, at ordinal ``rows.start + n + 1 + s`` and the column's rotary axes + 1 + s. Ordinals from
        ``limit`` on have width 0 and stand at ``limit - 1``.
        """
        ...

    def sample_scratch(self, positions: int, vocab: int) -> int:
        """Scratch bytes ``sample`` and ``accept`` need."""
        ...

    def count(self, counts: Buffer, lanes: Buffer, tokens: Buffer, width: Buffer) -> None:
        """counts[lanes[b], tokens[b, w]] += 1 for w < width[b]; lanes, width i32 [B], tokens i32 [B, W]."""
        ...

    def scatter(self, dst: Buffer, src: Buffer, index: Buffer) -> None:
        """dst[index[i]] = src[i] for index[i] >= 0; dst, src act [*, H], index i32 [n]."""
        ...

    def gather(self, dst: Buffer, src: Buffer, index: Buffer) -> None:
        """dst[i] = src[index[i]]; index i32 [n], where one below 0 leaves dst[i] alone."""
        ...
