"""Bound weights of one model, as values. Matrices are ``[out, in]``; norms are bf16 vectors."""

from __future__ import annotations

from dataclasses import dataclass

from ninfer.device import Buffer
from ninfer.models.qwen3_5.config import DFlashConfig, TextConfig
from ninfer.ops import Bank, Matrix


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """A gated full-attention mixer."""

    query: Matrix
    key: Matrix
    value: Matrix
    gate: Matrix
    output: Matrix
    query_norm: Buffer
    key_norm: Buffer


@dataclass(frozen=True, slots=True)
class GdnWeights:
    """A Gated DeltaNet mixer. ``convolution`` bf16 ``[taps, channels]``; ``a_log`` and ``dt_bias`` f32 ``[nv]``."""

    query: Matrix
    key: Matrix
    value: Matrix
    z: Matrix
    a: Matrix
    b: Matrix
    output: Matrix
    convolution: Buffer
    a_log: Buffer
    dt_bias: Buffer
    norm: Buffer


@dataclass(frozen=True, slots=True)
class DenseWeights:
    """A SwiGLU."""

    gate: Matrix
    up: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """A router over a bank of experts, and one SwiGLU that every token passes."""

    router: Matrix
    shared_score: Matrix
    bank: Bank
    shared: DenseWeights


@dataclass(frozen=True, slots=True)
class Block:
    """One decoder layer."""

    input_norm: Buffer
    mixer: AttentionWeights | GdnWeights
    post_norm: Buffer
    ffn: DenseWeights | MoeWeights


@dataclass(frozen=True, slots=True)
class MtpWeights:
    """The multi-token-prediction module; embedding and head are the text model's."""

    projection: Matrix
    embedding_norm: Buffer
    hidden_norm: Buffer
    block: Block
    final_norm: Buffer


@dataclass(frozen=True, slots=True)
class ConvolutionWeights:
    """base bf16 [2, taps, H]: of what enters and of what leaves a sublayer; what is added to it: a projection of the
    sublayer's input to [2 * taps * groups]."""

    base: Buffer
    projection: Matrix


@dataclass(frozen=True, slots=True)
class SelectorWeights:
    """Scores of pairs of tokens: predecessor, successor bf16 [R, rank] and what weighs the rank's terms."""

    projection: Matrix
    predecessor: Buffer
    successor: Buffer


@dataclass(frozen=True, slots=True)
class DraftLayer:
    """A layer of a block-drafting companion, with convolutions around its sublayers or without."""

    input_norm: Buffer
    query: Matrix
    key: Matrix
    value: Matrix
    context_key: Matrix
    context_value: Matrix
    query_norm: Buffer
    key_norm: Buffer
    output: Matrix
    post_norm: Buffer
    ffn: DenseWeights
    attention_conv: ConvolutionWeights | None = None
    mlp_conv: ConvolutionWeights | None = None


@dataclass(frozen=True, slots=True)
class DFlashWeights:
    """A block-drafting companion; embedding and head are the text model's."""

    config: DFlashConfig
    features: Matrix
    context_norm: Buffer
    layers: tuple[DraftLayer, ...]
    final_norm: Buffer
    selector: SelectorWeights | None = None


@dataclass(frozen=True, slots=True)
class ProposalWeights:
    """A head for drafting alone. Row i scores the token ``ids[i]`` i32 [rows], or token i where there are none.
    largest: the largest id."""

    head: Matrix
    ids: Buffer | None
    largest: int


@dataclass(frozen=True, slots=True)
class Model:
    """The language model and, where selected, what drafts for it. ``nbytes``: weight bytes made resident."""

    config: TextConfig
    embedding: Matrix
    blocks: tuple[Block, ...]
    final_norm: Buffer
    head: Matrix
    mtp: MtpWeights | None
    nbytes: int
    dflash: DFlashWeights | None = None
    proposal: ProposalWeights | None = None
