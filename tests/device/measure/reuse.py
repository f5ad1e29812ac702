"""What an engine spares of prompts that it knows: time to the first token, copies, the time of choosing; and that no
greedy answer shows it."""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import numpy as np

import ninfer
from ninfer.artifact import ArtifactSource
from ninfer.results import GenerationResult
from ninfer.work import Direction

from .stage import ROOT, Row, Rows, Stage

LENGTH = 24
"""Tokens of the answers that are compared."""
CLOSE = 0.3
"""Natural log by which two ways of computing one prompt may move a log-probability."""
OTHERS = 3
"""Further prompts. The device keeps one beside the one that runs, so each of them pushes another one out."""
HISTORIES = 24
"""How many compete for the device where the planner is measured."""


class Reuse:
    """What is asked of one engine with room for one request and one retained prompt, of ``tokens`` random tokens each.
    Only ``from_nothing``, whose times the others are compared with, must come first."""

    def __init__(self, engine: ninfer.Engine, tokens: int) -> None:
        self.engine = engine
        self.tokens = tokens
        rng = np.random.default_rng(1)
        self.known, *self.others = rng.integers(0, 500, (1 + OTHERS, tokens)).tolist()
        self.suffixes = rng.integers(0, 500, (3, 64)).tolist()
        self.cold = self.round = math.nan

    def ask(self, prompt: list[int], n: int = 1, **how: object) -> GenerationResult:
        options = {"max_tokens": n, "sampling": ninfer.SamplingParams(temperature=0), "ignore_eos": True, **how}
        return self.engine.generate(ninfer.TokenPrompt(prompt), **options)

    def copied(self, way: Direction) -> int:
        return self.engine.stats().context.bytes.get(way, 0)

    def from_nothing(self) -> Iterator[Row]:
        self.ask(self.others[0][: self.tokens // 2], cache="disabled")
        self.cold = min(_ttft(self.ask(self.known, cache="disabled")) for _ in range(2))
        decode = self.ask(self.known, 65, cache="disabled").timings.decode
        assert decode is not None
        self.round = decode / 64
        yield "from nothing", f"{_ms(self.cold)} to the first token, a round of decoding {_ms(self.round)}"

    def known_whole(self) -> Iterator[Row]:
        """A prompt of which everything is known: nothing is prefilled, the first token comes from the stored hidden."""
        self.ask(self.known)
        before, copied = self.engine.stats(), self.copied("d2d")
        results = [self.ask(self.known) for _ in range(15)]
        after, copied = self.engine.stats(), self.copied("d2d") - copied
        assert after.memory["prefill_tokens"] == before.memory["prefill_tokens"]
        spent = median(map(_ttft, results))
        yield "known whole", f"{self._spared(spent)}, {spent / self.round:.2f} rounds of decoding"
        choosing = (after.context.planning_ns["total"] - before.context.planning_ns["total"]) / len(results)
        queued = median(r.timings.queue or 0.0 for r in results)
        prepared = median(r.timings.prepare or 0.0 for r in results)
        yield (
            "known whole, of that",
            f"prepared {_ms(prepared)}, queued {_ms(queued)} of which choosing {choosing / 1e6:.2f} ms, copied"
            f" {copied / len(results) / 1e6:.2f} MB",
        )

    def known_but_a_suffix(self) -> Iterator[Row]:
        results = []
        for suffix in self.suffixes:  # what goes on from a prompt takes it over
            self.ask(self.known)
            results.append(self.ask([*self.known, *suffix]))
        assert all(r.usage.cached_tokens == self.tokens for r in results)
        yield f"{self.tokens} known, 64 new", self._spared(median(map(_ttft, results)))

    def same_answers(self) -> Iterator[Row]:
        for name, prompt in (("whole", self.known), ("but 64", [*self.known, *self.suffixes[0]])):
            self.ask(self.known)
            yield f"answer, known {name}", self._compared(prompt)

    def from_host_memory(self) -> Iterator[Row]:
        """Prompts in turn, more of them than the device holds: each comes back from host memory."""
        prompts = [self.known, *self.others]
        for prompt in prompts:
            self.ask(prompt)
        slowest = max(_ttft(self.ask(prompt)) for prompt in prompts)  # host memory is taken from the system
        yield "first time to the host and back", f"at most {_ms(slowest)} to the first token"
        up, down = self.copied("h2d"), self.copied("d2h")
        results = [self.ask(prompt) for prompt in prompts]
        up, down = self.copied("h2d") - up, self.copied("d2h") - down
        assert up > 0
        assert all(r.usage.cached_tokens == self.tokens for r in results)
        spent, n = median(map(_ttft, results)), len(results)
        moved = f"up {up / n / 1e6:.0f} MB, down {down / n / 1e6:.0f} MB a request"
        yield "from host memory", f"{self._spared(spent)}, {spent / self.cold:.1%} of reading again; {moved}"
        for prompt in prompts[1:]:
            self.ask(prompt)
        yield "answer, from host memory", self._compared(self.known)

    def two_grammars(self) -> Iterator[Row]:
        """On one exact prompt, each from its own mask."""
        self.ask(self.known)
        for words in (["yes", "no"], ["left", "right"]):
            constraint = ninfer.OutputConstraint.choice(words)
            warm = self.ask(self.known, LENGTH, ignore_eos=False, constraint=constraint)
            cold = self.ask(self.known, LENGTH, ignore_eos=False, constraint=constraint, cache="disabled")
            assert warm.usage.cached_tokens == self.tokens
            assert warm.text in words
            yield f"known whole, {' or '.join(words)}", f"{warm.text!r}; from nothing {cold.text!r}"

    def choosing(self) -> Iterator[Row]:
        """Admissions while many histories compete for the device."""
        for i in range(HISTORIES):
            self.ask([i, *self.known[:100]])
        before = self.engine.stats().context
        for i in range(HISTORIES):
            self.ask([HISTORIES + i, *self.known[:100]])
        after = self.engine.stats().context
        spent = (after.planning_ns["total"] - before.planning_ns["total"]) / HISTORIES
        looked = (after.assessments - before.assessments) / HISTORIES
        yield (
            f"choosing among {sum(after.entries.values())} histories",
            f"{spent / 1e6:.2f} ms an admission, {looked:.0f} targets looked at; longest since the start"
            f" {after.planning_ns['longest'] / 1e6:.1f} ms",
        )

    def _spared(self, seconds: float) -> str:
        return f"{_ms(seconds)} to the first token, {self.cold / seconds:.0f}x faster than from nothing"

    def _compared(self, prompt: list[int]) -> str:
        """How far the answer after a hit agrees with one from nothing: equal up to where two candidates were close."""
        warm = self.ask(prompt, LENGTH, logprobs=2)
        cold = self.ask(prompt, LENGTH, logprobs=2, cache="disabled")
        assert warm.usage.cached_tokens >= self.tokens
        assert warm.logprobs is not None
        assert cold.logprobs is not None
        furthest = 0.0
        for i, (mine, theirs) in enumerate(zip(warm.token_ids, cold.token_ids, strict=True)):
            first, second = cold.logprobs[i].top[:2]
            if mine != theirs:
                gap = first[1] - second[1]
                assert gap < CLOSE, f"token {i}: {mine} for {theirs}, {gap:.3f} ahead of the next"
                return f"{i} tokens equal, then one that was {gap:.3f} ahead of the next"
            furthest = max(furthest, abs(warm.logprobs[i].logprob - cold.logprobs[i].logprob))
        return f"{len(cold.token_ids)} tokens equal, log-probabilities within {furthest:.1e}"


def reuse(device: str, source: ArtifactSource | Path, tokens: int = 8192, many: bool = False) -> Iterator[Row]:
    """What is spared of prompts of ``tokens`` tokens; ``many``: also what choosing among histories costs. A part that
    fails leaves the others."""
    cache = ninfer.CacheOptions(
        device_state_slots=4, host_state_slots=2 * HISTORIES if many else 8, host_kv_bytes=6 << 30,
        max_continuations=HISTORIES + 1, aging_window=1000,
    )  # fmt: skip
    options = {"max_concurrency": 1, "max_context": tokens + 256, "cache": cache, "progress": False, "device": device}
    with ninfer.Engine(source, **options) as engine:
        run = Reuse(engine, tokens)
        parts = [run.from_nothing, run.known_whole, run.known_but_a_suffix, run.same_answers, run.from_host_memory]
        for part in (*parts, run.two_grammars, *([run.choosing] if many else [])):
            try:
                yield from part()
            except Exception as error:
                traceback.print_exc()
                yield f"{part.__name__} FAILED", f"{error!r}"[:150]


def tiny(out: Path) -> Rows:
    file = ROOT / "examples" / "tiny" / "tiny.ninfer"
    return [(f"tiny: {what}", figure) for what, figure in reuse("cuda:0", file, tokens=3584, many=True)]


def large(out: Path) -> Iterator[Row]:
    from ninfer.models.qwen3_5.synthetic import synthetic_source

    source = synthetic_source("27b", "q4-mixed", alike=True)
    return ((f"27b q4-mixed: {what}", figure) for what, figure in reuse("cuda:0", source))


STAGES = {"reuse tiny": Stage(25, tiny), "reuse 27b": Stage(55, large)}


def _ttft(result: GenerationResult) -> float:
    assert result.timings.ttft is not None
    return result.timings.ttft


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"
