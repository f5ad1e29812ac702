"""A block-drafting companion: its ``config.json`` as an artifact stores it, checked against the text model.

The causality of a layer is what the reference implementations take it for: ``is_causal``, else
``dflash_config.causal``, else layers with a window are causal and the others are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ninfer.convert.hf_config import binary32, object_member, only, refuse
from ninfer.errors import ArtifactError
from ninfer.models.qwen3_5.config import FULL, SLIDING, DFlashConfig, TextConfig, parse_dflash

_COPIED = (
    "architectures", "model_type", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "num_hidden_layers", "max_position_embeddings",
)  # fmt: skip


_CHAIN = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def companion_record(
    root: Mapping[str, Any], text: TextConfig, component: str = "dflash"
) -> tuple[dict[str, Any], DFlashConfig]:
    """The config of the component "dflash" or "dflash2" from a companion's ``config.json``, and the same one parsed.
    ConversionError names a member that does not belong to a companion of this text model."""
    own = object_member(root, "dflash_config") if "dflash_config" in root else {}
    layers = len(text.layer_types)
    for name, value in {
        "hidden_size": text.hidden_size, "num_target_layers": layers, "vocab_size": text.vocab_size,
        "hidden_act": "silu", "attention_bias": False, "input_embedding_scale": 1, "output_multiplier": 1,
    }.items():  # fmt: skip
        only(root, name, value)
    if root.get("final_logit_softcapping") is not None:
        raise refuse("final_logit_softcapping: not supported")
    types, window = _layer_types(root, own)
    record = {name: root[name] for name in _COPIED if name in root} | {
        "rms_norm_eps": binary32(root.get("rms_norm_eps", 1e-6)),
        "rope_parameters": {"rope_theta": _theta(root)},
        "layer_types": types,
        "causal": _causal(root, own, types),
        "dflash_config": {
            "target_layer_ids": own.get("target_layer_ids", _default_taps(layers, len(types))),
            "mask_token_id": own.get("mask_token_id", root.get("mask_token_id")),
        },
    }
    if component == "dflash2":
        _only_own(root, own)
        record["dflash_config"] |= {n: own.get(n, root.get(n)) for n in _CHAIN}
    if SLIDING in types:
        record["sliding_window"] = window
    if (block := own.get("block_size", root.get("block_size"))) is not None:
        record["block_size"] = block
    try:
        return record, parse_dflash(record, text, component, where="")
    except ArtifactError as error:
        raise refuse(f"{error.where.lstrip('.')}: {error.reason}") from None


def _only_own(root: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """A selector that also chooses what the anchor is followed by would be another one."""
    for members in (root, own):
        only(members, "sample_from_anchor", False)


def _layer_types(root: Mapping[str, Any], own: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """Kinds of the layers, and the window of those that have one; older checkpoints have one for all, or none."""
    types, layers = root.get("layer_types"), root.get("num_hidden_layers")
    if isinstance(types, list):
        return types, root.get("sliding_window")
    if type(layers) is not int or not 1 <= layers <= 4096:
        raise refuse(f"num_hidden_layers: {layers!r} is not a number of layers")
    return [SLIDING if own.get("use_swa") else FULL] * layers, own.get("swa_window_size")


def _causal(root: Mapping[str, Any], own: Mapping[str, Any], types: list[Any]) -> Any:
    for value in (root.get("is_causal"), own.get("causal")):
        if value is not None:
            return value
    return [kind == SLIDING for kind in types]


def _theta(root: Mapping[str, Any]) -> Any:
    found: dict[str, Any] = {"rope_theta": root.get("rope_theta")}
    for name in ("rope_scaling", "rope_parameters"):
        if root.get(name) is not None:
            found |= object_member(root, name)
    if found.get("rope_type", found.get("type", "default")) != "default":
        raise refuse(f"rope_parameters: only the default kind is supported, not {found!r}")
    return binary32(found["rope_theta"])


def _default_taps(layers: int, taps: int) -> list[int]:
    """As many text layers as the companion has of its own, evenly spread from the second to the fourth from the end."""
    return [layers // 2] if taps == 1 else [round(1 + i * (layers - 4) / (taps - 1)) for i in range(taps)]
