"""What a sequence owns on the device: paged keys and values, recurrent state, and records of verified columns.

Each function runs over a measuring scope to plan and over an allocating one to build.
"""

from __future__ import annotations

from ninfer.device import Buffer, Device, Scope
from ninfer.models.qwen3_5.config import TextConfig
from ninfer.ops import GdnRecord, GdnState, KVPlanes

PAGE_TOKENS = 64
SCALED = 64
"""Features of a head that share one scale of an i8 plane."""


def allocate_kv(
    config: TextConfig, scope: Scope, layers: int, pages: int, rows: int, blocks_per_row: int, dtype: str
) -> list[KVPlanes]:
    """Planes of full-attention layers, in layer order, over one shared block table i32 ``[rows, blocks_per_row]``.

    pages: pages of 64 tokens per layer. dtype: "f32", "bf16", or "i8" with a plane of scales beside each.
    """
    if config.attention is None or not layers:
        return []
    head = (pages, config.attention.hk, PAGE_TOKENS)
    blocks = scope.buffer("kv", (rows, blocks_per_row), "i32")
    scales = -(-config.attention.hd // SCALED) if dtype == "i8" else 0

    def planes(leading: int, dtype: str) -> tuple[Buffer, Buffer]:
        k, v = (scope.buffer("kv", (*head, leading), dtype) for _ in range(2))
        return k, v

    return [
        KVPlanes(*planes(config.attention.hd, dtype), blocks, *(planes(scales, "f16") if scales else ()))
        for _ in range(layers)
    ]


def allocate_state(config: TextConfig, scope: Scope, device: Device, slots: int) -> list[GdnState]:
    """Recurrent state of ``slots`` sequences, one entry per linear-attention layer in layer order."""
    g = config.gdn
    if g is None:
        return []
    return [
        GdnState(
            scope.buffer("state", (slots, g.nv, g.dk, g.dv), "f32"),
            scope.buffer("state", (slots, g.taps - 1, g.channels), device.activation),
        )
        for _ in range(config.linear_layers)
    ]


def allocate_record(config: TextConfig, scope: Scope, device: Device, tokens: int) -> list[GdnRecord]:
    """Records of up to ``tokens`` columns of one verify pass, per linear-attention layer in layer order."""
    g = config.gdn
    if g is None:
        return []
    return [
        GdnRecord(
            scope.buffer("records", (tokens, g.nk, g.dk), "f32"),
            scope.buffer("records", (tokens, g.nv, g.dv), "f32"),
            scope.buffer("records", (tokens, g.nv), "f32"),
            scope.buffer("records", (tokens, g.channels), device.activation),
        )
        for _ in range(config.linear_layers)
    ]
