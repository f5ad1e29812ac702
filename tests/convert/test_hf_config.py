"""config.json in its several spellings, and what is refused in it."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from ninfer.convert.hf_config import parse_config
from ninfer.errors import ConversionError

FLAT: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "hidden_size": 5120,
    "num_hidden_layers": 8,
    "intermediate_size": 17408,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
    "mtp_num_hidden_layers": 1,
    "eos_token_id": 248044,
}
VISION: dict[str, Any] = {
    "model_type": "qwen3_5",
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_position_embeddings": 2304,
    "out_hidden_size": 5120,
    "deepstack_visual_indexes": [],
}


def nested(**changes: Any) -> dict[str, Any]:
    text = {k: v for k, v in FLAT.items() if k not in ("architectures", "tie_word_embeddings")}
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": True,
        "text_config": copy.deepcopy(text),
        "vision_config": copy.deepcopy(VISION),
    } | changes


def test_component_configs_are_closed_and_rounded() -> None:
    config = parse_config(FLAT)
    assert config.text_record == {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_size": 5120,
        "vocab_size": 248320,
        "num_hidden_layers": 8,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
        "rms_norm_eps": 9.999999974752427e-07,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]},
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_num_value_heads": 48,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "intermediate_size": 17408,
    }
    assert config.vision is None
    assert config.prefix == "model."
    assert config.mtp_record == {"architectures": ["Qwen3_5MTP"]}
    assert config.eos_token_id == 248044


def test_nested_checkpoints() -> None:
    config = parse_config(nested())
    assert config.prefix == "model.language_model."
    assert config.text_record["tie_word_embeddings"] is True
    assert config.text_record["architectures"] == ["Qwen3_5ForCausalLM"]
    assert config.vision_record == {
        "model_type": "qwen3_5_vision",
        **{name: VISION[name] for name in VISION if name not in _NOT_STORED},
    }
    assert parse_config(nested(), vision=False).vision is None


_NOT_STORED = ("model_type", "hidden_act", "in_channels", "out_hidden_size", "deepstack_visual_indexes")


def test_older_rotary_spelling_is_the_same() -> None:
    flat = {k: v for k, v in FLAT.items() if k != "rope_parameters"}
    flat |= {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "head_dim": 256}
    assert parse_config(flat).text_record == parse_config(FLAT).text_record
    flat["rope_scaling"] = {"type": "mrope", "mrope_section": [11, 11, 10]}
    assert parse_config(flat).text_record == parse_config(FLAT).text_record


@pytest.mark.parametrize(("head_dim", "section"), [(256, [11, 11, 10]), (32, [2, 1, 1]), (512, [43, 11, 10])])
def test_a_missing_section_is_the_default_cut_to_the_head(head_dim: int, section: list[int]) -> None:
    """[11, 11, 10] with each axis limited to the pairs it can reach: what the reference implementation computes."""
    config = FLAT | {"head_dim": head_dim, "rope_parameters": {"rope_theta": 1e7}}
    assert parse_config(config).text_record["rope_parameters"]["mrope_section"] == section


def test_transformers_agrees_on_the_defaults() -> None:
    from transformers import Qwen3_5TextConfig

    required = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "max_position_embeddings")
    heads = ("num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads")
    ours = parse_config(
        {k: FLAT[k] for k in ("architectures", "model_type", *required, *heads)}
        | {"rope_parameters": {"rope_theta": 1e7}, "full_attention_interval": 2}
    ).text_record
    theirs = Qwen3_5TextConfig(
        **{k: FLAT[k] for k in (*required, *heads)}, rope_parameters={"rope_theta": 1e7}, full_attention_interval=2
    )
    for name in ours:
        if name not in ("architectures", "rope_parameters"):
            expected = pytest.approx(ours[name], rel=1e-6) if name == "rms_norm_eps" else ours[name]
            assert getattr(theirs, name) == expected, name
    assert theirs.rope_parameters["partial_rotary_factor"] == ours["rope_parameters"]["partial_rotary_factor"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"}, "architectures"),
        ({"architectures": None}, "architectures"),
        ({"model_type": "qwen3_5_moe_text"}, "model_type"),
        ({"attention_bias": True}, "attention_bias"),
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers"),
        ({"layer_types": ["sliding_attention"] * 8}, "layer_types[0]"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": "full_attention"}, "layer_types"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers"),
        ({"full_attention_interval": 0}, "full_attention_interval"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": 5120.0}, "hidden_size"),
        ({"vocab_size": True}, "vocab_size"),
        ({"num_key_value_heads": 5}, "num_key_value_heads"),
        ({"linear_num_value_heads": 17}, "linear_num_value_heads"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"rope_parameters": {}}, "rope_theta"),
        ({"rope_parameters": []}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e7, "factor": 4.0}}, "rope_type"),
        ({"rope_parameters": {"rope_theta": 1e7, "mrope_interleaved": False}}, "mrope_interleaved"),
        ({"rope_parameters": {"rope_theta": 1e7, "mrope_section": [8, 16, 8]}}, "mrope_section"),
        ({"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 1.5}}, "partial_rotary_factor"),
    ],
)
def test_refusals_name_the_member(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConversionError) as caught:
        parse_config(FLAT | change)
    assert caught.value.tensor == "config.json"
    assert named in caught.value.reason


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"deepstack_visual_indexes": [8, 16, 24]}, "vision_config.deepstack_visual_indexes"),
        ({"hidden_act": "silu"}, "vision_config.hidden_act"),
        ({"in_channels": 1}, "vision_config.in_channels"),
        ({"out_hidden_size": 4096}, "vision_config.out_hidden_size"),
        ({"patch_size": [16, 16]}, "vision_config.patch_size"),
        ({"num_position_embeddings": 2305}, "vision_config.num_position_embeddings"),
        ({"num_heads": 7}, "vision_config.num_heads"),
        ({"depth": None}, "vision_config.depth"),
    ],
)
def test_vision_refusals_name_the_member(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConversionError) as caught:
        parse_config(nested(vision_config=VISION | change))
    assert named in caught.value.reason
    parse_config(nested(vision_config=VISION | change), vision=False)


def test_nested_members_are_named_with_their_place() -> None:
    config = nested()
    del config["text_config"]["head_dim"], config["text_config"]["hidden_size"]
    with pytest.raises(ConversionError, match=r"text_config\.hidden_size"):
        parse_config(config)
