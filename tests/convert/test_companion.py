"""A DFlash companion becomes a component of the model's artifact."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ninfer.artifact import Artifact, open_artifact
from ninfer.convert import convert
from ninfer.convert.companion import companion_record
from ninfer.convert.hf_config import parse_config, read_json
from ninfer.errors import ConversionError
from ninfer.gateway.cli import main
from ninfer.models.qwen3_5.bind import check

CONFIG: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "num_target_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32, "block_size": 8,
    "hidden_act": "silu", "attention_bias": False, "dtype": "bfloat16",
    "dflash_config": {"mask_token_id": 301, "target_layer_ids": [0, 2]},
}  # fmt: skip


def shapes(layers: int = 2, taps: int = 2) -> dict[str, tuple[int, ...]]:
    H, Q, K, hd, I = 128, 64, 32, 16, 96
    out: dict[str, tuple[int, ...]] = {"fc.weight": (H, taps * H), "hidden_norm.weight": (H,), "norm.weight": (H,)}
    for i in range(layers):
        p, a, m = f"layers.{i}.", f"layers.{i}.self_attn.", f"layers.{i}.mlp."
        out |= {f"{p}input_layernorm.weight": (H,), f"{p}post_attention_layernorm.weight": (H,)}
        out |= {f"{a}q_proj.weight": (Q, H), f"{a}k_proj.weight": (K, H), f"{a}v_proj.weight": (K, H)}
        out |= {f"{a}o_proj.weight": (H, Q), f"{a}q_norm.weight": (hd,), f"{a}k_norm.weight": (hd,)}
        out |= {f"{m}gate_proj.weight": (I, H), f"{m}up_proj.weight": (I, H), f"{m}down_proj.weight": (H, I)}
    return out


@pytest.fixture
def companion(tmp_path: Path) -> Callable[..., tuple[Path, dict[str, np.ndarray]]]:
    """Write a companion's folder with changes to its config and tensors."""
    import torch
    from safetensors.torch import save_file

    def write(changes: dict[str, Any] | None = None, extra: dict[str, tuple[int, ...]] | None = None):
        folder = tmp_path / "draft"
        folder.mkdir()
        generator = torch.Generator().manual_seed(3)
        wanted = shapes() | (extra or {})
        tensors = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in wanted.items()}
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(CONFIG | (changes or {})))
        return folder, {name: t.float().numpy() for name, t in tensors.items()}

    return write


def test_a_companion_is_stored_beside_its_model(built, companion, tmp_path: Path) -> None:
    folder, (draft, tensors), out = built("dense")[0], companion(), tmp_path / "m.ninfer"
    assert main(["convert", str(folder), str(out), "--recipe", "bf16", "--dflash", str(draft), "--quiet"]) == 0
    with open_artifact(out) as source:
        artifact = Artifact(source)
        selection = check(artifact, ("text", "dflash"))
        assert selection.dflash.windows == (32, None)
        assert selection.dflash.causal == (True, False)
        assert (selection.dflash.taps, selection.dflash.mask, selection.dflash.block) == ((0, 2), 301, 8)
        for name, stored in {
            "feature_projection": "fc", "context_norm": "hidden_norm", "final_norm": "norm",
            "layers/1/attention/query": "layers.1.self_attn.q_proj", "layers/1/mlp/up": "layers.1.mlp.up_proj",
            "layers/0/attention/key": "layers.0.self_attn.k_proj", "layers/0/mlp/down": "layers.0.mlp.down_proj",
            "layers/0/attention/context_key": "layers.0.self_attn.k_proj",
            "layers/1/attention/context_value": "layers.1.self_attn.v_proj",
            "layers/0/attention/query_norm": "layers.0.self_attn.q_norm",
        }.items():  # fmt: skip
            want = tensors[f"{stored}.weight"]
            np.testing.assert_array_equal(artifact.decode(f"dflash/{name}", want.shape), want)
        shared = [artifact.binding(f"dflash/layers/0/attention/{name}") for name in ("key", "context_key")]
        assert shared[0] == shared[1]
        assert ("text/output_head", "dflash/final_hidden") in artifact.directory.uses


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"hidden_size": 96}, "hidden_size"),
        ({"num_target_layers": 8}, "num_target_layers"),
        ({"vocab_size": 1000}, "vocab_size"),
        ({"output_multiplier": 2.0}, "output_multiplier"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "architectures"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_parameters"),
        ({"dflash_config": {"mask_token_id": 320, "target_layer_ids": [0]}}, "mask_token_id"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [2, 9]}}, "target_layer_ids"),
        ({"dflash_config": {"target_layer_ids": [2]}}, "mask_token_id"),
    ],
)
def test_a_companion_of_another_model_is_refused(built, companion, tmp_path: Path, change, place: str) -> None:
    draft, _ = companion(change)
    with pytest.raises(ConversionError, match=place) as caught:
        convert(built("dense")[0], tmp_path / "m.ninfer", recipe="bf16", dflash=draft, progress=False)
    assert caught.value.tensor == "config.json"
    assert not (tmp_path / "m.ninfer").exists()


def test_tensors_must_be_those_of_a_companion(built, companion, tmp_path: Path) -> None:
    draft, _ = companion(extra={"lm_head.weight": (320, 128)})
    with pytest.raises(ConversionError, match="not a tensor"):
        convert(built("dense")[0], tmp_path / "m.ninfer", recipe="bf16", dflash=draft, progress=False)


def test_older_configs(built) -> None:
    """One window for all layers, or none; causality by key, and else by kind; layers that are not named."""
    text = parse_config(read_json(built("dense")[0], "config.json")).text
    old = {k: v for k, v in CONFIG.items() if k not in ("layer_types", "sliding_window", "block_size", "rope_theta")}
    old["rope_parameters"] = {"rope_theta": 1e4}
    assert companion_record(old, text)[1].windows == (None, None)
    own = CONFIG["dflash_config"] | {"use_swa": True, "swa_window_size": 16, "block_size": 4}
    parsed = companion_record(old | {"dflash_config": own}, text)[1]
    assert (parsed.windows, parsed.causal, parsed.block) == ((16, 16), (True, True), 4)
    assert companion_record(old | {"dflash_config": own | {"causal": False}}, text)[1].causal == (False, False)
    assert companion_record(CONFIG | {"is_causal": True}, text)[1].causal == (True, True)
    unnamed = CONFIG | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    unnamed["dflash_config"] = {"mask_token_id": 301}
    assert companion_record(unnamed, text)[1].taps == (2,)


def test_a_dflash2_companion_beside_the_other(built, companion, tmp_path: Path) -> None:
    chain = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 24, "selector_top_k": 8}
    extra: dict[str, tuple[int, ...]] = {"candidate_selector.hidden_projection.weight": (24, 128)}
    extra |= {f"candidate_selector.{name}_codebook": (320, 24) for name in ("predecessor", "successor")}
    for i in range(2):
        for name in ("attention_conv", "mlp_conv"):
            extra[f"layers.{i}.{name}.base_kernel"] = (2, 2, 128)
            extra[f"layers.{i}.{name}.kernel_projection.weight"] = (32, 128)
    plain = companion()[0].rename(tmp_path / "plain")
    changes = {"architectures": ["DFlash2DraftModel"], "sample_from_anchor": False}
    draft, tensors = companion(changes | {"dflash_config": CONFIG["dflash_config"] | chain}, extra)
    out = tmp_path / "m.ninfer"
    convert(built("dense")[0], out, recipe="q8", dflash=plain, dflash2=draft, progress=False)
    with open_artifact(out) as source:
        artifact = Artifact(source)
        assert check(artifact, ("text", "dflash")).dflash.chain is None
        assert check(artifact, ("text", "dflash2")).dflash.chain.candidates == 8
        for name, stored in {
            "candidate_selector/successor_codebook": "candidate_selector.successor_codebook",
            "candidate_selector/hidden_projection": "candidate_selector.hidden_projection.weight",
            "layers/1/mlp_conv/base_kernel": "layers.1.mlp_conv.base_kernel",
            "layers/0/attention_conv/kernel_projection": "layers.0.attention_conv.kernel_projection.weight",
        }.items():
            want = tensors[stored]
            np.testing.assert_array_equal(artifact.decode(f"dflash2/{name}", want.shape), want)
    with pytest.raises(ConversionError, match="architectures"):
        convert(built("dense")[0], tmp_path / "n.ninfer", recipe="q8", dflash=draft, progress=False)
    other = json.loads((draft / "config.json").read_text()) | {"sample_from_anchor": True}
    (draft / "config.json").write_text(json.dumps(other))
    with pytest.raises(ConversionError, match="sample_from_anchor"):
        convert(built("dense")[0], tmp_path / "n.ninfer", recipe="q8", dflash2=draft, progress=False)
