"""Random artifacts: legal, deterministic, of the wanted spread, made only when viewed. And the census."""

from __future__ import annotations

import gc
import json
import weakref

import attrs
import numpy as np
import pytest

from ninfer.artifact import (
    FORMATS,
    Artifact,
    Binding,
    Component,
    Part,
    RandomTensor,
    SyntheticSource,
    Use,
    inspect,
    verify,
)
from ninfer.errors import ArtifactError

TEXT = {"text": Component({"architectures": ["Example"]})}
MATRIX = [name for name, f in FORMATS.items() if f.kind != "direct"]


def one(format: str, shape: tuple[int, ...], **options: object) -> SyntheticSource:
    return SyntheticSource([RandomTensor(format, (("text/a", shape),), **options)], components=TEXT)  # type: ignore[arg-type]


@pytest.mark.parametrize("format", [*MATRIX, "bf16", "fp32"])
def test_spread(format: str) -> None:
    values = Artifact(one(format, (512, 1024))).decode("text/a")
    assert 0.85 < values.std() * 32 < 1.15
    assert abs(values.mean()) < 0.2 * values.std()
    values = Artifact(one(format, (512, 1024), std=3.0)).decode("text/a")
    assert 0.85 < values.std() / 3 < 1.15


def test_a_mean_that_cannot_be_had_is_refused() -> None:
    with pytest.raises(ArtifactError) as caught:
        one("q4_g64_fp16", (64, 64), mean=0.5)
    assert caught.value.where == "tensors[0].mean"


def test_given_values() -> None:
    norm = Artifact(one("bf16", (4096,), mean=1.0, std=0.1)).decode("text/a")
    assert abs(norm.mean() - 1) < 0.01
    assert 0.09 < norm.std() < 0.11
    assert Artifact(one("int32", (5,))).decode("text/a").tolist() == [0, 1, 2, 3, 4]
    assert Artifact(one("int32", (2,), values=np.array([7, -7]))).decode("text/a").tolist() == [7, -7]
    assert Artifact(one("fp32", (), values=np.array(2.5))).decode("text/a") == 2.5


@pytest.mark.parametrize("columns", [1, 31, 33, 65, 130, 192, 256])
def test_bytes_are_legal(columns: int) -> None:
    tensors = [RandomTensor(f, ((f"text/{f}", (130, columns)),)) for f in MATRIX if f != "nvfp4"]
    source = SyntheticSource(tensors, components=TEXT)
    assert verify(source) == []
    assert verify(one("nvfp4", (128, 192))) == []


def test_the_same_arguments_give_the_same_bytes(sample: SyntheticSource) -> None:
    def build(seed: int) -> SyntheticSource:
        return SyntheticSource([RandomTensor(f, ((f, (128, 64)),)) for f in MATRIX], components=TEXT, seed=seed)

    a, b, c = build(1), build(1), build(2)
    total = a.directory.payload_bytes
    for o in reversed(b.directory.objects.values()):
        assert b.read(o.offset, o.nbytes) == a.read(o.offset, o.nbytes)
        assert b.read(o.offset, o.nbytes) != c.read(o.offset, o.nbytes)
    whole = a.read(0, total)
    for offset, nbytes in [(0, total), (0, 0), (total, 0), (100, 9000), (4000, 500), (total - 1, 1)]:
        assert b.read(offset, nbytes) == whole[offset : offset + nbytes]
    assert not b.view(0, total).flags.writeable
    for offset, nbytes in [(0, total + 1), (-1, 1), (total, 1)]:
        with pytest.raises(ArtifactError):
            a.view(offset, nbytes)


def test_memory_is_held_only_by_views() -> None:
    source = one("q4_g64_fp16", (256, 256))
    nbytes = source.directory.payload_bytes
    first, second = source.view(0, nbytes), source.view(100, 50)
    assert np.shares_memory(first, second)
    base = weakref.ref(first.base)
    assert base() is not None
    del first
    assert base() is not None
    del second
    gc.collect()
    assert base() is None
    artifact = Artifact(source)
    tensor = artifact.parent("weight/000000")
    assert artifact.parent("weight/000000") is tensor
    held = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert held() is None


def test_census(sample: SyntheticSource) -> None:
    census = inspect(sample)
    assert json.loads(json.dumps(census.to_dict()))["formats"][0]["format"] == "bf16"
    assert {f.format: f.objects for f in census.formats} == dict.fromkeys(FORMATS, 1) | {"bf16": 2, "fp32": 2}
    assert sum(f.nbytes for f in census.formats) + census.gap_bytes + 7 + 2 == census.payload_bytes
    assert [(c.name, c.architecture, c.target, c.bindings, c.uses, c.objects) for c in census.components] == [
        ("text", "Example", None, 10, 7, 10),
        ("vision", None, "text", 1, 0, 2),
        ("proposal", None, "text", 1, 0, 1),
    ]
    assert census.components[0].resources == {"tokenizer.json": 7}
    assert census.policies == {"AllowA4": 1, "A16Only": 6}
    assert census.unreferenced == census.unowned == ()
    text = str(census)
    for expected in ("exämple", "q5_g64_fp16", "tokenizer.json  7 B", "12 bindings, 7 uses (1 AllowA4, 6 A16Only)"):
        assert expected in text


def test_leftovers() -> None:
    source = one("q4_g64_fp16", (4, 64))
    stored = source.directory.bindings["text/a"]
    source.directory = attrs.evolve(
        source.directory, bindings={"audio/x": Binding((Part("weight/000000", 0, 5),), False)}
    )
    assert inspect(source).unowned == ("audio/x",)
    assert "1 unowned bindings: audio/x" in str(inspect(source))
    source.directory = attrs.evolve(source.directory, bindings={})
    assert inspect(source).unreferenced == ("weight/000000",)
    source.directory = attrs.evolve(
        source.directory, bindings={"text/b": stored}, uses={("text/b", "x"): Use("text/b", "x", None, {"r": stored})}
    )
    assert inspect(source).unreferenced == ()


def test_a_directory_of_33_000_parameters(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A mixture of experts has tens of thousands of parameters in a few dozen objects."""
    from ninfer.artifact import open_artifact, write_artifact

    tensors = [
        RandomTensor("q4_g64_fp16", tuple((f"text/{layer}/{e}", (1, 64)) for e in range(768))) for layer in range(43)
    ]
    source = SyntheticSource(
        tensors, components=TEXT, uses=[Use(name, "x", "A16Only") for t in tensors for name, _ in t.members]
    )
    path = tmp_path_factory.mktemp("experts") / "a.ninfer"
    objects = source.directory.objects
    write_artifact(path, source.directory, lambda o: [(0, source.view(objects[o].offset, objects[o].nbytes))])
    with open_artifact(path) as opened:
        assert len(opened.directory.bindings) == len(opened.directory.uses) == 33_024
        artifact = Artifact(opened)
        ours, theirs = artifact.decode("text/42/767", (1, 64)), Artifact(source).decode("text/42/767")
        assert np.array_equal(ours.reshape(-1), theirs)
