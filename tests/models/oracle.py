"""Random models of the family: a Hugging Face model and the same weights as an artifact on disk."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

from ninfer.artifact import (
    Artifact,
    Component,
    ResourceSpec,
    Use,
    encode,
    open_artifact,
    pack_members,
    plan_directory,
    write_artifact,
)
from ninfer.models.qwen3_5.bind import RESOURCES
from ninfer.models.qwen3_5.config import FULL, LINEAR, SLIDING, parse_dflash, parse_text
from ninfer.models.qwen3_5.geometries import text_geometry
from ninfer.models.qwen3_5.packing import parents
from ninfer.models.qwen3_5.parameters import dflash_parameters, mtp_parameters, text_parameters

torch.set_num_threads(1)  # the models are tiny

Weights = dict[str, npt.NDArray[np.float32]]


def random_config(seed: int) -> dict[str, Any]:
    """A text component config in which no two axes have the same size. Even seeds are dense, every third is tied."""
    rng = np.random.default_rng(seed)

    def pick(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    hk, ratio = pick((1, 3), (2, 3), (1, 5), (3, 4))
    nk, share = pick((1, 2), (2, 3), (3, 2), (1, 5))
    head_dim, rotary = pick(
        (24, (0.25, (1, 1, 1))), (32, (0.25, (2, 1, 1))), (40, (0.5, (4, 3, 3))), (20, (1.0, (4, 3, 3)))
    )
    moe = None if seed % 2 == 0 else pick((6, 2, 28, 44), (12, 3, 20, 36), (7, 4, 24, 16))
    layers = pick(3, 4, 5, 6)
    config = text_geometry(
        pick(52, 70, 84, 98), layers, heads=(hk * ratio, hk), gdn=(nk, nk * share),
        dense=None if moe else pick(118, 150, 202), moe=moe, tied=seed % 3 == 0, vocab=pick(211, 307, 401),
        head_dim=head_dim, gdn_dims=pick((12, 20), (16, 10), (8, 12), (18, 14)), rotary=rotary, positions=4096,
    )  # fmt: skip
    config["rope_parameters"]["rope_theta"] = float(pick(1e4, 1e7))
    config["linear_conv_kernel_dim"] = pick(4, 4, 2, 5)
    types = [FULL if rng.random() < 0.4 else LINEAR for _ in range(layers)]
    types[0], types[-1] = pick((FULL, LINEAR), (LINEAR, FULL))
    return config | {"layer_types": types}


def hugging_face(config: dict[str, Any], seed: int) -> torch.nn.Module:
    """A model whose weights are bfloat16 numbers held in fp32, spread widely enough for mistakes to show."""
    moe = "num_experts" in config
    own = {k: v for k, v in config.items() if k not in ("architectures", "rope_parameters")}
    rope = config["rope_parameters"] | {"rope_type": "default", "mrope_interleaved": True}
    kind, cls = (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM) if moe else (Qwen3_5TextConfig, Qwen3_5ForCausalLM)
    hf = kind(**own, rope_parameters=rope)
    model = cls._from_config(hf, attn_implementation="eager", experts_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            normal = torch.randn(p.shape, generator=generator)
            if name.endswith("A_log"):
                p.copy_(torch.log(torch.rand(p.shape, generator=generator) * 7.95 + 0.05))
            elif name.endswith("linear_attn.norm.weight"):
                p.copy_((1 + 0.2 * normal).bfloat16())
            elif name.endswith("embed_tokens.weight"):
                p.copy_(normal.bfloat16())
            elif name.endswith("dt_bias"):
                p.copy_(0.2 * normal)
            elif p.ndim == 1:
                p.copy_((0.2 * normal).bfloat16())
            else:
                p.copy_((normal / math.sqrt(p[0].numel() if p.ndim == 2 else p.shape[-1])).bfloat16())
    return model


def with_mtp(config: dict[str, Any], state: Weights, seed: int) -> Weights:
    """The state dict with a random MTP module beside the model, under the family's names."""
    single = config | {"num_hidden_layers": 1, "layer_types": [FULL]}
    layer = {k: v.detach().numpy() for k, v in hugging_face(single, seed).state_dict().items()}
    rng, H = np.random.default_rng(seed), config["hidden_size"]

    def rounded(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        return torch.from_numpy(values.astype(np.float32)).bfloat16().float().numpy()

    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    return state | {
        **{f"mtp.{k.removeprefix('model.')}": v for k, v in layer.items() if k.startswith("model.layers.0.")},
        "mtp.fc.weight": rounded(rng.normal(size=(H, 2 * H)) / math.sqrt(2 * H)),
        **{f"mtp.{name}.weight": rounded(0.2 * rng.normal(size=H)) for name in norms},
    }


def random_dflash(config: dict[str, Any], seed: int, chain: bool = False) -> dict[str, Any]:
    """A companion's component config for a text config; chain: of a DFlash2 companion."""
    rng = np.random.default_rng(seed)

    def pick(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    layers, taps = pick(1, 2, 3), pick(1, 2, 3)
    hk, ratio = pick((1, 3), (2, 2), (3, 1))
    types = [pick(SLIDING, FULL) for _ in range(layers)]
    draft = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "intermediate_size": pick(90, 122),
        "num_attention_heads": hk * ratio, "num_key_value_heads": hk, "head_dim": pick(16, 26, 40),
        "num_hidden_layers": layers, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": float(pick(1e4, 1e7))}, "layer_types": types,
        "dflash_config": {
            "target_layer_ids": sorted(rng.permutation(config["num_hidden_layers"])[:taps].tolist()),
            "mask_token_id": config["vocab_size"] - 3,
        },
    }  # fmt: skip
    draft |= {"sliding_window": pick(3, 20, 70)} if SLIDING in types else {}
    causal = pick(None, True, [bool(rng.integers(2)) for _ in range(layers)])
    draft |= {} if causal is None else {"causal": causal}
    if not chain:
        return draft
    own = {"conv_kernel_size": pick(2, 3), "conv_group_size": 2, "selector_rank": pick(5, 24), "selector_top_k": 6}
    return draft | {"architectures": ["DFlash2DraftModel"], "dflash_config": draft["dflash_config"] | own}


def dflash_state(config: dict[str, Any], draft: dict[str, Any], seed: int) -> Weights:
    """A random companion under its checkpoint's names."""
    rng, H, hd = np.random.default_rng(seed), config["hidden_size"], draft["head_dim"]
    Q, K = draft["num_attention_heads"] * hd, draft["num_key_value_heads"] * hd
    width, taps = draft["intermediate_size"], len(draft["dflash_config"]["target_layer_ids"])
    own = draft["dflash_config"]
    chain = "selector_rank" in own

    def rounded(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        return torch.from_numpy(values.astype(np.float32)).bfloat16().float().numpy()

    def matrix(rows: int, columns: int) -> npt.NDArray[np.float32]:
        return rounded(rng.normal(size=(rows, columns)) / math.sqrt(columns))

    def norm(size: int) -> npt.NDArray[np.float32]:
        return rounded(1 + 0.3 * rng.normal(size=size))

    out = {"fc.weight": matrix(H, taps * H), "hidden_norm.weight": norm(H), "norm.weight": norm(H)}
    for i in range(draft["num_hidden_layers"]):
        p = f"layers.{i}."
        out |= {f"{p}input_layernorm.weight": norm(H), f"{p}post_attention_layernorm.weight": norm(H)}
        for name, size in (("q_proj", (Q, H)), ("k_proj", (K, H)), ("v_proj", (K, H)), ("o_proj", (H, Q))):
            out[f"{p}self_attn.{name}.weight"] = matrix(*size)
        out |= {f"{p}self_attn.q_norm.weight": norm(hd), f"{p}self_attn.k_norm.weight": norm(hd)}
        for name, size in (("gate_proj", (width, H)), ("up_proj", (width, H)), ("down_proj", (H, width))):
            out[f"{p}mlp.{name}.weight"] = matrix(*size)
        if chain:
            taps, groups = own["conv_kernel_size"], H // own["conv_group_size"]
            for name in ("attention_conv", "mlp_conv"):
                out[f"{p}{name}.base_kernel"] = rounded(rng.normal(size=(2, taps, H)))
                out[f"{p}{name}.kernel_projection.weight"] = matrix(2 * taps * groups, H)
    if chain:
        rank, R, s = own["selector_rank"], config["vocab_size"], "candidate_selector."
        out[f"{s}hidden_projection.weight"] = matrix(rank, H)
        for name in ("predecessor_codebook", "successor_codebook"):
            out[s + name] = rounded(rng.normal(size=(R, rank)))
    return out


def dflash_weights(draft: dict[str, Any], state: Weights) -> Weights:
    """That state dict under the artifact's parameter names."""
    chain = "selector_rank" in draft["dflash_config"]
    out = {"feature_projection": state["fc.weight"], "context_norm": state["hidden_norm.weight"]}
    out["final_norm"] = state["norm.weight"]
    for i in range(draft["num_hidden_layers"]):
        s, p = f"layers.{i}.", f"layers/{i}/"
        out[f"{p}input_norm"] = state[f"{s}input_layernorm.weight"]
        out[f"{p}post_attention_norm"] = state[f"{s}post_attention_layernorm.weight"]
        for ours, theirs in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"), ("context_key", "k_proj"),
                             ("context_value", "v_proj"), ("output", "o_proj"), ("query_norm", "q_norm"),
                             ("key_norm", "k_norm")):  # fmt: skip
            out[f"{p}attention/{ours}"] = state[f"{s}self_attn.{theirs}.weight"]
        for part in ("gate", "up", "down"):
            out[f"{p}mlp/{part}"] = state[f"{s}mlp.{part}_proj.weight"]
        if chain:
            for name in ("attention_conv", "mlp_conv"):
                out[f"{p}{name}/base_kernel"] = state[f"{s}{name}.base_kernel"]
                out[f"{p}{name}/kernel_projection"] = state[f"{s}{name}.kernel_projection.weight"]
    if chain:
        p, s = "candidate_selector/", "candidate_selector."
        out[f"{p}hidden_projection"] = state[f"{s}hidden_projection.weight"]
        for name in ("predecessor_codebook", "successor_codebook"):
            out[p + name] = state[s + name]
    return {f"{'dflash2' if chain else 'dflash'}/{name}": value for name, value in out.items()}


def artifact_weights(config: dict[str, Any], state: Weights) -> Weights:
    """The state dict under the artifact's parameter names."""
    text = parse_text(config)
    out: Weights = {
        "text/token_embedding": state["model.embed_tokens.weight"],
        "text/final_norm": state["model.norm.weight"],
        "text/output_head": state["model.embed_tokens.weight" if text.tie_word_embeddings else "lm_head.weight"],
    }
    layers = [(f"model.layers.{i}.", f"text/layers/{i}/", kind) for i, kind in enumerate(text.layer_types)]
    if "mtp.fc.weight" in state:
        layers.append(("mtp.layers.0.", "mtp/layers/0/", FULL))
        for ours, theirs in (("input_projection", "fc"), ("embedding_norm", "pre_fc_norm_embedding"),
                             ("hidden_norm", "pre_fc_norm_hidden"), ("final_norm", "norm")):  # fmt: skip
            out[f"mtp/{ours}"] = state[f"mtp.{theirs}.weight"]
    for s, p, kind in layers:
        out[f"{p}input_norm"] = state[f"{s}input_layernorm.weight"]
        out[f"{p}post_attention_norm"] = state[f"{s}post_attention_layernorm.weight"]
        if kind == FULL:
            assert text.attention is not None
            q = state[f"{s}self_attn.q_proj.weight"].reshape(text.attention.hq, 2, text.attention.hd, -1)
            out[f"{p}attention/query"], out[f"{p}attention/gate"] = (q[:, j].reshape(-1, q.shape[-1]) for j in (0, 1))
            for ours, theirs in (("key", "k_proj"), ("value", "v_proj"), ("output", "o_proj"),
                                 ("query_norm", "q_norm"), ("key_norm", "k_norm")):  # fmt: skip
                out[f"{p}attention/{ours}"] = state[f"{s}self_attn.{theirs}.weight"]
        else:
            assert text.gdn is not None
            keys, g = text.gdn.nk * text.gdn.dk, f"{p}gdn/"
            qkv = np.split(state[f"{s}linear_attn.in_proj_qkv.weight"], [keys, 2 * keys])
            out[f"{g}query"], out[f"{g}key"], out[f"{g}value"] = qkv
            for ours, theirs in (("z", "in_proj_z"), ("a_projection", "in_proj_a"), ("b_projection", "in_proj_b"),
                                 ("output", "out_proj"), ("norm", "norm")):  # fmt: skip
                out[g + ours] = state[f"{s}linear_attn.{theirs}.weight"]
            out[f"{g}convolution"] = state[f"{s}linear_attn.conv1d.weight"][:, 0].T
            out[f"{g}a_log"], out[f"{g}dt_bias"] = state[f"{s}linear_attn.A_log"], state[f"{s}linear_attn.dt_bias"]
        mlps = [(f"{s}mlp.", f"{p}mlp/")]
        if "num_experts" in config:
            mlps = [(f"{s}mlp.shared_expert.", f"{p}moe/shared/")]
            out[f"{p}moe/router"] = state[f"{s}mlp.gate.weight"]
            out[f"{p}moe/shared_score"] = state[f"{s}mlp.shared_expert_gate.weight"]
            banks = (state[f"{s}mlp.experts.gate_up_proj"], state[f"{s}mlp.experts.down_proj"])
            for e, (gate_up, down) in enumerate(zip(*banks)):
                x = f"{p}moe/experts/{e}/"
                out[f"{x}gate"], out[f"{x}up"] = np.split(gate_up, 2)
                out[f"{x}down"] = down
        for theirs, ours in mlps:
            for part in ("gate", "up", "down"):
                out[ours + part] = state[f"{theirs}{part}_proj.weight"]
    return out


def write(
    path: Path, config: dict[str, Any], weights: Weights, *, matrices: str = "bf16",
    dflash: dict[str, Any] | None = None,
) -> Artifact:  # fmt: skip
    """Store weights by artifact name; matrices in one format, packed as the converter packs them. dflash: config of a
    companion whose weights are among them."""
    mtp = "mtp/input_projection" in weights
    text = parse_text(config, mtp=mtp)
    kind = "dflash2" if dflash and "selector_rank" in dflash["dflash_config"] else "dflash"
    companions = [name for name, there in (("mtp", mtp), (kind, dflash)) if there]
    specs = [*text_parameters(text, companions), *(mtp_parameters(text) if mtp else ())]
    if dflash:
        specs += dflash_parameters(parse_dflash(dflash, text, kind), text)
    forms = {spec.name: spec.format or matrices for spec in specs}
    shapes = {spec.name: spec.shape for spec in specs}
    objects: list[Any] = [ResourceSpec(f"resource/{role}", 2) for role in RESOURCES["text"]]
    bindings: dict[str, Any] = {}
    contents: dict[str, Any] = {spec.id: b"{}" for spec in objects}
    for i, members in enumerate(parents(specs, forms)):
        form = forms[members[0]]
        tensor, bound = pack_members(f"weight/{i:06}", form, [(name, shapes[name]) for name in members])
        stacked = np.concatenate([weights[name].reshape(shapes[name]) for name in members]).astype(np.float32)
        contents[tensor.id] = encode(form, stacked.reshape(tensor.shape))
        objects.append(tensor)
        bindings.update(bound)
    resources = {role: f"resource/{role}" for role in RESOURCES["text"]}
    components = {"text": Component(config, resources=resources)}
    if mtp:
        own = "Qwen3_5MoeMTP" if "num_experts" in config else "Qwen3_5MTP"
        components["mtp"] = Component({"architectures": [own]}, target="text")
    if dflash:
        components[kind] = Component(dflash, target="text")
    directory = plan_directory(
        components=components,
        objects=objects,
        bindings=bindings,
        uses=[Use(spec.name, site, "A16Only") for spec in specs for site in spec.uses],
    )
    write_artifact(path, directory, lambda object_id: [(0, contents[object_id])])
    return Artifact(open_artifact(path))
