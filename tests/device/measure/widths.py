"""What a round of several columns costs next to one of one column, part by part; what a schema adds; what adapting the
number of drafts brings."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from .stage import ROOT, Row, Stage

TINY = ROOT / "examples" / "tiny"
TOKENS = 64


def bench(out: Path, *arguments: str) -> dict[str, Any]:
    """The figures of ``ninfer bench``."""
    from ninfer.gateway.cli import main as ninfer

    file = out / "bench.json"
    if ninfer(["bench", *arguments, "--json", str(file)]):
        raise RuntimeError("ninfer bench failed; it says why above")
    figures: dict[str, Any] = json.loads(file.read_text())
    return figures


def constrained(geometry: str, recipe: str, *, device: str = "cuda:0", batches: str = "1,8",
                tokens: int = 24) -> Callable[[Path], Iterator[Row]]:  # fmt: skip
    """Rounds of three drafts under a schema and free, in one engine, in turn. The words of the vocabulary are made up,
    its size is the family's."""

    def measure(out: Path) -> Iterator[Row]:
        what = ("--synthetic", geometry, "--recipe", recipe, "--spec", "mtp", "--draft-tokens", "3", "--constraint")
        size = ("--prompt", "64", "--tokens", str(tokens), "--batches", batches)
        figures = bench(out, "--device", device, *what, *size)
        for c in figures["constraint"]:
            name = f"{geometry} {recipe}, {c['batch']} rows, mtp round of 3 drafts"
            times = f"{1e3 * c['constrained_seconds']:.3f} ms, free {1e3 * c['free_seconds']:.3f} ms"
            first = f"first documents {1e3 * c['first_documents_seconds']:.3f} ms"
            yield f"{name}, schema / free", f"{c['ratio']:.3f}; {times}; {first}"
            yield f"{name}: a mask", f"{1e6 * c['mask_seconds']:.1f} us"
        for row in figures["speculation"]:
            name = f"{geometry} {recipe}, {row['batch']} rows, mtp round of 3 drafts"
            yield name, f"{1e3 * row['round_seconds']:.3f} ms, {row['round_cost']:.3f} of a plain step"

    return measure


def widths(geometry: str, recipe: str, *, device: str = "cuda:0", rows: int = 8) -> Callable[[Path], Iterator[Row]]:
    """Microseconds of the recorded parts of a round with a context of some 60 tokens, on the device alone."""

    def measure(out: Path) -> Iterator[Row]:
        import ninfer
        from ninfer.models.qwen3_5.synthetic import synthetic_source

        alike = device.startswith("cuda")
        source = synthetic_source(geometry, recipe, components=("text", "mtp"), alike=alike)
        spec = ninfer.SpecOptions("mtp", draft_tokens=7, adaptive=True)
        options = {"max_concurrency": rows, "max_context": 512, "spec": spec, "progress": False}
        with ninfer.Engine(source, device=device, **options) as engine:
            prompts = [ninfer.TokenPrompt([i % 200 for i in range(n, n + TOKENS)]) for n in range(rows)]
            engine.generate(prompts, max_tokens=24, sampling=ninfer.SamplingParams(temperature=0), ignore_eos=True)
            parts = engine._core.ask(lambda worker: _parts(worker._program._units, rows)).result()
            limits = engine._core.ask(lambda worker: worker._units._limits).result()
            times = limits.prices.seconds(rows)
        one = {(kind, B): parts[kind, B, 1] for kind in ("forward", "finish") for B in (1, rows)}
        for (kind, B, n), spent in parts.items():
            ratio = f", {spent / one[kind, B]:.3f} of one column" if (kind, B) in one else ""
            unit = "drafts" if kind == "draft" else "columns"
            yield f"{geometry} {recipe}, {B} rows, {kind}, {n} {unit}", f"{1e6 * spent:.1f} us{ratio}"
        for B in (1, rows):
            spent, plain = (parts["forward", B, n] + parts["finish", B, n] for n in (8, 1))
            yield f"{geometry} {recipe}, {B} rows, verification, 8 columns / 1", f"{spent / plain:.3f}"
        costs = " ".join(f"{spent / times[0]:.2f}" for spent in times)
        counts = ", ".join(map(str, limits.prices.choices))
        yield f"{geometry} {recipe}, {rows} rows, round of {counts} drafts, measured by the engine", costs

    return measure


def _parts(units: Any, rows: int) -> dict[tuple[str, int, int], float]:
    """Seconds of every recording of rounds of one row and of all, by what it does, its rows and its width."""
    spent: dict[tuple[str, int, int], float] = {}
    fields = units.decision.block.fields  # goes up with every forward
    for B in (1, rows):
        for n in units.widths:
            fields["start"][:B], fields["width"][:B], fields["drafted"][:B] = TOKENS, n, n - 1
            for kind, name in (("forward", ("forward", B, n)), ("finish", ("finish", B, n, False, False))):
                spent[kind, B, n] = _seconds(units, name)
            if n > 1:  # what is kept where no draft is: the anchor
                fields["accepted"][:B], fields["last"][:B] = 1, range(0, n * B, n)
                units._recorded.launch(("forward", B, n))
                spent["fold", B, n] = _seconds(units, ("fold", B, n))
        for n in units.steps:
            spent["draft", B, n] = _seconds(units, ("draft", B, n))
    return spent


def _seconds(units: Any, name: tuple[Any, ...], repeat: int = 10, rounds: int = 5) -> float:
    """Median over ``rounds`` of the mean of ``repeat`` launches of one recording."""
    spent = []
    for _ in range(rounds + 1):  # the first does not count: it warms up
        began = time.perf_counter()
        for _ in range(repeat):
            units._recorded.launch(name)
        units.drain()
        spent.append((time.perf_counter() - began) / repeat)
    return median(spent[1:])


def adaptive(
    *,
    device: str = "cuda:0",
    batches: Sequence[int] = (1, 8),
    backends: Sequence[str] = ("mtp", "dflash", "dflash2"),
    tokens: int = 96,
    repeats: int = 3,
    large: bool = True,
) -> Callable[[Path], Iterator[Row]]:
    """Speed against an engine without drafts, of all drafts and of as many as pay: of answers by the small model, in
    turn; and of large weights that keep no draft."""

    def measure(out: Path) -> Iterator[Row]:
        for backend in backends:
            for batch in batches:
                yield from _side_by_side(device, backend, batch, tokens, repeats)
        if large:
            what = ("--synthetic", "27b", "--recipe", "fp8", "--spec", "mtp", "--spec-adaptive")
            figures = bench(out, "--device", device, *what, "--prompt", "64", "--tokens", "128", "--batches", "1")
            yield _compared("27b fp8, 1 row, mtp adaptive, no draft kept", figures["speculation"][0])

    return measure


def _side_by_side(device: str, backend: str, batch: int, tokens: int, repeats: int) -> Iterator[Row]:
    import ninfer
    from ninfer.gateway.cli.speculation import _measure

    artifact = TINY / ("tiny-dflash.ninfer" if backend.startswith("dflash") else "tiny.ninfer")
    kinds = {"fixed": {"spec": backend}, "adaptive": {"spec": ninfer.SpecOptions(backend, adaptive=True)}}
    options = {"device": device, "max_concurrency": batch, "max_context": 512, "progress": False}
    with ExitStack() as opened:
        plain, *others = [opened.enter_context(ninfer.Engine(artifact, **options, **o)) for o in ({}, *kinds.values())]
        turns = [[_measure(engine, batch, tokens) for engine in (plain, *others)] for _ in range(repeats)]
    speeds = [[one.tokens / one.seconds for one in turn] for turn in turns]
    for n, kind in enumerate(kinds, 1):
        ratios, last = sorted(turn[n] / turn[0] for turn in speeds), turns[-1][n]
        width, decided = (1 + count / last.rows for count in (last.drafts.drafted, last.drafts.accepted))
        speed = f"{median(ratios):.3f} x without drafts, {ratios[0]:.3f} to {ratios[-1]:.3f}"
        rounds = f"{width:.2f} columns, {decided:.2f} tokens a round"
        yield f"tiny, {batch} rows, {backend} {kind}", f"{speed} ({median(t[0] for t in speeds):,.0f} tok/s); {rounds}"


def _compared(name: str, row: dict[str, Any]) -> Row:
    speed = f"{row['speedup']:.3f} x without drafts ({row['plain_tokens_per_second']:,.0f} tok/s)"
    cost = f"{row['width']:.2f} columns, {row['tokens_per_round']:.2f} tokens, {row['round_cost']:.3f} steps a round"
    return name, f"{speed}; {cost}"


STAGES = {
    "spec constrained": Stage(110, constrained("27b", "fp8")),
    "spec widths": Stage(70, widths("27b", "fp8")),
    "adaptive": Stage(170, adaptive()),
}
