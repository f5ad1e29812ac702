"""Published geometries of the family, as text component configs, and a tiny one for tests and demonstrations."""

from __future__ import annotations

from typing import Any

from ninfer.models.qwen3_5.config import FULL, LINEAR


def text_geometry(
    hidden: int,
    layers: int,
    *,
    heads: tuple[int, int],
    gdn: tuple[int, int],
    dense: int | None = None,
    moe: tuple[int, int, int, int] | None = None,
    tied: bool,
    vocab: int = 248_320,
    head_dim: int = 256,
    gdn_dims: tuple[int, int] = (128, 128),
    rotary: tuple[float, tuple[int, int, int]] = (0.25, (11, 11, 10)),
    positions: int = 262_144,
) -> dict[str, Any]:
    """A text config with every fourth layer full attention.

    heads: query, key. gdn: key heads, value heads; gdn_dims: their widths. moe: experts, selected, width, shared width.
    rotary: rotated share of a head, pairs per axis.
    """
    kind = "Qwen3_5ForCausalLM" if dense else "Qwen3_5MoeForCausalLM"
    config: dict[str, Any] = {
        "architectures": [kind],
        "model_type": "qwen3_5_text" if dense else "qwen3_5_moe_text",
        "hidden_size": hidden,
        "vocab_size": vocab,
        "num_hidden_layers": layers,
        "max_position_embeddings": positions,
        "tie_word_embeddings": tied,
        "rms_norm_eps": 1e-6,
        "layer_types": [FULL if (i + 1) % 4 == 0 else LINEAR for i in range(layers)],
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": head_dim,
        "rope_parameters": {
            "rope_theta": 1e7,
            "partial_rotary_factor": rotary[0],
            "mrope_section": list(rotary[1]),
        },
        "linear_num_key_heads": gdn[0],
        "linear_key_head_dim": gdn_dims[0],
        "linear_num_value_heads": gdn[1],
        "linear_value_head_dim": gdn_dims[1],
        "linear_conv_kernel_dim": 4,
    }
    if dense:
        config["intermediate_size"] = dense
    if moe:
        names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
        config.update(zip(names, moe))
    return config


GEOMETRIES: dict[str, dict[str, Any]] = {
    "tiny": text_geometry(
        128, 4, heads=(4, 2), gdn=(2, 4), dense=256, tied=True, vocab=512, head_dim=32, gdn_dims=(32, 32),
        rotary=(0.25, (2, 1, 1)), positions=4096,
    ),
    "0.8b": text_geometry(1024, 24, heads=(8, 2), gdn=(16, 16), dense=3584, tied=True),
    "2b": text_geometry(2048, 24, heads=(8, 2), gdn=(16, 16), dense=6144, tied=True),
    "4b": text_geometry(2560, 32, heads=(16, 4), gdn=(16, 32), dense=9216, tied=True),
    "9b": text_geometry(4096, 32, heads=(16, 4), gdn=(16, 32), dense=12288, tied=False),
    "27b": text_geometry(5120, 64, heads=(24, 4), gdn=(16, 48), dense=17408, tied=False),
    "35b-a3b": text_geometry(2048, 40, heads=(16, 2), gdn=(16, 32), moe=(256, 8, 512, 512), tied=False),
}  # fmt: skip
