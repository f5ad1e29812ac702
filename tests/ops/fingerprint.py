"""Run every family of Ops on fixed inputs and print a hash of each result; run as a program by test_machines."""

from __future__ import annotations

import hashlib

import numpy as np
from ops.harness import FORMATS, Lab

from ninfer._cpu.device import CpuDevice
from ninfer._cpu.kernels import products
from ninfer.device import Buffer
from ninfer.ops import AttentionShape, GdnShape, GdnState, KVPlanes


def show(lab: Lab, name: str, *buffers: Buffer) -> None:
    print(name, *(hashlib.sha1(lab.get(buffer).tobytes()).hexdigest()[:12] for buffer in buffers))


def projections(lab: Lab, rng: np.random.Generator) -> None:
    K = 1152  # more columns than one stretch
    for format in FORMATS:
        matrix, _ = lab.matrix(format, rng.normal(size=(256, K)))
        for T in (1, 5, 30):
            out, norm = lab.empty(T, 256), lab.put(rng.normal(size=K), "bf16")
            x, scratch = lab.put(rng.normal(size=(T, K))), lab.scratch(lab.ops.norm_scratch(T, K))
            lab.ops.norm_project([out], x, norm, [matrix], 1e-6, scratch)
            show(lab, f"{format} {T}", out)
    gate, _ = lab.matrix("q8_g32_fp16", rng.normal(size=(100, 70)))
    out = lab.empty(7, 100)
    lab.ops.norm_swiglu(out, lab.put(rng.normal(size=(7, 70))), None, gate, gate, 1e-6, lab.scratch(1))
    show(lab, "swiglu", out)


def attention(lab: Lab, rng: np.random.Generator) -> None:
    shape = AttentionShape(4, 2, 40, 16, 1e4, (0, 1, 2, 0, 1, 2, 0, 1))
    keys, values = (lab.put(rng.normal(size=(20, 2, 64, 40)), "bf16") for _ in range(2))
    kv = KVPlanes(keys, values, lab.put([list(range(20))], "i32"))
    for W in (1, 30):
        q, k, norm = lab.put(rng.normal(size=(W, 160))), lab.put(rng.normal(size=(W, 80))), lab.put(np.ones(40), "bf16")
        out, rows = lab.empty(W, 160), lab.rows(1, W, [700])
        lab.ops.attention_prepare(q, k, k, norm, norm, kv, rows, shape, 1e-6)
        lab.ops.attention(out, q, q, kv, rows, shape, lab.scratch(lab.ops.attention_scratch(W, 1280, shape)))
        show(lab, f"attention {W}", q, kv.k, out)


def gdn(lab: Lab, rng: np.random.Generator) -> None:
    shape, W = GdnShape(2, 4, 24, 36, 4), 33
    state = GdnState(lab.put(rng.normal(size=(1, 4, 24, 36)) * 0.1), lab.put(rng.normal(size=(1, 3, shape.channels))))
    q, k, v, z, a, b = (lab.put(rng.normal(size=(W, n))) for n in (48, 48, 144, 144, 4, 4))
    out = lab.empty(W, 144)
    convolution, norm = lab.put(rng.normal(size=(4, shape.channels)), "bf16"), lab.put(np.ones(36), "bf16")
    a_log, dt_bias = lab.put(rng.normal(size=4)), lab.put(rng.normal(size=4))
    lab.ops.gdn(
        out, (q, k, v), z, a, b, convolution, a_log, dt_bias, norm, state, None, lab.rows(1, W, [5]), shape, 1e-6,
        lab.scratch(lab.ops.gdn_scratch(W, shape)),
    )  # fmt: skip
    show(lab, "gdn", out, state.s, state.tail)


if __name__ == "__main__":
    lab, rng = Lab(CpuDevice(threads=2)), np.random.default_rng(0)
    print("tile", products.COLUMNS)
    projections(lab, rng)
    attention(lab, rng)
    gdn(lab, rng)
