"""Dry runs on released geometries: published counts come out of a config and a list of tensor names alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from ninfer.artifact import TensorObject, geometry
from ninfer.convert.checkpoint import TensorInfo
from ninfer.convert.convert import prepare
from ninfer.convert.hf_config import parse_config
from ninfer.convert.planning import Plan
from ninfer.models.qwen3_5.geometries import GEOMETRIES

VISION = {
    "model_type": "qwen3_5", "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16,
    "patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2, "num_position_embeddings": 2304,
}  # fmt: skip
Shapes = Iterator[tuple[str, tuple[int, ...]]]


def released(name: str) -> dict[str, Any]:
    text = GEOMETRIES[name]
    moe = "num_experts" in text
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration" if moe else "Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5_moe" if moe else "qwen3_5",
        "text_config": {**text, "mtp_num_hidden_layers": 1, "eos_token_id": 248046},
        "vision_config": VISION | {"out_hidden_size": text["hidden_size"]},
    }


def tensors(config: dict[str, Any]) -> Shapes:
    """Names and shapes of a released multimodal checkpoint with an MTP module."""
    c = config["text_config"]
    H, R = c["hidden_size"], c["vocab_size"]
    yield from (("model.language_model.embed_tokens.weight", (R, H)), ("lm_head.weight", (R, H)))
    yield "model.language_model.norm.weight", (H,)
    for i, kind in enumerate(c["layer_types"]):
        for name, shape in layer(c, kind):
            yield f"model.language_model.layers.{i}.{name}", shape
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        yield f"mtp.{name}.weight", (H,)
    yield "mtp.fc.weight", (H, 2 * H)
    for name, shape in layer(c, "full_attention"):
        yield f"mtp.layers.0.{name}", shape
    h, i, p = 1152, 4304, "model.visual."
    yield from ((f"{p}patch_embed.proj.weight", (h, 3, 2, 16, 16)), (f"{p}patch_embed.proj.bias", (h,)))
    yield f"{p}pos_embed.weight", (2304, h)
    linears = [("merger.linear_fc1", 4 * h, 4 * h), ("merger.linear_fc2", H, 4 * h)]
    norms = ["merger.norm"]
    for b in range(27):
        linears += [(f"blocks.{b}.{n}", rows, columns) for n, rows, columns in (
            ("attn.qkv", 3 * h, h), ("attn.proj", h, h), ("mlp.linear_fc1", i, h), ("mlp.linear_fc2", h, i)
        )]  # fmt: skip
        norms += [f"blocks.{b}.norm1", f"blocks.{b}.norm2"]
    for name, rows, columns in linears:
        yield from ((f"{p}{name}.weight", (rows, columns)), (f"{p}{name}.bias", (rows,)))
    for name in norms:
        yield from ((f"{p}{name}.weight", (h,)), (f"{p}{name}.bias", (h,)))


def layer(c: dict[str, Any], kind: str) -> Shapes:
    H, D = c["hidden_size"], c["head_dim"]
    yield from (("input_layernorm.weight", (H,)), ("post_attention_layernorm.weight", (H,)))
    if kind == "full_attention":
        Q, K = c["num_attention_heads"] * D, c["num_key_value_heads"] * D
        for name, shape in (("q_proj", (2 * Q, H)), ("k_proj", (K, H)), ("v_proj", (K, H)), ("o_proj", (H, Q))):
            yield f"self_attn.{name}.weight", shape
        yield from (("self_attn.q_norm.weight", (D,)), ("self_attn.k_norm.weight", (D,)))
    else:
        nv, dv = c["linear_num_value_heads"], c["linear_value_head_dim"]
        C = 2 * c["linear_num_key_heads"] * c["linear_key_head_dim"] + nv * dv
        for name, shape in (
            ("in_proj_qkv.weight", (C, H)), ("in_proj_z.weight", (nv * dv, H)), ("in_proj_a.weight", (nv, H)),
            ("in_proj_b.weight", (nv, H)), ("conv1d.weight", (C, 1, 4)), ("A_log", (nv,)), ("dt_bias", (nv,)),
            ("norm.weight", (dv,)), ("out_proj.weight", (H, nv * dv)),
        ):  # fmt: skip
            yield f"linear_attn.{name}", shape
    if "num_experts" not in c:
        wide = c["intermediate_size"]
        for name, shape in (("gate_proj", (wide, H)), ("up_proj", (wide, H)), ("down_proj", (H, wide))):
            yield f"mlp.{name}.weight", shape
        return
    E, wide, shared = c["num_experts"], c["moe_intermediate_size"], c["shared_expert_intermediate_size"]
    yield from (("mlp.gate.weight", (E, H)), ("mlp.shared_expert_gate.weight", (1, H)))
    yield from (("mlp.experts.gate_up_proj", (E, 2 * wide, H)), ("mlp.experts.down_proj", (E, H, wide)))
    for name, shape in (("gate_proj", (shared, H)), ("up_proj", (shared, H)), ("down_proj", (H, shared))):
        yield f"mlp.shared_expert.{name}.weight", shape


@attrs.define
class Listed:
    """A checkpoint that is only a list of tensors; the scalars it is asked for are all 2."""

    tensors: dict[str, TensorInfo]

    def rows(self, info: TensorInfo, first: int, last: int, columns: int) -> np.ndarray:
        assert math.prod(info.shape) == 1
        return np.full((1, 1), 2.0, "f4")


def planned(tmp_path: Path, add_resources: Any, config: dict[str, Any], infos: list[TensorInfo], recipe: str) -> Plan:
    add_resources(tmp_path)
    listed: Any = Listed({info.name: info for info in infos})
    return prepare(tmp_path, parse_config(config), listed, recipe)


def weights(plan: Plan) -> list[TensorObject]:
    return [o for o in plan.directory.objects.values() if isinstance(o, TensorObject) and o.id.startswith("weight/")]


def test_dense_27b(tmp_path: Path, add_resources: Any) -> None:
    """Published for text, vision, MTP and a draft head: 1422 bindings, 785 uses, 1118 weights with a/b kept apart."""
    config = released("27b")
    infos = [TensorInfo(name, "BF16", shape) for name, shape in tensors(config)]
    plan = planned(tmp_path, add_resources, config, infos, "q4-mixed")
    head_bindings, head_uses, head_weights, gdn_layers = 2, 1, 2, 48
    assert len(plan.directory.bindings) == 1422 - head_bindings
    assert len(plan.directory.uses) == 785 - head_uses
    assert len(weights(plan)) == 1118 - head_weights - gdn_layers
    first = plan.directory.objects["weight/000000"]
    assert isinstance(first, TensorObject)
    assert (first.shape, first.format) == ((4096, 5120), "q4_g64_fp16")
    q8 = planned(tmp_path, add_resources, config, infos, "q8")
    assert sum(o.shape == (14336, 5120) for o in weights(q8)) == 17  # query, key, gate, value; MTP's too
    assert sum(o.shape == (16384, 5120) for o in weights(q8)) == 48
    assert sum(o.shape == (34816, 5120) for o in weights(q8)) == 65


def test_moe_35b(tmp_path: Path, add_resources: Any) -> None:
    """Published with DFlash and a draft head: 32713 bindings, 32184 uses, 934 weights; 1045 source tensors."""
    config = released("35b-a3b")
    infos = [TensorInfo(name, "BF16", shape) for name, shape in tensors(config)]
    assert len(infos) == 1045
    plan = planned(tmp_path, add_resources, config, infos, "q8")
    dflash_bindings, dflash_uses, dflash_weights = 3 + 6 * 13, 1 + 6 * 9, 3 + 6 * 8
    assert len(plan.directory.bindings) == 32713 - dflash_bindings - 2
    assert len(plan.directory.uses) == 32184 - dflash_uses - 1 - 2  # also the head's at DFlash
    assert len(weights(plan)) == 934 - dflash_weights - 2
    shapes = {o.shape for o in weights(plan)}
    assert {(9216, 2048), (12288, 2048), (257, 2048), (262144, 2048), (524288, 512), (1024, 2048)} <= shapes


def nvfp4(infos: list[TensorInfo]) -> Iterator[TensorInfo]:
    """The released mixture: NVFP4 but for early attention, two attention outputs and one GDN output."""
    kept = ["in_proj_a", "in_proj_b", "layers.3.self_attn.o_proj", "layers.7.self_attn.o_proj"]
    kept += ["layers.4.linear_attn.out_proj"]
    kept += [f"layers.{i}.self_attn.{n}_proj" for i in range(24) for n in "qkv"]
    for info in infos:
        module = info.name.removesuffix(".weight")
        language = ".language_model.layers." in info.name and len(info.shape) == 2
        if not language or any(module.endswith(name) for name in kept):
            yield info
            continue
        rows, columns = info.shape
        yield TensorInfo(f"{module}.weight_packed", "U8", (rows, columns // 2))
        yield TensorInfo(f"{module}.weight_scale", "F8_E4M3", (rows, columns // 16))
        for name in ("weight_global_scale", "input_global_scale"):
            yield TensorInfo(f"{module}.{name}", "F32", (1,))


def test_dense_27b_nvfp4(tmp_path: Path, add_resources: Any) -> None:
    """Published: 1054 weights with a draft head and a/b apart, and 485 divisors when each use has its own."""
    config = released("27b")
    group = {"weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}}
    config["quantization_config"] = {"quant_method": "compressed-tensors", "config_groups": {"g": group}}
    infos = list(nvfp4([TensorInfo(name, "BF16", shape) for name, shape in tensors(config)]))
    plan = planned(tmp_path, add_resources, config, infos, "q8")
    divisors = [o for o in plan.directory.objects.values() if o.id.startswith("auxiliary/")]
    assert len(divisors) == 485
    assert len(weights(plan)) == 1054 - 2 - 48
    assert len(plan.directory.bindings) == 1422 - 2
    policies = [use.activation_policy for use in plan.directory.uses.values()]
    assert (policies.count("AllowA4"), policies.count("AllowA8")) == (485, 0)


@pytest.mark.parametrize("recipe", ["bf16", "q8"])
def test_objects_follow_each_other(tmp_path: Path, add_resources: Any, recipe: str) -> None:
    config = released("0.8b")
    tied = [(name, shape) for name, shape in tensors(config) if name != "lm_head.weight"]
    infos = [TensorInfo(name, "BF16", shape) for name, shape in tied]
    plan = planned(tmp_path, add_resources, config, infos, recipe)
    kinds = [object_id.split("/")[0] for object_id in plan.directory.objects]
    assert kinds == ["resource"] * 6 + ["weight"] * (len(kinds) - 6)
    cursor = 0
    for o in plan.directory.objects.values():
        assert cursor <= o.offset < cursor + 256
        if isinstance(o, TensorObject):
            assert o.offset % 256 == 0
            assert o.nbytes == geometry(o.format, o.layout, o.shape).nbytes
        cursor = o.offset + o.nbytes
    elements = sum(o.elements for o in weights(plan))
    assert elements == sum(math.prod(info.shape) for info in infos)
