"""Greedy decoding at batch 1, side by side with `transformers` in fp32 on the same machine in the same run.

    python examples/benchmarks/against_transformers.py examples/tiny/tiny.ninfer
    python examples/benchmarks/against_transformers.py --synthetic 0.8b --recipe q8

Needs torch and transformers (the ``test`` extra). The reference model has the artifact's geometry and random weights:
speed does not depend on their values. Both sides decode the same number of tokens after a prompt of 8; the two are
timed in turn, three times each, and the medians are compared.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import ninfer
from ninfer.artifact import ArtifactSource, open_artifact
from ninfer.models.qwen3_5.synthetic import synthetic_source

PROMPT = list(range(8))


def reference(config: dict[str, Any]) -> Callable[[int], float]:
    """A function that decodes n tokens with transformers and returns seconds per token."""
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    wanted = {k: v for k, v in config.items() if k not in ("architectures", "model_type")}
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**wanted)).float().eval()
    model.generation_config.eos_token_id = None
    ids = torch.tensor([PROMPT])

    def seconds(n: int) -> float:
        start = time.perf_counter()
        model.generate(ids, max_new_tokens=n, min_new_tokens=n, do_sample=False, use_cache=True)
        return time.perf_counter() - start

    def decode(n: int) -> float:
        first = seconds(1)
        return (seconds(n) - first) / (n - 1)

    return decode


def ours(engine: ninfer.Engine) -> Callable[[int], float]:
    """The same for an engine."""
    greedy = ninfer.SamplingParams(temperature=0)

    def decode(n: int) -> float:
        options = ninfer.RequestOptions(max_tokens=n, ignore_eos=True, sampling=greedy, cache="disabled")
        handle = engine.submit(ninfer.TokenPrompt(PROMPT), options)
        seconds = handle.result().timings.decode
        assert seconds is not None
        return seconds / (n - 1)

    return decode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", nargs="?")
    parser.add_argument("--synthetic", metavar="GEOMETRY")
    parser.add_argument("--recipe", default="q8")
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    source: ArtifactSource = (
        synthetic_source(arguments.synthetic, arguments.recipe)
        if arguments.synthetic
        else open_artifact(arguments.artifact)
    )
    config = copy.deepcopy(dict(source.directory.components["text"].config))
    theirs = reference(config)
    with ninfer.Engine(source, max_concurrency=1, max_context=1024) as engine:
        mine = ours(engine)
        for warm_up in (mine, theirs):
            warm_up(8)
        pairs = [(mine(arguments.tokens), theirs(arguments.tokens)) for _ in range(3)]
        name = engine.model_name
    a, b = (statistics.median(side) for side in zip(*pairs, strict=True))
    print(f"{name}: ninfer {a * 1e3:.3f} ms/token, transformers fp32 {b * 1e3:.3f} ms/token, ratio {b / a:.2f}")


if __name__ == "__main__":
    main()
