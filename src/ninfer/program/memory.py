"""Everything a Program holds on the device, laid out by one function that both plans and builds."""

from __future__ import annotations

from dataclasses import dataclass

from ninfer.device import Buffer, Device
from ninfer.program.blocks import BlockMemory
from ninfer.program.capacity import pool_pages
from ninfer.program.drafting import DraftMemory
from ninfer.program.frame import DeviceFrame, input_fields, output_fields
from ninfer.program.layout import KVCodec, pages
from ninfer.program.scope import MeasureScope, Scopes
from ninfer.program.text import PlacedModel, Placement, TextModel


@dataclass(frozen=True, slots=True)
class Shape:
    """The fixed sizes of a Program.

    rows: sequences active at once. context: tokens of one sequence. chunk: tokens of one prefill unit. control:
    tokens of one forced unit. vocabulary: ids that may be sampled. window: drafts of a round, 0 without speculation.
    adaptive: rounds may verify and make fewer. spare: state slots beyond one per row, for checkpoints.
    """

    rows: int
    context: int
    chunk: int
    control: int
    codec: KVCodec
    vocabulary: int
    spare: int = 0
    window: int = 0
    adaptive: bool = False

    @property
    def slots(self) -> int:
        return self.rows + self.spare

    @property
    def width(self) -> int:
        """Most columns of a row in a decode round."""
        return self.window + 1

    @property
    def recorded(self) -> int:
        """Columns of the widest unit whose state is kept apart until it is committed."""
        return max(self.control, self.rows * self.width if self.window else 0)

    @property
    def columns(self) -> int:
        return max(self.rows * self.width, self.chunk, self.control)


@dataclass(frozen=True, slots=True)
class Memory:
    """stored: continuation hidden act [slots, H], part of the state image. hidden act [columns, H] and logits f32
    [rows*W, V] of the current unit. masks u32 [rows, W, words]. counts i32 [rows, V]: generated tokens of each lane."""

    model: PlacedModel
    stored: Buffer
    hidden: Buffer
    logits: Buffer
    masks: Buffer
    counts: Buffer
    scratch: Buffer
    input: DeviceFrame
    output: DeviceFrame
    last: Buffer
    """act [rows, H]: hidden of the last accepted columns, on its way into the state."""
    one: Buffer
    """i32 [rows] of 1."""
    shared: Buffer
    """u8: what the device's Ops work in, beside the scratch of single ones."""
    drafts: DraftMemory | BlockMemory | None


def lay_out(scope: Scopes, device: Device, model: TextModel, shape: Shape, kv_pages: int) -> Memory:
    C, W, V, H, blocks = shape.rows, shape.width, shape.vocabulary, model.hidden_size, pages(shape.context)
    decided, K, block = C * W, shape.window, model.block(shape.window)
    columns = max(decided, shape.control)
    hidden = max(columns, shape.chunk if K and block is None else 0)
    pool = pool_pages(model.kv_geometries, kv_pages, C, K)
    placement = Placement(
        pool, C, blocks, shape.slots, shape.columns, shape.recorded, shape.context, shape.codec,
        block.columns if block else 0, columns,
    )  # fmt: skip
    drafts: DraftMemory | BlockMemory | None = None
    if K:
        drafts = (
            BlockMemory.place(scope, device, H, C, K, block, V, model.proposal)
            if block
            else DraftMemory.place(scope, device, H, C, K, columns, shape.context, V, model.proposal)
        )
    return Memory(
        model.place(scope, device, placement),
        scope.buffer("state", (shape.slots, H), device.activation),
        scope.buffer("logits", (hidden, H), device.activation),
        scope.buffer("logits", (decided, V), "f32"),
        scope.buffer("masks", (C, W, mask_words(V)), "u32"),
        scope.buffer("sampling", (C, V), "i32"),
        scope.buffer("sampling", (max(1, device.ops.sample_scratch(decided, V)),), "u8"),
        DeviceFrame.place(scope, input_fields(C, K, shape.columns, blocks)),
        DeviceFrame.place(scope, output_fields(C, K)),
        scope.buffer("logits", (C, H), device.activation),
        scope.buffer("sampling", (C,), "i32"),
        scope.buffer("operations", (device.ops.shared_bytes,), "u8"),
        drafts,
    )


def mask_words(vocabulary: int) -> int:
    """uint32 words of one mask."""
    return (vocabulary + 31) // 32


def measure(device: Device, model: TextModel, shape: Shape, kv_pages: int) -> dict[str, int]:
    """Bytes of the plan with ``kv_pages`` pages, by component. Allocates nothing."""
    scope = MeasureScope()
    lay_out(scope, device, model, shape, kv_pages)
    return scope.cursor.components
