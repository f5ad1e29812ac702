"""Configs, the parameter table, packing and recipes against published numbers of the family."""

from __future__ import annotations

import contextlib
import copy
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.errors import ArtifactError
from ninfer.models.qwen3_5.config import parse_mtp, parse_text, parse_vision, rotary_axes
from ninfer.models.qwen3_5.geometries import GEOMETRIES
from ninfer.models.qwen3_5.packing import parents
from ninfer.models.qwen3_5.parameters import mtp_parameters, text_parameters, vision_parameters
from ninfer.models.qwen3_5.recipes import RECIPES, storage_format

VISION = {
    "model_type": "qwen3_5_vision", "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16,
    "patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2, "num_position_embeddings": 2304,
}  # fmt: skip
MISSING = object()


@pytest.mark.parametrize(
    ("name", "billions", "state", "kv"),
    [
        ("0.8b", 0.752, 18 << 20, 12_288),
        ("2b", 1.882, 18 << 20, 12_288),
        ("4b", 4.206, 48 << 20, 32_768),
        ("9b", 8.954, 48 << 20, 32_768),
        ("27b", 26.896, 144 << 20, 65_536),
        ("35b-a3b", 34.661, 60 << 20, 20_480),
    ],
)
def test_published_sizes(name: str, billions: float, state: int, kv: int) -> None:
    config = parse_text(GEOMETRIES[name])
    elements = sum(math.prod(spec.shape) for spec in text_parameters(config))
    if config.tie_word_embeddings:
        elements -= config.vocab_size * config.hidden_size
    assert round(elements / 1e9, 3) == billions
    assert config.kv_bytes_per_token("bf16") == kv
    assert config.gdn is not None
    tail = config.linear_layers * 3 * config.gdn.channels * 2
    assert config.state_bytes("bf16") == state + tail


def test_published_binding_and_use_counts() -> None:
    dense, moe = parse_text(GEOMETRIES["27b"]), parse_text(GEOMETRIES["35b-a3b"])
    specs = [*text_parameters(dense, ("mtp",)), *mtp_parameters(dense), *vision_parameters(parse_vision(VISION), 5120)]
    proposal_bindings, proposal_uses = 2, 1
    assert len(specs) == 1422 - proposal_bindings
    assert sum(len(spec.uses) for spec in specs) == 785 - proposal_uses
    assert len({spec.name for spec in specs}) == len(specs)
    specs = [*text_parameters(moe), *mtp_parameters(moe), *vision_parameters(parse_vision(VISION), 2048)]
    dflash_bindings = 3 + 6 * 13
    assert len(specs) == 32713 - proposal_bindings - dflash_bindings


def test_official_parents() -> None:
    config = parse_text(GEOMETRIES["27b"])
    specs = [*text_parameters(config), *mtp_parameters(config)]
    q8 = {spec.name: storage_format(RECIPES["q8"], spec) for spec in specs}
    groups = parents(specs, q8)
    assert sorted(name for group in groups for name in group) == sorted(q8)
    assert groups[0] == tuple(f"text/layers/0/gdn/{part}" for part in ("query", "key", "value", "z"))
    assert groups[1] == ("text/layers/0/gdn/a_projection", "text/layers/0/gdn/b_projection")
    assert groups[2] == ("text/layers/0/mlp/gate", "text/layers/0/mlp/up")
    assert tuple(f"text/layers/3/attention/{part}" for part in ("query", "key", "gate", "value")) in groups
    mixed = parents(specs, {spec.name: storage_format(RECIPES["q4-mixed"], spec) for spec in specs})
    assert ("text/layers/3/attention/query", "text/layers/3/attention/key") in mixed
    assert ("text/layers/3/attention/gate", "text/layers/3/attention/value") in mixed
    assert ("text/layers/0/gdn/value", "text/layers/0/gdn/z") in mixed
    tied = parents(specs, {name: form for name, form in q8.items() if name != "text/output_head"})
    assert not any("text/output_head" in group for group in tied)


def test_expert_banks_are_single_parents() -> None:
    raw = copy.deepcopy(GEOMETRIES["35b-a3b"]) | {"num_experts": 3, "num_experts_per_tok": 2}
    specs = list(text_parameters(parse_text(raw)))
    groups = parents(specs, {spec.name: storage_format(RECIPES["q4-mixed"], spec) for spec in specs})
    p = "text/layers/0/moe/"
    assert tuple(f"{p}experts/{e}/{part}" for e in range(3) for part in ("gate", "up")) in groups
    assert tuple(f"{p}experts/{e}/down" for e in range(3)) in groups
    assert (f"{p}router", f"{p}shared_score") in groups
    assert (f"{p}shared/gate", f"{p}shared/up") in groups
    assert len({len(group) for group in groups if f"{p}experts/0/gate" in group}) == 1


def test_vision_groups() -> None:
    specs = list(vision_parameters(parse_vision(VISION), 64))
    groups = parents(specs, {spec.name: storage_format(RECIPES["q4-mixed"], spec) for spec in specs})
    p = "vision/layers/0/attention/"
    assert (f"{p}query", f"{p}key", f"{p}value") in groups
    assert (f"{p}query_bias", f"{p}key_bias", f"{p}value_bias") in groups


def test_recipes_place_the_documented_formats() -> None:
    specs = {spec.name: spec for spec in text_parameters(parse_text(GEOMETRIES["27b"]))}
    mixed = {name: storage_format(RECIPES["q4-mixed"], spec) for name, spec in specs.items()}
    assert mixed["text/token_embedding"] == mixed["text/output_head"] == "q6_g64_fp16"
    for name in ("attention/query", "attention/key", "mlp/gate", "mlp/up"):
        assert mixed[f"text/layers/3/{name}"] == "q4_g64_fp16"
    for name in ("attention/gate", "attention/value", "attention/output", "mlp/down"):
        assert mixed[f"text/layers/3/{name}"] == "q5_g64_fp16"
    for name in ("gdn/value", "gdn/z", "gdn/output"):
        assert mixed[f"text/layers/0/{name}"] == "q5_g64_fp16"
    for recipe in RECIPES.values():
        assert storage_format(recipe, specs["text/layers/0/gdn/a_projection"]) == "bf16"
        assert storage_format(recipe, specs["text/layers/0/gdn/a_log"]) == "fp32"


def test_rotary_axes_of_the_released_sections() -> None:
    assert rotary_axes((11, 11, 10), 32) == (0, 1, 2) * 10 + (0, 1)


def test_reals_round_to_binary32() -> None:
    raw = GEOMETRIES["tiny"]
    assert parse_text(raw | {"rms_norm_eps": 9.999999974752427e-07}) == parse_text(raw | {"rms_norm_eps": 1e-6})


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("hidden_size", MISSING), ("hidden_size", 1.0), ("hidden_size", True), ("hidden_size", 0),
        ("rms_norm_eps", 1e-60), ("rms_norm_eps", float("inf")), ("rms_norm_eps", 10**400), ("rms_norm_eps", "1e-6"),
        ("vocab_size", 2**32), ("tie_word_embeddings", 1), ("architectures", ["Llama"]), ("architectures", "Q"),
        ("model_type", "qwen3_5_moe_text"), ("layer_types", ["full_attention"]), ("num_key_value_heads", 3),
        ("linear_num_value_heads", 3), ("linear_conv_kernel_dim", MISSING), ("intermediate_size", MISSING),
        ("num_experts", 4), ("surprise", None), ("rope_parameters", {"rope_theta": 1e7}), ("rope_parameters", 3),
    ],
)  # fmt: skip
def test_bad_text_config_names_the_member(member: str, value: object) -> None:
    raw = copy.deepcopy(GEOMETRIES["tiny"])
    raw[member] = value
    if value is MISSING:
        del raw[member]
    with pytest.raises(ArtifactError) as error:
        parse_text(raw)
    assert error.value.where.startswith(f"components.text.config.{member}")


@pytest.mark.parametrize(
    "change",
    [
        {"partial_rotary_factor": 1.5}, {"partial_rotary_factor": 0.03}, {"mrope_section": [2, 2, 1]},
        {"mrope_section": [0, 2, 2]}, {"mrope_section": [4, 0]}, {"rope_theta": -1.0}, {"rope_type": "default"},
    ],
)  # fmt: skip
def test_bad_rope_parameters(change: dict[str, object]) -> None:
    raw = copy.deepcopy(GEOMETRIES["tiny"])
    raw["rope_parameters"] |= change
    with pytest.raises(ArtifactError) as error:
        parse_text(raw)
    assert error.value.where.startswith("components.text.config.rope_parameters.")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)


@given(member=st.sampled_from([*GEOMETRIES["tiny"], *GEOMETRIES["tiny"]["rope_parameters"]]), value=JSON)
def test_any_json_is_a_config_or_a_typed_error(member: str, value: object) -> None:
    raw = copy.deepcopy(GEOMETRIES["tiny"])
    (raw if member in raw else raw["rope_parameters"])[member] = value
    with contextlib.suppress(ArtifactError):
        parse_text(raw)


def test_mtp_needs_attention_geometry_and_its_kind() -> None:
    raw = copy.deepcopy(GEOMETRIES["tiny"]) | {"layer_types": ["linear_attention"] * 4}
    for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "rope_parameters"):
        del raw[name]
    assert parse_text(raw).attention is None
    with pytest.raises(ArtifactError, match="num_attention_heads"):
        parse_text(raw, mtp=True)
    text = parse_text(GEOMETRIES["tiny"])
    assert parse_mtp({"architectures": ["Qwen3_5MTP"]}, text).architecture == "Qwen3_5MTP"
    with pytest.raises(ArtifactError, match="architectures"):
        parse_mtp({"architectures": ["Qwen3_5MoeMTP"]}, text)


@pytest.mark.parametrize("change", [{"num_heads": 7}, {"num_position_embeddings": 2300}, {"depth": 0}, {"x": 1}])
def test_bad_vision_config(change: dict[str, object]) -> None:
    with pytest.raises(ArtifactError, match=next(iter(change))):
        parse_vision(VISION | change)
