"""compressed-tensors checkpoints, written by hand: codes, scales and divisors arrive bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ninfer.artifact import Artifact, TensorObject, plane_view, unswizzle_scales
from ninfer.artifact.verification import verify
from ninfer.convert import convert
from ninfer.convert.quantised import declared_schemes
from ninfer.errors import ConversionError
from ninfer.models.qwen3_5.bind import check

Tensors = dict[str, torch.Tensor]
H, HEADS, HEAD, KV, KEYS, VALUES, WIDTH, VOCAB = 128, 4, 32, 128, 128, 256, 256, 64
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "vocab_size": VOCAB, "hidden_size": H,
    "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "intermediate_size": WIDTH,
    "num_attention_heads": HEADS, "num_key_value_heads": 4, "head_dim": HEAD, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "rope_parameters": {"rope_theta": 1e6},
}  # fmt: skip
FP8_GROUP = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
    "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
}
NVFP4_GROUP = {
    "targets": ["re:.*mlp.*"],
    "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True},
    "input_activations": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "dynamic": "local"},
}
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "mixed-precision",
    "config_groups": {"group_0": FP8_GROUP, "group_1": NVFP4_GROUP},
    "ignore": ["lm_head", "re:.*in_proj_[ab]"],
    "kv_cache_scheme": None,
}


class Maker:
    """Random tensors. NVFP4 and FP8 words are drawn over their whole legal range."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)
        self.tensors: Tensors = {}

    def floats(self, name: str, *shape: int) -> None:
        self.tensors[name] = torch.from_numpy(self.rng.normal(size=shape).astype("f4")).bfloat16()

    def fp8(self, module: str, rows: int, columns: int, *, flat: bool = False) -> None:
        codes = self.rng.integers(0, 256, (rows, columns), "u1")
        codes[codes & 0x7F == 0x7F] = 0x80
        scales = self.rng.integers(0, 0x7F80, (rows,) if flat else (rows, 1)).astype("u2")
        scales.flat[1] = 0  # legal: the row is all zero
        codes[1] &= 0x80
        self.tensors[f"{module}.weight"] = torch.from_numpy(codes).view(torch.float8_e4m3fn)
        self.tensors[f"{module}.weight_scale"] = torch.from_numpy(scales.view("i2")).view(torch.bfloat16)

    def nvfp4(self, module: str, rows: int, columns: int, divisor: float, activation: float | None = 3.5) -> None:
        scales = self.rng.integers(0, 0x7F, (rows, columns // 16), "u1")
        self.tensors[f"{module}.weight_packed"] = torch.from_numpy(
            self.rng.integers(0, 256, (rows, columns // 2), "u1")
        )
        self.tensors[f"{module}.weight_scale"] = torch.from_numpy(scales).view(torch.float8_e4m3fn)
        self.tensors[f"{module}.weight_global_scale"] = torch.tensor([divisor])
        if activation is not None:
            self.tensors[f"{module}.input_global_scale"] = torch.tensor([activation])


def mixed() -> Tensors:
    """Layer 0: NVFP4 with two divisors in one group, FP8 output. Layer 1: FP8 and NVFP4 attention, weight-only MLP."""
    make = Maker()
    make.floats("model.embed_tokens.weight", VOCAB, H)
    make.floats("lm_head.weight", VOCAB, H)
    make.floats("model.norm.weight", H)
    for i in range(2):
        make.floats(f"model.layers.{i}.input_layernorm.weight", H)
        make.floats(f"model.layers.{i}.post_attention_layernorm.weight", H)
    p = "model.layers.0.linear_attn."
    make.nvfp4(f"{p}in_proj_qkv", 2 * KEYS + VALUES, H, 0.1, 7.0)
    make.nvfp4(f"{p}in_proj_z", VALUES, H, 1300.7, 7.0)
    make.fp8(f"{p}out_proj", H, VALUES)
    for name in ("in_proj_a", "in_proj_b"):
        make.floats(f"{p}{name}.weight", 4, H)
    make.floats(f"{p}A_log", 4)
    make.floats(f"{p}dt_bias", 4)
    make.floats(f"{p}conv1d.weight", 2 * KEYS + VALUES, 1, 4)
    make.floats(f"{p}norm.weight", 64)
    p = "model.layers.1.self_attn."
    make.nvfp4(f"{p}q_proj", 2 * HEADS * HEAD, H, 8.25, 2.0)
    for name in ("k_proj", "v_proj"):
        make.fp8(f"{p}{name}", KV, H, flat=name == "k_proj")
    make.floats(f"{p}o_proj.weight", H, HEADS * HEAD)
    make.floats(f"{p}q_norm.weight", HEAD)
    make.floats(f"{p}k_norm.weight", HEAD)
    for i, activation in ((0, 1.25), (1, None)):
        p = f"model.layers.{i}.mlp."
        for name in ("gate_proj", "up_proj"):
            make.nvfp4(p + name, WIDTH, H, 0.3, activation)
        make.nvfp4(f"{p}down_proj", H, WIDTH, 2.0**-120, activation)
    return make.tensors


@pytest.fixture
def source(tmp_path: Path, add_resources: Any, add_tensors: Any) -> Callable[..., Path]:
    """Writes a checkpoint folder from tensors and changes to the config."""

    def write(tensors: Tensors, quantization: Any = QUANTIZATION, **changes: Any) -> Path:
        folder = tmp_path / "source"
        folder.mkdir()
        add_resources(folder)
        names = sorted(tensors)
        for i in range(3):
            add_tensors(folder, f"part{i}.safetensors", {name: tensors[name] for name in names[i::3]})
        config = CONFIG | {"quantization_config": quantization} | changes
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return write


def words(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy()


def stored_rows(artifact: Artifact, name: str) -> tuple[str, np.ndarray, np.ndarray, np.ndarray]:
    """(format, codes, scales in natural order, divisor bits) of a parameter's rows of its parent."""
    ((parent, begin, end),) = artifact.parts(name)
    g = parent.geometry
    rows = slice(begin // g.columns, end // g.columns)
    assert g.scales is not None
    codes = plane_view(parent.data, g.codes, rows)
    if g.divisor is None:
        return parent.format, codes, plane_view(parent.data, g.scales, rows), np.zeros(0, "u1")
    natural = unswizzle_scales(plane_view(parent.data, g.scales).reshape(-1), g.rows, g.groups)
    return parent.format, codes, natural[rows], plane_view(parent.data, g.divisor)


def test_words_arrive_bit_for_bit(source: Any, opened: Callable[[Path], Artifact], tmp_path: Path) -> None:
    t = mixed()
    convert(source(t), tmp_path / "m", recipe="import", progress=False)
    artifact = opened(tmp_path / "m")
    check(artifact)
    assert verify(artifact.source) == []
    formats = {o.format for o in artifact.directory.objects.values() if isinstance(o, TensorObject)}
    assert formats == {"bf16", "fp32", "nvfp4", "fp8_e4m3fn_row_bf16"}

    attention, gdn = "model.layers.1.self_attn.", "model.layers.0.linear_attn."
    per_head = np.arange(2 * HEADS * HEAD).reshape(HEADS, 2, HEAD)
    expected = {
        "text/layers/1/attention/query": (f"{attention}q_proj", per_head[:, 0].reshape(-1)),
        "text/layers/1/attention/gate": (f"{attention}q_proj", per_head[:, 1].reshape(-1)),
        "text/layers/1/attention/key": (f"{attention}k_proj", np.arange(KV)),
        "text/layers/1/attention/value": (f"{attention}v_proj", np.arange(KV)),
        "text/layers/0/gdn/query": (f"{gdn}in_proj_qkv", np.arange(KEYS)),
        "text/layers/0/gdn/key": (f"{gdn}in_proj_qkv", np.arange(KEYS, 2 * KEYS)),
        "text/layers/0/gdn/value": (f"{gdn}in_proj_qkv", np.arange(2 * KEYS, 2 * KEYS + VALUES)),
        "text/layers/0/gdn/z": (f"{gdn}in_proj_z", np.arange(VALUES)),
        "text/layers/0/gdn/output": (f"{gdn}out_proj", np.arange(H)),
    }
    for i in range(2):
        for name, rows in (("gate", WIDTH), ("up", WIDTH), ("down", H)):
            expected[f"text/layers/{i}/mlp/{name}"] = (f"model.layers.{i}.mlp.{name}_proj", np.arange(rows))
    for name, (module, rows) in expected.items():
        format, codes, scales, divisor = stored_rows(artifact, name)
        assert format == ("nvfp4" if f"{module}.weight_packed" in t else "fp8_e4m3fn_row_bf16"), name
        packed = t.get(f"{module}.weight_packed", t.get(f"{module}.weight"))
        assert packed is not None
        np.testing.assert_array_equal(codes, words(packed)[rows], err_msg=name)
        source_scales = words(t[f"{module}.weight_scale"]).reshape(packed.shape[0], -1)
        np.testing.assert_array_equal(scales, source_scales[rows], err_msg=name)
        if format == "nvfp4":
            np.testing.assert_array_equal(divisor.reshape(-1), words(t[f"{module}.weight_global_scale"]))

    # and what the reference arithmetic makes of the words
    module = f"{gdn}in_proj_z"
    nibbles = np.stack([words(t[f"{module}.weight_packed"]) & 15, words(t[f"{module}.weight_packed"]) >> 4], -1)
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = magnitudes[nibbles & 7] * np.where(nibbles & 8, -1, 1)
    scaled = (
        values.reshape(VALUES, -1, 16) * t[f"{module}.weight_scale"].float().numpy()[..., None] / np.float32(1300.7)
    )
    decoded = artifact.decode("text/layers/0/gdn/z", (VALUES, H))
    np.testing.assert_allclose(decoded, scaled.reshape(VALUES, H), rtol=1e-6)


def test_parents_uses_and_divisors(source: Any, opened: Callable[[Path], Artifact], tmp_path: Path) -> None:
    t = mixed()
    convert(source(t), tmp_path / "m", recipe="q8", progress=False)
    artifact = opened(tmp_path / "m")
    bound = {name: binding.parts[0].object for name, binding in artifact.directory.bindings.items()}
    gdn, attention = "text/layers/0/gdn/", "text/layers/1/attention/"
    # q, k, v share a divisor but z has another: {q, k} stack, v and z stay apart
    assert bound[f"{gdn}query"] == bound[f"{gdn}key"] != bound[f"{gdn}value"] != bound[f"{gdn}z"]
    # {query, key} and {gate, value} differ in format inside
    assert len({bound[attention + name] for name in ("query", "key", "gate", "value")}) == 4
    assert bound["text/layers/0/mlp/gate"] == bound["text/layers/0/mlp/up"]
    formats = {o.id: o.format for o in artifact.directory.objects.values() if isinstance(o, TensorObject)}
    assert formats[bound["text/output_head"]] == formats[bound[f"{attention}output"]] == "q8_g32_fp16"

    activation = {f"{gdn}{n}": 7.0 for n in ("query", "key", "value", "z")}
    activation |= {f"{attention}query": 2.0, f"{attention}gate": 2.0}
    activation |= {f"text/layers/0/mlp/{n}": 1.25 for n in ("gate", "up", "down")}
    seen = []
    for (parameter, _), use in artifact.directory.uses.items():
        if parameter in activation:
            assert use.activation_policy == "AllowA4"
            divisor = use.auxiliaries["activation_input_divisor"]
            assert divisor.whole
            assert artifact.decode(divisor) == np.float32(activation[parameter])
            assert artifact.decode(divisor).shape == ()
            seen.append(divisor.parts[0].object)
        else:
            fp8 = formats[bound[parameter]] == "fp8_e4m3fn_row_bf16"
            assert use.activation_policy == ("AllowA8" if fp8 else "A16Only"), parameter
            assert not use.auxiliaries
    assert seen == [f"auxiliary/{i:06d}" for i in range(len(activation))]
    assert list(artifact.directory.objects)[-len(seen) :] == seen


def test_experts_stack_only_under_one_divisor(source: Any, opened: Callable[[Path], Artifact], tmp_path: Path) -> None:
    t = {name: tensor for name, tensor in mixed().items() if ".mlp." not in name}
    make = Maker()
    for i in range(2):
        p = f"model.layers.{i}.mlp."
        make.floats(f"{p}gate.weight", 2, H)
        make.floats(f"{p}shared_expert_gate.weight", 1, H)
        for module in ("shared_expert", "experts.0", "experts.1"):
            for name in ("gate_proj", "up_proj"):
                make.nvfp4(f"{p}{module}.{name}", 128, H, 0.3 + i * (module == "experts.1"))
            make.nvfp4(f"{p}{module}.down_proj", H, 128, 0.5)
    folder = source(
        t | make.tensors,
        architectures=["Qwen3_5MoeForCausalLM"], model_type="qwen3_5_moe_text", num_experts=2, num_experts_per_tok=1,
        moe_intermediate_size=128, shared_expert_intermediate_size=128,
    )  # fmt: skip
    config = json.loads((folder / "config.json").read_text())
    del config["intermediate_size"]
    (folder / "config.json").write_text(json.dumps(config))
    convert(folder, tmp_path / "m", recipe="bf16", progress=False)
    artifact = opened(tmp_path / "m")
    check(artifact)
    for i, count in ((0, 1), (1, 4)):
        names = [f"text/layers/{i}/moe/experts/{e}/{name}" for e in range(2) for name in ("gate", "up")]
        assert len({artifact.binding(name).parts[0].object for name in names}) == count
    for e in range(2):
        _, codes, scales, _ = stored_rows(artifact, f"text/layers/1/moe/experts/{e}/up")
        module = f"model.layers.1.mlp.experts.{e}.up_proj"
        np.testing.assert_array_equal(codes, words(make.tensors[f"{module}.weight_packed"]))
        np.testing.assert_array_equal(scales, words(make.tensors[f"{module}.weight_scale"]))


def without(t: Tensors, name: str) -> None:
    del t[name]


def put(name: str, index: Any, value: int) -> Callable[[Tensors], None]:
    """Sets one stored word of a tensor."""

    def change(t: Tensors) -> None:
        width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[t[name].element_size()]
        t[name].view(width)[index] = value

    return change


OUT, PACKED = "model.layers.0.linear_attn.out_proj", "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize(
    ("change", "blamed"),
    [
        (put(f"{OUT}.weight", (5, 7), 0x7F), f"{OUT}.weight"),
        (put(f"{OUT}.weight", (5, 7), 0xFF), f"{OUT}.weight"),
        (put(f"{OUT}.weight", (1, 7), 0x01), f"{OUT}.weight_scale"),
        (put(f"{OUT}.weight_scale", (9, 0), 0x7F80), f"{OUT}.weight_scale"),
        (put(f"{OUT}.weight_scale", (9, 0), -0x8000), f"{OUT}.weight_scale"),
        (put(f"{PACKED}.weight_scale", (9, 3), 0x7F), f"{PACKED}.weight_scale"),
        (put(f"{PACKED}.weight_scale", (9, 3), 0x80), f"{PACKED}.weight_scale"),
        (put(f"{PACKED}.weight_global_scale", 0, 0), f"{PACKED}.weight_global_scale"),
        (put(f"{PACKED}.input_global_scale", 0, 0x7F800000), f"{PACKED}.input_global_scale"),
        (lambda t: without(t, f"{OUT}.weight_scale"), f"{OUT}.weight_scale"),
        (lambda t: without(t, f"{PACKED}.weight_scale"), f"{PACKED}.weight_scale"),
        (lambda t: without(t, f"{PACKED}.weight_global_scale"), f"{PACKED}.weight_global_scale"),
        (lambda t: t.update({f"{OUT}.weight_scale": t[f"{OUT}.weight_scale"].float()}), f"{OUT}.weight_scale"),
        (lambda t: t.update({f"{OUT}.weight_scale": t[f"{OUT}.weight_scale"][1:]}), f"{OUT}.weight_scale"),
        (
            lambda t: t.update({f"{PACKED}.weight_packed": t[f"{PACKED}.weight_packed"][:, 8:]}),
            f"{PACKED}.weight_packed",
        ),
        (lambda t: t.update({f"{PACKED}.weight_global_scale": torch.ones(2)}), f"{PACKED}.weight_global_scale"),
        (lambda t: t.update({f"{OUT}.input_scale": torch.ones(1)}), f"{OUT}.input_scale"),
        (
            lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(torch.float8_e4m3fn)}),
            "model.norm.weight",
        ),
    ],
)
def test_illegal_words_are_refused(source: Any, tmp_path: Path, change: Any, blamed: str) -> None:
    t = mixed()
    change(t)
    with pytest.raises(ConversionError) as caught:
        convert(source(t), tmp_path / "m", recipe="bf16", progress=False)
    assert caught.value.tensor == blamed
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_shapes_that_nvfp4_cannot_store(source: Any, tmp_path: Path) -> None:
    make = Maker()
    make.nvfp4("model.layers.1.mlp.gate_proj", 192, H, 0.3)
    make.nvfp4("model.layers.1.mlp.up_proj", 192, H, 0.4)
    make.nvfp4("model.layers.1.mlp.down_proj", H, 192, 0.4)
    make.nvfp4("model.layers.0.mlp.gate_proj", 192, H, 0.3)
    make.nvfp4("model.layers.0.mlp.up_proj", 192, H, 0.3)
    make.nvfp4("model.layers.0.mlp.down_proj", H, 192, 0.4)
    with pytest.raises(ConversionError, match=r"^model.layers.1.mlp.gate_proj.weight_packed: .*128"):
        convert(source(mixed() | make.tensors, intermediate_size=192), tmp_path / "m", recipe="bf16", progress=False)


def group(**weights: Any) -> dict[str, Any]:
    return QUANTIZATION | {"config_groups": {"g": FP8_GROUP | {"weights": FP8_GROUP["weights"] | weights}}}  # type: ignore[operator]


def test_declared_schemes() -> None:
    assert declared_schemes(None) == frozenset()
    assert declared_schemes(QUANTIZATION | {"sparsity_config": {"format": "dense"}, "transform_config": {}}) == (
        {"fp8_e4m3fn_row_bf16", "nvfp4"}
    )
    assert declared_schemes(QUANTIZATION) == {"fp8_e4m3fn_row_bf16", "nvfp4"}
    weight_only = {**NVFP4_GROUP, "input_activations": None}
    assert declared_schemes(QUANTIZATION | {"config_groups": {"g": weight_only}}) == {"nvfp4"}


@pytest.mark.parametrize(
    ("quantization", "named"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "quant_method"),
        ("awq", "quant_method"),
        (QUANTIZATION | {"config_groups": {}}, "config_groups"),
        (QUANTIZATION | {"config_groups": {"g": 3}}, "config_groups.g"),
        (QUANTIZATION | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (QUANTIZATION | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        (QUANTIZATION | {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
        (group(strategy="tensor"), "config_groups.g"),
        (group(symmetric=False), "config_groups.g"),
        (group(num_bits=4, type="int", strategy="group", group_size=128), "config_groups.g"),
        (QUANTIZATION | {"config_groups": {"g": FP8_GROUP | {"input_activations": {"dynamic": False}}}}, "g"),
    ],
)
def test_other_schemes_are_refused(quantization: Any, named: str) -> None:
    with pytest.raises(ConversionError, match=r"^config.json: quantization_config") as caught:
        declared_schemes(quantization)
    assert named in caught.value.reason


def test_undeclared_quantisation_is_refused(source: Any, tmp_path: Path) -> None:
    only_fp8 = QUANTIZATION | {"config_groups": {"g": FP8_GROUP}}
    with pytest.raises(ConversionError, match="nvfp4, which quantization_config does not declare"):
        convert(source(mixed(), only_fp8), tmp_path / "m", recipe="bf16", progress=False)
