"""``ninfer bench``: what an engine does on this machine, measured through its public API."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ninfer.constraints import OutputConstraint
from ninfer.errors import InvalidRequest
from ninfer.gateway.cli import speculation
from ninfer.gateway.cli.engine import add_engine_options, engine_options
from ninfer.inputs import TokenPrompt
from ninfer.options import SamplingParams
from ninfer.results import Delta, GenerationResult

WARMUP_TOKENS = 8
RECORDS = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "count": {"type": "integer"}},
        "required": ["name", "count"],
        "additionalProperties": False,
    },
}
"""What ``--constraint`` decodes: no answer within a budget is long enough to end."""


def add_commands(commands: Any) -> None:
    p = commands.add_parser("bench", help="measure speed on this machine", description=bench.__doc__)
    what = p.add_mutually_exclusive_group(required=True)
    what.add_argument("artifact", nargs="?", metavar="ARTIFACT", help="path of the .ninfer entry file")
    what.add_argument("--synthetic", metavar="GEOMETRY", help="random weights of this geometry, e.g. 0.8b")
    what.add_argument("--ops", action="store_true", help="time operations one by one, without a model")
    p.add_argument("--recipe", default="q8", help="number formats of --synthetic weights (default q8)")
    add_engine_options(p)
    p.add_argument("--prompt", type=int, default=512, metavar="N", help="tokens of the prefill measurement")
    p.add_argument("--tokens", type=int, default=64, metavar="N", help="decoded tokens a request")
    p.add_argument("--batches", type=_sizes, default=(1, 2, 4, 8), metavar="B,...", help="decode batch sizes")
    p.add_argument(
        "--contexts", type=_sizes, metavar="N,...", help="tokens each request has when it decodes (default --prompt)"
    )
    p.add_argument("--only", action="append", default=[], metavar="TEXT", help="with --ops: those whose name has it")
    p.add_argument("--constraint", action="store_true", help="also decode under a JSON schema")
    p.epilog = "With --spec, answers are made with and without drafts, side by side; prefill is measured with them."
    p.add_argument("--json", metavar="FILE", help="also write the figures as JSON; - is standard output")
    p.set_defaults(command=lambda arguments: bench(arguments, p.get_default))


def bench(arguments: argparse.Namespace, default: Callable[[str], Any]) -> int:
    """Time to first token, prefill speed, decode speed by batch size and context against what the bytes of a round cost
    at memory bandwidth, and the longest gap a running request sees while others prefill. Random prompts, greedy, stop
    tokens ignored."""
    _check(arguments, default)
    if arguments.ops:
        return _operations(arguments.device, arguments.only)
    from ninfer.engine import Engine

    sizes, contexts = arguments.batches, arguments.contexts or [arguments.prompt]
    source: Any = arguments.artifact
    if arguments.synthetic:
        from ninfer.models.qwen3_5.synthetic import synthetic_source

        # layers alike are copied in the memory of a GPU, so nothing is read from a cache that would not be
        alike = arguments.device.startswith("cuda")
        components: tuple[str, ...] = ("text",) if arguments.spec == "none" else ("text", arguments.spec)
        components += ("proposal",) if arguments.proposal_head == "on" else ()
        source = synthetic_source(arguments.synthetic, arguments.recipe, components=components, alike=alike)
    options = engine_options(
        arguments,
        max_concurrency=max(sizes),
        max_context=max(arguments.prompt, WARMUP_TOKENS, *contexts) + 2 * arguments.tokens + 64,
        phase_timings=arguments.constraint,
    )
    started = time.perf_counter()
    with Engine(source, options) as engine:
        start_seconds = time.perf_counter() - started
        run = _Runs(engine, arguments.tokens)
        run.decode(1, WARMUP_TOKENS)
        bandwidth = engine.memory_bandwidth()
        figures: dict[str, Any] = {
            "model": engine.model_name,
            "device": repr(engine),
            "spec": arguments.spec,
            "start_seconds": start_seconds,
            "bandwidth_bytes_per_second": bandwidth,
            "ttft_seconds": run.first_token(16),
            "prefill": {"tokens": arguments.prompt, "tokens_per_second": run.prefill(arguments.prompt)},
            "decode": [_decode(run, B, n, bandwidth) for n in contexts for B in sizes if run.fits(B, n)]
            if arguments.spec == "none"
            else [],
            "gap_seconds": run.gap(arguments.prompt) if max(sizes) > 1 else None,
            "constraint": [run.constrained(B) for B in sizes] if arguments.constraint else [],
            "speculation": None
            if arguments.spec == "none"
            else speculation.compare(engine, source, options, sizes, arguments.tokens),
            "memory_bytes": {
                name.removeprefix("bytes."): nbytes
                for name, nbytes in engine.stats().memory.items()
                if name.startswith("bytes.")
            },
        }
    print(_table(figures), file=sys.stderr if arguments.json == "-" else sys.stdout)
    if arguments.json:
        text = json.dumps(figures, indent=2)
        if arguments.json == "-":
            print(text)
        else:
            with open(arguments.json, "w") as file:
                file.write(text + "\n")
    return 0


def _check(arguments: argparse.Namespace, default: Callable[[str], Any]) -> None:
    """Raises InvalidRequest for an option that has no effect on what is measured."""
    unused = {"only": "without --ops"}
    if arguments.ops:
        unused = dict.fromkeys(sorted(vars(arguments).keys() - {"ops", "device", "only", "command"}), "with --ops")
    elif not arguments.synthetic:
        unused["recipe"] = "without --synthetic"
    if arguments.spec != "none":
        unused.setdefault("contexts", "with --spec")
    for name, why in unused.items():
        if getattr(arguments, name) != default(name):
            raise InvalidRequest(f"has no effect {why}", field=f"--{name.replace('_', '-')}")


def _sizes(text: str) -> list[int]:
    try:
        return [int(size) for size in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected integers with commas between them, got {text!r}") from None


def _operations(device: str, only: Sequence[str]) -> int:
    if device.startswith("cuda:"):
        from ninfer._cuda import bench as cuda

        return cuda.run(int(device.removeprefix("cuda:")), only)
    from ninfer._cpu import bench as cpu

    cpu.run(only)
    return 0


def _decode(run: _Runs, size: int, context: int, bandwidth: float) -> dict[str, Any]:
    seconds, moved, gaps = run.decode(size, context)
    return {
        "batch": size,
        "context": context,
        "tokens_per_second": size / seconds,
        "round_seconds": seconds,
        "bytes_per_round": moved,
        "bandwidth_ratio": moved / seconds / bandwidth,
        "host_seconds": statistics.fmean(gaps),
        "host_median_seconds": statistics.median(gaps),
        "host_p90_seconds": statistics.quantiles(gaps, n=10)[-1] if len(gaps) > 1 else gaps[0],
    }


class _Runs:
    """Measured requests on one engine."""

    def __init__(self, engine: Any, tokens: int) -> None:
        self.engine = engine
        self.tokens = tokens
        self.random = random.Random(0)
        self.greedy = SamplingParams(temperature=0)

    def prompt(self, length: int) -> TokenPrompt:
        return TokenPrompt([self.random.randrange(256) for _ in range(length)])

    def submit(self, length: int, tokens: int) -> Any:
        return self.engine.submit(
            self.prompt(length), max_tokens=tokens, sampling=self.greedy, ignore_eos=True, block=True
        )

    def first_token(self, length: int) -> float:
        """Median seconds from submit to the first committed token."""
        return statistics.median(self.submit(length, 1).result().timings.ttft for _ in range(5))

    def prefill(self, length: int) -> float:
        """Prompt tokens per second of one request."""
        seconds = statistics.median(self.submit(length, 1).result().timings.prefill for _ in range(3))
        return length / seconds

    def fits(self, size: int, context: int) -> bool:
        """Whether ``size`` requests of ``context`` tokens can decode together."""
        pages = -(-(context + 2 * self.tokens) // 64)
        return bool(size * pages <= self.engine.stats().memory["pages.main.total"])

    def decode(self, size: int, context: int) -> tuple[float, float, list[float]]:
        """Seconds of a round of ``size`` requests that decode together after ``context`` tokens, the bytes it has to
        move, and the seconds between the results of each such round and the launch of the next, 0 where none follows.

        What counts is what the last request sees: the others have begun before it, and end after it.
        """
        before = self.engine.stats()
        head = min(self.tokens, 2 + 2 * size + context // 512)
        handles = [self.submit(context, self.tokens + (head if i + 1 < size else 0)) for i in range(size)]
        last = [handle.result() for handle in handles][-1]
        after = self.engine.stats()
        rounds = after.memory["decode_gaps"] - before.memory["decode_gaps"]
        gaps = [ns / 1e9 for rows, ns in after.gaps[-rounds:] if rows == size] if rounds else []
        memory, cached = after.memory, context + self.tokens // 2
        moved = memory[f"weight_bytes.{size}"]
        moved += size * (cached * memory["kv_bytes_per_token"] + 2 * memory["state_bytes_per_row"])
        return last.timings.decode / (last.usage.completion_tokens - 1), moved, gaps or [0.0]

    def constrained(self, size: int) -> dict[str, float]:
        """Seconds of a decode round of ``size`` requests, free and under a schema whose answers are longer than the
        budget, in turn.

        The first documents of the grammar are told apart; the rest is the second half, whose masks were mostly seen.
        """
        constraint = OutputConstraint.json_schema(RECORDS)
        free, bound, reports = [], [], []
        for _ in range(10):
            free.append(self._rounds(size, ignore_eos=True)[0])
            seconds, results = self._rounds(size, constraint=constraint)
            bound.append(seconds)
            reports.append([(r.constraint, r.timings.constraint_prepare) for r in results])
        prepared = [spent for round_ in reports[1:] for _, spent in round_]
        seen = [report for round_ in reports[5:] for report, _ in round_]
        times = statistics.median(free[5:]), statistics.median(bound[5:])
        return {
            "batch": size,
            "free_seconds": times[0],
            "constrained_seconds": times[1],
            "first_documents_seconds": bound[0],
            "ratio": times[1] / times[0],
            "cold_prepare_seconds": max(spent for _, spent in reports[0]),
            "warm_prepare_seconds": statistics.median(prepared),
            "mask_seconds": statistics.median(report.mask_seconds / report.masks for report in seen),
        }

    def _rounds(self, size: int, **options: Any) -> tuple[float, list[Any]]:
        """``size`` requests together: mean seconds of their decode rounds, and what they answered."""
        before = self.engine.stats()
        wanted = {"max_tokens": self.tokens, "sampling": self.greedy} | options
        handles = [self.engine.submit(self.prompt(WARMUP_TOKENS), **wanted) for _ in range(size)]
        results = [handle.result() for handle in handles]
        after = self.engine.stats()
        return (after.decode_ns - before.decode_ns) / 1e9 / (after.decode_rounds - before.decode_rounds), results

    def gap(self, length: int) -> dict[str, float]:
        """Median and longest pause between tokens of a request while prompts of ``length`` tokens prefill beside it."""
        pauses: list[float] = []
        handle = self.submit(WARMUP_TOKENS, 2 * self.tokens)

        def watch() -> None:
            pauses.extend(_pauses(handle))

        watcher = threading.Thread(target=watch)
        watcher.start()
        others = [self.submit(length, 2) for _ in range(3)]
        for other in others:
            other.result()
        watcher.join()
        return {"median": statistics.median(pauses), "longest": max(pauses)}


def _pauses(events: Any) -> Iterator[float]:
    last = None
    for event in events:
        if isinstance(event, Delta | GenerationResult):
            now = time.perf_counter()
            if last is not None:
                yield now - last
            last = now


def _table(figures: dict[str, Any]) -> str:
    prefill, bandwidth = figures["prefill"], figures["bandwidth_bytes_per_second"]
    lines = [
        figures["device"],
        f"start {figures['start_seconds']:.2f} s, memory bandwidth {bandwidth / 1e9:.1f} GB/s",
        f"first token {figures['ttft_seconds'] * 1e3:.1f} ms",
        f"prefill {prefill['tokens_per_second']:,.0f} tok/s at {prefill['tokens']} tokens",
        "memory " + ", ".join(f"{name} {n / 2**20:,.0f} MiB" for name, n in figures["memory_bytes"].items()),
    ]
    if figures["decode"]:
        lines.append(
            f"{'batch':>5} {'context':>8} {'tok/s':>9} {'ms/round':>9} {'MB/round':>9} {'GB/s':>7} {'of bandwidth':>12}"
            f" {'host us':>8} {'median':>7} {'p90':>6}"
        )
    for row in figures["decode"]:
        lines.append(
            f"{row['batch']:>5} {row['context']:>8} {row['tokens_per_second']:>9,.1f}"
            f" {row['round_seconds'] * 1e3:>9.3f} {row['bytes_per_round'] / 1e6:>9.1f}"
            f" {row['bytes_per_round'] / row['round_seconds'] / 1e9:>7.1f} {row['bandwidth_ratio']:>12.1%}"
            f" {row['host_seconds'] * 1e6:>8.0f} {row['host_median_seconds'] * 1e6:>7.0f}"
            f" {row['host_p90_seconds'] * 1e6:>6.0f}"
        )
    gap = figures["gap_seconds"]
    if gap:
        lines.append(
            f"gap between tokens while prompts of {figures['prefill']['tokens']} tokens prefill: median"
            f" {gap['median'] * 1e3:.2f} ms, longest {gap['longest'] * 1e3:.2f} ms"
        )
    if figures["speculation"]:
        head = f"a head of {figures['speculation'][0]['draft_vocabulary']:,} tokens"
        lines.append(f"answers with {figures['spec']} drafts from {head}, and without:")
        lines.append(speculation.table(figures["speculation"]))
    for c in figures["constraint"]:
        lines.append(
            f"{c['batch']} under a schema: {c['constrained_seconds'] * 1e6:.0f} us a round, free"
            f" {c['free_seconds'] * 1e6:.0f} us, ratio {c['ratio']:.3f}; a mask {c['mask_seconds'] * 1e6:.1f} us;"
            f" first documents {c['first_documents_seconds'] * 1e6:.0f} us a round, prepared in"
            f" {c['cold_prepare_seconds'] * 1e3:.2f} ms, from the cache in {c['warm_prepare_seconds'] * 1e3:.2f} ms"
        )
    return "\n".join(lines)
