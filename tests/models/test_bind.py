"""Binding: every refusal names its place, objects become resident once, and only the selected ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import numpy as np
import pytest

from ninfer._cpu.device import CpuDevice
from ninfer.artifact import Artifact, Binding, Directory, Part, TensorObject
from ninfer.errors import ArtifactError, InvalidRequest
from ninfer.models.qwen3_5.bind import bind, check
from ninfer.models.qwen3_5.geometries import GEOMETRIES
from ninfer.models.qwen3_5.synthetic import synthetic_source


class Counting(CpuDevice):
    """Remembers the weight bytes made resident."""

    def __init__(self) -> None:
        super().__init__(threads=1)
        self.resident: list[int] = []

    def weights(self, data: Any) -> Any:
        self.resident.append(data.nbytes)
        return super().weights(data)


@pytest.fixture
def device() -> Iterator[Counting]:
    device = Counting()
    yield device
    device.close()


def altered(change: Callable[[Directory], Directory], components: tuple[str, ...] = ("text", "mtp")) -> Artifact:
    source = synthetic_source("tiny", "q8", components=components)
    source.directory = change(source.directory)
    return Artifact(source)


def evolve(field: str, key: Any, value: Any) -> Callable[[Directory], Directory]:
    """Replace (or with None remove) one entry of a mapping of the directory."""

    def change(directory: Directory) -> Directory:
        entries = {**getattr(directory, field), key: value}
        return attrs.evolve(directory, **{field: {k: v for k, v in entries.items() if v is not None}})

    return change


def test_objects_become_resident_once(device: Counting) -> None:
    artifact = Artifact(synthetic_source("tiny", "q4-mixed", components=("text", "mtp")))
    seen: list[tuple[int, int]] = []
    model = bind(artifact, device, progress=lambda done, total: seen.append((done, total)))
    matrices = {
        o.id: o.nbytes
        for name, b in artifact.directory.bindings.items()
        if name.startswith("text/") and (name,) != ()
        for o in [artifact.directory.objects[b.parts[0].object]]
        if isinstance(o, TensorObject) and len(o.shape) == 2 and "convolution" not in name
    }
    assert sorted(device.resident) == sorted(matrices.values())
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (model.nbytes, model.nbytes)
    assert model.mtp is None


def test_only_selected_components_are_resident() -> None:
    artifact = Artifact(synthetic_source("tiny", "q8", components=("text", "mtp")))
    sizes = {}
    for components in (("text",), ("text", "mtp")):
        device = Counting()
        model = bind(artifact, device, components)
        assert (model.mtp is not None) == ("mtp" in components)
        sizes[components] = sum(device.resident)
        device.close()
    mtp = sum(
        o.nbytes
        for o in {b.parts[0].object: artifact.directory.objects[b.parts[0].object]
                  for name, b in artifact.directory.bindings.items() if name.startswith("mtp/")}.values()
        if isinstance(o, TensorObject) and len(o.shape) == 2
    )  # fmt: skip
    assert sizes[("text", "mtp")] - sizes[("text",)] == mtp > 0


@pytest.mark.parametrize("shared", [True, False])
def test_scattered_and_row_parts_give_the_same_logits(
    device: Counting, runner: ModuleType, oracle: ModuleType, tmp_path: Path, shared: bool
) -> None:
    """Splitting a parameter into many parts, on row boundaries or not, changes nothing."""
    config = oracle.random_config(0)
    hf = oracle.hugging_face(config, 0)
    state = {name: value.detach().numpy() for name, value in hf.state_dict().items()}
    artifact = oracle.write(tmp_path / "m.ninfer", config, oracle.artifact_weights(config, state))
    tokens = list(range(1, 20))
    expected = runner.Runner(device, bind(artifact, device), tokens=32).prefill(tokens, 32)
    bindings = dict(artifact.directory.bindings)
    columns = config["hidden_size"]
    for name, binding in bindings.items():
        object_shape = artifact.directory.objects[binding.parts[0].object].shape  # type: ignore[union-attr]
        if len(object_shape) != 2 or object_shape[1] != columns or binding.elements < 3 * columns:
            continue
        part = binding.parts[0]
        cut = part.begin + 2 * columns + (0 if shared else 3)
        parts = (Part(part.object, part.begin, cut), Part(part.object, cut, part.end))
        bindings[name] = Binding(parts, whole=False)
    artifact.source.directory = attrs.evolve(artifact.directory, bindings=bindings)
    got = runner.Runner(device, bind(artifact, device), tokens=32).prefill(tokens, 32)
    np.testing.assert_array_equal(got, expected)


Change = Callable[[Directory], Directory]
HEAD = ("text/output_head", "text/final_hidden")


def component(name: str, **fields: Any) -> Change:
    return lambda d: evolve("components", name, attrs.evolve(d.components[name], **fields))(d)


def misbound(name: str, other: str) -> Change:
    return lambda d: evolve("bindings", name, d.bindings[other])(d)


def head_use(**fields: Any) -> Change:
    return lambda d: evolve("uses", HEAD, attrs.evolve(d.uses[HEAD], **fields))(d)


def auxiliary(role: str) -> Change:
    return lambda d: head_use(auxiliaries={role: d.bindings["text/final_norm"]})(d)


REFUSALS: dict[str, Change] = {
    "components.mtp: no such component": evolve("components", "mtp", None),
    "components.mtp.target": component("mtp", target=None),
    "components.mtp.config.architectures": component("mtp", config={"architectures": ["Qwen3_5MoeMTP"]}),
    "components.text.resources.tokenizer.json": component("text", resources={}),
    "components.text.config.hidden_size": component("text", config=GEOMETRIES["tiny"] | {"hidden_size": 0}),
    "text/layers/0/gdn/z": evolve("bindings", "text/layers/0/gdn/z", None),
    "mtp/final_norm": evolve("bindings", "mtp/final_norm", None),
    "text/final_norm": misbound("text/final_norm", "text/layers/0/gdn/a_log"),
    "text/token_embedding": misbound("text/token_embedding", "text/layers/0/mlp/down"),
    "text/layers/0/mlp/gate": misbound("text/layers/0/mlp/gate", "text/layers/0/gdn/key"),
    "'text/output_head', 'mtp/final_hidden'": evolve("uses", ("text/output_head", "mtp/final_hidden"), None),
    "activation_policy": head_use(activation_policy=None),
    "auxiliaries.hadamard_signs": auxiliary("hadamard_signs"),
    "auxiliaries.activation_input_divisor": auxiliary("activation_input_divisor"),
}


@pytest.mark.parametrize("place", REFUSALS)
def test_refusals_name_the_place(device: Counting, place: str) -> None:
    with pytest.raises(ArtifactError) as error:
        bind(altered(REFUSALS[place]), device, ("text", "mtp"))
    assert place in str(error.value)
    assert device.resident == []


def test_a_direct_parameter_must_have_its_format(device: Counting) -> None:
    def change(d: Directory) -> Directory:
        (part,) = d.bindings["text/final_norm"].parts
        record = d.objects[part.object]
        assert isinstance(record, TensorObject)
        wrong = attrs.evolve(record, format="fp32", nbytes=record.nbytes * 2)
        return attrs.evolve(d, objects={**d.objects, record.id: wrong})

    with pytest.raises(ArtifactError, match=r"text/final_norm.*fp32, must be bf16"):
        check(altered(change))


def test_unused_damage_is_ignored(device: Counting) -> None:
    artifact = altered(evolve("bindings", "mtp/final_norm", None))
    assert bind(artifact, device).mtp is None


def test_unknown_component_is_refused(device: Counting) -> None:
    with pytest.raises(InvalidRequest, match="components"):
        bind(altered(lambda d: d), device, ("text", "vision"))
