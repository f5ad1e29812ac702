"""A Hugging Face ``config.json`` becomes the component configs of an artifact.

Multimodal checkpoints nest the language model under ``text_config``; text-only exports have it at the root. Rotary
settings come as ``rope_parameters``, or in the older flat spelling (``rope_theta``, ``partial_rotary_factor``,
``rope_scaling``). What the inference code does not implement is refused here, before any weight is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from ninfer.errors import ArtifactError, ConversionError
from ninfer.models.qwen3_5.config import (
    DFlashConfig,
    TextConfig,
    VisionConfig,
    parse_text,
    parse_vision,
    rotary_axes,
)

CONFIG = "config.json"

_ARCHITECTURES = {
    "Qwen3_5ForCausalLM": False,
    "Qwen3_5ForConditionalGeneration": False,
    "Qwen3_5MoeForCausalLM": True,
    "Qwen3_5MoeForConditionalGeneration": True,
}
_MODEL_TYPES = {False: ("qwen3_5", "qwen3_5_text"), True: ("qwen3_5_moe", "qwen3_5_moe_text")}
_COMMON = (
    "hidden_size",
    "vocab_size",
    "num_hidden_layers",
    "max_position_embeddings",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
_LINEAR = (
    "linear_num_key_heads",
    "linear_key_head_dim",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
_DENSE = ("intermediate_size",)
_MOE = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
_VISION = (
    "depth",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "patch_size",
    "temporal_patch_size",
    "spatial_merge_size",
    "num_position_embeddings",
)
# Members a config may leave out, with the value the reference implementation then uses.
_DEFAULTS = {"head_dim": 256, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
_DEFAULT_SECTION = (11, 11, 10)


@attrs.frozen
class SourceConfig:
    """What a checkpoint's config says: component configs as an artifact stores them, and the same ones parsed.

    companions, companion_records: of block-drafting companions that are converted too, by component. prefix: of the
    language model's tensors. mtp_layers: ``None`` when the config does not say. eos_token_id and quantization are
    passed on unread.
    """

    text_record: dict[str, Any]
    vision_record: dict[str, Any] | None
    mtp_record: dict[str, Any]
    text: TextConfig
    vision: VisionConfig | None
    prefix: str
    mtp_layers: int | None
    mtp_own_embeddings: bool
    eos_token_id: Any
    quantization: Any
    companions: Mapping[str, DFlashConfig] = attrs.Factory(dict)
    companion_records: Mapping[str, dict[str, Any]] = attrs.Factory(dict)


def refuse(message: str) -> ConversionError:
    """A ConversionError that blames ``config.json``."""
    return ConversionError(message, tensor=CONFIG)


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object from a file of the checkpoint; ConversionError naming the file."""
    try:
        value = json.loads((folder / name).read_bytes().decode())
    except OSError as error:
        raise ConversionError(error.strerror or "cannot be read", tensor=name) from None
    except (ValueError, RecursionError):
        raise ConversionError("not valid JSON", tensor=name) from None
    if not isinstance(value, dict):
        raise ConversionError("not a JSON object", tensor=name)
    return value


def parse_config(root: Mapping[str, Any], *, vision: bool = True) -> SourceConfig:
    """A checkpoint's parsed ``config.json``, checked. ConversionError names the member at fault.

    vision: whether the vision tower is wanted; its config is not looked at otherwise.
    """
    moe = _is_moe(root)
    nested = "text_config" in root
    source = object_member(root, "text_config") if nested else root
    text = _text(source, moe)
    text["tie_word_embeddings"] = root.get("tie_word_embeddings", source.get("tie_word_embeddings", False))
    tower = None
    try:
        parsed_text = parse_text(text, mtp=True, where="text_config" if nested else "")
        if vision and nested and root.get("vision_config") is not None:
            tower = _vision(object_member(root, "vision_config"), moe, parsed_text.hidden_size)
        parsed_tower = None if tower is None else parse_vision(tower, where="vision_config")
    except ArtifactError as error:
        raise refuse(f"{error.where.lstrip('.')}: {error.reason}") from None
    return SourceConfig(
        text_record=text,
        vision_record=tower,
        mtp_record={"architectures": ["Qwen3_5MoeMTP" if moe else "Qwen3_5MTP"]},
        text=parsed_text,
        vision=parsed_tower,
        prefix="model.language_model." if nested else "model.",
        mtp_layers=source.get("mtp_num_hidden_layers", root.get("mtp_num_hidden_layers")),
        mtp_own_embeddings=source.get("mtp_use_dedicated_embeddings", False) is not False,
        eos_token_id=source.get("eos_token_id", root.get("eos_token_id")),
        quantization=root.get("quantization_config", source.get("quantization_config")),
    )


def _is_moe(root: Mapping[str, Any]) -> bool:
    named = root.get("architectures")
    architecture = named[0] if isinstance(named, list) and len(named) == 1 else None
    if architecture not in _ARCHITECTURES:
        raise refuse(f"architectures: {named!r} is not one of {', '.join(_ARCHITECTURES)}")
    moe = _ARCHITECTURES[architecture]
    if root.get("model_type") not in _MODEL_TYPES[moe]:
        raise refuse(f"model_type: {root.get('model_type')!r} does not belong to {architecture}")
    return moe


def _text(source: Mapping[str, Any], moe: bool) -> dict[str, Any]:
    """The members that geometry needs; ``parse_text`` checks their values."""
    only(source, "attention_bias", False)
    only(source, "attn_output_gate", True)
    only(source, "hidden_act", "silu")
    only(source, "mlp_only_layers", [])
    config: dict[str, Any] = {
        "architectures": ["Qwen3_5MoeForCausalLM" if moe else "Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_moe_text" if moe else "qwen3_5_text",
        **_copied(source, _COMMON),
        "rms_norm_eps": binary32(source.get("rms_norm_eps", 1e-6)),
        "layer_types": _layer_types(source),
        "rope_parameters": _rope(source),
        **_copied(source, _MOE if moe else _DENSE),
    }
    if "linear_attention" in config["layer_types"]:
        config |= _copied(source, _LINEAR)
    return config


def _layer_types(source: Mapping[str, Any]) -> list[Any]:
    types = source.get("layer_types")
    if types is not None:
        return list(types) if isinstance(types, list) else [types]
    layers, interval = source.get("num_hidden_layers"), source.get("full_attention_interval", 4)
    if type(layers) is not int or type(interval) is not int or not 1 <= layers <= 4096 or interval < 1:
        raise refuse(f"num_hidden_layers, full_attention_interval: {layers!r}, {interval!r} give no layer pattern")
    return ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)]


def _rope(source: Mapping[str, Any]) -> dict[str, Any]:
    """``{rope_theta, partial_rotary_factor, mrope_section}`` from the nested or the flat spelling."""
    found: dict[str, Any] = {k: source[k] for k in ("rope_theta", "partial_rotary_factor") if k in source}
    for name in ("rope_scaling", "rope_parameters"):
        if source.get(name) is not None:
            found |= object_member(source, name)
    kind = found.get("rope_type", found.get("type", "default"))
    if kind not in ("default", "mrope"):
        raise refuse(f"rope_parameters.rope_type: {kind!r} is not supported")
    only(found, "mrope_interleaved", True)
    factor = binary32(found.get("partial_rotary_factor", 0.25))
    rope = {"partial_rotary_factor": factor, "mrope_section": found.get("mrope_section")}
    if rope["mrope_section"] is None:
        rope["mrope_section"] = _default_section(source.get("head_dim", _DEFAULTS["head_dim"]), factor)
    return ({"rope_theta": binary32(found["rope_theta"])} if "rope_theta" in found else {}) | rope


def _default_section(head_dim: Any, factor: Any) -> list[int]:
    """The reference implementation's default [11, 11, 10], cut down to the rotary pairs there are."""
    try:
        axes = rotary_axes(_DEFAULT_SECTION, min(int(head_dim * factor), 2**16) // 2)
    except (TypeError, ValueError, OverflowError):
        return list(_DEFAULT_SECTION)
    return [axes.count(axis) for axis in range(3)]


def _vision(source: Mapping[str, Any], moe: bool, text_width: int) -> dict[str, Any]:
    only(source, "hidden_act", "gelu_pytorch_tanh", "vision_config.")
    only(source, "in_channels", 3, "vision_config.")
    only(source, "deepstack_visual_indexes", [], "vision_config.")
    only(source, "out_hidden_size", text_width, "vision_config.")
    return {"model_type": "qwen3_5_moe_vision" if moe else "qwen3_5_vision", **_copied(source, _VISION)}


def _copied(source: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    found = {name: source.get(name, _DEFAULTS.get(name)) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def object_member(root: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = root[name]
    if not isinstance(value, dict):
        raise refuse(f"{name}: expected an object, got {value!r}")
    return value


def only(source: Mapping[str, Any], name: str, allowed: Any, place: str = "") -> None:
    value = source.get(name)
    if value is not None and value != allowed:
        raise refuse(f"{place}{name}: {value!r} is not supported, only {allowed!r}")


def binary32(value: Any) -> Any:
    """A number at the precision artifacts keep; anything else unchanged, for the parser to refuse."""
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 3e38:
        return value
    return float(np.float32(value))
