"""The forward pass against transformers and a float64 reference, on random geometries of the family."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from ninfer._cpu.device import CpuDevice
from ninfer.models.qwen3_5.bind import bind

PROMPT, NEW = 131, 64
Array = npt.NDArray[Any]


@dataclass
class Case:
    """One random model three ways: transformers in fp32, NumPy in float64, and ours."""

    config: dict[str, Any]
    hf: torch.nn.Module
    reference: Any
    runner: Any
    module: ModuleType
    tokens: Array
    """Prompt and its greedy continuation by transformers, int64 [PROMPT + NEW]."""
    steps: Array
    """Logits of transformers' cached single steps, [NEW, R]."""
    exact: Array
    """float64 logits of the whole sequence at text positions, [PROMPT + NEW, R]."""

    def limit(self, scale: float) -> float:
        return scale * max(1.0, float(self.exact.std()))


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(threads=1)
    yield device
    device.close()


@pytest.fixture(scope="module", params=range(12))
def case(
    request: pytest.FixtureRequest,
    device: CpuDevice,
    oracle: ModuleType,
    reference: ModuleType,
    runner: ModuleType,
    tmp_path_factory: pytest.TempPathFactory,
) -> Case:
    seed = request.param
    config = oracle.random_config(seed)
    hf = oracle.hugging_face(config, seed)
    state = {name: value.detach().numpy() for name, value in hf.state_dict().items()}
    path: Path = tmp_path_factory.mktemp("model") / "m.ninfer"
    artifact = oracle.write(path, config, oracle.artifact_weights(config, state))
    ours = runner.Runner(device, bind(artifact, device), lanes=3)
    prompt = np.random.default_rng(seed).integers(0, config["vocab_size"], PROMPT)
    tokens, steps = greedy(hf, prompt)
    exact = reference.Reference(config, state)
    return Case(config, hf, exact, ours, runner, tokens, steps, exact.logits(tokens, text_positions(len(tokens))))


def text_positions(n: int) -> Array:
    return np.broadcast_to(np.arange(n), (3, n))


def greedy(hf: torch.nn.Module, prompt: Array) -> tuple[Array, Array]:
    """Greedy continuation with a cache, and the logits of each of its steps."""
    tokens, steps, cache = list(prompt), [], None
    with torch.no_grad():
        feed = torch.tensor(prompt)[None]
        for _ in range(NEW):
            out = hf(feed, cache=cache, use_cache=True)
            cache = out.past_key_values
            steps.append(out.logits[0, -1].numpy())
            tokens.append(int(steps[-1].argmax()))
            feed = torch.tensor([[tokens[-1]]])
    return np.array(tokens), np.array(steps)


def same_choice(ours: Array, exact: Array) -> None:
    """The same greedy token wherever the margin of the float64 logits exceeds 1e-3 of their spread."""
    top = np.sort(exact, -1)
    clear = top[:, -1] - top[:, -2] > 1e-3 * exact.std()
    assert clear.mean() > 0.9
    assert (ours.argmax(-1) == exact.argmax(-1))[clear].all()


def test_one_pass(case: Case) -> None:
    got = case.runner.prefill(case.tokens, 256)
    assert case.reference.closest_route > 1e-5, "choose another seed: two experts are nearly tied"
    with torch.no_grad():
        theirs = case.hf(torch.tensor(case.tokens)[None]).logits[0].numpy()
    error = np.abs(got - case.exact).max()
    print(f"logits: {error:.1e} of float64, {np.abs(got - theirs).max():.1e} of transformers, s {case.exact.std():.2f}")
    assert error <= case.limit(5e-4)
    assert np.abs(got - theirs).max() <= case.limit(5e-4)
    same_choice(got, case.exact)


def test_three_position_axes(case: Case) -> None:
    tokens = case.tokens[:PROMPT]
    positions = np.random.default_rng(1).integers(0, 3000, (3, PROMPT))
    exact = case.reference.logits(tokens, positions)
    with torch.no_grad():
        theirs = case.hf(torch.tensor(tokens)[None], position_ids=torch.tensor(positions)[:, None]).logits[0].numpy()
    got = case.runner.prefill(tokens, 256, positions)
    assert np.abs(got - exact).max() <= case.limit(5e-4)
    assert np.abs(got - theirs).max() <= case.limit(5e-4)
    same_choice(got, exact)
    swapped = case.runner.prefill(tokens, 256, positions[[0, 2, 1]])
    assert ("full_attention" in case.config["layer_types"]) == (np.abs(swapped - got).max() > 1e-3)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunked_prefill_is_bitwise_one_pass(case: Case, chunk: int) -> None:
    whole = case.runner.prefill(case.tokens[:PROMPT], 256)
    state = case.runner.snapshot()
    np.testing.assert_array_equal(case.runner.prefill(case.tokens[:PROMPT], chunk), whole)
    for a, b in zip(case.runner.snapshot(), state):
        np.testing.assert_array_equal(a, b)


def test_decode_continues_the_prefill(case: Case) -> None:
    full = case.runner.prefill(case.tokens, 256)
    case.runner.prefill(case.tokens[:PROMPT], 64)
    rows = [case.module.Row([token], PROMPT + i) for i, token in enumerate(case.tokens[PROMPT:])]
    got = np.concatenate([case.runner.run([row])[0] for row in rows])
    np.testing.assert_array_equal(got, full[PROMPT:])


def test_greedy_continuation(case: Case) -> None:
    """Fed with transformers' own continuation, every step chooses its next token."""
    got = [case.runner.prefill(case.tokens[:PROMPT], 64)[-1]]
    for i in range(PROMPT, PROMPT + NEW - 1):
        got.append(case.runner.run([case.module.Row([case.tokens[i]], i)])[0][0])
    got, exact = np.array(got), case.exact[PROMPT - 1 : PROMPT + NEW - 1]
    assert np.abs(got - case.steps).max() <= case.limit(5e-4)
    same_choice(got, exact)


def test_rows_of_a_batch_do_not_see_each_other(case: Case) -> None:
    prefix = (70, 0, 20)
    alone = []
    for lane, start in enumerate(prefix):
        case.runner.prefill(case.tokens[:start], 64, lane=lane) if start else None
        part = case.tokens[start : start + lane + 2]
        alone.append((case.runner.run([case.module.Row(part, start, lane)])[0], case.runner.snapshot(lane)))
    for lane, start in enumerate(prefix):
        case.runner.prefill(case.tokens[:start], 64, lane=lane) if start else None
    rows = [case.module.Row(case.tokens[s : s + lane + 2], s, lane) for lane, s in enumerate(prefix)]
    for lane, got in enumerate(case.runner.run(rows)):
        np.testing.assert_array_equal(got, alone[lane][0])
        for a, b in zip(case.runner.snapshot(lane), alone[lane][1]):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("accepted", [0, 1, 3, 5])
def test_verify_and_fold_equals_decoding_in_place(case: Case, accepted: int) -> None:
    """Five columns are verified against an untouched state; folding a prefix leaves what decoding it would."""
    start, Row = 67, case.module.Row
    case.runner.prefill(case.tokens[:start], 64)
    before = case.runner.snapshot()
    for i in range(start, start + accepted):
        case.runner.run([Row([case.tokens[i]], i)])
    expected = case.runner.snapshot()
    after = case.runner.run([Row([case.tokens[start + accepted]], start + accepted)])[0]

    case.runner.prefill(case.tokens[:start], 64)
    verify = [Row(case.tokens[start : start + 5], start)]
    got = case.runner.run(verify, record=True)[0]
    assert np.abs(got - case.exact[start : start + 5]).max() <= case.limit(5e-4)
    for a, b in zip(case.runner.snapshot(), before):
        np.testing.assert_array_equal(a, b)
    case.runner.fold(verify, [accepted])
    for a, b in zip(case.runner.snapshot(), expected):
        assert np.abs(a - b).max() <= 1e-6 * max(1.0, np.abs(b).max())
    again = case.runner.run([Row([case.tokens[start + accepted]], start + accepted)])[0]
    assert np.abs(again - after).max() <= case.limit(2e-4)


def test_state_can_be_read_from_one_slot_and_written_to_another(case: Case) -> None:
    start = 30
    case.runner.prefill(case.tokens[:start], 64)
    before, spare = case.runner.snapshot(), 3
    step = case.runner.run([case.module.Row([case.tokens[start]], start, write=spare)])[0]
    for a, b in zip(case.runner.snapshot(), before):
        np.testing.assert_array_equal(a, b)
    moved = case.runner.snapshot(spare)
    np.testing.assert_array_equal(case.runner.run([case.module.Row([case.tokens[start]], start)])[0], step)
    for a, b in zip(case.runner.snapshot(), moved):
        np.testing.assert_array_equal(a, b)
