"""``ninfer bench --spec``: the same answers with and without drafts, side by side on one machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import attrs

from ninfer.inputs import Chat
from ninfer.options import EngineOptions, SamplingParams, SpecOptions
from ninfer.results import SpeculationStats

QUESTIONS = (
    "What is 17 + 25?", "Tell me a story.", "Ada is in the garden. Ben is in the kitchen. Where is Ada?",
    "What is 123 + 456?", "Write about rain.", "Count from one to twenty.", "Who are you?", "Name five animals.",
)  # fmt: skip
"""What is answered. Random weights answer nothing of it, and keep no drafts."""


@dataclass(frozen=True, slots=True)
class _Measured:
    """seconds: of a whole batch of answers, prefill included. round_seconds: from the launch of a decode round to the
    next. rows: of all decode rounds. weight_bytes: that a round of full width has to read.
    draft_vocabulary: tokens that can be drafted."""

    tokens: int
    seconds: float
    round_seconds: float
    rows: int
    weight_bytes: int
    draft_vocabulary: int
    drafts: SpeculationStats


def compare(
    engine: Any, source: Any, options: EngineOptions, sizes: Sequence[int], tokens: int
) -> list[dict[str, Any]]:
    """For each batch size, what drafts bring: rows of figures. ``engine`` runs with ``options``; ``source`` is opened
    once more without speculation. Greedy answers of up to ``tokens`` tokens."""
    from ninfer.engine import Engine

    drafting = [_measure(engine, size, tokens) for size in sizes]
    with Engine(source, attrs.evolve(options, spec=SpecOptions())) as ordinary:
        plain = [_measure(ordinary, size, tokens) for size in sizes]
    return [_row(size, one, other) for size, one, other in zip(sizes, drafting, plain, strict=True)]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The figures as text."""
    lines = [
        f"{'batch':>5} {'tok/s':>9} {'off':>9} {'ratio':>6} {'columns':>8} {'decided':>8}"
        f" {'ms/round':>9} {'off':>9} {'cost':>6} {'bytes':>6}  kept by place"
    ]
    for row in rows:
        kept = " ".join(f"{share:.0%}" for share in row["kept_by_place"])
        lines.append(
            f"{row['batch']:>5} {row['tokens_per_second']:>9,.1f} {row['plain_tokens_per_second']:>9,.1f}"
            f" {row['speedup']:>6.2f} {row['width']:>8.2f} {row['tokens_per_round']:>8.2f}"
            f" {row['round_seconds'] * 1e3:>9.3f} {row['plain_round_seconds'] * 1e3:>9.3f} {row['round_cost']:>6.2f}"
            f" {row['weight_bytes'] / row['plain_weight_bytes']:>6.2f}  {kept}"
        )
    return "\n".join(lines)


def _measure(engine: Any, size: int, tokens: int) -> _Measured:
    chats = [Chat([{"role": "user", "content": text}], thinking=False) for text in QUESTIONS]
    options = {"max_tokens": tokens, "sampling": SamplingParams(temperature=0), "ignore_eos": True}
    for handle in [engine.submit(chat, **options) for chat in chats[:size]]:
        handle.result()
    before, begin, results = engine.stats(), time.perf_counter(), []
    for first in range(0, len(chats), size):
        handles = [engine.submit(chat, **options) for chat in chats[first : first + size]]
        results += [handle.result() for handle in handles]
    seconds, after = time.perf_counter() - begin, engine.stats()
    drafts = SpeculationStats()
    for result in results:
        if result.speculation is not None:
            drafts = drafts.plus(result.speculation)
    gaps, device_ns, gap_ns = (
        after.memory[name] - before.memory[name] for name in ("decode_gaps", "decode_device_ns", "decode_gap_ns")
    )
    rounds, rows = after.decode_rounds - before.decode_rounds, after.decode_rows - before.decode_rows
    period = (device_ns / rounds + gap_ns / max(gaps, 1)) / 1e9
    weights, tokens = after.memory[f"weight_bytes.{size}"], sum(r.usage.completion_tokens for r in results)
    return _Measured(tokens, seconds, period, rows, weights, after.memory["draft_vocabulary"], drafts)


def _row(size: int, one: _Measured, other: _Measured) -> dict[str, Any]:
    d = one.drafts
    return {
        "batch": size,
        "tokens_per_second": one.tokens / one.seconds,
        "plain_tokens_per_second": other.tokens / other.seconds,
        "speedup": one.tokens / one.seconds / (other.tokens / other.seconds),
        "rounds": d.rounds,
        "drafted": d.drafted,
        "accepted": d.accepted,
        "draft_vocabulary": one.draft_vocabulary,
        "width": 1 + d.drafted / one.rows,
        "tokens_per_round": 1 + d.accepted / one.rows,
        "kept_by_place": [n / d.rounds for n in d.accepted_per_position] if d.rounds else [],
        "round_seconds": one.round_seconds,
        "plain_round_seconds": other.round_seconds,
        "round_cost": one.round_seconds / other.round_seconds,
        "weight_bytes": one.weight_bytes,
        "plain_weight_bytes": other.weight_bytes,
    }
