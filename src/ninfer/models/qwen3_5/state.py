"""What a sequence owns on the device: paged keys and values, recurrent state, and records of verified columns.

Each function runs over a measuring scope to plan and over an allocating one to build.
"""

from __future__ import annotations

from ninfer.contract import Device, Scope
from ninfer.models.qwen3_5.config import TextConfig
from ninfer.ops import GdnRecord, GdnState, KVPlanes

PAGE_TOKENS = 64


def allocate_kv(
    config: TextConfig, scope: Scope, pages: int, rows: int, blocks_per_row: int, dtype: str
) -> list[KVPlanes]:
    """Planes of the full-attention layers, in layer order, over one shared block table i32 ``[rows, blocks_per_row]``.

    pages: pages of 64 tokens per layer. dtype: "f32" or "bf16".
    """
    if config.attention is None or not config.full_layers:
        return []
    shape = (pages, config.attention.hk, PAGE_TOKENS, config.attention.hd)
    blocks = scope.buffer("kv", (rows, blocks_per_row), "i32")
    return [
        KVPlanes(scope.buffer("kv", shape, dtype), scope.buffer("kv", shape, dtype), blocks)
        for _ in range(config.full_layers)
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
