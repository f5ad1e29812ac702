"""Where each parameter of the family lies in a Hugging Face checkpoint.

A source is a list of row ranges of one tensor, the tensor being seen as a matrix with the parameter's columns. So the
query of an attention layer is every other block of ``head_dim`` rows of ``q_proj`` (each head's query rows are followed
by its gate rows), and an expert's gate is a range of rows of the stacked ``gate_up_proj`` bank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import attrs
import numpy as np
import numpy.typing as npt

from ninfer.convert.hf_config import SourceConfig
from ninfer.models.qwen3_5.config import FULL, Dense, DFlashConfig, Moe, TextConfig, VisionConfig
from ninfer.models.qwen3_5.parameters import PROPOSAL_HEAD

Spans = tuple[tuple[int, int], ...]


@attrs.frozen
class Source:
    """Rows ``spans`` of ``tensor``, seen as ``[elements / columns, columns]``, in this order.

    shape: of the whole tensor in the checkpoint. transposed: the selected matrix ``[n, m]`` is stored as ``[m, n]``.
    """

    tensor: str
    shape: tuple[int, ...]
    columns: int
    spans: Spans
    transposed: bool = False

    @property
    def rows(self) -> int:
        return sum(last - first for first, last in self.spans)

    @property
    def module(self) -> str:
        """The name without ``.weight``: what a quantised checkpoint's companion tensors are named after."""
        return self.tensor.removesuffix(".weight")


Located = Iterator[tuple[str, Source]]


def locate(
    config: SourceConfig,
    components: Collection[str],
    names: Collection[str],
    proposal: npt.NDArray[np.int32] | None = None,
) -> dict[str, Source]:
    """Parameter name -> source, for every parameter of the chosen components.

    names: the checkpoint's tensors; they decide only whether experts are stacked and whether a tied head is stored.
    proposal: rows of the output head that make one for drafting.
    """
    found = dict(_text(config, names))
    if "mtp" in components:
        found.update(_mtp(config.text, names))
    if "vision" in components and config.vision is not None:
        found.update(_vision(config.vision, config.text.hidden_size))
    for companion in config.companions.values():
        found.update(_dflash(companion, config.text))
    if proposal is not None:
        breaks = np.flatnonzero(np.diff(proposal) != 1) + 1
        spans = [(int(run[0]), int(run[-1]) + 1) for run in np.split(proposal, breaks)]
        found[PROPOSAL_HEAD] = _cut(found["text/output_head"], *spans)
    return found


def _vector(tensor: str, size: int) -> Source:
    return Source(tensor, (size,), 1, ((0, size),))


def _matrix(tensor: str, rows: int, columns: int) -> Source:
    return Source(tensor, (rows, columns), columns, ((0, rows),))


def _cut(source: Source, *spans: tuple[int, int]) -> Source:
    return attrs.evolve(source, spans=spans)


def _thirds(source: Source, size: int) -> list[Source]:
    return [_cut(source, (i * size, (i + 1) * size)) for i in range(3)]


def _text(config: SourceConfig, names: Collection[str]) -> Located:
    t, text = config.prefix, config.text
    embedding = _matrix(f"{t}embed_tokens.weight", text.vocab_size, text.hidden_size)
    stored_head = attrs.evolve(embedding, tensor="lm_head.weight")
    yield "text/token_embedding", embedding
    yield "text/output_head", embedding if text.tie_word_embeddings else stored_head
    yield "text/final_norm", _vector(f"{t}norm.weight", text.hidden_size)
    for i, kind in enumerate(text.layer_types):
        yield from _block(f"text/layers/{i}/", f"{t}layers.{i}.", text, kind, names)


def _mtp(text: TextConfig, names: Collection[str]) -> Located:
    H = text.hidden_size
    yield "mtp/input_projection", _matrix("mtp.fc.weight", H, 2 * H)
    yield "mtp/embedding_norm", _vector("mtp.pre_fc_norm_embedding.weight", H)
    yield "mtp/hidden_norm", _vector("mtp.pre_fc_norm_hidden.weight", H)
    yield "mtp/final_norm", _vector("mtp.norm.weight", H)
    yield from _block("mtp/layers/0/", "mtp.layers.0.", text, FULL, names)


def _block(p: str, t: str, text: TextConfig, kind: str, names: Collection[str]) -> Located:
    """One layer: ``p`` prefixes the parameters, ``t`` the tensors."""
    yield f"{p}input_norm", _vector(f"{t}input_layernorm.weight", text.hidden_size)
    yield f"{p}post_attention_norm", _vector(f"{t}post_attention_layernorm.weight", text.hidden_size)
    if kind == FULL:
        yield from _attention(f"{p}attention/", f"{t}self_attn.", text)
    else:
        yield from _gdn(f"{p}gdn/", f"{t}linear_attn.", text)
    if isinstance(text.ffn, Dense):
        yield from _swiglu(f"{p}mlp/", f"{t}mlp.", text.hidden_size, text.ffn.width)
    else:
        yield from _moe(f"{p}moe/", f"{t}mlp.", text.hidden_size, text.ffn, names)


def _attention(p: str, t: str, text: TextConfig) -> Located:
    s, H = text.attention, text.hidden_size
    assert s is not None
    joint = _matrix(f"{t}q_proj.weight", 2 * s.hq * s.hd, H)
    starts = [2 * head * s.hd for head in range(s.hq)]
    yield f"{p}query", _cut(joint, *((r, r + s.hd) for r in starts))
    yield f"{p}gate", _cut(joint, *((r + s.hd, r + 2 * s.hd) for r in starts))
    yield f"{p}key", _matrix(f"{t}k_proj.weight", s.hk * s.hd, H)
    yield f"{p}value", _matrix(f"{t}v_proj.weight", s.hk * s.hd, H)
    yield f"{p}query_norm", _vector(f"{t}q_norm.weight", s.hd)
    yield f"{p}key_norm", _vector(f"{t}k_norm.weight", s.hd)
    yield f"{p}output", _matrix(f"{t}o_proj.weight", H, s.hq * s.hd)


def _gdn(p: str, t: str, text: TextConfig) -> Located:
    s, H = text.gdn, text.hidden_size
    assert s is not None
    keys, values = s.nk * s.dk, s.nv * s.dv
    joint = _matrix(f"{t}in_proj_qkv.weight", s.channels, H)
    yield f"{p}query", _cut(joint, (0, keys))
    yield f"{p}key", _cut(joint, (keys, 2 * keys))
    yield f"{p}value", _cut(joint, (2 * keys, s.channels))
    yield f"{p}z", _matrix(f"{t}in_proj_z.weight", values, H)
    yield f"{p}a_projection", _matrix(f"{t}in_proj_a.weight", s.nv, H)
    yield f"{p}b_projection", _matrix(f"{t}in_proj_b.weight", s.nv, H)
    yield f"{p}a_log", _vector(f"{t}A_log", s.nv)
    yield f"{p}dt_bias", _vector(f"{t}dt_bias", s.nv)
    # [channels, 1, taps] in the checkpoint, one row per tap in the artifact
    kernel = Source(f"{t}conv1d.weight", (s.channels, 1, s.taps), s.taps, ((0, s.channels),), transposed=True)
    yield f"{p}convolution", kernel
    yield f"{p}norm", _vector(f"{t}norm.weight", s.dv)
    yield f"{p}output", _matrix(f"{t}out_proj.weight", H, values)


def _swiglu(p: str, t: str, hidden: int, width: int) -> Located:
    yield f"{p}gate", _matrix(f"{t}gate_proj.weight", width, hidden)
    yield f"{p}up", _matrix(f"{t}up_proj.weight", width, hidden)
    yield f"{p}down", _matrix(f"{t}down_proj.weight", hidden, width)


def _moe(p: str, t: str, hidden: int, ffn: Moe, names: Collection[str]) -> Located:
    yield f"{p}router", _matrix(f"{t}gate.weight", ffn.experts, hidden)
    yield f"{p}shared_score", _matrix(f"{t}shared_expert_gate.weight", 1, hidden)
    yield from _swiglu(f"{p}shared/", f"{t}shared_expert.", hidden, ffn.shared_width)
    stacked = f"{t}experts.gate_up_proj" in names or f"{t}experts.down_proj" in names
    for e in range(ffn.experts):
        if stacked:
            yield from _stacked_expert(f"{p}experts/{e}/", f"{t}experts.", hidden, ffn, e)
        else:
            yield from _swiglu(f"{p}experts/{e}/", f"{t}experts.{e}.", hidden, ffn.width)


def _stacked_expert(p: str, t: str, hidden: int, ffn: Moe, e: int) -> Located:
    """Expert ``e`` of the banks ``gate_up_proj [E, 2 width, hidden]`` and ``down_proj [E, hidden, width]``."""
    first = 2 * e * ffn.width
    bank = Source(f"{t}gate_up_proj", (ffn.experts, 2 * ffn.width, hidden), hidden, ())
    yield f"{p}gate", _cut(bank, (first, first + ffn.width))
    yield f"{p}up", _cut(bank, (first + ffn.width, first + 2 * ffn.width))
    down = (ffn.experts, hidden, ffn.width)
    yield f"{p}down", Source(f"{t}down_proj", down, ffn.width, ((e * hidden, (e + 1) * hidden),))


def _vision(vision: VisionConfig, text_hidden: int) -> Located:
    t, h = "model.visual.", vision.hidden_size
    patch = (3, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    columns = 3 * vision.temporal_patch_size * vision.patch_size**2
    yield "vision/patch_embedding", Source(f"{t}patch_embed.proj.weight", (h, *patch), columns, ((0, h),))
    yield "vision/patch_embedding_bias", _vector(f"{t}patch_embed.proj.bias", h)
    yield "vision/position_embedding", _matrix(f"{t}pos_embed.weight", vision.num_position_embeddings, h)
    for i in range(vision.depth):
        yield from _vision_block(f"vision/layers/{i}/", f"{t}blocks.{i}.", vision)
    merged = vision.spatial_merge_size**2 * h
    yield "vision/merger/norm_weight", _vector(f"{t}merger.norm.weight", h)
    yield "vision/merger/norm_bias", _vector(f"{t}merger.norm.bias", h)
    yield from _linear("vision/merger/fc1", f"{t}merger.linear_fc1", merged, merged)
    yield from _linear("vision/merger/fc2", f"{t}merger.linear_fc2", text_hidden, merged)


def _vision_block(p: str, t: str, vision: VisionConfig) -> Located:
    h = vision.hidden_size
    for norm in ("norm1", "norm2"):
        for kind in ("weight", "bias"):
            yield f"{p}{norm}_{kind}", _vector(f"{t}{norm}.{kind}", h)
    weights = _thirds(_matrix(f"{t}attn.qkv.weight", 3 * h, h), h)
    biases = _thirds(_vector(f"{t}attn.qkv.bias", 3 * h), h)
    for name, weight, bias in zip(("query", "key", "value"), weights, biases):
        yield f"{p}attention/{name}", weight
        yield f"{p}attention/{name}_bias", bias
    yield from _linear(f"{p}attention/output", f"{t}attn.proj", h, h)
    yield from _linear(f"{p}mlp/fc1", f"{t}mlp.linear_fc1", vision.intermediate_size, h)
    yield from _linear(f"{p}mlp/fc2", f"{t}mlp.linear_fc2", h, vision.intermediate_size)


def _linear(p: str, t: str, rows: int, columns: int) -> Located:
    yield p, _matrix(f"{t}.weight", rows, columns)
    yield f"{p}_bias", _vector(f"{t}.bias", rows)


def _dflash(config: DFlashConfig, text: TextConfig) -> Located:
    """The names of a companion's tensors begin with its component's, beside those of the model."""
    c, hidden, chain = f"{config.name}/", text.hidden_size, config.chain
    yield f"{c}feature_projection", _matrix(f"{c}fc.weight", hidden, len(config.taps) * hidden)
    yield f"{c}context_norm", _vector(f"{c}hidden_norm.weight", hidden)
    yield f"{c}final_norm", _vector(f"{c}norm.weight", hidden)
    for i in range(len(config.windows)):
        yield from _dflash_layer(f"{c}layers/{i}/", f"{c}layers.{i}.", config, hidden)
    if chain:
        p, t = f"{c}candidate_selector/", f"{c}candidate_selector."
        yield f"{p}hidden_projection", _matrix(f"{t}hidden_projection.weight", chain.rank, hidden)
        for name in ("predecessor_codebook", "successor_codebook"):
            yield p + name, _matrix(t + name, text.vocab_size, chain.rank)


def _dflash_layer(p: str, t: str, config: DFlashConfig, hidden: int) -> Located:
    s, a = config.attention, f"{t}self_attn."
    yield f"{p}input_norm", _vector(f"{t}input_layernorm.weight", hidden)
    yield f"{p}post_attention_norm", _vector(f"{t}post_attention_layernorm.weight", hidden)
    yield f"{p}attention/query", _matrix(f"{a}q_proj.weight", s.hq * s.hd, hidden)
    for name, stored in (("key", "k_proj"), ("value", "v_proj")):
        yield f"{p}attention/{name}", _matrix(f"{a}{stored}.weight", s.hk * s.hd, hidden)
        yield f"{p}attention/context_{name}", _matrix(f"{a}{stored}.weight", s.hk * s.hd, hidden)
    yield f"{p}attention/output", _matrix(f"{a}o_proj.weight", hidden, s.hq * s.hd)
    yield f"{p}attention/query_norm", _vector(f"{a}q_norm.weight", s.hd)
    yield f"{p}attention/key_norm", _vector(f"{a}k_norm.weight", s.hd)
    yield from _swiglu(f"{p}mlp/", f"{t}mlp.", hidden, config.width)
    if (chain := config.chain) is not None:
        for name in ("attention_conv", "mlp_conv"):
            base = (2, chain.taps, hidden)
            yield f"{p}{name}/base_kernel", Source(f"{t}{name}.base_kernel", base, hidden, ((0, 2 * chain.taps),))
            rows = 2 * chain.taps * hidden // chain.group
            yield f"{p}{name}/kernel_projection", _matrix(f"{t}{name}.kernel_projection.weight", rows, hidden)
