"""Continuing kept histories with a random Qwen3.5 model on the host: tokens and log-probabilities are the same bits
as from nothing, wherever the history was kept and however the device delays its work."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
from fakes.async_device import AsyncDevice
from fakes.program_driver import GREEDY, accept_all, admit, make_request, prefill, run, seal

from ninfer._cpu.device import CpuDevice
from ninfer.artifact import Artifact
from ninfer.context import CaptureOffer, CheckpointKind, CheckpointRef
from ninfer.contract import TokenScore, UnitLicense
from ninfer.models.qwen3_5.bind import bind
from ninfer.models.qwen3_5.geometries import text_geometry
from ninfer.models.qwen3_5.synthetic import synthetic_source
from ninfer.program import ExplicitKV, KVCodec, Program, QwenText, Retention, Shape, open_program

VOCABULARY = 390
SHAPE = Shape(rows=2, context=512, chunk=64, control=8, codec=KVCodec.FP32, vocabulary=VOCABULARY, spare=3)
GEOMETRY = text_geometry(
    64, 4, heads=(4, 2), gdn=(2, 4), dense=96, tied=False, vocab=400, head_dim=32, gdn_dims=(16, 16),
    rotary=(0.25, (2, 1, 1)), positions=4096,
)  # fmt: skip
dice = np.random.default_rng(4)
SYSTEM, QUESTION, OTHER, FOLLOW = (dice.integers(0, VOCABULARY, n).tolist() for n in (130, 40, 77, 21))
OUTPUT = 6


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    device = CpuDevice()
    yield device
    device.close()


@pytest.fixture(scope="module")
def model(device: CpuDevice) -> QwenText:
    return QwenText(bind(Artifact(synthetic_source(GEOMETRY, "q8", seed=7)), device))


@pytest.fixture(params=["at once", "delayed"])
def program(request: pytest.FixtureRequest, device: CpuDevice, model: QwenText) -> Iterator[Program]:
    place = AsyncDevice(device) if request.param == "delayed" else device
    program = open_program(place, model, SHAPE, ExplicitKV(1024), Retention(0, 4, 1 << 21, 1 << 17))
    yield program
    program.close()


def ask(tokens, sampling=None):
    warm = sampling or dataclasses.replace(GREEDY, temperature=0.9, frequency_penalty=0.3, seed=5, logprobs=2)
    request = make_request(tokens, OUTPUT, warm)
    positions = np.broadcast_to(np.arange(len(tokens), dtype=np.int32), (3, len(tokens)))
    return dataclasses.replace(request, identity=dataclasses.replace(request.identity, positions=positions))


def answer(program: Program, request, ref=None, lane=0, keep=False, at=(), **how):
    """Tokens with their scores, and what the row leaves. at: frontiers at which a shared prefix is captured."""
    s = admit(program, request, lane, ref, **how)
    for frontier in at:
        while (done := len(request.identity.tokens) - program.prefill_remaining(s)) < frontier:
            program.prefill(s, min(64, frontier - done))
        session = program.open_capture(s, CaptureOffer(frontier, CheckpointKind.RESPONSE_REPLAY, True), [])
        run(program, seal(session, {}))
    prefill(program, s, 64)
    produced: list[tuple[int, TokenScore]] = []
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


def demote(program: Program, *owners) -> None:
    session = program.open_demotion(owners)
    run(program, seal(session, dict.fromkeys(owners, -2)))
    assert all(program.summary(owner).device_bytes == 0 for owner in owners)


@pytest.mark.parametrize("hosted", [False, True])
def test_a_second_turn_equals_one_from_nothing(program: Program, hosted: bool) -> None:
    first, kept = answer(program, ask(SYSTEM + QUESTION), keep=True)
    if hosted:
        demote(program, kept.owner)
    second = ask([*SYSTEM, *QUESTION, *(t for t, _ in first), *FOLLOW])
    cold, _ = answer(program, second, lane=1)
    for consume in (False, True):
        assert answer(program, second, kept.checkpoints[0].ref, consume=consume)[0] == cold


@pytest.mark.parametrize("hosted", [False, True])
def test_branches_of_one_prefix_do_not_see_each_other(program: Program, hosted: bool) -> None:
    a, b = ask(SYSTEM + QUESTION), ask(SYSTEM + OTHER)
    cold = [answer(program, request)[0] for request in (a, b)]
    one, kept = answer(program, a, keep=True, at=(len(SYSTEM),))
    (shared,) = [owner for owner, _ in program.store.histories.live() if owner.kind == "shared"]
    if hosted:
        demote(program, kept.owner, shared)
    refs = [CheckpointRef(shared, 0), CheckpointRef(kept.owner, 0)]
    assert one == cold[0]
    for ref in refs:
        assert answer(program, b, ref, consume=False)[0] == cold[1]
        assert answer(program, a, ref, lane=1, consume=False)[0] == cold[0]
    assert answer(program, a, refs[1])[0] == cold[0]


def test_an_exact_hit_equals_one_from_nothing(program: Program) -> None:
    request = ask(SYSTEM)
    cold, _ = answer(program, request)
    answer(program, request, at=(len(SYSTEM),))
    (shared,) = [owner for owner, _ in program.store.histories.live()]
    for _ in range(2):
        executed = program.stats()["prefill_tokens"]
        assert answer(program, request, CheckpointRef(shared, 0))[0] == cold
        assert program.stats()["prefill_tokens"] == executed
        demote(program, shared)
