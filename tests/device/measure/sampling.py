"""The sampler at the size of a real vocabulary."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from .stage import Rows, Stage, opened, seconds


def sampler(out: Path) -> Rows:
    """Seconds of sampling and verification at the size of a real vocabulary, replayed from a graph."""
    import numpy as np
    from ops.harness import Lab

    from ninfer.ops import Drafts, SampleOut, SampleRows

    V, rows = 248_320, []
    plain = [0.7, 0.9, 0.0, 0.0, 0.0]
    shapes = [
        ("greedy", [0.0, 1.0, 0.0, 0.0, 0.0], 20, -1, False), ("top-k 20", plain, 20, -1, False),
        ("top-k 64, mask, penalties", [0.7, 0.9, 0.0, 1.0, 0.1], 64, -1, True),
        ("top-k 20, 20 log-probabilities", plain, 20, 20, False),
        ("whole vocabulary, top-p 0.9", plain, 0, -1, False),
        ("whole vocabulary, flat", [4.0, 1.0, 0.0, 0.0, 0.0], 0, -1, False),
        ("whole vocabulary, flat, top-p 0.95", [4.0, 0.95, 0.0, 0.0, 0.0], 0, -1, False),
        ("whole vocabulary, min-p 0.01", [1.0, 1.0, 0.01, 0.0, 0.0], 0, -1, False),
    ]  # fmt: skip
    rng = np.random.default_rng(0)
    with opened() as device:
        lab = Lab(device)
        for B, W in ((1, 1), (8, 1), (8, 8), (8, 16)):
            logits = lab.put(rng.normal(0, 2, (B * W, V)))
            masks = lab.put(rng.integers(0, 2**32, (B, W, V // 32)), "u32")
            counts = lab.put(rng.integers(0, 2, (B, V)), "i32")
            scratch = lab.scratch(lab.ops.sample_scratch(B * W, V))
            drafts = Drafts(lab.put([max(W - 1, 0)] * B, "i32"), lab.put(np.ones((B, max(W - 1, 1))), "i32"))
            for name, real, top_k, alternatives, masked in shapes if W == 1 else [*shapes[1:3], shapes[5]]:
                inputs = SampleRows(
                    B, W, lab.put([real] * B), lab.put([[top_k, alternatives, masked, b] for b in range(B)], "i32"),
                    lab.put(rng.integers(0, 2**32, (B, 2)), "u32"), lab.put(rng.integers(0, 99, (B, W)), "i64"),
                    lab.put(np.ones((B, W)), "i32"), everything=top_k == 0 and real[0] > 0,
                )  # fmt: skip
                outputs = SampleOut(
                    lab.empty(B, W, dtype="i32"), lab.empty(B, W), lab.empty(B, W, 20, dtype="i32"),
                    lab.empty(B, W, 20),
                )  # fmt: skip
                accepted = lab.empty(B, dtype="i32")

                shared = (logits, masks, counts, inputs)
                work = partial(lab.ops.sample, outputs, *shared, scratch)
                if W > 1:
                    work = partial(lab.ops.accept, outputs, accepted, *shared, drafts, scratch)
                graph = device.capture(work)
                spent = seconds(device, graph.launch, 5, 3)
                rows.append((f"sampler, {B} x {W}, {name}", f"{1e6 * spent:.1f} us"))
                graph.close()
    return rows


STAGES = {"sampler": Stage(30, sampler)}
