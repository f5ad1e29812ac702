"""Everything a Program keeps, in one place: the stores, the histories that live in them, and the active rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from ninfer.context import CheckpointRef, CheckpointSummary, OwnerSummary
from ninfer.contract import Handle, HandleTable, PreparedRequest
from ninfer.program.capacity import KVCapacityProfile
from ninfer.program.history import Checkpoint, Histories, History
from ninfer.program.layout import PoolKind, pages
from ninfer.program.licensing import checkpoint_tokens
from ninfer.program.sequence import SequenceRecord
from ninfer.program.stores.blocks import LogicalPage
from ninfer.program.stores.host import HostArena
from ninfer.program.stores.images import StateStore
from ninfer.program.stores.spaces import KVStore
from ninfer.program.transfers import Transfers
from ninfer.work import Direction, PrefillWork, TransferBatch


@dataclass(slots=True)
class Store:
    """rows: sequences that may be active at once; the device has ``spare`` state slots beyond one for each. chunk:
    tokens of a prefill unit. revision: counts stable changes of ownership, placement or free capacity."""

    profile: KVCapacityProfile
    kv: dict[PoolKind, KVStore]
    states: StateStore
    arena: HostArena
    transfers: Transfers
    rows: int
    spare: int
    chunk: int
    histories: Histories = field(default_factory=Histories)
    sequences: HandleTable[SequenceRecord] = field(default_factory=lambda: HandleTable("sequence"))
    revision: int = 0

    @property
    def unsettled(self) -> bool:
        return any(record.binding.forked for _, record in self.sequences.live())

    def blocks(self, history: History, kind: PoolKind, frontier: int) -> list[LogicalPage]:
        """The pages of the first ``frontier`` tokens of an inactive history."""
        kv = self.kv[kind]
        count = pages(checkpoint_tokens(kind, frontier))
        return [kv.pages.get(h) for h in kv.spaces.get(history.spaces[kind]).blocks[:count]]

    def restoring(self, history: History, checkpoint: Checkpoint) -> tuple[TransferBatch, ...]:
        """The copies from host memory without which the checkpoint cannot start a request."""
        host = {
            kind: sum(page.device is None for page in self.blocks(history, kind, checkpoint.frontier))
            for kind in self.kv
        }
        return self.transfer("h2d", host, self.states.images.get(checkpoint.image).device is None)

    def transfer(self, direction: Direction, counts: dict[PoolKind, int], images: int) -> tuple[TransferBatch, ...]:
        """One batch that copies pages of each pool and whole images; none where there is nothing to copy."""
        t, slots = self.transfers, self.arena.slots
        ops, nbytes = images * t.image_copies, images * t.image_bytes
        for kind, n in counts.items():  # pages of one superblock lie together
            ops += t.page_copies[kind] * -(-n // slots[kind])
            nbytes += n * t.page_bytes[kind]
        return (TransferBatch(direction, 1, ops, nbytes),) if ops or nbytes else ()

    def summary(self, owner: Handle) -> OwnerSummary:
        """Raises StaleHandle."""
        history = self.histories.get(owner)
        checkpoints = []
        for number, c in history.checkpoints.items():
            image = self.states.images.get(c.image)
            replicas = [page for kind in self.kv for page in self.blocks(history, kind, c.frontier)]
            on_device = image.device is not None and all(page.device for page in replicas)
            on_host = image.host is not None and all(page.hosted for page in replicas)
            checkpoints.append(CheckpointSummary(CheckpointRef(owner, number), c.kind, c.key, on_device, on_host))
        device = host = 0
        for kind in self.kv:
            held = self.blocks(history, kind, history.frontier)
            device += self.transfers.page_bytes[kind] * sum(page.device is not None for page in held)
            host += self.transfers.page_bytes[kind] * sum(page.host is not None for page in held)
        images = [self.states.images.get(image) for image in {c.image for c in history.checkpoints.values()}]
        device += self.transfers.image_bytes * sum(i.device is not None for i in images)
        host += self.transfers.image_bytes * sum(i.host is not None for i in images)
        return OwnerSummary(owner, tuple(checkpoints), device, host, self.revision)

    def prefill(self, request: PreparedRequest, begin: int) -> PrefillWork:
        """Executing a prompt from ``begin`` on, in chunks that end at its execution frontiers."""
        end = len(request.identity.tokens)
        splits = [f for f in request.identity.execution_frontiers if begin < f < end]
        stops = [begin, *splits, end]
        chunks = sum(-(-(b - a) // self.chunk) for a, b in pairwise(stops))
        return span_work(begin, end, chunks)

    def span(self, begin: int, end: int) -> PrefillWork:
        """Executing a history's tokens ``[begin, end)`` again."""
        return span_work(begin, end, -(-(end - begin) // self.chunk))

    def expect_pressure(self) -> None:
        """What is on the device now may have to go to host memory soon."""
        arena, states = self.arena, self.states
        superblocks = sum(bound is not None for bound in arena.bound)
        superblocks += sum(-(-kv.pool.allocated // arena.slots[kind]) for kind, kv in self.kv.items())
        images = states.host_capacity - states.host_available + states.capacity - states.available
        self.transfers.expect(min(superblocks, len(arena.bound)), min(images, states.host_capacity))

    def forget(self, history: History, ids: list[int]) -> None:
        """Delete checkpoints of a history, and what only they needed of it; without any left, all of it."""
        for number in ids:
            self.states.release(history.checkpoints.pop(number).image)
        for kind, kv in self.kv.items():
            if history.checkpoints:
                kv.truncate(history.spaces[kind], checkpoint_tokens(kind, history.frontier))
            else:
                kv.release(history.spaces[kind])


def span_work(begin: int, end: int, chunks: int) -> PrefillWork:
    n = end - begin
    return PrefillWork(chunks, n, begin * n + n * (n + 1) // 2)
