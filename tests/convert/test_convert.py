"""Checkpoints written by transformers: every parameter of the artifact is the canonical encoding of its source."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ninfer.artifact import Artifact, TensorObject, decode, encode
from ninfer.artifact.verification import verify
from ninfer.convert import RECIPES, convert
from ninfer.models.qwen3_5.bind import check

Built = Callable[[str], tuple[Path, dict[str, np.ndarray]]]
Opened = Callable[[Path], Artifact]

HEADS, HEAD, EXPERTS, WIDTH = 4, 32, 4, 64
KEYS, VALUES = 2 * 16, 4 * 16


def logical(kind: str, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What each parameter must hold, written from the reference implementation's use of its tensors."""
    nested = kind.endswith("-vl")
    t = "model.language_model." if nested else "model."
    w = {
        "text/token_embedding": tensors[f"{t}embed_tokens.weight"],
        "text/output_head": tensors["lm_head.weight"],
        "text/final_norm": tensors[f"{t}norm.weight"],
    }
    for i in range(4):
        block(w, f"text/layers/{i}/", {k.removeprefix(f"{t}layers.{i}."): v for k, v in tensors.items()})
    if "mtp.fc.weight" in tensors:
        w["mtp/input_projection"] = tensors["mtp.fc.weight"]
        w["mtp/embedding_norm"] = tensors["mtp.pre_fc_norm_embedding.weight"]
        w["mtp/hidden_norm"] = tensors["mtp.pre_fc_norm_hidden.weight"]
        w["mtp/final_norm"] = tensors["mtp.norm.weight"]
        block(w, "mtp/layers/0/", {k.removeprefix("mtp.layers.0."): v for k, v in tensors.items()})
    if nested:
        vision(w, {k.removeprefix("model.visual."): v for k, v in tensors.items()})
    return w


def block(w: dict[str, np.ndarray], p: str, t: dict[str, np.ndarray]) -> None:
    w[f"{p}input_norm"] = t["input_layernorm.weight"]
    w[f"{p}post_attention_norm"] = t["post_attention_layernorm.weight"]
    if "self_attn.q_proj.weight" in t:
        joint = t["self_attn.q_proj.weight"].reshape(HEADS, 2, HEAD, -1)  # chunked in two after the view by heads
        w[f"{p}attention/query"] = joint[:, 0].reshape(HEADS * HEAD, -1)
        w[f"{p}attention/gate"] = joint[:, 1].reshape(HEADS * HEAD, -1)
        for name, tensor in (("key", "k_proj"), ("value", "v_proj"), ("output", "o_proj")):
            w[f"{p}attention/{name}"] = t[f"self_attn.{tensor}.weight"]
        for name, tensor in (("query_norm", "q_norm"), ("key_norm", "k_norm")):
            w[f"{p}attention/{name}"] = t[f"self_attn.{tensor}.weight"]
    else:
        joint = t["linear_attn.in_proj_qkv.weight"]
        parts = np.split(joint, [KEYS, 2 * KEYS])
        w |= {f"{p}gdn/{name}": part for name, part in zip(("query", "key", "value"), parts)}
        for name, tensor in (("z", "in_proj_z"), ("a_projection", "in_proj_a"), ("b_projection", "in_proj_b")):
            w[f"{p}gdn/{name}"] = t[f"linear_attn.{tensor}.weight"]
        w[f"{p}gdn/a_log"], w[f"{p}gdn/dt_bias"] = t["linear_attn.A_log"], t["linear_attn.dt_bias"]
        w[f"{p}gdn/convolution"] = np.stack([t["linear_attn.conv1d.weight"][:, 0, tap] for tap in range(4)])
        w[f"{p}gdn/norm"], w[f"{p}gdn/output"] = t["linear_attn.norm.weight"], t["linear_attn.out_proj.weight"]
    if "mlp.gate_proj.weight" in t:
        w |= {f"{p}mlp/{name}": t[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down")}
        return
    w[f"{p}moe/router"], w[f"{p}moe/shared_score"] = t["mlp.gate.weight"], t["mlp.shared_expert_gate.weight"]
    for name in ("gate", "up", "down"):
        w[f"{p}moe/shared/{name}"] = t[f"mlp.shared_expert.{name}_proj.weight"]
    for e in range(EXPERTS):
        gate, up = np.split(t["mlp.experts.gate_up_proj"][e], 2)
        w[f"{p}moe/experts/{e}/gate"], w[f"{p}moe/experts/{e}/up"] = gate, up
        w[f"{p}moe/experts/{e}/down"] = t["mlp.experts.down_proj"][e]


def vision(w: dict[str, np.ndarray], t: dict[str, np.ndarray]) -> None:
    def linear(name: str, tensor: str) -> None:
        w[name], w[f"{name}_bias"] = t[f"{tensor}.weight"], t[f"{tensor}.bias"]

    w["vision/patch_embedding"] = t["patch_embed.proj.weight"].reshape(32, -1)
    w["vision/patch_embedding_bias"] = t["patch_embed.proj.bias"]
    w["vision/position_embedding"] = t["pos_embed.weight"]
    for i in range(2):
        p, b = f"vision/layers/{i}/", f"blocks.{i}."
        for norm in ("norm1", "norm2"):
            w[f"{p}{norm}_weight"], w[f"{p}{norm}_bias"] = t[f"{b}{norm}.weight"], t[f"{b}{norm}.bias"]
        for j, name in enumerate(("query", "key", "value")):
            w[f"{p}attention/{name}"] = t[f"{b}attn.qkv.weight"].reshape(3, 32, 32)[j]
            w[f"{p}attention/{name}_bias"] = t[f"{b}attn.qkv.bias"].reshape(3, 32)[j]
        linear(f"{p}attention/output", f"{b}attn.proj")
        linear(f"{p}mlp/fc1", f"{b}mlp.linear_fc1")
        linear(f"{p}mlp/fc2", f"{b}mlp.linear_fc2")
    w["vision/merger/norm_weight"], w["vision/merger/norm_bias"] = t["merger.norm.weight"], t["merger.norm.bias"]
    linear("vision/merger/fc1", "merger.linear_fc1")
    linear("vision/merger/fc2", "merger.linear_fc2")


def formats_of(artifact: Artifact, name: str) -> str:
    record = artifact.directory.objects[artifact.binding(name).parts[0].object]
    assert isinstance(record, TensorObject)
    return record.format


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [(kind, "bf16") for kind in ("dense", "tied", "moe", "dense-vl", "moe-vl")]
    + [("dense", "q8"), ("dense", "fp8"), ("tied", "q6"), ("moe-vl", "q4-mixed"), ("dense-vl", "q8")],
)
def test_every_parameter_is_its_source(built: Built, opened: Opened, tmp_path: Path, kind: str, recipe: str) -> None:
    folder, tensors = built(kind)
    report = convert(folder, tmp_path / "m.ninfer", recipe=recipe, name="tiny", progress=False)
    artifact = opened(tmp_path / "m.ninfer")
    expected = logical(kind, tensors)
    assert set(artifact.directory.bindings) == set(expected)
    for name, values in expected.items():
        format = formats_of(artifact, name)
        stored = values if format in ("bf16", "fp32") else decode(format, encode(format, values), values.shape)
        np.testing.assert_array_equal(artifact.decode(name, values.shape), stored, err_msg=name)

    components = ["text"] + ["mtp"] * ("mtp.fc.weight" in tensors) + ["vision"] * kind.endswith("-vl")
    assert list(artifact.directory.components) == list(report.components) == components
    check(artifact, components)
    assert verify(artifact.source) == []
    assert all(use.activation_policy == "A16Only" and not use.auxiliaries for use in artifact.directory.uses.values())
    assert artifact.directory.metadata == {"name": "tiny"}
    assert report.artifact_bytes == (tmp_path / "m.ninfer").stat().st_size
    shards = {file.name: file.stat().st_size for file in folder.glob("*.safetensors")}
    assert 0.9 * sum(shards.values()) < report.source_bytes < sum(shards.values())
    assert [file.name for file in tmp_path.iterdir()] == ["m.ninfer"]


def test_formats_follow_the_recipe(built: Built, opened: Opened, tmp_path: Path) -> None:
    assert list(RECIPES) == ["bf16", "fp8", "q8", "q6", "q4-mixed", "import"]
    folder, _ = built("dense")
    for recipe, small, large in (("q8", "bf16", "q8_g32_fp16"), ("fp8", "bf16", "fp8_e4m3fn_row_bf16")):
        convert(folder, tmp_path / recipe, recipe=recipe, progress=False)
        artifact = opened(tmp_path / recipe)
        assert formats_of(artifact, "text/layers/0/gdn/a_projection") == small
        assert formats_of(artifact, "text/layers/0/gdn/a_log") == "fp32"
        assert formats_of(artifact, "text/layers/3/attention/query_norm") == "bf16"
        assert formats_of(artifact, "mtp/layers/0/mlp/up") == large
        assert formats_of(artifact, "text/output_head") == large


def test_parents_stack_in_the_published_order(built: Built, opened: Opened, tmp_path: Path) -> None:
    convert(built("moe")[0], tmp_path / "one", recipe="q8", progress=False)
    convert(built("dense")[0], tmp_path / "two", recipe="q4-mixed", progress=False)

    def order(artifact: Artifact, folder: str, names: list[str]) -> list[str]:
        parts = {name: artifact.binding(f"{folder}/{name}").parts[0] for name in names}
        assert len({part.object for part in parts.values()}) == 1
        return sorted(names, key=lambda name: parts[name].begin)

    one, two = opened(tmp_path / "one"), opened(tmp_path / "two")
    for layer in ("text/layers/3", "mtp/layers/0"):
        assert order(one, f"{layer}/attention", ["value", "gate", "key", "query"]) == ["query", "key", "gate", "value"]
    assert order(one, "text/layers/0/gdn", ["z", "value", "key", "query"]) == ["query", "key", "value", "z"]
    bank = [f"{e}/{name}" for e in range(EXPERTS) for name in ("gate", "up")]
    assert order(one, "text/layers/1/moe/experts", bank[::-1]) == bank
    assert order(one, "text/layers/1/moe", ["shared_score", "router"]) == ["router", "shared_score"]
    assert order(one, "text/layers/1/moe/shared", ["up", "gate"]) == ["gate", "up"]
    assert order(two, "text/layers/3/attention", ["key", "query"]) == ["query", "key"]
    assert order(two, "text/layers/3/attention", ["value", "gate"]) == ["gate", "value"]
    first = two.directory.objects["weight/000000"]
    assert isinstance(first, TensorObject)
    assert first.shape == (2 * KEYS, 128)
    kinds = [object_id.split("/")[0] for object_id in two.directory.objects]
    assert kinds == sorted(kinds, key=["resource", "weight"].index)


def test_a_tied_head_is_the_embedding(built: Built, opened: Opened, tmp_path: Path, copied: Any) -> None:
    convert(built("tied")[0], tmp_path / "m", recipe="q8", progress=False)
    artifact = opened(tmp_path / "m")
    assert artifact.binding("text/output_head") == artifact.binding("text/token_embedding")
    assert artifact.directory.components["text"].config["tie_word_embeddings"] is True
    assert [use for use in artifact.directory.uses if use[0] == "text/output_head"] == [
        ("text/output_head", "text/final_hidden")
    ]


def test_experts_may_be_stacked(built: Built, opened: Opened, tmp_path: Path, copied: Any) -> None:
    import torch
    from safetensors import safe_open

    folder, tensors = built("moe")
    stacked: dict[str, Any] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as shard:
            stacked |= {name: shard.get_tensor(name) for name in shard.keys() if ".experts." not in name}  # noqa: SIM118
    stacked |= {name: torch.from_numpy(v).bfloat16() for name, v in tensors.items() if ".experts." in name}
    from safetensors.torch import save_file

    other = tmp_path / "stacked"
    other.mkdir()
    for file in folder.iterdir():
        if not file.name.endswith((".safetensors", ".index.json")):
            (other / file.name).write_bytes(file.read_bytes())
    save_file({name: tensor.contiguous() for name, tensor in stacked.items()}, other / "model.safetensors")
    for name, source in (("a", folder), ("b", other)):
        convert(source, tmp_path / name, recipe="q4-mixed", progress=False)
    a, b = opened(tmp_path / "a"), opened(tmp_path / "b")
    assert a.directory.bindings == b.directory.bindings
    assert a.source.read(0, a.directory.payload_bytes) == b.source.read(0, b.directory.payload_bytes)


def test_resources_are_copied(built: Built, opened: Opened, tmp_path: Path) -> None:
    folder, _ = built("dense-vl")
    convert(folder, tmp_path / "m", recipe="bf16", progress=False)
    artifact = opened(tmp_path / "m")
    for component, roles in (
        ("text", ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")),
        ("vision", ("preprocessor_config.json", "video_preprocessor_config.json")),
    ):
        for role in roles:
            assert artifact.resource(component, role) == (folder / role).read_bytes()


def test_resources_older_checkpoints_lack(copied: Callable[[str], Path], opened: Opened, tmp_path: Path) -> None:
    folder = copied("dense")
    (folder / "chat_template.jinja").unlink()
    (folder / "generation_config.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ 'ü' }}"}))
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": [5, 6]}
    (folder / "config.json").write_text(json.dumps(config))
    convert(folder, tmp_path / "m", recipe="bf16", progress=False)
    artifact = opened(tmp_path / "m")
    assert artifact.resource("text", "chat_template.jinja").decode() == "{{ 'ü' }}"
    assert json.loads(artifact.resource("text", "generation_config.json")) == {"eos_token_id": [5, 6]}


def test_chosen_components_and_shards(built: Built, opened: Opened, tmp_path: Path) -> None:
    folder, _ = built("moe-vl")
    convert(folder, tmp_path / "m", recipe="bf16", components=("text",), shard_bytes=1 << 20, progress=False)
    artifact = opened(tmp_path / "m")
    assert list(artifact.directory.components) == ["text"]
    assert not any(name.startswith(("mtp/", "vision/")) for name in artifact.directory.bindings)
    assert len(artifact.directory.files) > 1
    assert {use[1] for use in artifact.directory.uses if use[0] == "text/output_head"} == {"text/final_hidden"}
    assert all(file.stat().st_size <= 1 << 20 for file in tmp_path.iterdir())
    check(artifact, ("text",))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_float_types(built: Built, opened: Opened, tmp_path: Path, dtype: str) -> None:
    """fp16 and fp32 sources are rounded once: to bfloat16 where stored so, by the encoder elsewhere."""
    import torch
    from safetensors.torch import load_file, save_file

    folder, _ = built("dense")
    source = tmp_path / "source"
    source.mkdir()
    tensors: dict[str, Any] = {}
    generator = torch.Generator().manual_seed(1)
    for file in sorted(folder.iterdir()):
        if file.suffix == ".safetensors":
            for name, tensor in load_file(file).items():
                noise = torch.rand(tensor.shape, generator=generator) * 0.01
                tensors[name] = (tensor.float() + noise).to(getattr(torch, dtype))
        elif not file.name.endswith(".index.json"):
            (source / file.name).write_bytes(file.read_bytes())
    save_file(tensors, source / "model.safetensors")
    convert(source, tmp_path / "m", recipe="q8", progress=False)
    artifact = opened(tmp_path / "m")
    expected = logical("dense", {name: tensor.float().numpy() for name, tensor in tensors.items()})
    for name, values in expected.items():
        format = formats_of(artifact, name)
        if format == "bf16":
            stored = torch.from_numpy(values.copy()).bfloat16().float().numpy()
        else:
            stored = decode(format, encode(format, values), values.shape)
        np.testing.assert_array_equal(artifact.decode(name, values.shape), stored, err_msg=name)


def test_blocks_do_not_show(built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: Opened) -> None:
    """The smallest row blocks, which cross parameters and heads, give the same payload."""
    folder, _ = built("moe-vl")
    for name, block in (("whole", 1 << 22), ("blocks", 1)):
        monkeypatch.setattr("ninfer.convert.streaming._BLOCK", block)
        convert(folder, tmp_path / name, recipe="q4-mixed", progress=False)
    whole, blocks = opened(tmp_path / "whole"), opened(tmp_path / "blocks")
    size = whole.directory.payload_bytes
    assert whole.source.read(0, size) == blocks.source.read(0, size)
