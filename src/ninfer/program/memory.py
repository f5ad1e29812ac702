"""Everything a Program holds on the device, laid out by one function that both plans and builds."""

from __future__ import annotations

from dataclasses import dataclass

from ninfer.contract import Buffer, Device
from ninfer.program.frame import DeviceFrame, input_fields, output_fields
from ninfer.program.layout import KVCodec, pages
from ninfer.program.scope import MeasureScope, Scopes
from ninfer.program.text import PlacedModel, Placement, TextModel


@dataclass(frozen=True, slots=True)
class Shape:
    """The fixed sizes of a Program.

    rows: sequences active at once. context: tokens of one sequence. chunk: tokens of one prefill unit. control:
    tokens of one forced unit. vocabulary: ids that may be sampled. spare: state slots beyond one per row, for
    checkpoints.
    """

    rows: int
    context: int
    chunk: int
    control: int
    codec: KVCodec
    vocabulary: int
    spare: int = 0

    @property
    def slots(self) -> int:
        return self.rows + self.spare

    @property
    def columns(self) -> int:
        return max(self.rows, self.chunk, self.control)


@dataclass(frozen=True, slots=True)
class Memory:
    """stored: continuation hidden act [slots, H], part of the state image. hidden act [rows, H] and logits f32
    [rows, V] of the current round. masks u32 [rows, 1, words]. counts i32 [rows, V]: generated tokens of each lane."""

    model: PlacedModel
    stored: Buffer
    hidden: Buffer
    logits: Buffer
    masks: Buffer
    counts: Buffer
    scratch: Buffer
    input: DeviceFrame
    output: DeviceFrame


def lay_out(scope: Scopes, device: Device, model: TextModel, shape: Shape, kv_pages: int) -> Memory:
    C, V, blocks = shape.rows, shape.vocabulary, pages(shape.context)
    placement = Placement(kv_pages, C, blocks, shape.slots, shape.columns, shape.control, shape.context, shape.codec)
    return Memory(
        model.place(scope, device, placement),
        scope.buffer("state", (shape.slots, model.hidden_size), device.activation),
        scope.buffer("logits", (C, model.hidden_size), device.activation),
        scope.buffer("logits", (C, V), "f32"),
        scope.buffer("masks", (C, 1, mask_words(V)), "u32"),
        scope.buffer("sampling", (C, V), "i32"),
        scope.buffer("sampling", (max(1, device.ops.sample_scratch(C, V)),), "u8"),
        DeviceFrame.place(scope, input_fields(C, shape.columns, blocks)),
        DeviceFrame.place(scope, output_fields(C)),
    )


def mask_words(vocabulary: int) -> int:
    """uint32 words of one mask."""
    return (vocabulary + 31) // 32


def measure(device: Device, model: TextModel, shape: Shape, kv_pages: int) -> dict[str, int]:
    """Bytes of the plan with ``kv_pages`` pages, by component. Allocates nothing."""
    scope = MeasureScope()
    lay_out(scope, device, model, shape, kv_pages)
    return scope.cursor.components
