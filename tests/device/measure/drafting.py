"""What a round with drafts costs next to a plain step. Random weights keep hardly any draft: all rounds are alike."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from .stage import Row, Stage


def drafted(geometry: str, recipe: str, backend: str, drafts: int, *, device: str = "cuda:0", batches: str = "1,8",
            tokens: int = 24) -> Callable[[Path], Iterator[Row]]:  # fmt: skip
    """``ninfer bench --spec``: milliseconds of both, and the bytes of weights that each has to read."""

    def measure(out: Path) -> Iterator[Row]:
        from ninfer.gateway.cli import main as ninfer

        file = out / "drafted.json"
        what = ("--synthetic", geometry, "--recipe", recipe, "--spec", backend, "--draft-tokens", str(drafts))
        size = ("--prompt", "64", "--tokens", str(tokens), "--batches", batches)
        if ninfer(["bench", "--device", device, *what, *size, "--json", str(file)]):
            raise RuntimeError("ninfer bench failed; it says why above")
        for row in json.loads(file.read_text())["speculation"]:
            name, plain = f"{geometry} {recipe}, {row['batch']} rows", row["plain_weight_bytes"]
            added = row["weight_bytes"] - plain
            reads = f"{added / 1e6:,.0f} MB of weights, {added / plain:.3f} of a plain step"
            yield f"{name}: plain step", f"{1e3 * row['plain_round_seconds']:.3f} ms, {plain / 1e6:,.0f} MB of weights"
            took = f"{1e3 * row['round_seconds']:.3f} ms, {row['round_cost']:.3f} of a plain step"
            yield f"{name}: {backend} round, {drafts} drafts", f"{took}; {row['tokens_per_round']:.2f} tokens"
            yield f"{name}: drafting", reads

    return measure


STAGES = {
    f"model 27b fp8 {backend}": Stage(80, drafted("27b", "fp8", backend, drafts))
    for backend, drafts in (("mtp", 3), ("dflash", 7), ("dflash2", 7))
}
