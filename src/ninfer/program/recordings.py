"""Passes that are recorded once, by what they do and for how many rows and columns, and then launched as a whole."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import ExitStack

from ninfer.device import Device, Graph


class Recordings:
    """``works``: what each recording submits, by name. A device that works beside the host records all of them now, in
    memory that was planned for it; on the host each is recorded when it is first launched."""

    def __init__(self, device: Device, works: Mapping[Hashable, Callable[[], None]]) -> None:
        self._device = device
        self._works = works
        self._graphs: dict[Hashable, Graph] = {}
        with ExitStack() as unless_all:
            unless_all.callback(self.close)
            for name in works if device.asynchronous else ():
                self._record(name)
            unless_all.pop_all()

    def __contains__(self, name: Hashable) -> bool:
        return name in self._works

    def launch(self, name: Hashable) -> None:
        (self._graphs.get(name) or self._record(name)).launch()

    def close(self) -> None:
        """Before the buffers that the recordings name."""
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()

    def _record(self, name: Hashable) -> Graph:
        graph = self._graphs[name] = self._device.capture(self._works[name])
        return graph
