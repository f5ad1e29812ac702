"""The block-drafting companion against a float64 reference, on random geometries."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from ninfer._cpu.device import CpuDevice
from ninfer.errors import ArtifactError
from ninfer.models.qwen3_5 import dflash
from ninfer.models.qwen3_5.bind import bind
from ninfer.models.qwen3_5.config import parse_dflash, parse_text
from ninfer.models.qwen3_5.forward import forward

BLOCK = 6
KINDS = ("dflash", "dflash2")


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(threads=1)
    yield device
    device.close()


class Companion:
    """A bound text model with a companion of two rows, and the float64 ones."""

    def __init__(self, seed: int, device: CpuDevice, oracle: Any, reference: Any, runner: Any, folder: Path) -> None:
        config = oracle.random_config(seed)
        hf = oracle.hugging_face(config, seed)
        state = {name: value.detach().numpy() for name, value in hf.state_dict().items()}
        self.config = oracle.random_dflash(config, seed + 50, chain=seed % 2 == 1)
        own = oracle.dflash_state(config, self.config, seed + 100)
        weights = oracle.artifact_weights(config, state) | oracle.dflash_weights(self.config, own)
        artifact = oracle.write(folder / "m.ninfer", config, weights, dflash=self.config)
        self.text = reference.Reference(config, state)
        self.exact = reference.DFlash(self.config, own, self.text.w["model.embed_tokens.weight"])
        self.runner = r = runner.Runner(device, bind(artifact, device, ("text", KINDS[seed % 2])), lanes=2)
        self.row, model = runner.Row, r.model
        self.draft, self.vocabulary = model.dflash, model.config.vocab_size
        c, H = self.draft.config, model.config.hidden_size
        self.ring = dflash.ring_pages(self.config.get("sliding_window", 1), BLOCK, 256)
        self.kv = dflash.allocate_context(c, r.scope, device, 8, 2, 4, 3, self.ring)
        for planes in self.kv:
            if planes.blocks is not None:
                r.put(planes.blocks, np.array([[5, 2, 0, 1], [4, 7, 3, 6]], np.int32))
        self.ws = dflash.plan_workspace(c, H, r.scope, device, 256, 2 * BLOCK, 256)

    def extend(self, rows: list[Any]) -> None:
        """Run the text model over the rows, and make them context."""
        r, packed, taps = self.runner, self.runner.rows(rows), self.draft.config.taps
        forward(r.device.ops, r.model, r.ws, packed, r.kv, r.state, None, self.ws.features, taps)
        dflash.append(r.device.ops, self.draft, self.ws, packed, self.kv)

    def block(self, rows: list[Any], chosen: list[int]) -> np.ndarray:
        r, packed = self.runner, self.runner.rows(rows)
        out = r.final.head(len(chosen), r.final.shape[1])
        dflash.draft(r.device.ops, r.model, self.ws, packed, self.kv, r.ints("accepted", chosen), out)
        return r.get(out)


@pytest.fixture(scope="module", params=range(4))
def companion(
    request: pytest.FixtureRequest, device: CpuDevice, oracle: ModuleType, reference: ModuleType, runner: ModuleType,
    tmp_path_factory: pytest.TempPathFactory,
) -> Companion:  # fmt: skip
    return Companion(request.param, device, oracle, reference, runner, tmp_path_factory.mktemp("dflash"))


def test_blocks_equal_the_reference_over_any_history(companion: Companion) -> None:
    """Two rows that grow in chunks; rotary positions of the text model do not matter to the companion."""
    rng, mask, row = np.random.default_rng(3), companion.draft.config.mask, companion.row
    tokens = rng.integers(0, companion.vocabulary, (2, 200))
    axes = np.cumsum(rng.integers(0, 3, (3, 200)), axis=1)
    taps = list(companion.draft.config.taps)
    features = [companion.text.features(own, axes, taps) for own in tokens]
    ends = [(0, 0), (40, 1), (41, 90), (45, 95), (180, 96)]
    for (b0, b1), (e0, e1) in itertools.pairwise(ends):
        for lane, begin, end in ((0, b0, e0), (1, b1, e1)):
            companion.extend([row(tokens[lane, begin:end], begin, lane, axes[:, begin:end])])
        blocks = [row([tokens[lane, end], *[mask] * (BLOCK - 1)], end, lane) for lane, end in ((0, e0), (1, e1))]
        got = companion.block(blocks, [0, 3, 5, BLOCK, BLOCK + 4])
        both = [companion.exact.block(features[i][:end], tokens[i, end], BLOCK) for i, end in ((0, e0), (1, e1))]
        want = np.concatenate(both)[[0, 3, 5, BLOCK, BLOCK + 4]]
        np.testing.assert_allclose(got, want, atol=5e-5 * max(1.0, float(np.abs(want).max())))


def test_columns_taken_back_leave_no_trace(companion: Companion) -> None:
    rng, row, mask = np.random.default_rng(4), companion.row, companion.draft.config.mask
    tokens = rng.integers(0, companion.vocabulary, 170)
    block = [row([7, *[mask] * (BLOCK - 1)], 150)]
    companion.extend([row(tokens[:150], 0)])
    want = companion.block(block, [1, 5])
    companion.extend([row(tokens[150 : 150 + BLOCK], 150)])
    np.testing.assert_array_equal(companion.block(block, [1, 5]), want)


def test_configs_of_another_model_are_refused(oracle: ModuleType) -> None:
    config = oracle.random_config(0)
    text, good = parse_text(config), oracle.random_dflash(config, 1) | {"layer_types": ["sliding_attention"]}
    good |= {"num_hidden_layers": 1, "sliding_window": 8, "causal": [True]}
    own, layers = good["dflash_config"], config["num_hidden_layers"]
    assert parse_dflash(good, text).windows == (8,)
    assert parse_dflash(good | {"block_size": 16}, text).block == 16
    for place, change in {
        "architectures": {"architectures": ["LlamaForCausalLM"]},
        "model_type": {"model_type": "llama"},
        "head_dim": {"head_dim": 33},
        "num_key_value_heads": {"num_key_value_heads": 7},
        "layer_types": {"layer_types": ["linear_attention"]},
        "sliding_window": {"sliding_window": 0},
        "causal": {"causal": [True, False]},
        "block_size": {"block_size": -1},
        "is_causal": {"is_causal": True},
        "rope_parameters.factor": {"rope_parameters": {"rope_theta": 1e4, "factor": 2}},
        "dflash_config.target_layer_ids": {"dflash_config": own | {"target_layer_ids": [layers]}},
        "dflash_config.mask_token_id": {"dflash_config": own | {"mask_token_id": config["vocab_size"]}},
        "dflash_config.extra": {"dflash_config": own | {"extra": 1}},
    }.items():
        with pytest.raises(ArtifactError) as caught:
            parse_dflash(good | change, text)
        assert caught.value.where == f"components.dflash.config.{place}"
