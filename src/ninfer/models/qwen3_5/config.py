"""Component configs: closed JSON records of the artifact become frozen geometry.

Every member is checked before use; a wrong, missing or unknown one raises :class:`~ninfer.errors.ArtifactError` naming
its place. Reals are rounded to binary32, so two spellings of one number give one config.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ninfer.device import ITEM_BYTES
from ninfer.errors import ArtifactError
from ninfer.ops import AttentionShape, GdnShape

LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"
_MODEL_TYPES = {"Qwen3_5ForCausalLM": "qwen3_5_text", "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text"}
_MTP_OF = {"Qwen3_5ForCausalLM": "Qwen3_5MTP", "Qwen3_5MoeForCausalLM": "Qwen3_5MoeMTP"}
_DFLASH = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel"}
CANDIDATES = 20
"""Most candidates of a drafted token."""
_ATTENTION = ("num_attention_heads", "num_key_value_heads", "head_dim", "rope_parameters")
_GDN = (
    "linear_num_key_heads",
    "linear_key_head_dim",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)


@dataclass(frozen=True, slots=True)
class Dense:
    """One SwiGLU per layer, ``width`` features wide."""

    width: int


@dataclass(frozen=True, slots=True)
class Moe:
    """``selected`` of ``experts`` SwiGLUs of ``width`` per token, and one of ``shared_width`` that is always on."""

    experts: int
    selected: int
    width: int
    shared_width: int


@dataclass(frozen=True, slots=True)
class TextConfig:
    """The language model. ``vocab_size`` counts stored rows of embedding and head; the token domain may be smaller.

    ``attention`` and ``gdn`` are None where no layer (nor MTP) needs them.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    layer_types: tuple[str, ...]
    max_position_embeddings: int
    tie_word_embeddings: bool
    eps: float
    attention: AttentionShape | None
    gdn: GdnShape | None
    ffn: Dense | Moe

    @property
    def full_layers(self) -> int:
        return self.layer_types.count(FULL)

    @property
    def linear_layers(self) -> int:
        return self.layer_types.count(LINEAR)

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of keys and values one token takes over all full-attention layers, stored as ``dtype``."""
        if self.attention is None:
            return 0
        return self.full_layers * 2 * self.attention.hk * self.attention.hd * ITEM_BYTES[dtype]

    def state_bytes(self, activation: str) -> int:
        """Bytes of one sequence's recurrent state: fp32 matrices and convolution tails in ``activation``."""
        if self.gdn is None:
            return 0
        g = self.gdn
        matrices = g.nv * g.dk * g.dv * ITEM_BYTES["f32"]
        return self.linear_layers * (matrices + (g.taps - 1) * g.channels * ITEM_BYTES[activation])


@dataclass(frozen=True, slots=True)
class MtpConfig:
    """A multi-token-prediction module: one full-attention layer with the text model's geometry."""

    architecture: str


@dataclass(frozen=True, slots=True)
class ChainConfig:
    """What DFlash2 adds. taps: rows of a block that a convolution around each sublayer reads, one number for ``group``
    neighbouring channels. candidates of each drafted token, and the rank of the codebooks that score their pairs."""

    taps: int
    group: int
    rank: int
    candidates: int


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """A block-drafting companion (DFlash): a transformer of the text model's hidden size that reads the residuals of
    some of its layers. ``chain``: of a DFlash2 companion.

    attention: plain rotary attention, one position axis. windows: of each layer, how many tokens away a query still
    sees, or None for all. causal: of each layer, whether a block's column sees none behind it. width: of the SwiGLUs.
    taps: text layers whose residuals are read. mask: the id that stands for a token to be drafted. block: columns it
    was trained with; None where that is not known.
    """

    attention: AttentionShape
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    width: int
    eps: float
    taps: tuple[int, ...]
    mask: int
    block: int | None
    chain: ChainConfig | None = None

    @property
    def name(self) -> str:
        """Of the component."""
        return "dflash2" if self.chain else "dflash"

    @property
    def full_layers(self) -> int:
        return self.windows.count(None)


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """The image and video tower; its output width is the text model's hidden size."""

    model_type: str
    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    num_position_embeddings: int


class _Record:
    """A closed JSON object whose members are taken one by one; ``close`` refuses what nobody took."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, Mapping):
            raise ArtifactError("must be an object", where=where)
        self._left = dict(value)
        self._where = where

    def error(self, name: str, message: str) -> ArtifactError:
        return ArtifactError(message, where=f"{self._where}.{name}" if name else self._where)

    def has(self, *names: str) -> bool:
        return any(name in self._left for name in names)

    def take(self, name: str) -> Any:
        if name not in self._left:
            raise self.error(name, "missing")
        return self._left.pop(name)

    def integer(self, name: str) -> int:
        value = self.take(name)
        if type(value) is not int or not 1 <= value <= 2**32 - 1:
            raise self.error(name, f"must be an integer in 1..2^32-1, not {value!r}")
        return value

    def real(self, name: str) -> float:
        value = self.take(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, f"must be a number, not {value!r}")
        with np.errstate(over="ignore", under="ignore"):
            rounded = float(np.float32(value)) if abs(value) < 1e39 else math.inf
        if not math.isfinite(rounded) or rounded <= 0:
            raise self.error(name, f"must be finite and positive in binary32, not {value!r}")
        return rounded

    def text(self, name: str) -> str:
        value = self.take(name)
        if not isinstance(value, str):
            raise self.error(name, f"must be a string, not {value!r}")
        return value

    def boolean(self, name: str) -> bool:
        value = self.take(name)
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false, not {value!r}")
        return value

    def list(self, name: str) -> list[Any]:
        value = self.take(name)
        if not isinstance(value, list | tuple):
            raise self.error(name, f"must be an array, not {value!r}")
        return list(value)

    def record(self, name: str) -> _Record:
        return _Record(self.take(name), f"{self._where}.{name}")

    def only(self, name: str) -> str:
        """The single string of a one-element array."""
        value = self.list(name)
        if len(value) != 1 or not isinstance(value[0], str):
            raise self.error(name, "must be an array of one string")
        return value[0]

    def close(self) -> None:
        for name in self._left:
            raise self.error(name, "unknown member")


def rotary_axes(section: tuple[int, int, int], pairs: int) -> tuple[int, ...]:
    """Axis (0 T, 1 H, 2 W) of each rotary pair: H and W are interleaved every third pair up to 3x their section."""
    return tuple(
        1 if j % 3 == 1 and j < 3 * section[1] else 2 if j % 3 == 2 and j < 3 * section[2] else 0 for j in range(pairs)
    )


def _attention(r: _Record) -> AttentionShape:
    hq, hk, hd = r.integer("num_attention_heads"), r.integer("num_key_value_heads"), r.integer("head_dim")
    if hq % hk:
        raise r.error("num_key_value_heads", f"{hk} does not divide num_attention_heads {hq}")
    rope = r.record("rope_parameters")
    theta, factor, section = rope.real("rope_theta"), rope.real("partial_rotary_factor"), rope.list("mrope_section")
    if factor > 1:
        raise rope.error("partial_rotary_factor", f"must be at most 1, not {factor!r}")
    rot = int(hd * factor)
    if rot <= 0 or rot % 2:
        raise rope.error("partial_rotary_factor", f"gives {rot} rotated features of {hd}; must be positive and even")
    if len(section) != 3 or any(type(n) is not int or n < 0 for n in section) or sum(section) != rot // 2:
        raise rope.error("mrope_section", f"must be three non-negative integers with sum {rot // 2}, not {section!r}")
    axes = rotary_axes((section[0], section[1], section[2]), rot // 2)
    if [axes.count(axis) for axis in range(3)] != section:
        raise rope.error("mrope_section", f"{section!r} cannot be interleaved over {rot // 2} pairs")
    rope.close()
    return AttentionShape(hq, hk, hd, rot, theta, axes)


def _gdn(r: _Record) -> GdnShape:
    nk, dk = r.integer("linear_num_key_heads"), r.integer("linear_key_head_dim")
    nv, dv = r.integer("linear_num_value_heads"), r.integer("linear_value_head_dim")
    if nv % nk:
        raise r.error("linear_num_value_heads", f"{nv} is not a multiple of linear_num_key_heads {nk}")
    return GdnShape(nk, nv, dk, dv, r.integer("linear_conv_kernel_dim"))


def _moe(r: _Record) -> Moe:
    experts, selected = r.integer("num_experts"), r.integer("num_experts_per_tok")
    if selected > experts:
        raise r.error("num_experts_per_tok", f"{selected} exceeds num_experts {experts}")
    return Moe(experts, selected, r.integer("moe_intermediate_size"), r.integer("shared_expert_intermediate_size"))


def parse_text(config: object, *, mtp: bool = False, where: str = "components.text.config") -> TextConfig:
    """The text component's config. ``mtp``: an MTP module will be used, so attention geometry is required."""
    r = _Record(config, where)
    architecture, model_type = r.only("architectures"), r.text("model_type")
    if architecture not in _MODEL_TYPES:
        raise r.error("architectures", f"unsupported architecture {architecture!r}")
    if model_type != _MODEL_TYPES[architecture]:
        raise r.error("model_type", f"must be {_MODEL_TYPES[architecture]!r} for {architecture}, not {model_type!r}")
    hidden, vocab, layers = r.integer("hidden_size"), r.integer("vocab_size"), r.integer("num_hidden_layers")
    positions, tied = r.integer("max_position_embeddings"), r.boolean("tie_word_embeddings")
    eps = r.real("rms_norm_eps")
    types = r.list("layer_types")
    if len(types) != layers:
        raise r.error("layer_types", f"has {len(types)} entries for {layers} layers")
    for i, kind in enumerate(types):
        if kind not in (LINEAR, FULL):
            raise r.error(f"layer_types[{i}]", f"must be {LINEAR!r} or {FULL!r}, not {kind!r}")
    attention = _attention(r) if mtp or FULL in types or r.has(*_ATTENTION) else None
    gdn = _gdn(r) if LINEAR in types or r.has(*_GDN) else None
    ffn = Dense(r.integer("intermediate_size")) if architecture == "Qwen3_5ForCausalLM" else _moe(r)
    r.close()
    return TextConfig(architecture, vocab, hidden, tuple(types), positions, tied, eps, attention, gdn, ffn)


def parse_mtp(config: object, text: TextConfig, *, where: str = "components.mtp.config") -> MtpConfig:
    """The MTP component's config; its architecture must match the text model's kind."""
    r = _Record(config, where)
    architecture = r.only("architectures")
    if architecture != _MTP_OF[text.architecture]:
        raise r.error("architectures", f"must be {_MTP_OF[text.architecture]!r}, not {architecture!r}")
    r.close()
    return MtpConfig(architecture)


def parse_dflash(config: object, text: TextConfig, name: str = "dflash", *, where: str | None = None) -> DFlashConfig:
    """The config of the component "dflash" or "dflash2", checked against the text model it drafts for."""
    r = _Record(config, f"components.{name}.config" if where is None else where)
    if (architecture := r.only("architectures")) != _DFLASH[name]:
        raise r.error("architectures", f"unsupported architecture {architecture!r}")
    if (model_type := r.text("model_type")) != "qwen3":
        raise r.error("model_type", f"must be 'qwen3', not {model_type!r}")
    width, layers, _ = (r.integer(n) for n in ("intermediate_size", "num_hidden_layers", "max_position_embeddings"))
    hq, hk, hd = r.integer("num_attention_heads"), r.integer("num_key_value_heads"), r.integer("head_dim")
    if hq % hk:
        raise r.error("num_key_value_heads", f"{hk} does not divide num_attention_heads {hq}")
    if hd % 2:
        raise r.error("head_dim", f"must be even, not {hd}")
    eps, rope, types = r.real("rms_norm_eps"), r.record("rope_parameters"), r.list("layer_types")
    theta = rope.real("rope_theta")
    rope.close()
    if len(types) != layers or any(kind not in (SLIDING, FULL) for kind in types):
        raise r.error("layer_types", f"must be {layers} of {SLIDING!r} and {FULL!r}, not {types!r}")
    window = r.integer("sliding_window") if SLIDING in types or r.has("sliding_window") else None
    causal = _causal(r, layers)
    block = r.integer("block_size") if r.has("block_size") else None
    own = r.record("dflash_config")
    taps, mask = own.list("target_layer_ids"), own.take("mask_token_id")
    chain = _chain(own, text.hidden_size) if name == "dflash2" else None
    own.close()
    r.close()
    if not taps or any(type(n) is not int or not 0 <= n < len(text.layer_types) for n in taps):
        raise own.error("target_layer_ids", f"{taps!r} are not layers of a text model with {len(text.layer_types)}")
    if sorted(set(taps)) != taps:
        raise own.error("target_layer_ids", f"must ascend, not {taps!r}")
    if type(mask) is not int or not 0 <= mask < text.vocab_size:
        raise own.error("mask_token_id", f"must be an id below {text.vocab_size}, not {mask!r}")
    shape = AttentionShape(hq, hk, hd, hd, theta, (0,) * (hd // 2))
    windows = tuple(window if kind == SLIDING else None for kind in types)
    return DFlashConfig(shape, windows, causal, width, eps, tuple(taps), mask, block, chain)


def _chain(r: _Record, hidden: int) -> ChainConfig:
    taps, group, rank, candidates = (
        r.integer(n) for n in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    )
    if hidden % group:
        raise r.error("conv_group_size", f"{group} does not divide hidden_size {hidden}")
    if candidates > CANDIDATES:
        raise r.error("selector_top_k", f"must be at most {CANDIDATES}, not {candidates}")
    return ChainConfig(taps, group, rank, candidates)


def _causal(r: _Record, layers: int) -> tuple[bool, ...]:
    """One boolean for every layer, from one for all, a list, or none: then a block's columns see each other."""
    value = r.take("causal") if r.has("causal") else False
    if isinstance(value, bool):
        return (value,) * layers
    if not isinstance(value, list | tuple) or len(value) != layers or any(not isinstance(v, bool) for v in value):
        raise r.error("causal", f"must be a boolean, or one for each of {layers} layers, not {value!r}")
    return tuple(value)


def parse_vision(config: object, *, where: str = "components.vision.config") -> VisionConfig:
    """The vision component's config."""
    r = _Record(config, where)
    model_type = r.text("model_type")
    if model_type not in ("qwen3_5_vision", "qwen3_5_moe_vision"):
        raise r.error("model_type", f"unsupported model type {model_type!r}")
    depth, hidden, width, heads = (
        r.integer(name) for name in ("depth", "hidden_size", "intermediate_size", "num_heads")
    )
    patch, temporal, merge = (r.integer(name) for name in ("patch_size", "temporal_patch_size", "spatial_merge_size"))
    positions = r.integer("num_position_embeddings")
    if hidden % heads or hidden // heads % 4:
        raise r.error("num_heads", f"{heads} heads over {hidden} features: the head width must be a multiple of 4")
    if math.isqrt(positions) ** 2 != positions:
        raise r.error("num_position_embeddings", f"{positions} is not a square")
    r.close()
    return VisionConfig(model_type, depth, hidden, width, heads, patch, temporal, merge, positions)
