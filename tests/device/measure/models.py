"""``ninfer bench`` of random weights in the geometries of real models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from .stage import Rows, Stage


def model(geometry: str, recipe: str, *options: str) -> Callable[[Path], Rows]:
    """``ninfer bench`` with 96 tokens to a row, and one prompt of 8,192."""

    def measure(out: Path) -> Rows:
        from ninfer.gateway.cli import main as ninfer

        file = out / "bench.json"
        fixed = ("--device", "cuda:0", "--prompt", "8192", "--tokens", "96", "--json", str(file))
        if ninfer(["bench", "--synthetic", geometry, "--recipe", recipe, *fixed, *options]):
            raise RuntimeError("ninfer bench failed; it says why above")
        figures = json.loads(file.read_text())
        rows = [("start", f"{figures['start_seconds']:.1f} s")]
        rows.append(("prefill 8192", f"{figures['prefill']['tokens_per_second']:,.0f} tok/s"))
        for row in figures["decode"]:
            what = f"decode, {row['batch']} rows, {row['context']} tokens"
            speed = f"{row['tokens_per_second']:,.0f} tok/s, {1e3 * row['round_seconds']:.2f} ms"
            mean, median, p90 = (1e6 * row[f"host_{of}seconds"] for of in ("", "median_", "p90_"))
            host = f"host {mean:.0f} us, median {median:.0f}, p90 {p90:.0f}"
            rows.append((what, f"{speed}, {row['bandwidth_ratio']:.0%} of bandwidth, {host}"))
        return [(f"{geometry} {recipe}: {name}", figure) for name, figure in rows]

    return measure


SHORT = ("--batches", "1,8", "--contexts", "1024")
STAGES = {
    "model 4b": Stage(40, model("4b", "bf16", *SHORT)),
    "model 27b": Stage(45, model("27b", "q4-mixed", *SHORT)),
    "model 0.8b": Stage(25, model("0.8b", "bf16", *SHORT)),
    "model 27b long": Stage(60, model("27b", "q4-mixed", "--batches", "1", "--contexts", "131072")),
    "model 27b fp8": Stage(40, model("27b", "fp8", *SHORT)),
    "model 35b": Stage(40, model("35b-a3b", "q4-mixed", *SHORT)),
}
