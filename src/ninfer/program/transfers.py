"""Copies of pages and state images between their places. Between device and host they run in a queue of their own,
beside the units; on the device they are part of its ordinary work, so that what follows sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy.typing as npt

from ninfer.device import Buffer, Device
from ninfer.program.hosting import HostMemory
from ninfer.program.layout import PoolKind
from ninfer.program.stores.host import HostArena, HostSlot

Array = npt.NDArray[Any]


class Transfers:
    """planes: the buffers of each pool, pages along their first axis. images: those of the state, slots along theirs.

    ahead: host memory is taken before it is used, by a thread beside. page_bytes, image_bytes: of one page of each
    pool, of one image. page_copies, image_copies: calls that move one. bytes: payload so far, by direction.
    """

    def __init__(
        self,
        device: Device,
        planes: Mapping[PoolKind, Sequence[Buffer]],
        images: Sequence[Buffer],
        arena: HostArena,
        ahead: bool = False,
    ) -> None:
        self._device = device
        self._copies = device.copies()
        self._event = self._copies.event()
        self._planes = planes
        self._images = images
        self._arena = arena
        dtypes = {b.dtype for buffers in (*planes.values(), images) for b in buffers}
        self._types = {dtype: device.host((0,), dtype).dtype for dtype in sorted(dtypes)}
        self.page_bytes = {kind: sum(b.nbytes // b.shape[0] for b in buffers) for kind, buffers in planes.items()}
        self.page_copies = {kind: len(buffers) for kind, buffers in planes.items()}
        self.image_bytes = sum(b.nbytes // b.shape[0] for b in images)
        self.image_copies = len(images)
        self._memory = HostMemory(device, {"superblock": arena.superblock, "image": self.image_bytes}, ahead)
        self.count_anew()

    def count_anew(self) -> None:
        self.bytes = {"d2h": 0, "h2d": 0, "d2d": 0}

    def begin(self) -> None:
        """Copies from now on see what the device has been given so far."""
        self._copies.follow()

    def mark(self) -> None:
        """``done`` answers for what has been submitted up to here."""
        self._event.record()

    def done(self) -> bool:
        """Whether the marked copies have happened. Raises DeviceError when they cannot."""
        return self._event.done()

    def wait(self) -> None:
        self._event.wait()

    # -- copies --------------------------------------------------------------------------------------------------

    def pages_down(self, pool: PoolKind, moves: Sequence[tuple[int, HostSlot]]) -> None:
        """Device pages into host slots."""
        for page, slot, n in _runs(moves):
            for buffer, host in zip(self._planes[pool], self._views(slot)):
                self._copies.download(host[slot.slot : slot.slot + n], buffer.slice(page, page + n))
                self._count("d2h", buffer, n)

    def pages_up(self, pool: PoolKind, moves: Sequence[tuple[int, HostSlot]]) -> None:
        """Host slots into device pages."""
        for page, slot, n in _runs(moves):
            for buffer, host in zip(self._planes[pool], self._views(slot)):
                self._copies.upload(buffer.slice(page, page + n), host[slot.slot : slot.slot + n])
                self._count("h2d", buffer, n)

    def page_across(self, pool: PoolKind, source: int, target: int) -> None:
        self._device.copy_rows(self._planes[pool], source, target)
        for buffer in self._planes[pool]:
            self._count("d2d", buffer, 1)

    def image_down(self, slot: int, host: int) -> None:
        self._image(slot, host, lambda buffer, array: self._copies.download(array, buffer), "d2h")

    def image_up(self, slot: int, host: int) -> None:
        self._image(slot, host, self._copies.upload, "h2d")

    def host_bytes(self) -> int:
        """Host memory allocated so far."""
        return self._memory.nbytes

    def expect(self, superblocks: int, images: int) -> None:
        """So many superblocks and host images, the lowest ones, may be copied to soon."""
        self._memory.expect({"superblock": superblocks, "image": images})

    def used(self) -> None:
        """The device gets work now; no memory is taken beside it."""
        self._memory.used()

    def close(self) -> None:
        """Take no more memory."""
        self._memory.close()

    # -- own -----------------------------------------------------------------------------------------------------

    def _image(self, slot: int, host: int, copy: Callable[[Buffer, Array], None], direction: str) -> None:
        arrays = self._planes_of(self._memory.get("image", host), self._images, 1)
        for buffer, array in zip(self._images, arrays):
            copy(buffer.slice(slot, slot + 1), array)
            self._count(direction, buffer, 1)

    def _views(self, slot: HostSlot) -> list[Array]:
        """The planes of a superblock, each [slots, ...]: one after the other, so that neighbours move in one copy."""
        slab = self._memory.get("superblock", slot.superblock)
        return self._planes_of(slab, self._planes[slot.pool], self._arena.slots[slot.pool])

    def _planes_of(self, slab: Array, buffers: Sequence[Buffer], n: int) -> list[Array]:
        """``n`` rows of each buffer, one buffer after the other."""
        views, at = [], 0
        for b in buffers:
            end = at + n * (b.nbytes // b.shape[0])
            views.append(slab[at:end].view(self._types[b.dtype]).reshape(n, *b.shape[1:]))
            at = end
        return views

    def _count(self, direction: str, buffer: Buffer, n: int) -> None:
        self.bytes[direction] += n * (buffer.nbytes // buffer.shape[0])


def _runs(moves: Sequence[tuple[int, HostSlot]]) -> list[tuple[int, HostSlot, int]]:
    """Neighbours on both sides as (first page, first slot, pages)."""
    runs: list[tuple[int, HostSlot, int]] = []
    for page, slot in moves:
        if runs:
            first, start, n = runs[-1]
            if (page, slot.superblock, slot.slot) == (first + n, start.superblock, start.slot + n):
                runs[-1] = (first, start, n + 1)
                continue
        runs.append((page, slot, 1))
    return runs
