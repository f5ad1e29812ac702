"""What one page of each KV pool is made of. Every byte count of the cache is a sum over this inventory."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from ninfer.device import ITEM_BYTES, Shape

PAGE = 64
"""Tokens of one page, in every pool."""


def pages(tokens: int) -> int:
    """Pages that hold ``tokens`` cache ordinals."""
    return (tokens + PAGE - 1) // PAGE


class PoolKind(enum.Enum):
    """A set of planes with one page id space, one frontier and one lifetime."""

    MAIN = 0
    """Keys and values of the text model's full-attention layers."""
    MTP = 1
    """Those of the multi-token-prediction module. Inside a round it may be mapped beyond MAIN."""
    DRAFT_FULL = 2
    """Those of a draft model's full-context layers."""

    __hash__ = object.__hash__  # that of Enum is a function in Python, and pools are looked up in every round


SCALED = 64
"""Features of a head that share one scale of an INT8 plane."""


class KVCodec(enum.Enum):
    """How a key or value element is stored; the value is its device element type. INT8 has planes of scales too."""

    FP32 = "f32"
    BF16 = "bf16"
    INT8 = "i8"


class PlaneRole(enum.Enum):
    """The scale planes exist for INT8 alone."""

    K = 0
    V = 1
    K_SCALE = 2
    V_SCALE = 3


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """What the model caches: attention layers, key/value heads of each, elements of a head."""

    full_attention_layers: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class PlaneSpec:
    """One tensor of a pool: ``leading`` elements per token and head."""

    layer: int
    role: PlaneRole
    dtype: str
    leading: int
    kv_heads: int

    @property
    def bytes_per_token(self) -> int:
        return self.leading * self.kv_heads * ITEM_BYTES[self.dtype]

    def shape(self, pages: int) -> Shape:
        """Row-major shape of the plane: (pages, heads, 64, leading)."""
        return (pages, self.kv_heads, PAGE, self.leading)


@dataclass(frozen=True, slots=True)
class PoolLayout:
    kind: PoolKind
    planes: tuple[PlaneSpec, ...]

    @property
    def page_bytes(self) -> int:
        """Device bytes of one page: the slice of every plane that a page id selects."""
        return PAGE * sum(plane.bytes_per_token for plane in self.planes)

    @property
    def host_stride(self) -> int:
        """Bytes of one page in host memory."""
        return max(1, -(-self.page_bytes // 256)) * 256


def build_pool_layouts(
    geometries: Mapping[PoolKind, KVGeometry], codec: KVCodec, activation: str = "f32"
) -> tuple[PoolLayout, ...]:
    """The pools of a model, in the order every per-pool tuple uses; planes by layer, then by role. A draft model's are
    kept as the device's ``activation``."""
    codecs = {PoolKind.DRAFT_FULL: KVCodec.BF16 if activation == "bf16" else KVCodec.FP32}
    return tuple(PoolLayout(kind, _planes(geometry, codecs.get(kind, codec))) for kind, geometry in geometries.items())


def _planes(geometry: KVGeometry, codec: KVCodec) -> tuple[PlaneSpec, ...]:
    parts = [(role, codec.value, geometry.head_dim) for role in (PlaneRole.K, PlaneRole.V)]
    if codec is KVCodec.INT8:
        scales = -(-geometry.head_dim // SCALED)
        parts += [(role, "f16", scales) for role in (PlaneRole.K_SCALE, PlaneRole.V_SCALE)]
    return tuple(
        PlaneSpec(layer, role, dtype, leading, geometry.kv_heads)
        for layer in range(geometry.full_attention_layers)
        for role, dtype, leading in parts
    )
