"""Synthetic artifacts: they bind, they are what the recipe says, and every format computes what it decodes to."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from ninfer._cpu.device import CpuDevice
from ninfer.artifact import Artifact
from ninfer.errors import ArtifactError, InvalidRequest
from ninfer.models.qwen3_5.bind import bind, check
from ninfer.models.qwen3_5.geometries import GEOMETRIES, text_geometry
from ninfer.models.qwen3_5.recipes import RECIPES
from ninfer.models.qwen3_5.synthetic import synthetic_source

MOE = text_geometry(
    96, 4, heads=(6, 2), gdn=(2, 6), moe=(6, 2, 80, 112), tied=False, vocab=400, head_dim=32, gdn_dims=(16, 24),
    rotary=(0.25, (2, 1, 1)), positions=4096,
)  # fmt: skip


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(threads=1)
    yield device
    device.close()


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_every_geometry_can_be_bound(geometry: str) -> None:
    artifact = Artifact(synthetic_source(geometry, "q4-mixed", components=("text", "mtp")))
    selection = check(artifact, ("text", "mtp"))
    tied = selection.text.tie_word_embeddings
    head, embedding = (artifact.binding(f"text/{name}").parts[0] for name in ("output_head", "token_embedding"))
    assert (head.object == embedding.object) == tied


@pytest.mark.parametrize(("recipe", "bits"), [("bf16", 16), ("fp8", 8), ("q8", 8.5), ("q6", 6.25), ("q4-mixed", 5.1)])
def test_recipes_have_their_size(recipe: str, bits: float) -> None:
    source = synthetic_source("0.8b", recipe)
    assert source.directory.payload_bytes * 8 / 0.752e9 == pytest.approx(bits, rel=0.09)


def test_same_arguments_same_bytes() -> None:
    one, again, other = (synthetic_source("tiny", "q6", seed=seed) for seed in (3, 3, 4))
    assert one.directory == again.directory
    whole = [source.read(0, source.directory.payload_bytes) for source in (one, again, other)]
    assert whole[0] == whole[1] != whole[2]


@pytest.mark.parametrize("geometry", ["tiny", "moe"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_format_computes_what_it_decodes_to(
    device: CpuDevice, oracle: ModuleType, runner: ModuleType, tmp_path: Path, recipe: str, geometry: str
) -> None:
    """The same numbers stored as fp32 give the same logits."""
    config = copy.deepcopy(MOE) if geometry == "moe" else GEOMETRIES["tiny"]
    artifact = Artifact(synthetic_source(config, recipe, seed=5))
    specs = check(artifact).parameters
    plain = oracle.write(
        tmp_path / "m.ninfer", config, {s.name: artifact.decode(s.name, s.shape) for s in specs}, matrices="fp32"
    )
    tokens = np.random.default_rng(0).integers(0, config["vocab_size"], 70)
    got, expected = (runner.Runner(device, bind(a, device)).prefill(tokens, 64) for a in (artifact, plain))
    assert np.isfinite(got).all()
    assert 0.1 < expected.std() < 100
    assert np.abs(got - expected).max() <= 2e-4 * max(1.0, expected.std())


def test_tokenizer_covers_the_family_domain() -> None:
    artifact = Artifact(synthetic_source("2b", "q8"))
    tokenizer = Tokenizer.from_str(artifact.resource("text", "tokenizer.json").decode())
    assert tokenizer.get_vocab_size() == 248_077
    ids = {"<|endoftext|>": 248_044, "<|im_start|>": 248_045, "<tool_call>": 248_058, "</think>": 248_069}
    assert {name: tokenizer.token_to_id(name) for name in ids} == ids
    text = "héllo 世界\n\U0001f600 <|im_end|>"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert json.loads(artifact.resource("text", "generation_config.json"))["eos_token_id"] == [248_046, 248_044]


def test_bad_arguments_name_the_field() -> None:
    for field, call in (
        ("geometry", lambda: synthetic_source("70b", "q8")),
        ("recipe", lambda: synthetic_source("tiny", "q2")),
        ("components", lambda: synthetic_source("tiny", "q8", components=("text", "vision"))),
        ("geometry", lambda: synthetic_source(GEOMETRIES["tiny"] | {"vocab_size": 288}, "q8")),
    ):
        with pytest.raises(InvalidRequest) as error:
            call()
        assert error.value.field == field
    with pytest.raises(ArtifactError, match="hidden_size"):
        synthetic_source(GEOMETRIES["tiny"] | {"hidden_size": -1}, "q8")


def test_logits_do_not_depend_on_the_number_of_threads(runner: ModuleType) -> None:
    tokens, results = list(range(40)), []
    for threads in (1, 3):
        device = CpuDevice(threads=threads)
        model = bind(Artifact(synthetic_source(MOE, "q4-mixed")), device)
        results.append(runner.Runner(device, model, tokens=64).prefill(tokens, 16))
        device.close()
    np.testing.assert_array_equal(*results)


def test_alike_layers_are_made_once_and_copied_on_the_device(
    device: CpuDevice, runner: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, copied = [], []
    weights, duplicate = device.weights, device.duplicate

    def copy(original: Any) -> Any:
        copied.append((original, duplicate(original)))
        return copied[-1][1]

    monkeypatch.setattr(device, "weights", lambda data: made.append(data) or weights(data))
    monkeypatch.setattr(device, "duplicate", copy)
    model = bind(Artifact(synthetic_source("tiny", "q4-mixed", alike=True)), device)
    assert 0 < len(made) < len(copied)
    for original, other in copied:
        assert original.address != other.address
        np.testing.assert_array_equal(original.array, other.array)
    assert np.isfinite(runner.Runner(device, model).prefill(np.arange(20), 64)).all()
