"""What drafts cost: rounds next to plain steps; random weights keep hardly any draft, so all rounds are alike. And what
they bring: answers of the small trained model to questions it has not seen."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .stage import ROOT, Row, Stage

TINY = ROOT / "examples" / "tiny"


def drafted(geometry: str, recipe: str, backend: str, drafts: int, *options: str, device: str = "cuda:0",
            batches: str = "1,8", tokens: int = 24) -> Callable[[Path], Iterator[Row]]:  # fmt: skip
    """``ninfer bench --spec`` with more ``options``: milliseconds of both, and the weights that each has to read."""

    def measure(out: Path) -> Iterator[Row]:
        from ninfer.gateway.cli import main as ninfer

        file = out / "drafted.json"
        what = ("--synthetic", geometry, "--recipe", recipe, "--spec", backend, "--draft-tokens", str(drafts))
        size = ("--prompt", "64", "--tokens", str(tokens), "--batches", batches)
        if ninfer(["bench", "--device", device, *what, *options, *size, "--json", str(file)]):
            raise RuntimeError("ninfer bench failed; it says why above")
        for row in json.loads(file.read_text())["speculation"]:
            name, plain = f"{geometry} {recipe}, {row['batch']} rows", row["plain_weight_bytes"]
            added = row["weight_bytes"] - plain
            reads = f"{added / 1e6:,.0f} MB of weights, {added / plain:.3f} of a plain step"
            yield f"{name}: plain step", f"{1e3 * row['plain_round_seconds']:.3f} ms, {plain / 1e6:,.0f} MB of weights"
            took = f"{1e3 * row['round_seconds']:.3f} ms, {row['round_cost']:.3f} of a plain step"
            yield f"{name}: {backend} round, {drafts} drafts", f"{took}; {row['tokens_per_round']:.2f} tokens"
            yield f"{name}: drafting", f"{reads}; from {row['draft_vocabulary']:,} tokens"

    return measure


def answered(*, device: str = "cuda:0", count: int = 8) -> Callable[[Path], Iterator[Row]]:
    """Greedy answers to ``count`` held-out questions of each kind, a quarter of them one by one, then all in eight
    rows: wall-clock tokens per second, against those without drafts."""

    def measure(out: Path) -> Iterator[Row]:
        import ninfer

        sys.path.insert(0, str(TINY))
        import corpus

        items = [item for kind in zip(*corpus.held_out_sets(count).values()) for item in kind]
        chats = [ninfer.Chat(i["messages"][:-1], tools=i.get("tools") or (), thinking=i["thinking"]) for i in items]
        plain: dict[int, float] = {}
        for backend in ("none", "mtp", "dflash", "dflash2"):
            file = TINY / ("tiny-dflash.ninfer" if backend.startswith("dflash") else "tiny.ninfer")
            options = {"max_concurrency": 8, "max_context": 1024, "spec": backend, "progress": False}
            with ninfer.Engine(file, device=device, **options) as engine:
                for size, asked in ((1, chats[::4]), (8, chats)):
                    _answers(engine, asked[:2], size)
                    results, speed = _answers(engine, asked, size)
                    name, drafts = f"tiny, {size} rows, {backend}", [r.speculation for r in results if r.speculation]
                    if not drafts:
                        plain[size] = speed
                        yield name, f"{speed:,.0f} tok/s"
                        continue
                    rounds, gain = sum(d.rounds for d in drafts), speed / plain[size]
                    decided = 1 + sum(d.accepted for d in drafts) / rounds
                    of = 1 + len(drafts[0].accepted_per_position)
                    cost = f"{decided:.2f} tokens of {of} a round of {decided / gain:.2f} steps"
                    yield name, f"{speed:,.0f} tok/s, {gain:.2f} x without drafts; {cost}"

    return measure


def _answers(engine: Any, chats: list[Any], size: int) -> tuple[list[Any], float]:
    """Results, and tokens per second from the first question to the last answer."""
    from ninfer import RequestOptions, SamplingParams

    options = RequestOptions(max_tokens=200, sampling=SamplingParams(temperature=0), cache="disabled")
    began = time.perf_counter()
    if size == 1:
        results = [engine.generate(chat, options) for chat in chats]
    else:
        results = engine.generate(chats, options)
    return results, sum(r.usage.completion_tokens for r in results) / (time.perf_counter() - began)


STAGES = {
    f"model 27b fp8 {backend}": Stage(80, drafted("27b", "fp8", backend, drafts))
    for backend, drafts in (("mtp", 3), ("dflash", 7), ("dflash2", 7))
} | {
    "model 27b fp8 mtp proposal": Stage(80, drafted("27b", "fp8", "mtp", 3, "--proposal-head", "on")),
    "tiny drafts": Stage(60, answered()),
}
