"""The model as Program sees it: placed once in planned memory, then run by rows. ``QwenText`` is the Qwen3.5 family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

from ninfer.block_ops import Chain, ContextKV, Selection
from ninfer.device import Buffer, Device, Scope
from ninfer.models.qwen3_5 import dflash
from ninfer.models.qwen3_5 import forward as passes
from ninfer.models.qwen3_5 import state as storage
from ninfer.models.qwen3_5.config import Moe
from ninfer.models.qwen3_5.weights import AttentionWeights, Block, DraftLayer, GdnWeights, Model, MoeWeights
from ninfer.ops import GdnRecord, GdnState, KVPlanes, Matrix, Rows
from ninfer.program.layout import KVCodec, KVGeometry, PoolKind


@dataclass(frozen=True, slots=True)
class Placement:
    """How much of everything a placed model must hold.

    pages: KV pages by pool. rows, blocks: shape of the block tables. slots: state slots. columns: B*W of the widest
    pass. recorded: columns of the widest recorded pass. context: ordinals of the longest sequence.
    block: columns of a row in a block pass, 0 where the model drafts otherwise. unsettled: tokens of the widest unit
    that may be taken back.
    """

    pages: Mapping[PoolKind, int]
    rows: int
    blocks: int
    slots: int
    columns: int
    recorded: int
    context: int
    codec: KVCodec
    block: int = 0
    unsettled: int = 0


@dataclass(frozen=True, slots=True)
class BlockShape:
    """A block pass: columns of a row, and the token that stands for one to be drafted. candidates: of each draft, where
    they are chosen along a chain; 0 where a draft is its column's likeliest token."""

    columns: int
    mask: int
    candidates: int = 0


class PlacedModel(Protocol):
    """A model whose passes run in memory of its own. Every method submits device work and returns."""

    @property
    def tables(self) -> Mapping[PoolKind, Buffer]:
        """Block tables i32 [rows, blocks] that passes read, of the pools that have pages."""
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

    def propose(self, hidden: Buffer, out: Buffer) -> None:
        """out f32 [n, V]: logits to draft from, or f32 [n, rows] of the model's own head for that."""
        ...

    def fold(self, accepted: Buffer, rows: Rows) -> None:
        """Advance the state by the first ``accepted`` i32 [B] columns of the last recorded pass."""
        ...

    def draft(self, rows: Rows, hidden: Buffer, out: Buffer | None) -> None:
        """Run the MTP module, where the model has one: out act [B*W, H] from final hidden act [B*W, H] and the
        token behind each, appended to the module's own pool; without ``out`` only that. Overwrites what the last pass
        left."""
        ...

    def append(self, rows: Rows) -> None:
        """The real columns of the last pass become context of the block-drafting companion, where the model has one.
        ``rows.table``: rows of its own pool."""
        ...

    def block(self, rows: Rows, index: Buffer, out: Buffer) -> None:
        """Run the companion over a block; out act [n, H]: its final hidden at columns ``index`` i32 [n]."""
        ...

    def select(self, hidden: Buffer, ids: Buffer, scores: Buffer, rows: Chain, out: Selection) -> None:
        """Choose drafts among their candidates, where there are any: ids i32 and scores f32 [n, stride] from block
        outputs ``hidden`` act [n, H]."""
        ...

    def carry(self, read: int, write: int) -> None:
        """Copy what a unit only adds to from one state slot to another."""
        ...


class TextModel(Protocol):
    """A bound model before memory is planned."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def kv_geometries(self) -> Mapping[PoolKind, KVGeometry]:
        """Pools in order: MAIN, then that of what drafts, where it has one."""
        ...

    def state_bytes(self, activation: str) -> int:
        """Bytes of one state slot, without the continuation hidden."""
        ...

    def weight_bytes(self, rows: int) -> int:
        """Weight bytes a decode round of ``rows`` rows reads."""
        ...

    def draft_bytes(self, rows: int, window: int) -> int:
        """Weight bytes that drafting ``window`` tokens and their logits read."""
        ...

    @property
    def proposal(self) -> Buffer | None:
        """Ids i32 [rows] that the rows of a head for drafting stand for, where it has not one for every id."""
        ...

    def block(self, window: int) -> BlockShape | None:
        """The block pass that drafts ``window`` tokens, of a model with a block-drafting companion."""
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
    def kv_geometries(self) -> Mapping[PoolKind, KVGeometry]:
        config = self.model.config
        s = config.attention
        main = {PoolKind.MAIN: KVGeometry(config.full_layers, s.hk, s.hd) if s else KVGeometry(0, 0, 0)}
        if self.model.mtp and s:
            return main | {PoolKind.MTP: KVGeometry(1, s.hk, s.hd)}
        draft = self.model.dflash.config if self.model.dflash else None
        if draft and draft.full_layers:
            own = KVGeometry(draft.full_layers, draft.attention.hk, draft.attention.hd)
            return main | {PoolKind.DRAFT_FULL: own}
        return main

    def state_bytes(self, activation: str) -> int:
        return self.model.config.state_bytes(activation)

    def weight_bytes(self, rows: int) -> int:
        """Of a bank of experts, the most that ``rows`` rows can select."""
        return self.model.head.nbytes + sum(self._block_bytes(block, rows) for block in self.model.blocks)

    def draft_bytes(self, rows: int, window: int) -> int:
        mtp, dflash, own = self.model.mtp, self.model.dflash, self.model.proposal
        head = own.head.nbytes if own else self.model.head.nbytes
        if dflash:
            return dflash.features.nbytes + sum(map(_draft_layer_bytes, dflash.layers)) + head
        return window * (mtp.projection.nbytes + self._block_bytes(mtp.block, rows) + head) if mtp else 0

    @property
    def proposal(self) -> Buffer | None:
        return self.model.proposal.ids if self.model.proposal else None

    def block(self, window: int) -> BlockShape | None:
        if self.model.dflash is None:
            return None
        config = self.model.dflash.config
        return BlockShape(config.block or window + 1, config.mask, config.chain.candidates if config.chain else 0)

    def _block_bytes(self, block: Block, rows: int) -> int:
        total = sum(matrix.nbytes for matrix in _mixer(block.mixer))
        dense, ffn = block.ffn.shared if isinstance(block.ffn, MoeWeights) else block.ffn, self.model.config.ffn
        total += dense.gate.nbytes + dense.up.nbytes + dense.down.nbytes
        if isinstance(block.ffn, MoeWeights) and isinstance(ffn, Moe):
            bank = (*block.ffn.bank.gate, *block.ffn.bank.up, *block.ffn.bank.down)
            read = min(ffn.experts, rows * ffn.selected)
            total += block.ffn.router.nbytes + sum(matrix.nbytes for matrix in bank) * read // ffn.experts
        return total

    def place(self, scope: Scope, device: Device, placement: Placement) -> PlacedQwenText:
        config, p = self.model.config, placement
        planes: dict[PoolKind, Sequence[KVPlanes]] = {
            kind: storage.allocate_kv(
                config, scope, geometry.full_attention_layers, p.pages[kind], p.rows, p.blocks, p.codec.value
            )
            for kind, geometry in self.kv_geometries.items()
            if kind is not PoolKind.DRAFT_FULL
        }
        companion = None
        if (own := self.model.dflash) is not None:
            window = max((w for w in own.config.windows if w), default=0)
            ring = dflash.ring_pages(window, p.unsettled, p.context)
            full = p.pages.get(PoolKind.DRAFT_FULL, 0)
            companion = PlacedDFlash(
                dflash.allocate_context(own.config, scope, device, full, p.rows, p.blocks, p.slots, ring),
                dflash.plan_workspace(
                    own.config, config.hidden_size, scope, device, p.columns, p.rows * p.block, p.context
                ),
            )
        return PlacedQwenText(
            device,
            self.model,
            planes,
            storage.allocate_state(config, scope, device, p.slots),
            storage.allocate_record(config, scope, device, p.recorded),
            passes.plan_workspace(config, scope, device, p.columns, p.context, mtp=PoolKind.MTP in planes),
            companion,
        )


@dataclass(frozen=True, slots=True)
class PlacedDFlash:
    """What a block-drafting companion keeps of sequences, layer by layer, and what its passes work in."""

    context: Sequence[ContextKV]
    workspace: dflash.DraftWorkspace

    @property
    def paged(self) -> list[ContextKV]:
        return [kv for kv in self.context if kv.blocks is not None]

    @property
    def rings(self) -> list[Buffer]:
        return [b for kv in self.context if kv.blocks is None for b in (kv.k, kv.v)]


@dataclass(frozen=True, slots=True)
class PlacedQwenText:
    device: Device
    model: Model
    kv: Mapping[PoolKind, Sequence[KVPlanes]]
    state: Sequence[GdnState]
    record: Sequence[GdnRecord]
    workspace: passes.Workspace
    companion: PlacedDFlash | None

    @property
    def tables(self) -> Mapping[PoolKind, Buffer]:
        tables = {kind: planes[0].blocks for kind, planes in self.kv.items() if planes}
        for kv in self.companion.paged if self.companion else ():
            assert kv.blocks is not None
            tables[PoolKind.DRAFT_FULL] = kv.blocks  # one for all
        return tables

    def planes(self, pool: PoolKind) -> Sequence[Buffer]:
        """Every buffer of the attention layers but the block table they share."""
        if pool is PoolKind.DRAFT_FULL and self.companion:
            return [b for kv in self.companion.paged for b in (kv.k, kv.v)]
        return [b for layer in self.kv[pool] for b in _buffers(layer) if b is not layer.blocks]

    @property
    def images(self) -> Sequence[Buffer]:
        rings = self.companion.rings if self.companion else []
        return [b for layer in self.state for b in _buffers(layer)] + rings

    def forward(self, rows: Rows, recorded: bool = False) -> None:
        record = self.record if recorded else None
        kv = self.kv[PoolKind.MAIN]
        features = self.companion.workspace.features if self.companion else None
        taps = self.model.dflash.config.taps if self.model.dflash else ()
        passes.forward(self.device.ops, self.model, self.workspace, rows, kv, self.state, record, features, taps)

    def hidden(self, index: Buffer | None, out: Buffer) -> None:
        passes.hidden(self.device.ops, self.model, self.workspace, index, out)

    def logits(self, hidden: Buffer, out: Buffer) -> None:
        passes.logits(self.device.ops, self.model, hidden, out)

    def propose(self, hidden: Buffer, out: Buffer) -> None:
        passes.propose(self.device.ops, self.model, hidden, out)

    def draft(self, rows: Rows, hidden: Buffer, out: Buffer | None) -> None:
        (kv,) = self.kv[PoolKind.MTP]
        passes.draft(self.device.ops, self.model, self.workspace, rows, kv, hidden, out)

    def append(self, rows: Rows) -> None:
        assert self.companion is not None
        assert self.model.dflash is not None
        own = self.companion
        dflash.append(self.device.ops, self.model.dflash, own.workspace, rows, own.context)

    def block(self, rows: Rows, index: Buffer, out: Buffer) -> None:
        assert self.companion is not None
        own = self.companion
        dflash.draft(self.device.ops, self.model, own.workspace, rows, own.context, index, out)

    def select(self, hidden: Buffer, ids: Buffer, scores: Buffer, rows: Chain, out: Selection) -> None:
        assert self.companion is not None
        assert self.model.dflash is not None
        dflash.select(self.device.ops, self.model.dflash, self.companion.workspace, hidden, ids, scores, rows, out)

    def carry(self, read: int, write: int) -> None:
        for ring in self.companion.rings if self.companion else ():
            self.device.copy(ring.slice(write, write + 1), ring.slice(read, read + 1))

    def fold(self, accepted: Buffer, rows: Rows) -> None:
        passes.fold(self.device.ops, self.model.config, self.state, self.record, accepted, rows)


def _mixer(mixer: AttentionWeights | GdnWeights) -> tuple[Matrix, ...]:
    if isinstance(mixer, AttentionWeights):
        return (mixer.query, mixer.key, mixer.value, mixer.gate, mixer.output)
    return (mixer.query, mixer.key, mixer.value, mixer.z, mixer.a, mixer.b, mixer.output)


def _draft_layer_bytes(layer: DraftLayer) -> int:
    own = (layer.query, layer.key, layer.value, layer.output, layer.ffn.gate, layer.ffn.up, layer.ffn.down)
    convolutions = [conv.projection for conv in (layer.attention_conv, layer.mlp_conv) if conv]
    return sum(matrix.nbytes for matrix in (*own, *convolutions))


def _buffers(layer: KVPlanes | GdnState) -> list[Buffer]:
    return [b for b in (getattr(layer, f.name) for f in fields(layer)) if b is not None]
