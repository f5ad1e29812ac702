"""Tiny random checkpoints, written by transformers or by hand, and a reader of the artifacts made from them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ninfer.artifact import Artifact, open_artifact

RESOURCES = {
    "tokenizer.json": b'{ "model": {"vocab": {"a": 0}},\n\t"added_tokens": []}',
    "tokenizer_config.json": b'{"added_tokens_decoder": {} }',
    "chat_template.jinja": "{{ messages }} …\n".encode(),
    "generation_config.json": b'{"eos_token_id": [2, 1], "temperature": 0.6}',
    "preprocessor_config.json": b'{"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}',
    "video_preprocessor_config.json": b'{"patch_size":16,"temporal_patch_size":2,"merge_size":2,"fps":2}',
}
TEXT: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 192,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "max_position_embeddings": 256, "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]
    },
}  # fmt: skip
MOE = {k: v for k, v in TEXT.items() if k != "intermediate_size"} | {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96
}  # fmt: skip
VISION = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 72, "num_heads": 2, "out_hidden_size": 128,
    "num_position_embeddings": 16,
}  # fmt: skip


def write_resources(folder: Path) -> None:
    for name, content in RESOURCES.items():
        (folder / name).write_bytes(content)


def write_tensors(folder: Path, file: str, tensors: dict[str, Any]) -> None:
    """A shard of torch tensors, entered in the folder's index."""
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)
    index = folder / "model.safetensors.index.json"
    record = json.loads(index.read_text()) if index.exists() else {"metadata": {}, "weight_map": {}}
    record["weight_map"] |= dict.fromkeys(tensors, file)
    index.write_text(json.dumps(record))


def mtp_tensors(state: dict[str, Any], hidden: int) -> dict[str, Any]:
    """An MTP module shaped like the last layer of a model: its block's tensors permuted, and a random stem."""
    import torch

    prefix = next(name for name in state if ".layers.3." in name).split("layers.3.")[0] + "layers.3."
    generator = torch.Generator().manual_seed(5)
    found = {f"mtp.layers.0.{name.removeprefix(prefix)}": t.flip(0) for name, t in state.items() if prefix in name}
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        found[f"mtp.{name}.weight"] = torch.randn(hidden, generator=generator).to(torch.bfloat16)
    found["mtp.fc.weight"] = torch.randn(hidden, 2 * hidden, generator=generator).to(torch.bfloat16)
    return found


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, dict[str, np.ndarray]]]:
    """kind -> (folder, tensors as transformers holds them, with experts stacked, float32). Written once."""
    import torch
    import transformers as tf

    cache: dict[str, tuple[Path, dict[str, np.ndarray]]] = {}

    def build(kind: str) -> tuple[Path, dict[str, np.ndarray]]:
        if kind in cache:
            return cache[kind]
        text = MOE if kind.startswith("moe") else TEXT
        if kind.endswith("-vl"):
            config = (tf.Qwen3_5MoeConfig if text is MOE else tf.Qwen3_5Config)(text_config=text, vision_config=VISION)
            model_class = tf.Qwen3_5MoeForConditionalGeneration if text is MOE else tf.Qwen3_5ForConditionalGeneration
        else:
            config_class = tf.Qwen3_5MoeTextConfig if text is MOE else tf.Qwen3_5TextConfig
            config = config_class(**text | {"tie_word_embeddings": kind == "tied"})
            model_class = tf.Qwen3_5MoeForCausalLM if text is MOE else tf.Qwen3_5ForCausalLM
        torch.manual_seed(7)
        model = model_class(config)
        with torch.no_grad():  # no value may be alike in two places: zeros and ones would hide a wrong mapping
            for parameter in model.parameters():
                parameter.normal_(std=0.3)
        folder = tmp_path_factory.mktemp(kind)
        model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="200KB")
        write_resources(folder)
        state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        if kind in ("dense", "moe", "moe-vl"):
            extra = mtp_tensors(state, 128)
            write_tensors(folder, "extra.safetensors", extra)
            state |= extra
        cache[kind] = folder, {name: tensor.float().numpy() for name, tensor in state.items()}
        return cache[kind]

    return build


@pytest.fixture(scope="session")
def add_resources() -> Callable[[Path], None]:
    """Writes the tokenizer and processor files into a folder."""
    return write_resources


@pytest.fixture(scope="session")
def add_tensors() -> Callable[[Path, str, dict[str, Any]], None]:
    """Writes a shard of torch tensors and enters it in the folder's index."""
    return write_tensors


@pytest.fixture
def copied(built: Callable[[str], tuple[Path, Any]], tmp_path: Path) -> Callable[[str], Path]:
    """A private copy of a checkpoint, to be damaged."""

    def copy(kind: str) -> Path:
        return Path(shutil.copytree(built(kind)[0], tmp_path / "source"))

    return copy


@pytest.fixture
def opened() -> Iterator[Callable[[Path], Artifact]]:
    sources = []

    def open_it(path: Path) -> Artifact:
        sources.append(open_artifact(path))
        return Artifact(sources[-1])

    yield open_it
    for source in sources:
        source.close()
