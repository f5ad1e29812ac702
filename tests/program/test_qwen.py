"""Program over a random Qwen3.5 model on the host: results are the same bits in any batch, lane and chunking."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import numpy as np
import pytest
from fakes.async_device import AsyncDevice
from fakes.program_driver import GREEDY, accept_all, admit, make_request, prefill

from ninfer._cpu.device import CpuDevice
from ninfer.artifact import Artifact
from ninfer.contract import TokenScore, UnitLicense
from ninfer.models.qwen3_5.bind import bind
from ninfer.models.qwen3_5.geometries import text_geometry
from ninfer.models.qwen3_5.synthetic import synthetic_source
from ninfer.program import AutomaticKV, ExplicitKV, KVCodec, Program, QwenText, Shape, open_program
from ninfer.program.layout import build_pool_layouts

VOCABULARY = 390
SHAPE = Shape(rows=3, context=256, chunk=64, control=8, codec=KVCodec.FP32, vocabulary=VOCABULARY)
GEOMETRY = text_geometry(
    64, 4, heads=(4, 2), gdn=(2, 4), dense=96, tied=False, vocab=400, head_dim=32, gdn_dims=(16, 16),
    rotary=(0.25, (2, 1, 1)), positions=4096,
)  # fmt: skip
MOE = text_geometry(
    64, 4, heads=(4, 2), gdn=(2, 4), moe=(6, 2, 48, 32), tied=False, vocab=400, head_dim=32, gdn_dims=(16, 16),
    rotary=(0.25, (2, 1, 1)), positions=4096,
)  # fmt: skip
dice = np.random.default_rng(2)
PROMPTS = [dice.integers(0, VOCABULARY, n).tolist() for n in (1, 64, 130, 90)]
OUTPUT = 8


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    device = CpuDevice()
    yield device
    device.close()


@pytest.fixture(scope="module", params=["dense", "moe"])
def model(request: pytest.FixtureRequest, device: CpuDevice) -> QwenText:
    geometry, recipe = {"dense": (GEOMETRY, "q8"), "moe": (MOE, "bf16")}[request.param]
    return QwenText(bind(Artifact(synthetic_source(geometry, recipe, seed=7)), device))


@pytest.fixture
def program(device: CpuDevice, model: QwenText) -> Iterator[Program]:
    program = open_program(device, model, SHAPE, ExplicitKV(768))
    yield program
    program.close()


def requests():
    for i, prompt in enumerate(PROMPTS):
        warm = dataclasses.replace(GREEDY, temperature=2.0 * (i % 2), frequency_penalty=0.3, seed=i, logprobs=2)
        yield make_request(prompt, OUTPUT, warm, rope_delta=i, id=i)


def alone(program: Program, request) -> list[tuple[int, TokenScore]]:
    s = admit(program, request, 0)
    prefill(program, s, 64)
    produced = []
    for n in range(OUTPUT):
        batch = program.decode([s], [UnitLicense()], None) if n else program.finalize_prefill([s], None)
        (row,) = program.wait(batch)
        produced.append((row.tokens[0], row.scores[0]))
        accept_all(program, batch)
    program.discard(s)
    return produced


@pytest.mark.parametrize("seed", range(3))
def test_results_are_the_same_bits_in_any_company(program: Program, seed: int) -> None:
    start = program.audit()
    expected = [alone(program, request) for request in requests()]
    assert len({token for row in expected for token, _ in row}) > OUTPUT
    shuffle = random.Random(seed)
    waiting, running, produced = list(enumerate(requests())), {}, {i: [] for i in range(len(PROMPTS))}
    while waiting or running:
        if waiting and len(running) < 3:
            i, request = waiting.pop(shuffle.randrange(len(waiting)))
            lane = shuffle.choice(sorted({0, 1, 2} - {lane for _, lane in running.values()}))
            running[i] = (admit(program, request, lane), lane)
        ready: dict[bool, list[int]] = {True: [], False: []}
        for i, (s, _) in running.items():
            if program.prefill_remaining(s):
                program.prefill(s, shuffle.choice([5, 31, 64]))
            elif shuffle.random() < 0.7:
                ready[not produced[i]].append(i)
        for fresh, group in ready.items():
            sequences = [running[i][0] for i in group]
            if not group:
                continue
            if fresh:
                batch = program.finalize_prefill(sequences, None)
            else:
                batch = program.decode(sequences, [UnitLicense()] * len(group), None)
            for i, row in zip(group, program.wait(batch)):
                produced[i].append((row.tokens[0], row.scores[0]))
            accept_all(program, batch)
        for i in [i for i in running if len(produced[i]) == OUTPUT]:
            program.discard(running.pop(i)[0])
    assert [produced[i] for i in range(len(PROMPTS))] == expected
    assert program.audit() == start


def test_a_device_that_delays_everything_gives_the_same_results(
    device: CpuDevice, model: QwenText, program: Program
) -> None:
    """Nothing on the host is read or reused before the device is done with it."""
    expected = [alone(program, request) for request in requests()]
    late = open_program(AsyncDevice(device), model, SHAPE, ExplicitKV(768))
    sequences = [admit(late, request, lane) for lane, request in enumerate(list(requests())[1:])]
    while left := [s for s in sequences if late.prefill_remaining(s)]:
        for s in left:
            late.prefill(s, 31)
    produced: list[list[tuple[int, TokenScore]]] = [[] for _ in sequences]
    for n in range(OUTPUT):
        licences = [UnitLicense()] * len(sequences)
        batch = late.decode(sequences, licences, None) if n else late.finalize_prefill(sequences, None)
        for row, history in zip(late.wait(batch), produced):
            history.append((row.tokens[0], row.scores[0]))
        accept_all(late, batch)
    assert produced == expected[1:]
    for s in sequences:
        late.discard(s)
    late.close()


def test_forced_tokens_leave_what_sampling_them_leaves(program: Program) -> None:
    """The recorded route folds its columns in another order of sums, so results agree to rounding."""
    for request in requests():
        expected = alone(program, request)
        tokens = [token for token, _ in expected]
        s = admit(program, request, 2)
        prefill(program, s, 64)
        accept_all(program, program.control(s, tokens[:1]))
        accept_all(program, program.control(s, tokens[1:6]))
        for n in (6, 7):
            batch = program.decode([s], [UnitLicense()], None)
            (row,) = program.wait(batch)
            (score,) = row.scores
            assert row.tokens[0] == tokens[n]
            assert score.logprob == pytest.approx(expected[n][1].logprob, abs=1e-4)
            accept_all(program, batch)
        program.discard(s)


def test_the_plan_counts_every_page(device: CpuDevice, model: QwenText, program: Program) -> None:
    (layout,) = build_pool_layouts(model.kv_geometries, SHAPE.codec)
    table = 3 * 4 * 4
    assert program.components["kv"] == 12 * layout.page_bytes + -(-table // 256) * 256
    assert sum(program.components.values()) == program.report.planned_bytes
    bf16 = open_program(device, model, dataclasses.replace(SHAPE, codec=KVCodec.BF16), AutomaticKV(0))
    assert bf16.report.tokens == 3 * 256
    halved = {name for name, nbytes in bf16.components.items() if nbytes < program.components[name]}
    assert halved == {"kv"}
    request = list(requests())[2]
    (rounded, *_), (exact, *_) = alone(bf16, request), alone(program, request)
    assert rounded[1] != exact[1]
    assert rounded[1].logprob == pytest.approx(exact[1].logprob, abs=0.03)
    bf16.close()


def test_weight_bytes_are_those_of_the_matrices_a_round_reads(model: QwenText) -> None:
    per_row = [model.weight_bytes(rows) for rows in range(1, 5)]
    assert per_row == sorted(per_row)
    assert per_row[-1] + model.model.embedding.nbytes <= model.model.nbytes
    if model.model.config.architecture == "Qwen3_5ForCausalLM":
        assert per_row[0] == per_row[-1]
    else:
        assert per_row[0] < per_row[2] == per_row[3]
