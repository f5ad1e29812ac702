"""A history that went to host memory and came back is, bit for bit, the one that stayed on the GPU."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from fakes.program_driver import GREEDY, accept_all, admit, make_request, prefill, run, seal

from ninfer.artifact import Artifact
from ninfer.contract import UnitLicense
from ninfer.device import Device
from ninfer.models.qwen3_5.bind import bind
from ninfer.models.qwen3_5.geometries import text_geometry
from ninfer.models.qwen3_5.synthetic import synthetic_source
from ninfer.program import ExplicitKV, KVCodec, Program, QwenText, Retention, Shape, open_program

pytestmark = pytest.mark.device
SHAPE = Shape(rows=2, context=1024, chunk=256, control=8, codec=KVCodec.BF16, vocabulary=1000, spare=3)
GEOMETRY = text_geometry(
    256, 4, heads=(4, 2), gdn=(2, 4), dense=512, tied=False, vocab=1024, head_dim=128, gdn_dims=(128, 128),
    rotary=(0.25, (6, 5, 5)), positions=4096,
)  # fmt: skip
OUTPUT = 8


def ask(tokens):
    request = make_request(tokens, OUTPUT, dataclasses.replace(GREEDY, logprobs=2))
    positions = np.broadcast_to(np.arange(len(tokens), dtype=np.int32), (3, len(tokens)))
    return dataclasses.replace(request, identity=dataclasses.replace(request.identity, positions=positions))


def answer(program: Program, request, ref=None, keep=False, **how):
    s = admit(program, request, 0, ref, **how)
    prefill(program, s, 256)
    produced = []
    for n in range(OUTPUT):
        batch = program.decode([s], [UnitLicense()], None) if n else program.finalize_prefill([s], None)
        program.wait(batch)
        produced.append((batch.rows[0].tokens[0], batch.rows[0].scores[0]))
        accept_all(program, batch)
    if not keep:
        program.discard(s)
        return produced, None
    record = program.store.sequences.get(s)
    record.phase = type(record.phase).ENDED
    return produced, program.finish(s).retained


def test_to_the_host_and_back(gpu: Device) -> None:
    model = QwenText(bind(Artifact(synthetic_source(GEOMETRY, "q8", seed=7)), gpu))
    program = open_program(gpu, model, SHAPE, ExplicitKV(2048), Retention(0, 4, 64 << 20, 1 << 20))
    try:
        tokens = np.random.default_rng(3).integers(0, 1000, 700).tolist()
        first, kept = answer(program, ask(tokens), keep=True)
        follow, ref = ask([*tokens, *(t for t, _ in first), 1, 2, 3]), kept.checkpoints[0].ref
        stayed, _ = answer(program, follow, ref, consume=False)
        for _ in range(2):
            result = run(program, seal(program.open_demotion([kept.owner]), {kept.owner: -2}))
            assert result.transfers.d2h_bytes > 0 or program.summary(kept.owner).host_bytes > 0
            assert program.summary(kept.owner).device_bytes == 0
            came_back, _ = answer(program, follow, ref, consume=False)
            assert came_back == stayed
    finally:
        program.close()
