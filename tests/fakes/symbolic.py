"""A device and a language model whose numbers are hashes, for tests of everything around them.

The model's key/value column of position p is a hash of the tokens and positions 0..p, its state likewise, and its
logits are a hash of the state and of every column reached through the block table: a wrong page, slot, frontier,
position or order changes the sampled tokens. ``Oracle`` computes the same tokens from the ledger alone.

The device is stream-ordered. With ``delayed`` nothing runs before an event that follows it is waited for: uploads read
their host array and downloads write theirs only then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ninfer.device import DeviceMemory
from ninfer.errors import DeviceError, InvariantError, OutOfDeviceMemory
from ninfer.program.layout import KVGeometry, PoolKind
from ninfer.program.text import BlockShape

NUMPY = {
    "u8": np.uint8, "i8": np.int8, "f16": np.float16, "bf16": np.uint16, "i32": np.int32, "u32": np.uint32,
    "f32": np.float32, "i64": np.int64, "u64": np.uint64,
}  # fmt: skip
WORD = (1 << 64) - 1
RING = 20
"""Columns that a companion's window spans."""


def mix(*words: int) -> int:
    h = 0x243F6A8885A308D3
    for word in words:
        h = ((h ^ (int(word) & WORD)) * 0x9E3779B97F4A7C15) & WORD
        h ^= h >> 29
    return h


def context_hash(columns: np.ndarray) -> int:
    """Hash of all cached columns of a sequence, uint64 [n], in order."""
    weights = 2 * np.arange(len(columns), dtype=np.uint64) + np.uint64(1)
    return int((columns * weights).sum(dtype=np.uint64))


def hashed_logits(hidden: int, vocabulary: int) -> np.ndarray:
    """f32 [vocabulary], distinct multiples of 2^-20."""
    ids = np.arange(1, vocabulary + 1, dtype=np.uint64)
    words = (ids * np.uint64(0x9E3779B97F4A7C15)) ^ np.uint64(hidden)
    words = (words ^ (words >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
    return ((words >> np.uint64(44)).astype(np.float32)) * np.float32(2.0**-18)


def choose(logits, mask, counts, real, whole, seed, index, purpose) -> tuple[int, np.ndarray]:
    """Token and penalised logits: greedy at temperature 0, else one of the three best by (seed, index, purpose)."""
    z = logits.astype(np.float32).copy()
    if whole[2]:
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(z)]
        z[bits == 0] = -np.inf
    z -= np.float32(real[3]) * (counts > 0) + np.float32(real[4]) * counts
    if np.isnan(z).any():
        return -2, z
    legal = int((z > -np.inf).sum())
    if legal == 0:
        return -1, z
    order = np.argsort(-z, kind="stable")
    rank = 0 if real[0] == 0 else mix(seed[0], seed[1], index, purpose) % min(3, legal)
    return int(order[rank]), z


# -- device --------------------------------------------------------------------------------------------------------


class HostBuffer:
    def __init__(self, array: np.ndarray, dtype: str) -> None:
        self.array = array
        self.dtype = dtype

    @property
    def shape(self):
        return self.array.shape

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    def head(self, *shape: int) -> HostBuffer:
        return HostBuffer(self.array.reshape(-1)[: math.prod(shape)].reshape(shape), self.dtype)

    def slice(self, begin: int, end: int) -> HostBuffer:
        return HostBuffer(self.array[begin:end], self.dtype)


class SymbolicArena:
    def __init__(self, device: SymbolicDevice, nbytes: int) -> None:
        self.device = device
        self.nbytes = nbytes
        self.bytes = np.zeros(nbytes, np.uint8)

    def buffer(self, offset: int, shape: tuple[int, ...], dtype: str) -> HostBuffer:
        assert offset % 256 == 0
        size = math.prod(shape) * np.dtype(NUMPY[dtype]).itemsize
        assert offset + size <= self.nbytes
        return HostBuffer(self.bytes[offset : offset + size].view(NUMPY[dtype]).reshape(shape), dtype)

    def close(self) -> None:
        assert all(graph.closed for graph in self.device.graphs), "an arena was closed before a graph that names it"
        shared = self.device.ops.shared
        assert shared is None or not np.shares_memory(shared.array, self.bytes), "an arena was closed under the Ops"
        self.device.events.append("arena closed")
        self.device.held -= self.nbytes


class SymbolicEvent:
    def __init__(self, device: SymbolicDevice) -> None:
        self.device = device
        self.at = 0

    def record(self) -> None:
        self.device.submit("record", lambda: None)
        self.at = self.device.submitted

    def done(self) -> bool:
        return self.device.finished >= self.at

    def wait(self) -> None:
        self.device.run_until(self.at)


class SymbolicCopies:
    """A queue of its own. ``hold`` keeps copies from happening; a copy sees the device's work up to ``follow``."""

    def __init__(self, device: SymbolicDevice) -> None:
        self.device = device
        self.queue: list = []
        self.submitted = self.finished = 0
        self.hold = False
        self.after = 0

    def follow(self) -> None:
        self.after = self.device.submitted

    def upload(self, dst: HostBuffer, src: np.ndarray) -> None:
        assert dst.nbytes == src.nbytes
        assert dst.array.dtype == src.dtype
        self.submit("up", lambda: np.copyto(dst.array, src))

    def download(self, dst: np.ndarray, src: HostBuffer) -> None:
        assert dst.nbytes == src.nbytes
        assert src.array.dtype == dst.dtype
        self.submit("down", lambda: np.copyto(dst, src.array))

    def event(self) -> CopyEvent:
        return CopyEvent(self)

    def submit(self, name: str, step: Callable[[], None]) -> None:
        self.device.check(name)
        self.queue.append((name, self.after, step))
        self.submitted += 1

    def run_until(self, mark: int) -> None:
        while self.finished < mark:
            name, after, step = self.queue.pop(0)
            self.finished += 1
            self.device.run_until(after)
            self.device.fail_late(name)
            step()


class CopyEvent:
    def __init__(self, copies: SymbolicCopies) -> None:
        self.copies = copies
        self.at = 0

    def record(self) -> None:
        self.at = self.copies.submitted

    def done(self) -> bool:
        if not self.copies.hold:
            self.copies.run_until(self.at)
        return self.copies.finished >= self.at

    def wait(self) -> None:
        self.copies.run_until(self.at)


class SymbolicGraph:
    def __init__(self, device: SymbolicDevice, work: list) -> None:
        self.device = device
        self.work = work
        self.closed = False

    def launch(self) -> None:
        assert not self.closed
        self.device.check("launch")
        for name, step in self.work:
            self.device.enqueue(name, step)

    def close(self) -> None:
        self.device.events.append("graph closed")
        self.closed = True


class SymbolicDevice:
    """``faults[name]`` counts down to a DeviceError raised when that many submissions of ``name`` were made;
    ``late_faults[name]`` raises it when the work runs."""

    kind = "symbolic"
    name = "symbolic"
    activation = "u64"

    def __init__(self, delayed: bool = False, memory: int = 1 << 24) -> None:
        self.delayed = self.asynchronous = delayed
        self.recording_bytes = 100
        self.total = memory
        self.held = 0
        self.ops = SymbolicOps(self)
        self.queue: list = []
        self.submitted = self.finished = 0
        self.recording: list | None = None
        self.graphs: list[SymbolicGraph] = []
        self.events: list[str] = []
        self.faults: dict[str, int] = {}
        self.late_faults: dict[str, int] = {}
        self.copy_queue = SymbolicCopies(self)

    def memory(self) -> DeviceMemory:
        return DeviceMemory(self.total, self.total - self.held)

    def taken(self) -> dict[str, int]:
        return {"weights": 1000}

    def arena(self, nbytes: int) -> SymbolicArena:
        if nbytes > self.total - self.held:
            raise OutOfDeviceMemory("arena", free=self.total - self.held)
        self.held += nbytes
        return SymbolicArena(self, nbytes)

    def host(self, shape, dtype: str) -> np.ndarray:
        self.check("host")
        return np.zeros(shape, NUMPY[dtype])

    def weights(self, data):
        return HostBuffer(data, "u8")

    def upload(self, dst: HostBuffer, src: np.ndarray) -> None:
        assert dst.nbytes == src.nbytes
        self.submit("upload", lambda: np.copyto(dst.array, src))

    def download(self, dst: np.ndarray, src: HostBuffer) -> None:
        assert src.nbytes == dst.nbytes
        self.submit("download", lambda: np.copyto(dst, src.array))

    def copy_rows(self, planes, source: int, target: int) -> None:
        for plane in planes:
            self.copy(plane.slice(target, target + 1), plane.slice(source, source + 1))

    def copy(self, dst: HostBuffer, src: HostBuffer) -> None:
        self.submit("copy", lambda: np.copyto(dst.array, src.array))

    def zero(self, dst: HostBuffer) -> None:
        self.submit("zero", lambda: dst.array.fill(0))

    def event(self) -> SymbolicEvent:
        return SymbolicEvent(self)

    def copies(self) -> SymbolicCopies:
        return self.copy_queue

    def capture(self, work: Callable[[], None]) -> SymbolicGraph:
        self.recording = []
        work()
        graph = SymbolicGraph(self, self.recording)
        self.recording = None
        self.graphs.append(graph)
        return graph

    def close(self) -> None:
        self.run_until(self.submitted)

    def check(self, name: str) -> None:
        if name in self.faults:
            self.faults[name] -= 1
            if self.faults[name] < 0:
                del self.faults[name]
                raise DeviceError(f"injected fault at {name}")

    def submit(self, name: str, step: Callable[[], None]) -> None:
        if self.recording is not None:
            self.recording.append((name, step))
            return
        self.check(name)
        self.enqueue(name, step)

    def enqueue(self, name: str, step: Callable[[], None]) -> None:
        self.queue.append((name, step))
        self.submitted += 1
        if not self.delayed:
            self.run_until(self.submitted)

    def run_until(self, mark: int) -> None:
        while self.finished < mark:
            name, step = self.queue.pop(0)
            self.finished += 1
            self.fail_late(name)
            step()

    def fail_late(self, name: str) -> None:
        if name in self.late_faults:
            self.late_faults[name] -= 1
            if self.late_faults[name] < 0:
                del self.late_faults[name]
                raise DeviceError(f"injected late fault at {name}")


class SymbolicOps:
    def __init__(self, device: SymbolicDevice) -> None:
        self.device = device
        self.block = self
        self.shared: HostBuffer | None = None

    shared_bytes = 512

    def use(self, area: HostBuffer) -> None:
        if self.shared is not None:
            raise InvariantError("a second area")
        assert area.shape == (self.shared_bytes,)
        self.shared = area

    def leave(self, area: HostBuffer) -> None:
        if self.shared is area:
            self.shared = None

    def begin(self, tokens, start, width, decided, kept, rows, mask) -> None:
        def run() -> None:
            n = kept.array + 1
            start.array[:], width.array[:] = rows.start.array + n, n
            tokens.array[:] = mask
            tokens.array[:, 0] = decided.array[np.arange(rows.B), n - 1]

        self.device.submit("begin", run)

    def sample_scratch(self, positions: int, vocab: int) -> int:
        return 0

    def scatter(self, dst, src, index) -> None:
        def run() -> None:
            kept = index.array >= 0
            dst.array[index.array[kept]] = src.array[kept]

        self.device.submit("scatter", run)

    def gather(self, dst, src, index) -> None:
        self.device.submit("gather", lambda: np.copyto(dst.array, src.array[index.array]))

    def count(self, counts, lanes, tokens, width) -> None:
        def run() -> None:
            for lane, row, w in zip(lanes.array, tokens.array, width.array):
                np.add.at(counts.array[lane], row[:w], 1)

        self.device.submit("count", run)

    def sample(self, out, logits, masks, counts, rows, scratch) -> None:
        assert self.shared is not None, "an Op without an area"

        def run() -> None:
            assert self.shared is not None, "work outlived what it works in"
            for b in range(rows.B):
                whole = rows.whole.array[b]
                token, z = choose(
                    logits.array[b], masks.array[b, 0], counts.array[whole[3]], rows.real.array[b], whole,
                    rows.seed.array[b], rows.index.array[b, 0], rows.purpose.array[b, 0],
                )  # fmt: skip
                self._report(out, b, 0, whole, token, z)

        self.device.submit("sample", run)

    def accept(self, out, accepted, logits, masks, counts, rows, drafts, scratch) -> None:
        """A draft is kept where the token would have been chosen without it; so the tokens are those of ``sample``."""

        def run() -> None:
            for b in range(rows.B):
                whole, seen = rows.whole.array[b], counts.array[rows.whole.array[b, 3]].copy()
                planned = int(drafts.count.array[b])
                for j in range(planned if drafts.ids else 0):
                    assert drafts.q.array[b, j][drafts.ids.array[b, j] == drafts.tokens.array[b, j]] == 0.5
                for w in range(planned + 1):
                    token, z = choose(
                        logits.array[b * rows.W + w], masks.array[b, w], seen, rows.real.array[b], whole,
                        rows.seed.array[b], rows.index.array[b, w], min(rows.purpose.array[b, w], 1),
                    )  # fmt: skip
                    self._report(out, b, w, whole, token, z)
                    accepted.array[b] = w
                    if w == planned or token != drafts.tokens.array[b, w]:
                        break
                    seen[token] += 1

        self.device.submit("accept", run)

    @staticmethod
    def _report(out, b, w, whole, token, z) -> None:
        out.token.array[b, w] = token
        out.logprob.array[b, w] = z[token] if token >= 0 else 0
        best = np.argsort(-z, kind="stable")[: max(0, int(whole[1]))]
        out.alt_ids.array[b, w, : len(best)] = best
        out.alt_logprobs.array[b, w, : len(best)] = z[best]

    def draft_rows(self, index, start, width, positions, accepted, rows, limit) -> None:
        def run() -> None:
            B, W, n = rows.B, rows.W, accepted.array
            index.array[:] = np.arange(B) * W + n
            for s in range(len(start.array)):
                ordinals = rows.start.array + n + 1 + s
                start.array[s], width.array[s] = np.minimum(ordinals, limit - 1), ordinals < limit
                positions.array[s] = rows.positions.array[:, index.array] + 1 + s

        self.device.submit("draft_rows", run)


# -- model ---------------------------------------------------------------------------------------------------------


@dataclass
class SymbolicModel:
    vocabulary: int = 37
    hidden_size: int = 1
    drafting: bool | str = False
    """Whether it has a module that drafts, or with "block" a companion; ``guess`` says what."""
    guess: Callable[[int, int], int] = lambda hidden, token: mix(hidden, token)
    seen: list[int] = field(default_factory=list)
    """Hashes of the context that each row's block saw, of all of it and of its end."""
    proposed: tuple[int, ...] | None = None
    """Tokens that alone are drafted; the logit of each is the ordinary one."""

    @property
    def kv_geometries(self) -> dict[PoolKind, KVGeometry]:
        full = (PoolKind.DRAFT_FULL,)
        own = {False: (), True: (PoolKind.MTP,), "block": full, "chain": full}[self.drafting]
        kinds = (PoolKind.MAIN, *own)
        return {kind: KVGeometry(1, 1, 1) for kind in kinds}

    def draft_bytes(self, rows: int, window: int) -> int:
        return 100 * window

    @property
    def proposal(self) -> HostBuffer | None:
        return None if self.proposed is None else HostBuffer(np.array(self.proposed, np.int32), "i32")

    def block(self, window: int) -> BlockShape | None:
        if self.drafting not in ("block", "chain"):
            return None
        return BlockShape(window + 2, 1, 2 if self.drafting == "chain" else 0)

    def state_bytes(self, activation: str) -> int:
        return 8

    def weight_bytes(self, rows: int) -> int:
        return 1000

    def place(self, scope, device, p) -> PlacedSymbolicModel:
        pools = self.kv_geometries
        return PlacedSymbolicModel(
            device,
            self.vocabulary,
            {kind: scope.buffer("kv", (p.rows, p.blocks), "i32") for kind in pools},
            {kind: scope.buffer("kv", (p.pages[kind], 64), "u64") for kind in pools},
            scope.buffer("state", (p.slots,), "u64"),
            scope.buffer("records", (p.recorded,), "u64"),
            scope.buffer("workspace", (p.columns, 1), "u64"),
            self.guess,
            scope.buffer("state", (p.slots, min(RING + p.unsettled, p.context)), "u64") if p.block else None,
            self.seen,
            self.proposed,
        )


@dataclass
class PlacedSymbolicModel:
    device: SymbolicDevice
    vocabulary: int
    tables: dict[PoolKind, HostBuffer]
    columns: dict[PoolKind, HostBuffer]
    state: HostBuffer
    record: HostBuffer
    x: HostBuffer
    guess: Callable[[int, int], int]
    ring: HostBuffer | None
    seen: list[int]
    proposed: tuple[int, ...] | None

    def planes(self, pool) -> tuple[HostBuffer, ...]:
        return (self.columns[pool],)

    @property
    def images(self) -> tuple[HostBuffer, ...]:
        return (self.state, self.ring) if self.ring else (self.state,)

    def forward(self, rows, recorded: bool = False) -> None:
        self.device.submit("forward", lambda: self._forward(rows, recorded))

    def _forward(self, rows, recorded: bool) -> None:
        positions = rows.positions.array
        for b in range(rows.B):
            start = int(rows.start.array[b])
            h = 0 if start == 0 else int(self.state.array[rows.read.array[b]])
            table = self.tables[PoolKind.MAIN].array[rows.table.array[b]]
            columns = self.columns[PoolKind.MAIN].array
            for w in range(int(rows.width.array[b])):
                i, p = b * rows.W + w, start + w
                h = mix(h, rows.tokens.array[i], *positions[:, i])
                columns[table[p >> 6], p & 63] = h
                seen = columns[table[: (p >> 6) + 1]].reshape(-1)[: p + 1]
                self.x.array[i] = mix(h, context_hash(seen))
                if recorded:
                    self.record.array[i] = h
            if not recorded:
                self.state.array[rows.write.array[b]] = h

    def draft(self, rows, hidden, out) -> None:
        self.device.submit("draft", lambda: self._draft(rows, hidden.array.copy(), out))

    def _draft(self, rows, hidden, out) -> None:
        """A column is a hash of its hidden, the token behind it and its position; the output one of all columns."""
        columns, tokens = self.columns[PoolKind.MTP].array, rows.tokens.array.copy()
        for b in range(rows.B):
            table, start = self.tables[PoolKind.MTP].array[rows.table.array[b]], int(rows.start.array[b])
            for w in range(int(rows.width.array[b])):
                i, p = b * rows.W + w, start + w
                axes = rows.positions.array[:, i]
                columns[table[p >> 6], p & 63] = mix(hidden[i, 0], tokens[i], *axes)
                if out is None:
                    continue
                seen = columns[table[: (p >> 6) + 1]].reshape(-1)[: p + 1]
                out.array[i, 0] = self.guess(context_hash(seen), int(tokens[i]))

    def append(self, rows) -> None:
        def run() -> None:
            full, ring = self.columns[PoolKind.DRAFT_FULL].array, self.ring.array
            for b in range(rows.B):
                table = self.tables[PoolKind.DRAFT_FULL].array[rows.table.array[b]]
                start, slot = int(rows.start.array[b]), rows.write.array[b]
                for w in range(int(rows.width.array[b])):
                    column = mix(self.x.array[b * rows.W + w, 0])
                    full[table[(start + w) >> 6], (start + w) & 63] = column
                    ring[slot, (start + w) % ring.shape[1]] = column

        self.device.submit("append", run)

    def block(self, rows, index, out) -> None:
        def run() -> None:
            full, ring = self.columns[PoolKind.DRAFT_FULL].array, self.ring.array
            hashes = []
            for b in range(rows.B):
                table = self.tables[PoolKind.DRAFT_FULL].array[rows.table.array[b]]
                start = int(rows.start.array[b])
                tail = ring[rows.read.array[b], np.arange(max(0, start - RING), start) % ring.shape[1]]
                hashes.append(context_hash(full[table[: (start + 63) >> 6]].reshape(-1)[:start]))
                self.seen += [hashes[-1], context_hash(tail)]
            tokens = rows.tokens.array.reshape(rows.B, rows.W)
            for n, i in enumerate(index.array):
                b, column = divmod(int(i), rows.W)
                out.array[n, 0] = self.guess(hashes[b] + column, int(tokens[b, 0]))

        self.device.submit("block", run)

    def select(self, hidden, ids, scores, rows, out) -> None:
        """The second of two candidates in every other draft; both may be drafted, by a half each."""

        def run() -> None:
            for i, tokens in enumerate(out.token.array):
                own = ids.array[i * rows.B : (i + 1) * rows.B, :2]
                tokens[:] = own[:, i % 2]
                out.ids.array[:, i], out.q.array[:, i] = own, 0.5

        self.device.submit("select", run)

    def carry(self, read: int, write: int) -> None:
        if self.ring:
            self.device.copy(self.ring.slice(write, write + 1), self.ring.slice(read, read + 1))

    def hidden(self, index, out) -> None:
        def run() -> None:
            n = out.shape[0]
            out.array[:] = self.x.array[:n] if index is None else self.x.array[index.array]

        self.device.submit("hidden", run)

    def logits(self, hidden, out) -> None:
        def run() -> None:
            for row, h in zip(out.array, hidden.array[:, 0]):
                row[:] = hashed_logits(int(h), self.vocabulary)

        self.device.submit("logits", run)

    def propose(self, hidden, out) -> None:
        def run() -> None:
            for row, h in zip(out.array, hidden.array[:, 0]):
                logits = hashed_logits(int(h), self.vocabulary)
                row[:] = logits if self.proposed is None else logits[list(self.proposed)]

        self.device.submit("logits", run)

    def fold(self, accepted, rows) -> None:
        def run() -> None:
            for b in range(rows.B):
                n = int(accepted.array[b])
                if n:
                    self.state.array[rows.write.array[b]] = self.record.array[b * rows.W + n - 1]

        self.device.submit("fold", run)


class Oracle:
    """What one request must produce, from its ledger alone."""

    def __init__(self, request, vocabulary: int = 37) -> None:
        self.request = request
        self.vocabulary = vocabulary
        self.ledger = [int(t) for t in request.identity.tokens]
        self.prompt = len(self.ledger)

    def image(self, frontier: int) -> tuple[int, int]:
        """Recurrent state and final hidden after the first ``frontier`` tokens."""
        h, columns, identity = 0, [], self.request.identity
        for p, token in enumerate(self.ledger[:frontier]):
            axes = identity.positions[:, p] if p < self.prompt else [p + identity.rope_delta] * 3
            h = mix(h, token, *axes)
            columns.append(h)
        return h, mix(h, context_hash(np.array(columns, np.uint64)))

    def context(self) -> list[int]:
        """Hashes of what a companion must have seen of all tokens but the last: of all of it, and of its end."""
        h, columns, features, identity = 0, [], [], self.request.identity
        for p, token in enumerate(self.ledger[:-1]):
            axes = identity.positions[:, p] if p < self.prompt else [p + identity.rope_delta] * 3
            h = mix(h, token, *axes)
            columns.append(h)
            features.append(mix(mix(h, context_hash(np.array(columns, np.uint64)))))
        return [context_hash(np.array(part, np.uint64)) for part in (features, features[-RING:])]

    def draw(self, mask: np.ndarray | None = None) -> int:
        """The token the request must sample next; -1 where no id is legal."""
        generated = self.ledger[self.prompt :]
        counts = np.bincount(generated, minlength=self.vocabulary).astype(np.int32)
        s = self.request.sampling
        return choose(
            hashed_logits(self.image(len(self.ledger))[1], self.vocabulary),
            mask,
            counts,
            (s.temperature, s.top_p, s.min_p, s.presence_penalty, s.frequency_penalty),
            (s.top_k, s.logprobs, mask is not None, 0),
            (s.seed & 0xFFFFFFFF, s.seed >> 32),
            len(self.ledger),
            0 if not generated else 1,
        )[0]

    def accept(self, tokens: Sequence[int]) -> None:
        self.ledger.extend(tokens)

    def generate(self, n: int) -> list[int]:
        for _ in range(n):
            self.accept([self.draw()])
        return self.ledger[self.prompt :]
