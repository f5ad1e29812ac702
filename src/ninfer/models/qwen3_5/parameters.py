"""The parameter table: every weight of the family by logical name, shape, kind and place of use.

A *projection* is multiplied at the input sites it lists and may be stored in any matrix format; a *matrix* is looked up
by row (the embedding); a *direct* parameter has exactly the format it names. Binding, conversion and synthetic weights
all read this table, so a name or shape is written down once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ninfer.models.qwen3_5.config import FULL, Dense, DFlashConfig, TextConfig, VisionConfig

PROPOSAL_HEAD, PROPOSAL_IDS = "proposal/head", "proposal/token_ids"


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One logical parameter. Matrices are ``[out, in]``; ``format`` is set for direct parameters only."""

    name: str
    kind: Literal["projection", "matrix", "direct"]
    shape: tuple[int, ...]
    format: str | None = None
    uses: tuple[str, ...] = ()

    @property
    def role(self) -> str:
        """The name without layer and expert numbers, e.g. ``text/layers/attention/query``."""
        return "/".join(part for part in self.name.split("/") if not part.isdigit())


def _projection(name: str, shape: tuple[int, int], *uses: str) -> ParameterSpec:
    return ParameterSpec(name, "projection", shape, None, uses)


def _direct(name: str, *shape: int, format: str = "bf16") -> ParameterSpec:
    return ParameterSpec(name, "direct", shape, format)


def text_parameters(config: TextConfig, companions: Sequence[str] = ()) -> Iterator[ParameterSpec]:
    """The language model. ``companions``: speculative components that share the output head."""
    H, R = config.hidden_size, config.vocab_size
    yield ParameterSpec("text/token_embedding", "matrix", (R, H))
    for i, kind in enumerate(config.layer_types):
        yield from _block(f"text/layers/{i}/", config, kind)
    yield _direct("text/final_norm", H)
    yield _projection("text/output_head", (R, H), *(f"{c}/final_hidden" for c in ("text", *companions)))


def mtp_parameters(config: TextConfig) -> Iterator[ParameterSpec]:
    """The multi-token-prediction module: a stem over ``[embedding, hidden]`` and one full-attention layer."""
    H = config.hidden_size
    yield _projection("mtp/input_projection", (H, 2 * H), "mtp/stem_input")
    yield _direct("mtp/embedding_norm", H)
    yield _direct("mtp/hidden_norm", H)
    yield from _block("mtp/layers/0/", config, FULL)
    yield _direct("mtp/final_norm", H)


def dflash_parameters(config: DFlashConfig, text: TextConfig) -> Iterator[ParameterSpec]:
    """A block-drafting companion. The context's keys and values have names of their own: their input is another."""
    H, s, c, chain = text.hidden_size, config.attention, config.name, config.chain
    yield _projection(f"{c}/feature_projection", (H, len(config.taps) * H), f"{c}/target_features")
    yield _direct(f"{c}/context_norm", H)
    for i in range(len(config.windows)):
        p = f"{c}/layers/{i}/"
        site = f"{p}query_projection_input"
        yield _direct(f"{p}input_norm", H)
        for name, heads in (("query", s.hq), ("key", s.hk), ("value", s.hk)):
            yield _projection(f"{p}attention/{name}", (heads * s.hd, H), site)
        for name in ("context_key", "context_value"):
            yield _projection(f"{p}attention/{name}", (s.hk * s.hd, H), f"{c}/context_input")
        yield _direct(f"{p}attention/query_norm", s.hd)
        yield _direct(f"{p}attention/key_norm", s.hd)
        yield _projection(f"{p}attention/output", (H, s.hq * s.hd), f"{p}attention_output")
        yield _direct(f"{p}post_attention_norm", H)
        yield _projection(f"{p}mlp/gate", (config.width, H), f"{p}mlp_input")
        yield _projection(f"{p}mlp/up", (config.width, H), f"{p}mlp_input")
        yield _projection(f"{p}mlp/down", (H, config.width), f"{p}mlp_product")
        if chain:
            for sub in ("attention_conv", "mlp_conv"):
                yield _direct(f"{p}{sub}/base_kernel", 2, chain.taps, H)
                rows = 2 * chain.taps * H // chain.group
                yield _projection(f"{p}{sub}/kernel_projection", (rows, H), f"{p}{sub}_input")
    yield _direct(f"{c}/final_norm", H)
    if chain:
        yield _projection(f"{c}/candidate_selector/hidden_projection", (chain.rank, H), f"{c}/final_hidden")
        for name in ("predecessor_codebook", "successor_codebook"):
            yield _direct(f"{c}/candidate_selector/{name}", text.vocab_size, chain.rank)


def proposal_parameters(config: TextConfig, rows: int | None, companions: Sequence[str]) -> Iterator[ParameterSpec]:
    """The head that ``companions`` draft with: the rows of the ids it lists, or where ``rows`` is None of all ids."""
    uses = [f"{c}/final_hidden" for c in companions]
    yield _projection(PROPOSAL_HEAD, (config.vocab_size if rows is None else rows, config.hidden_size), *uses)
    if rows is not None:
        yield _direct(PROPOSAL_IDS, rows, format="int32")


def shared_binding(name: str, *, tied: bool) -> str | None:
    """The parameter whose stored elements this one has too: a companion projects its context as it does a block, and a
    ``tied`` head is the embedding."""
    if name == "text/output_head":
        return "text/token_embedding" if tied else None
    folder, _, leaf = name.rpartition("/")
    return f"{folder}/{leaf.removeprefix('context_')}" if leaf in ("context_key", "context_value") else None


def _block(p: str, config: TextConfig, kind: str) -> Iterator[ParameterSpec]:
    yield _direct(f"{p}input_norm", config.hidden_size)
    yield from _attention(p, config) if kind == FULL else _gdn(p, config)
    yield _direct(f"{p}post_attention_norm", config.hidden_size)
    yield from _mlp(p, config.hidden_size, config.ffn) if isinstance(config.ffn, Dense) else _moe(p, config)


def _attention(p: str, config: TextConfig) -> Iterator[ParameterSpec]:
    H, s = config.hidden_size, config.attention
    assert s is not None
    Q, Kv, site = s.hq * s.hd, s.hk * s.hd, f"{p}mixer_input"
    for name, rows in (("query", Q), ("key", Kv), ("gate", Q), ("value", Kv)):
        yield _projection(f"{p}attention/{name}", (rows, H), site)
    yield _direct(f"{p}attention/query_norm", s.hd)
    yield _direct(f"{p}attention/key_norm", s.hd)
    yield _projection(f"{p}attention/output", (H, Q), f"{p}attention/gated_output")


def _gdn(p: str, config: TextConfig) -> Iterator[ParameterSpec]:
    H, s = config.hidden_size, config.gdn
    assert s is not None
    Kg, Vg, site = s.nk * s.dk, s.nv * s.dv, f"{p}mixer_input"
    for name, rows in (("query", Kg), ("key", Kg), ("value", Vg), ("z", Vg)):
        yield _projection(f"{p}gdn/{name}", (rows, H), site)
    yield _projection(f"{p}gdn/a_projection", (s.nv, H), site)
    yield _projection(f"{p}gdn/b_projection", (s.nv, H), site)
    yield _direct(f"{p}gdn/a_log", s.nv, format="fp32")
    yield _direct(f"{p}gdn/dt_bias", s.nv, format="fp32")
    yield _direct(f"{p}gdn/convolution", s.taps, s.channels)
    yield _direct(f"{p}gdn/norm", s.dv)
    yield _projection(f"{p}gdn/output", (H, Vg), f"{p}gdn/gated_output")


def _mlp(p: str, H: int, ffn: Dense) -> Iterator[ParameterSpec]:
    yield _projection(f"{p}mlp/gate", (ffn.width, H), f"{p}ffn_input")
    yield _projection(f"{p}mlp/up", (ffn.width, H), f"{p}ffn_input")
    yield _projection(f"{p}mlp/down", (H, ffn.width), f"{p}mlp/product")


def _moe(p: str, config: TextConfig) -> Iterator[ParameterSpec]:
    H, ffn = config.hidden_size, config.ffn
    assert not isinstance(ffn, Dense)
    m, site = f"{p}moe/", f"{p}ffn_input"
    yield _projection(f"{m}router", (ffn.experts, H), site)
    yield _projection(f"{m}shared_score", (1, H), site)
    experts = [(f"experts/{e}/", ffn.width) for e in range(ffn.experts)]
    for part, width in (*experts, ("shared/", ffn.shared_width)):
        yield _projection(f"{m}{part}gate", (width, H), site)
        yield _projection(f"{m}{part}up", (width, H), site)
        yield _projection(f"{m}{part}down", (H, width), f"{m}{part}product")


def vision_parameters(config: VisionConfig, text_hidden: int) -> Iterator[ParameterSpec]:
    """The vision tower; ``text_hidden`` is the width of its output."""
    h, width = config.hidden_size, config.intermediate_size
    merged = config.spatial_merge_size**2 * h
    patch = 3 * config.temporal_patch_size * config.patch_size**2

    def linear(name: str, out: int, inner: int, site: str) -> Iterator[ParameterSpec]:
        yield _projection(name, (out, inner), site)
        yield _direct(f"{name}_bias", out)

    yield from linear("vision/patch_embedding", h, patch, "vision/patch_input")
    yield _direct("vision/position_embedding", config.num_position_embeddings, h)
    for i in range(config.depth):
        p = f"vision/layers/{i}/"
        for norm in ("norm1", "norm2"):
            yield _direct(f"{p}{norm}_weight", h)
            yield _direct(f"{p}{norm}_bias", h)
        for name in ("query", "key", "value"):
            yield from linear(f"{p}attention/{name}", h, h, f"{p}attention_input")
        yield from linear(f"{p}attention/output", h, h, f"{p}attention_output")
        yield from linear(f"{p}mlp/fc1", width, h, f"{p}mlp_input")
        yield from linear(f"{p}mlp/fc2", h, width, f"{p}mlp_activation")
    yield _direct("vision/merger/norm_weight", h)
    yield _direct("vision/merger/norm_bias", h)
    yield from linear("vision/merger/fc1", merged, merged, "vision/merger/input")
    yield from linear("vision/merger/fc2", text_hidden, merged, "vision/merger/activation")
