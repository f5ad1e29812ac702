"""Host time between two rounds of the tiny model on a GPU, by how long the host has waited, and in which way."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from .stage import ROOT, Row, Stage

TINY = ROOT / "examples" / "tiny" / "tiny.ninfer"
ROUNDS = 60


def _spin(event: Any, length: float) -> None:
    while not event.done():
        pass


def _yielding(event: Any, length: float) -> None:
    while not event.done():
        time.sleep(0)


def _asleep(event: Any, length: float) -> None:
    time.sleep(0.8 * length)
    event.sync()


def _late(event: Any, length: float) -> None:
    time.sleep(0.8 * length)
    _spin(event, length)


WAYS: dict[str, Callable[[Any, float], None]] = {
    "as it is": lambda event, length: event.sync(), "polled": _spin, "polled, yielding": _yielding,
    "asleep, then as it is": _asleep, "asleep, then polled": _late,
}  # fmt: skip


def waits(out: Path) -> Iterator[Row]:
    """A read of device memory behind each Forward makes a round as long as a larger model's."""
    import ninfer
    from ninfer._cuda.products import pack
    from ninfer._cuda.streams import CudaEvent
    from ninfer.program import program, rounds
    from ninfer.program.filling import fill_decode
    from ninfer.program.units import Units
    from ninfer.runtime import units as runtime

    opened: list[Units] = []
    made, forward, wait = Units.__init__, Units.forward, CudaEvent.wait
    filler: dict[str, Any] = {"seconds": 0.0, "way": WAYS["as it is"], "words": None}
    marks: list[tuple[str, int]] = []

    def init(units: Units, *args: Any) -> None:
        made(units, *args)
        opened.append(units)

    def longer(units: Units, *args: Any) -> None:
        forward(units, *args)
        if filler["seconds"]:
            device: Any = units.device
            device.launch(device.function("sweep", "sweep"), 2 * device.multiprocessors, 512, filler["words"])

    def waiting(event: Any) -> None:
        if opened and event is opened[0].decision.event:
            event.sync = lambda: wait(event)
            filler["way"](event, filler["seconds"])
        else:
            wait(event)

    Units.__init__, Units.forward, CudaEvent.wait = init, longer, waiting  # type: ignore[method-assign,assignment]
    greedy = ninfer.SamplingParams(temperature=0)
    with ninfer.Engine(TINY, device="cuda:0", max_concurrency=8, max_context=1024, progress=False) as engine:
        device: Any = opened[0].device
        size = 512 << 20
        arena = device.arena(size + (1 << 20))
        once = 0.0

        def words(repeat: int) -> Any:
            return pack(arena.ptr + size, arena.ptr, size // (512 * 8 * 16), repeat)

        def sweep() -> None:
            device.launch(device.function("sweep", "sweep"), 2 * device.multiprocessors, 512, words(8))

        device.seconds(sweep)
        once = device.seconds(sweep) / 8

        def run(B: int) -> float:
            """Microseconds between rounds, median."""
            opened[0].gaps.clear()
            launch = Units._launch

            def watched(units: Units, *name: Any) -> None:
                if name[0] == "forward":
                    marks.append(("launch", time.perf_counter_ns()))
                launch(units, *name)

            Units._launch = watched  # type: ignore[method-assign]
            handles = [
                engine.submit(ninfer.TokenPrompt(range(10, 40)), max_tokens=ROUNDS, sampling=greedy, ignore_eos=True)
                for _ in range(B)
            ]
            for handle in handles:
                handle.result()
            Units._launch = launch  # type: ignore[method-assign]
            return median([ns for rows, ns in opened[0].gaps if rows == B]) / 1e3

        def rehearsing(event: Any, length: float) -> None:
            """Every 100 us, some of what comes next is done to no effect, so that it stays in the caches."""
            worker: Any = engine._core._worker
            while not event.done():
                rows = [row for row in worker.active if row.sequence is not None]
                for row in rows:
                    row.session.preview((11,))
                    row.session.discard()
                records = tuple(worker._program._sequences.get(row.sequence) for row in rows)
                fill_decode(opened[0]._frames[0], 1, records, (), False)
                until = time.perf_counter() + 1e-4
                while time.perf_counter() < until and not event.done():
                    pass

        run(8)
        for B in (1, 8):
            for seconds in (0.0, 2e-3, 8e-3):
                for name, way in (WAYS | {"polled, rehearsing": rehearsing}).items():
                    if seconds or way in (WAYS["as it is"], _spin):
                        filler.update(seconds=seconds, way=way, words=words(max(1, round(seconds / once))))
                        yield f"{B} rows, {1e3 * seconds:.0f} ms longer, {name}", f"{run(B):.0f} us"
        filler.update(seconds=8e-3, way=WAYS["as it is"], words=words(round(8e-3 / once)))
        parts = [
            (Units, "results"), (program.Program, "wait"), (program.Program, "commit"), (runtime.Units, "_finish"),
            (runtime.Units, "decode"), (program.Program, "decode"), (rounds, "prepare"),
        ]  # fmt: skip
        for owner, name in parts:
            setattr(owner, name, _marked(marks, getattr(owner, name), f"{owner.__name__.split('.')[-1]}.{name}"))
        for B in (1, 8):
            marks.clear()
            run(B)
            for where, spent in _between(marks):
                yield f"{B} rows, 8 ms longer, {where}", f"{spent:.1f} us"
        arena.close()


def _marked(marks: list[tuple[str, int]], work: Callable[..., Any], name: str) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        marks.append((name, time.perf_counter_ns()))
        result = work(*args, **options)
        marks.append((f"/{name}", time.perf_counter_ns()))
        return result

    return call


def _between(marks: list[tuple[str, int]]) -> list[tuple[str, float]]:
    """Median microseconds of every step from the results of a round to the launch of the next."""
    steps: dict[str, list[int]] = defaultdict(list)
    inside = False
    for (a, begin), (b, end) in pairwise(marks):
        inside = a == "/Units.results" or (inside and a != "launch")
        if inside:
            steps[f"{a} -> {b}"].append(end - begin)
    return [(name, median(spent) / 1e3) for name, spent in steps.items() if len(spent) > ROUNDS // 2]


STAGES = {"waits": Stage(45, waits)}
