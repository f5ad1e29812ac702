"""Memory does not grow with the checkpoint, whatever the size of its largest tensor."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ninfer

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "vocab_size": 160_000, "hidden_size": 1024,
    "num_hidden_layers": 1, "layer_types": ["full_attention"], "intermediate_size": 2048, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e6},
}  # fmt: skip
SHAPES = {
    "model.embed_tokens.weight": (160_000, 1024),
    "model.norm.weight": (1024,),
    "model.layers.0.input_layernorm.weight": (1024,),
    "model.layers.0.post_attention_layernorm.weight": (1024,),
    "model.layers.0.self_attn.q_proj.weight": (512, 1024),
    "model.layers.0.self_attn.k_proj.weight": (64, 1024),
    "model.layers.0.self_attn.v_proj.weight": (64, 1024),
    "model.layers.0.self_attn.o_proj.weight": (1024, 256),
    "model.layers.0.self_attn.q_norm.weight": (64,),
    "model.layers.0.self_attn.k_norm.weight": (64,),
    "model.layers.0.mlp.gate_proj.weight": (2048, 1024),
    "model.layers.0.mlp.up_proj.weight": (2048, 1024),
    "model.layers.0.mlp.down_proj.weight": (1024, 2048),
}
PROGRAM = """
import sys
from ninfer.convert import convert
def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024
sizes = []
convert(sys.argv[1], sys.argv[2], recipe=sys.argv[3], progress=lambda *args: sizes.append(peak()))
print(sizes[0], sizes[-1])
"""


@pytest.mark.parametrize("recipe", ["bf16", "q8"])
def test_peak_memory_is_a_row_block(tmp_path: Path, add_resources: Any, recipe: str) -> None:
    """A 328 MB tensor, read from a sparse file, costs less than 100 MB beyond what the first block needed."""
    add_resources(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    header, cursor = {}, 0
    for name, shape in SHAPES.items():
        end = cursor + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [cursor, end]}
        cursor = end
    text = json.dumps(header).encode()
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + cursor)
    root = str(Path(ninfer.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), str(tmp_path / "m"), recipe],
        env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    first, last = map(int, done.stdout.split())
    assert cursor > 340_000_000
    assert last < 500_000_000
    assert last - first < 100_000_000
