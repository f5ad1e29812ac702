"""The device side of every unit: what is submitted, in which order, and the few places where the host waits.

Decode is two recordings per exact batch size and width, Forward and Finish, so that masks can be filled while Forward
runs. Drafting is a third, by how many drafts the next round wants: what was decided comes down before it, so that the
host takes it in while the device drafts, and waits for the drafts only when they are needed. Where the device works
beside the host, prefill is recorded too: a chunk runs in the narrowest recording that holds it, and what it lacks is
padding.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import partial
from itertools import product

import numpy as np
import numpy.typing as npt

from ninfer import env
from ninfer.device import Arena, Device
from ninfer.errors import DeviceError
from ninfer.program.checking import Bounds, check_frame
from ninfer.program.drafting import Drafting, MtpDrafting
from ninfer.program.frame import HostBlock, InputFrame, before, input_fields, output_fields
from ninfer.program.layout import PoolKind, pages
from ninfer.program.memory import Memory, Shape
from ninfer.program.recordings import Recordings
from ninfer.program.stores.rows import ExecutionRows
from ninfer.program.widths import at_least, draft_steps, prefill_widths, round_widths

TABLES = {PoolKind.MAIN: "blocks", PoolKind.MTP: "draft_blocks", PoolKind.DRAFT_FULL: "draft_blocks"}
"""Field of an input frame with the block table of a pool."""

COUNTERS = (
    "launches", "uploads", "upload_bytes", "downloads", "download_bytes", "decode_device_ns", "decode_gaps",
    "decode_gap_ns",
)  # fmt: skip
"""What is counted since the start. decode_device_ns: nanoseconds from the launch of each decode round until its results
were here, drafts included where the host waited for them. decode_gaps: decode rounds that followed another one of as
many rows, decode_gap_ns: from there to the launch of the other."""

GAPS = 1024
"""Of how many of the latest decode rounds the time before each is kept, not only its sum."""

FINISHES = tuple(product((False, True), repeat=2))
"""Ways to finish a round: with masks or without, with rows that draw from the whole vocabulary or without. Of a round
that neither verifies nor makes drafts there are as many more."""


class Units:
    """Submits units and owns what they need on the host: input frames, one output frame, mask words, recordings.

    decision: the frame of a decision round, whose copy up is part of the recording. Free whenever no batch is pending.
    gaps: rows and nanoseconds of the latest of ``decode_gaps``.
    """

    def __init__(self, device: Device, arena: Arena, memory: Memory, shape: Shape, table: ExecutionRows) -> None:
        self.device = device
        self.arena = arena
        self.memory = memory
        self.table = table
        self.widths = round_widths(device, shape)
        fields = input_fields(shape.rows, shape.window, shape.columns, pages(shape.context))
        results = output_fields(shape.rows, shape.window)
        up, down = memory.input.bytes, memory.output.bytes
        self._short, self._tabled, self._whole = (
            up.head(nbytes) for nbytes in (before(fields, "blocks"), before(fields, "wide_tokens"), up.nbytes)
        )
        self._brief, self._scored = (down.head(before(results, name)) for name in ("alt_ids", "drafts"))
        sizes = {1, *self.widths}
        self.decision, *self._frames = (InputFrame(device, fields, shape.rows, sizes, shape.window) for _ in range(3))
        self._output = HostBlock(device, results)
        self._done, self._drafted = device.event(), device.event()
        self._launched_ns = self._rows = 0
        self._masks = device.host(memory.masks.shape, "u32")
        self._table_version = -1
        self._bounds = Bounds(memory.stored.shape[0], shape.rows, shape.context, shape.columns)
        self._checked = env.checks()
        self.count_anew()
        self.drafting: Drafting | None = None
        self.steps: tuple[int, ...] = ()
        if memory.drafts is not None:
            one = device.host(memory.one.shape, "i32")
            one[:] = 1
            device.upload(memory.one, one)
            self.drafting = memory.drafts.drafting(device, memory)
            self.steps = draft_steps(shape, self.widths, self.drafting.whole)
        self._prefills = prefill_widths(device, shape.chunk)
        self._recorded = Recordings(device, self._works(shape.rows))

    def _works(self, rows: int) -> dict[Hashable, Callable[[], None]]:
        """What is recorded, by kind and sizes."""
        works: dict[Hashable, Callable[[], None]] = {}
        for B in range(1, rows + 1):
            works["recall", B] = partial(self._submit_recall, B)
            for how in FINISHES:
                works["first", B, 1, *how] = partial(self._submit_finish, B, 1, True, *how)
            for W in self.widths:
                works["forward", B, W] = partial(self._submit_forward, B, W)
                for how in FINISHES:
                    works["finish", B, W, *how] = partial(self._submit_finish, B, W, False, *how)
                    if W == 1 < self.widths[-1]:
                        works["plain", B, W, *how] = partial(self._submit_plain, B, *how)
                if W > 1:
                    works["fold", B, W] = partial(self._submit_fold, B, W)
            if self.drafting is not None:
                works |= {("draft", B, S): partial(self.drafting.draft, B, S) for S in self.steps}
        return works | {("prefill", width): partial(self._submit_prefill, width) for width in self._prefills}

    def count_anew(self) -> None:
        self.counters, self._results_ns = dict.fromkeys(COUNTERS, 0), 0
        self.gaps: deque[tuple[int, int]] = deque(maxlen=GAPS)

    # -- host frames ---------------------------------------------------------------------------------------------

    def frame(self) -> InputFrame:
        """The frame of a unit that decides nothing: the older of two, once the device no longer reads it."""
        self._frames.reverse()
        frame = self._frames[0]
        frame.event.wait()
        return frame

    # -- units ---------------------------------------------------------------------------------------------------

    def columns(self, width: int) -> int:
        """Columns that a prefill unit of ``width`` tokens runs with."""
        return at_least(width, self._prefills) or width

    def width(self, drafts: int) -> int:
        """Columns that a row has in a decode round that verifies ``drafts``."""
        return at_least(1 + drafts, self.widths)

    def ahead(self, drafts: int) -> int:
        """Drafts that a round makes where ``drafts`` are wanted for the next."""
        return at_least(drafts, self.steps) if drafts else 0

    def prefill(self, frame: InputFrame, width: int) -> None:
        """Run one row of ``width`` prompt tokens; the hidden of its last token becomes part of the state."""
        self._results_ns = 0
        self._upload(frame, wide=True)
        self._carry(frame, 1)
        columns = self.columns(width)
        if columns in self._prefills:
            self._launch("prefill", columns)
        else:
            self._submit_prefill(width)
        frame.event.record()

    def forward(self, B: int, W: int, forked: bool) -> None:
        """Run ``B`` anchors and the drafts behind them, ``W`` columns a row, and leave their logits. forked: some row
        reads another state slot than it writes."""
        self._send_decision()
        if forked:
            self._carry(self.decision, B)
        self._launched_ns = time.perf_counter_ns()
        if self._results_ns and self._rows == B:
            gap = self._launched_ns - self._results_ns
            self.counters["decode_gaps"] += 1
            self.counters["decode_gap_ns"] += gap
            self.gaps.append((B, gap))
        self._rows = B
        self._launch("forward", B, W)

    def recall(self, B: int) -> None:
        """Leave the logits of ``B`` rows' stored hidden."""
        self._send_decision()
        self._launch("recall", B)

    def masks(self, B: int, W: int) -> npt.NDArray[np.uint32]:
        """Host words u32 [B, W, words] of a round's masks, packed as the device reads them."""
        words = self._masks.shape[-1]
        return self._masks.reshape(-1, words)[: B * W].reshape(B, W, words)

    def finish(
        self, B: int, W: int, first: bool, scores: bool, *, masked: bool, everything: bool, ahead: int = 0
    ) -> None:
        """Send the masks, if some row has one; decide, and bring the results down; then draft ``ahead`` tokens, and
        bring them down. first: one column a row, from a stored hidden."""
        kind = "first" if first else "plain" if W == 1 and not ahead and self.drafting is not None else "finish"
        self._launch(kind, B, W, masked, everything)
        if masked:
            self._count("upload", self.masks(B, W).nbytes)
        source = self._scored if scores else self._brief
        self.device.download(self._output.bytes[: source.nbytes], source)
        self._count("download", source.nbytes)
        self.decision.event.record()
        if ahead:
            self._launch("draft", B, ahead)
            drafts = self.memory.output.fields["drafts"].head(B * ahead)
            self.device.download(self._output.fields["drafts"][: B * ahead], drafts)
            self._count("download", drafts.nbytes)
            self._drafted.record()

    def results(self, decode: bool) -> HostBlock:
        """What the last ``finish`` decided, once it is here. ``drafts`` waits for the others."""
        self.decision.event.wait()
        self._results_ns = 0
        if decode:
            self._arrived()
        return self._output

    def drafts(self, B: int, ahead: int) -> list[tuple[int, ...]]:
        """What the last ``finish`` drafted for each row, once it is here."""
        waits = not self._drafted.done()
        self._drafted.wait()
        if waits and self._results_ns:
            self._arrived()
        return list(map(tuple, self._output.fields["drafts"][: B * ahead].reshape(-1, B).T.tolist()))

    def _arrived(self) -> None:
        """A part of a decode round's results has come down."""
        now = time.perf_counter_ns()
        self.counters["decode_device_ns"] += now - (self._results_ns or self._launched_ns)
        self._results_ns = now

    def control(self, frame: InputFrame, width: int) -> None:
        """Run one row of ``width`` decided tokens, recorded: keys and values are appended, the state is left alone."""
        self._results_ns = 0
        self._upload(frame, wide=True)
        self._carry(frame, 1)
        m = self.memory
        rows = m.input.wide_rows(width)
        m.model.forward(rows, recorded=True)
        m.model.hidden(None, m.hidden.slice(0, width))
        self.device.ops.count(m.counts, m.input.fields["lanes"].head(1), rows.tokens.head(1, width), rows.width)
        if self.drafting is not None:
            self.drafting.forced(width)
        frame.event.record()

    def join(self, frame: InputFrame) -> None:
        """Append to the drafting module's history the last prompt token of one row, which has a forced successor."""
        assert isinstance(self.drafting, MtpDrafting)
        self._upload(frame)
        self.drafting.join()
        frame.event.record()

    def fold(self, frame: InputFrame, B: int, width: int) -> None:
        """Advance the state of ``B`` rows by the accepted columns of a recorded unit of ``width``."""
        self._upload(frame)
        if ("fold", B, width) in self._recorded:
            self._launch("fold", B, width)
        else:
            self._submit_fold(B, width)
        frame.event.record()

    def reset_counts(self, lane: int, tokens: npt.NDArray[np.int32]) -> None:
        """What a lane's request has generated so far; none, unless it is resumed."""
        counts = self.memory.counts.slice(lane, lane + 1)
        if not len(tokens):
            self.device.zero(counts)
            return
        so_far = self.device.host(counts.shape, "i32")
        so_far[0] = np.bincount(tokens, minlength=counts.shape[1])
        self.device.upload(counts, so_far)
        self.drain()

    def drain(self) -> None:
        """Wait for everything submitted."""
        self._done.record()
        self._done.wait()

    def close(self) -> None:
        """Graphs before the buffers they name. Nobody waits for the last work any more, so it may have failed."""
        with suppress(DeviceError):
            self.drain()
        self._recorded.close()
        self.device.ops.leave(self.memory.shared)
        self.arena.close()

    # -- submissions ---------------------------------------------------------------------------------------------

    def _submit_prefill(self, width: int) -> None:
        m, last = self.memory, self.memory.last.slice(0, 1)
        m.model.forward(m.input.wide_rows(width))
        m.model.hidden(m.input.fields["last"].head(1), last)
        self.device.ops.scatter(m.stored, last, m.input.fields["write"].head(1))
        if self.drafting is not None:
            self.drafting.prompt(width)

    def _submit_forward(self, B: int, W: int) -> None:
        """The state of a single column advances at once; of several it is known later how many count."""
        m, ops, one = self.memory, self.device.ops, W == 1
        self._upload_decision()
        rows, hidden = m.input.rows(B, W), m.hidden.slice(0, B * W)
        m.model.forward(rows, recorded=not one)
        m.model.hidden(None, hidden)
        m.model.logits(hidden, m.logits.slice(0, B * W))  # whose weights are asked for while hidden is made
        if one:
            ops.scatter(m.stored, hidden, rows.write)
        counted = rows.width if one else m.one.head(B)  # drafts are counted once accepted
        ops.count(m.counts, m.input.fields["lanes"].head(B), rows.tokens.head(B, W), counted)

    def _submit_recall(self, B: int) -> None:
        m, hidden = self.memory, self.memory.hidden.slice(0, B)
        self._upload_decision()
        self.device.ops.gather(hidden, m.stored, m.input.fields["read"].head(B))
        m.model.logits(hidden, m.logits.slice(0, B))

    def _submit_finish(
        self, B: int, W: int, first: bool, masked: bool, everything: bool, drafting: bool = True
    ) -> None:
        m, ops = self.memory, self.device.ops
        out, sampled, logits = (
            m.output.sample_out(B, W),
            m.input.sample_rows(B, W, everything),
            m.logits.slice(0, B * W),
        )
        masks = m.masks.head(B, W, m.masks.shape[2])
        if masked:
            self.device.upload(masks, self.masks(B, W))
        if W == 1:
            ops.sample(out, logits, masks, m.counts, sampled, m.scratch)
        else:
            drafts, accepted = m.input.drafts(B, W), m.output.fields["accepted"].head(B)
            if self.drafting is not None:
                drafts = self.drafting.proposed(drafts)
            ops.accept(out, accepted, logits, masks, m.counts, sampled, drafts, m.scratch)
            ops.count(m.counts, m.input.fields["lanes"].head(B), drafts.tokens, accepted)
        if self.drafting is not None:
            self.drafting.decided(B, W, first, drafting)

    def _submit_plain(self, B: int, masked: bool, everything: bool) -> None:
        self._submit_finish(B, 1, False, masked, everything, drafting=False)

    def _submit_fold(self, B: int, W: int) -> None:
        """The state advances, and the hidden of the last accepted column becomes part of it."""
        m, ops, fields = self.memory, self.device.ops, self.memory.input.fields
        m.model.fold(fields["accepted"].head(B), m.input.wide_rows(W) if B == 1 else m.input.rows(B, W))
        last = m.last.slice(0, B)
        ops.gather(last, m.hidden, fields["last"].head(B))
        ops.scatter(m.stored, last, fields["kept"].head(B))

    def _carry(self, frame: InputFrame, B: int) -> None:
        """Rows that read one state slot and write another take along what a unit only adds to."""
        rows = frame.rows(B)
        for read, write in zip(rows.read.tolist(), rows.write.tolist()):
            if read != write:
                self.memory.model.carry(read, write)

    def _upload_decision(self) -> None:
        self.device.upload(self._short, self.decision.block.bytes[: self._short.nbytes])

    def _send_decision(self) -> None:
        """What the recording does not send: the block tables, where they changed."""
        if self._table_version != self.table.version:
            self._upload(self.decision)
            return
        if self._checked:
            check_frame(self.decision.block.fields, self._bounds)
        self._count("upload", self._short.nbytes)

    def _upload(self, frame: InputFrame, wide: bool = False) -> None:
        """Send the frame: its short fields, the block tables if they changed, and the wide fields if asked."""
        version = self.table.version
        dirty = self._table_version != version
        if (dirty or wide) and frame.version != version:
            for kind, name in TABLES.items():
                if kind in self.table.tables:
                    frame.block.fields[name][:] = self.table.tables[kind]
            frame.version = version
        if self._checked:
            check_frame(frame.block.fields, self._bounds)
        target = self._whole if wide else self._tabled if dirty else self._short
        self.device.upload(target, frame.block.bytes[: target.nbytes])
        if dirty:
            for kind, blocks in self.memory.model.tables.items():
                self.device.copy(blocks, self.memory.input.fields[TABLES[kind]])
        self._table_version = version
        self._count("upload", target.nbytes)

    def _launch(self, *name: Hashable) -> None:
        self._recorded.launch(name)
        self.counters["launches"] += 1

    def _count(self, way: str, nbytes: int) -> None:
        self.counters[f"{way}s"] += 1
        self.counters[f"{way}_bytes"] += nbytes
