"""The context cache as a caller sees it: what is kept of finished requests, and a way to drop it."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping

import attrs

from ninfer.errors import InvalidRequest
from ninfer.runtime.core import EngineCore
from ninfer.runtime.worker import Worker


@attrs.frozen
class ResumePoint:
    """A place that a request can start from. tokens: how many it spares. kind: why it was made. tier: "device",
    or "host" where starting from it copies. hits: how often one did."""

    tokens: int
    kind: str
    tier: str
    hits: int


@attrs.frozen
class CacheEntry:
    """One retained history. kind: "continuation" (of one request) or "shared" (a prefix for any). session: the name it
    was left under. age: admissions since it was last used. Bytes count what it refers to; shared ones in every
    entry."""

    kind: str
    session: str | None
    age: int
    points: tuple[ResumePoint, ...]
    device_bytes: int
    host_bytes: int


@attrs.frozen
class MemoryMap:
    """What an engine's memory holds at one moment. stores: occupancy as in ``EngineStats.memory``. ``str`` and a
    notebook show it as a table."""

    entries: tuple[CacheEntry, ...]
    stores: Mapping[str, int]

    def __str__(self) -> str:
        rows = [_HEADINGS, *self._rows()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADINGS))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        return "\n".join([self._summary(), *lines]) if self.entries else self._summary()

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in _HEADINGS)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in self._rows()
        )
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if self.entries else ""
        return f"<p>{html.escape(self._summary())}</p>{table}"

    def _summary(self) -> str:
        pools = sorted({name.rpartition(".")[0] for name in self.stores if name.endswith(".total")})
        held = [f"{name}: {self.stores.get(f'{name}.used', 0)} of {self.stores[f'{name}.total']}" for name in pools]
        kept = f"{len(self.entries)} entries, {sum(len(entry.points) for entry in self.entries)} resume points"
        return "; ".join([kept, *held])

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for entry in self.entries:
            points = ", ".join(f"{p.tokens} ({p.kind}, {p.tier}, {p.hits} hits)" for p in entry.points)
            bytes_ = (_size(entry.device_bytes), _size(entry.host_bytes))
            yield (entry.kind, entry.session or "", str(entry.age), *bytes_, points)


class ContextCache:
    """What an engine keeps of finished requests, so that later ones need not read it again. Thread-safe."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    def clear(self) -> int:
        """Drop everything that no active request holds; returns how many entries. Waits for the worker.

        Errors: EngineClosed, EngineFailed.
        """
        return self._core.ask(lambda worker: worker.release_all()).result()

    def demote(self, session: str | None = None) -> int:
        """Move what is kept of a session, or everything, to host memory, as far as that has room; returns how many
        entries moved. What active requests use stays as it is. Waits for the copies.

        Errors: InvalidRequest("session"), EngineClosed, EngineFailed.
        """
        if session is not None and not isinstance(session, str):
            raise InvalidRequest(f"expected a name or None, got {session!r}", field="session")
        return self._core.ask(lambda worker: worker.demotion.ask(session)).result().result()

    def map(self) -> MemoryMap:
        """What is kept now, the most recently used first. Waits for the worker. Errors: EngineClosed, EngineFailed."""
        return self._core.ask(_look).result()

    def __str__(self) -> str:
        return str(self.map())

    def _repr_html_(self) -> str:
        return self.map()._repr_html_()


_HEADINGS = ("kind", "session", "age", "device", "host", "resume points")


def _look(worker: Worker) -> MemoryMap:
    catalogue, found = worker.resources.catalogue, []
    for entry in sorted(catalogue, key=catalogue.age):
        points = tuple(
            ResumePoint(p.key.frontier, p.kind.value, "device" if p.on_device else "host", entry.hits.get(q, 0))
            for q, p in sorted(entry.checkpoints.items(), key=lambda item: item[1].key.frontier)
        )
        bytes_ = worker.occupancy(entry.owner)
        found.append(CacheEntry(entry.owner.kind, entry.session, catalogue.age(entry), points, *bytes_))
    return MemoryMap(tuple(found), worker.metrics.memory)


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB" if nbytes else "-"
