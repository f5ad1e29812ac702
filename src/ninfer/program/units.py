"""The device side of every unit: what is submitted, in which order, and the few places where the host waits.

Decode is two recordings per exact batch size, Forward and Finish, so that masks can be filled while Forward runs. Where
the device works beside the host, prefill is recorded too: a chunk runs in the narrowest recording that holds it, and
what it lacks is padding.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial

from ninfer import env
from ninfer.contract import Arena, Device, Graph
from ninfer.errors import DeviceError
from ninfer.program.checking import Bounds, check_frame
from ninfer.program.frame import HostBlock, InputFrame, end_of, input_fields, output_fields
from ninfer.program.layout import PoolKind, pages
from ninfer.program.memory import Memory, Shape
from ninfer.program.stores.rows import ExecutionRows

COUNTERS = (
    "launches", "uploads", "upload_bytes", "downloads", "download_bytes", "decode_device_ns", "decode_gaps",
    "decode_gap_ns",
)  # fmt: skip
"""What is counted since the start. decode_device_ns: nanoseconds from the launch of each decode round to its results.
decode_gaps: decode rounds that followed another one, decode_gap_ns: from the results of the one to the launch of the
other."""

WIDTHS = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536)
"""Tokens of the recorded prefill units below a whole chunk. Close enough that padding costs at most half a unit."""


def prefill_widths(device: Device, chunk: int) -> tuple[int, ...]:
    """Tokens of the prefill units that are recorded, ascending."""
    return (*(w for w in WIDTHS if w < chunk), chunk) if device.asynchronous else ()


def recording_bytes(device: Device, shape: Shape) -> int:
    """Device memory to set aside for the recordings of passes: a decode round and a prefill unit of each size."""
    return device.recording_bytes * (shape.rows + len(prefill_widths(device, shape.chunk)))


class Units:
    """Submits units and owns what they need on the host: two input frames, one output frame, mask words, graphs."""

    def __init__(self, device: Device, arena: Arena, memory: Memory, shape: Shape, table: ExecutionRows) -> None:
        self.device = device
        self.arena = arena
        self.memory = memory
        self.table = table
        fields, results = input_fields(shape.rows, shape.columns, pages(shape.context)), output_fields(shape.rows)
        up, down = memory.input.bytes, memory.output.bytes
        self._short, self._tabled, self._whole = (
            up.head(nbytes) for nbytes in (end_of(fields, "purpose"), end_of(fields, "blocks"), up.nbytes)
        )
        self._brief, self._scored = down.head(end_of(results, "logprob")), down
        self._frames = [InputFrame(device, fields, shape.rows) for _ in range(2)]
        self._output = HostBlock(device, results)
        self._done = device.event()
        self._launched_ns = self._results_ns = 0
        self.masks = device.host(memory.masks.shape, "u32")
        self._table_version = -1
        self._bounds = Bounds(memory.stored.shape[0], shape.rows, shape.context, shape.columns)
        self._checked = env.checks()
        self.counters = dict.fromkeys(COUNTERS, 0)
        sizes = range(1, shape.rows + 1)
        with ExitStack() as graphs:

            def capture(work: Callable[[], None]) -> Graph:
                graph = device.capture(work)
                graphs.callback(graph.close)
                return graph

            self._forward = [capture(partial(self._submit_forward, B)) for B in sizes]
            self._recall = [capture(partial(self._submit_recall, B)) for B in sizes]
            self._finish = [capture(partial(self._submit_finish, B)) for B in sizes]
            self._masked_finish = [capture(partial(self._submit_masked_finish, B)) for B in sizes]
            widths = prefill_widths(device, shape.chunk)
            self._prefill = {width: capture(partial(self._submit_prefill, width)) for width in widths}
            self._graphs = graphs.pop_all()

    # -- host frames ---------------------------------------------------------------------------------------------

    def frame(self) -> InputFrame:
        """The older input frame, once the device no longer reads it."""
        self._frames.reverse()
        frame = self._frames[0]
        frame.event.wait()
        return frame

    # -- units ---------------------------------------------------------------------------------------------------

    def columns(self, width: int) -> int:
        """Columns that a prefill unit of ``width`` tokens runs with."""
        return min((recorded for recorded in self._prefill if recorded >= width), default=width)

    def prefill(self, frame: InputFrame, width: int) -> None:
        """Run one row of ``width`` prompt tokens; the hidden of its last token becomes part of the state."""
        self._results_ns = 0
        self._upload(frame, wide=True)
        recorded = self._prefill.get(self.columns(width))
        if recorded is None:
            self._submit_prefill(width)
        else:
            self._launch(recorded)
        frame.event.record()

    def forward(self, frame: InputFrame, B: int) -> None:
        """Run ``B`` anchors and leave their logits."""
        self._upload(frame)
        self._launch(self._forward[B - 1])
        self._launched_ns = time.perf_counter_ns()
        if self._results_ns:
            self.counters["decode_gaps"] += 1
            self.counters["decode_gap_ns"] += self._launched_ns - self._results_ns

    def recall(self, frame: InputFrame, B: int) -> None:
        """Leave the logits of ``B`` rows' stored hidden."""
        self._upload(frame)
        self._launch(self._recall[B - 1])

    def finish(self, frame: InputFrame, B: int, scores: bool, *, masked: bool) -> None:
        """Send the masks, if some row has one; sample, and bring the results down."""
        if masked:
            self._launch(self._masked_finish[B - 1])
            self._count("upload", B * self.masks.itemsize * self.masks.shape[1])
        else:
            self._launch(self._finish[B - 1])
        source = self._scored if scores else self._brief
        self.device.download(self._output.bytes[: source.nbytes], source)
        self._count("download", source.nbytes)
        frame.event.record()

    def results(self, decode: bool) -> HostBlock:
        """What the last ``finish`` brought down, once it is here. The one wait of a round."""
        self._frames[0].event.wait()
        self._results_ns = time.perf_counter_ns() if decode else 0
        if decode:
            self.counters["decode_device_ns"] += self._results_ns - self._launched_ns
        return self._output

    def control(self, frame: InputFrame, width: int) -> None:
        """Run one row of ``width`` decided tokens, recorded: keys and values are appended, the state is left alone."""
        self._results_ns = 0
        self._upload(frame, wide=True)
        m = self.memory
        rows = m.input.wide_rows(width)
        m.model.forward(rows, recorded=True)
        self.device.ops.count(m.counts, m.input.fields["lanes"].head(1), rows.tokens.head(1, width), rows.width)
        frame.event.record()

    def fold(self, frame: InputFrame, width: int) -> None:
        """Advance the state by the accepted columns of a control unit of ``width``."""
        self._upload(frame)
        self.memory.model.fold(self.memory.input.fields["accepted"], self.memory.input.wide_rows(width))
        self._store_hidden()
        frame.event.record()

    def clear_counts(self, lane: int) -> None:
        self.device.zero(self.memory.counts.slice(lane, lane + 1))

    def drain(self) -> None:
        """Wait for everything submitted."""
        self._done.record()
        self._done.wait()

    def close(self) -> None:
        """Graphs before the buffers they name. Nobody waits for the last work any more, so it may have failed."""
        with suppress(DeviceError):
            self.drain()
        self._graphs.close()
        self.arena.close()

    # -- submissions ---------------------------------------------------------------------------------------------

    def _submit_prefill(self, width: int) -> None:
        self.memory.model.forward(self.memory.input.wide_rows(width))
        self._store_hidden()

    def _submit_forward(self, B: int) -> None:
        m, ops = self.memory, self.device.ops
        rows, hidden = m.input.rows(B), m.hidden.slice(0, B)
        m.model.forward(rows)
        m.model.hidden(None, hidden)
        ops.scatter(m.stored, hidden, rows.write)
        m.model.logits(hidden, m.logits.slice(0, B))
        ops.count(m.counts, m.input.fields["lanes"].head(B), rows.tokens.head(B, 1), rows.width)

    def _submit_recall(self, B: int) -> None:
        m, hidden = self.memory, self.memory.hidden.slice(0, B)
        self.device.ops.gather(hidden, m.stored, m.input.fields["read"].head(B))
        m.model.logits(hidden, m.logits.slice(0, B))

    def _submit_finish(self, B: int) -> None:
        m = self.memory
        self.device.ops.sample(
            m.output.sample_out(B), m.logits.slice(0, B), m.masks.slice(0, B), m.counts, m.input.sample_rows(B),
            m.scratch,
        )  # fmt: skip

    def _submit_masked_finish(self, B: int) -> None:
        self.device.upload(self.memory.masks.slice(0, B), self.masks[:B])
        self._submit_finish(B)

    def _store_hidden(self) -> None:
        m, hidden = self.memory, self.memory.hidden.slice(0, 1)
        m.model.hidden(m.input.fields["last"], hidden)
        self.device.ops.scatter(m.stored, hidden, m.input.fields["write"].head(1))

    def _upload(self, frame: InputFrame, wide: bool = False) -> None:
        """Send the frame: its short fields, the block table if it changed, and the wide fields if asked."""
        version = self.table.version
        dirty = self._table_version != version
        if (dirty or wide) and frame.table_version != version:
            frame.block.fields["blocks"][:] = self.table.tables[PoolKind.MAIN]
            frame.table_version = version
        if self._checked:
            check_frame(frame.block.fields, self._bounds)
        target = self._whole if wide else self._tabled if dirty else self._short
        self.device.upload(target, frame.block.bytes[: target.nbytes])
        if dirty and self.memory.model.blocks is not None:
            self.device.copy(self.memory.model.blocks, self.memory.input.fields["blocks"])
        self._table_version = version
        self._count("upload", target.nbytes)

    def _launch(self, graph: Graph) -> None:
        graph.launch()
        self.counters["launches"] += 1

    def _count(self, way: str, nbytes: int) -> None:
        self.counters[f"{way}s"] += 1
        self.counters[f"{way}_bytes"] += nbytes
