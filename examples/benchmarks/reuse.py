"""What the context cache spares: tokens read again, time to the first token, and what choosing costs.

    python examples/benchmarks/reuse.py [ARTIFACT] [--device auto]

Every answer after a hit is compared with the one of a request that reads everything; greedy, so they must be the same.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ninfer import CacheOptions, Chat, Engine, GenerationResult, SamplingParams, TokenPrompt

TINY = Path(__file__).parents[1] / "tiny" / "tiny.ninfer"
GREEDY = SamplingParams(temperature=0.0)
SYSTEM = "You answer in one sentence. " * 12
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
ROOMY = CacheOptions(device_state_slots=24, max_continuations=40, max_shared_prefixes=40)
HOSTED = CacheOptions(
    device_state_slots=3,
    host_state_slots=128,
    host_kv_bytes=1 << 30,
    retained_kv_tokens=1024,
    max_continuations=45,
    max_shared_prefixes=45,
)


def ask(engine: Engine, prompt: Any, **options: Any) -> GenerationResult:
    return engine.generate(prompt, **{"max_tokens": 8, "sampling": GREEDY, "ignore_eos": True, **options})


def chat(*turns: str, system: str = SYSTEM) -> Chat:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    first = {"role": "system", "content": system, "cache_marker": True}
    return Chat([first, *messages], thinking=False)


def words(tokens: int) -> str:
    return " ".join((WORDS * tokens)[:tokens])


def report(name: str, engine: Engine, prompt: Any, **options: Any) -> GenerationResult:
    """Answer with and without the cache; one line."""
    warm = ask(engine, prompt, **options)
    cold = ask(engine, prompt, cache="disabled")
    u, same = warm.usage, warm.token_ids == cold.token_ids
    faster = (cold.timings.ttft or 0) / (warm.timings.ttft or 1)
    print(
        f"{name:<34} {u.prompt_tokens:>7} {u.cached_tokens:>7} {u.prompt_tokens - u.cached_tokens:>7}"
        f" {1e3 * (warm.timings.ttft or 0):>9.1f} {faster:>6.1f}x  {'same' if same else 'DIFFERENT'}"
    )
    return warm


def conversations(engine: Engine) -> None:
    ask(engine, chat("Where is Ada?"))
    for tokens in (40, 400, 1300):
        report(f"shared system, suffix {tokens} words", engine, chat(words(tokens)))
    first = ask(engine, chat("Where is Ada?"), session="talk")
    report("second turn", engine, chat("Where is Ada?", first.text, "And Bo?"), session="talk")
    report("regenerate", engine, chat("Where is Ada?", first.text, "And Bo?"))
    report("edited last message", engine, chat("Where is Ada?", first.text, "And Cy?"))
    stem = ("Where is Ada?", "In the hall.")
    a = ask(engine, chat(*stem, "Is she well?"))
    ask(engine, chat(*stem, "Where is Bo?"))
    report("branch A, after A and B", engine, chat(*stem, "Is she well?", a.text, "Good."))
    tokens = [30 + i % 200 for i in range(min(8192, engine.max_context - 64))]
    ask(engine, TokenPrompt(tokens))
    report("the same prompt again", engine, TokenPrompt(tokens))
    report("a long prefix, 16 tokens more", engine, TokenPrompt([*tokens, *range(40, 56)]))


def many_prefixes(engine: Engine, count: int = 39) -> None:
    """Each prefix twice, with other questions; the device holds a few of them."""

    def prompt(i: int, question: str) -> Chat:
        return chat(question, system=f"{i}. {SYSTEM}")

    for i in range(count):
        ask(engine, prompt(i, "Where is Ada?"), max_tokens=1)
    reused = reusable = 0
    for i in range(count):
        result = ask(engine, prompt(i, "Where is Bo?"), max_tokens=1)
        reused += result.usage.cached_tokens
        reusable += engine.prepare(prompt(i, "Where is Bo?")).cache_markers[0]
    print(f"{count} prefixes, second pass: {reused} of {reusable} reusable tokens reused ({reused / reusable:.1%})")
    context = engine.stats().context
    admissions = sum(context.hits.values()) + sum(context.misses.values())
    print(
        f"choosing: {context.planning_ns['total'] / admissions / 1e6:.2f} ms an admission under pressure, longest"
        f" {context.planning_ns['longest'] / 1e6:.1f} ms; copied {context.bytes}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", nargs="?", default=TINY)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--context", type=int, default=4096, help="tokens of the longest prompt (default 4096)")
    options = parser.parse_args()
    common = {"device": options.device, "progress": False}
    with Engine(options.artifact, max_context=options.context, max_concurrency=2, cache=ROOMY, **common) as engine:
        print(f"{engine!r}\n{ROOMY}")
        print(f"{'':<34} {'prompt':>7} {'reused':>7} {'read':>7} {'ttft ms':>9} {'faster':>7}  answer")
        conversations(engine)
        context = engine.stats().context
        print(f"choosing where to start: longest {context.planning_ns['longest'] / 1e6:.2f} ms")
    with Engine(options.artifact, max_context=512, max_concurrency=1, cache=HOSTED, **common) as engine:
        print(HOSTED)
        many_prefixes(engine)


if __name__ == "__main__":
    main()
