"""The model as Program sees it: placed once in planned memory, then run by rows. ``QwenText`` is the Qwen3.5 family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol

from ninfer.contract import Buffer, Device, Scope
from ninfer.models.qwen3_5 import forward as passes
from ninfer.models.qwen3_5 import state as storage
from ninfer.models.qwen3_5.config import Moe
from ninfer.models.qwen3_5.weights import AttentionWeights, GdnWeights, Model, MoeWeights
from ninfer.ops import GdnRecord, GdnState, KVPlanes, Matrix, Rows
from ninfer.program.layout import KVCodec, KVGeometry, PoolKind


@dataclass(frozen=True, slots=True)
class Placement:
    """How much of everything a placed model must hold.

    pages: KV pages. rows, blocks: shape of the block table. slots: state slots. columns: B*W of the widest pass.
    recorded: columns of the widest recorded pass. context: ordinals of the longest sequence.
    """

    pages: int
    rows: int
    blocks: int
    slots: int
    columns: int
    recorded: int
    context: int
    codec: KVCodec


class PlacedModel(Protocol):
    """A model whose passes run in memory of its own. Every method submits device work and returns."""

    @property
    def blocks(self) -> Buffer | None:
        """Block table i32 [rows, blocks] that passes read; None where nothing is paged."""
        ...

    def planes(self, pool: PoolKind) -> Sequence[Buffer]:
        """What a page of the pool consists of: buffers whose first axis is the page id."""
        ...

    @property
    def images(self) -> Sequence[Buffer]:
        """What a state image consists of, without the continuation hidden: buffers whose first axis is the slot."""
        ...

    def forward(self, rows: Rows, recorded: bool = False) -> None:
        """Run the rows. The state advances in place, or is left alone and recorded for ``fold``."""
        ...

    def hidden(self, index: Buffer | None, out: Buffer) -> None:
        """out act [n, H]: final hidden of the last pass's columns ``index`` i32 [n], or of its first n."""
        ...

    def logits(self, hidden: Buffer, out: Buffer) -> None:
        """out f32 [n, V] from final hidden act [n, H]."""
        ...

    def fold(self, accepted: Buffer, rows: Rows) -> None:
        """Advance the state by the first ``accepted`` i32 [B] columns of the last recorded pass."""
        ...


class TextModel(Protocol):
    """A bound model before memory is planned."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def kv_geometry(self) -> KVGeometry: ...

    def state_bytes(self, activation: str) -> int:
        """Bytes of one state slot, without the continuation hidden."""
        ...

    def weight_bytes(self, rows: int) -> int:
        """Weight bytes a decode round of ``rows`` rows reads."""
        ...

    def place(self, scope: Scope, device: Device, placement: Placement) -> PlacedModel: ...


@dataclass(frozen=True, slots=True)
class QwenText:
    """A bound Qwen3.5 language model."""

    model: Model

    @property
    def hidden_size(self) -> int:
        return self.model.config.hidden_size

    @property
    def kv_geometry(self) -> KVGeometry:
        config = self.model.config
        s = config.attention
        return KVGeometry(config.full_layers, s.hk, s.hd) if s else KVGeometry(0, 0, 0)

    def state_bytes(self, activation: str) -> int:
        return self.model.config.state_bytes(activation)

    def weight_bytes(self, rows: int) -> int:
        """Of a bank of experts, the most that ``rows`` rows can select."""
        model, ffn = self.model, self.model.config.ffn
        total = model.head.nbytes
        for block in model.blocks:
            total += sum(matrix.nbytes for matrix in _mixer(block.mixer))
            dense = block.ffn.shared if isinstance(block.ffn, MoeWeights) else block.ffn
            total += dense.gate.nbytes + dense.up.nbytes + dense.down.nbytes
            if isinstance(block.ffn, MoeWeights) and isinstance(ffn, Moe):
                bank = (*block.ffn.bank.gate, *block.ffn.bank.up, *block.ffn.bank.down)
                read = min(ffn.experts, rows * ffn.selected)
                total += block.ffn.router.nbytes + sum(matrix.nbytes for matrix in bank) * read // ffn.experts
        return total

    def place(self, scope: Scope, device: Device, placement: Placement) -> PlacedQwenText:
        config, p = self.model.config, placement
        return PlacedQwenText(
            device,
            self.model,
            storage.allocate_kv(config, scope, p.pages, p.rows, p.blocks, p.codec.value),
            storage.allocate_state(config, scope, device, p.slots),
            storage.allocate_record(config, scope, device, p.recorded),
            passes.plan_workspace(config, scope, device, p.columns, p.context),
        )


@dataclass(frozen=True, slots=True)
class PlacedQwenText:
    device: Device
    model: Model
    kv: Sequence[KVPlanes]
    state: Sequence[GdnState]
    record: Sequence[GdnRecord]
    workspace: passes.Workspace

    @property
    def blocks(self) -> Buffer | None:
        return self.kv[0].blocks if self.kv else None

    def planes(self, pool: PoolKind) -> Sequence[Buffer]:
        """Every buffer of the attention layers but the block table they share."""
        return [b for layer in self.kv for b in _buffers(layer) if b is not layer.blocks]

    @property
    def images(self) -> Sequence[Buffer]:
        return [b for layer in self.state for b in _buffers(layer)]

    def forward(self, rows: Rows, recorded: bool = False) -> None:
        record = self.record if recorded else None
        passes.forward(self.device.ops, self.model, self.workspace, rows, self.kv, self.state, record)

    def hidden(self, index: Buffer | None, out: Buffer) -> None:
        passes.hidden(self.device.ops, self.model, self.workspace, index, out)

    def logits(self, hidden: Buffer, out: Buffer) -> None:
        passes.logits(self.device.ops, self.model, hidden, out)

    def fold(self, accepted: Buffer, rows: Rows) -> None:
        passes.fold(self.device.ops, self.model.config, self.state, self.record, accepted, rows)


def _mixer(mixer: AttentionWeights | GdnWeights) -> tuple[Matrix, ...]:
    if isinstance(mixer, AttentionWeights):
        return (mixer.query, mixer.key, mixer.value, mixer.gate, mixer.output)
    return (mixer.query, mixer.key, mixer.value, mixer.z, mixer.a, mixer.b, mixer.output)


def _buffers(layer: KVPlanes | GdnState) -> list[Buffer]:
    return [b for b in (getattr(layer, f.name) for f in fields(layer)) if b is not None]
