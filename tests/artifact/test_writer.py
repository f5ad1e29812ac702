"""Writing: what is read back, how files split, and that a failure anywhere leaves nothing."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.artifact import (
    Artifact,
    ArtifactWriter,
    Binding,
    Component,
    Directory,
    Part,
    ResourceSpec,
    SyntheticSource,
    TensorSpec,
    Use,
    open_artifact,
    pack_members,
    plan_directory,
    write_artifact,
)
from ninfer.artifact import writer as writer_module
from ninfer.errors import ArtifactError

Write = Callable[..., Directory]


@pytest.mark.parametrize("limit", [None, 65_536, 12_288, 8192 + 4096])
def test_what_was_written_is_read(
    write_sample: Write, sample: SyntheticSource, tmp_path: Path, limit: int | None
) -> None:
    path = tmp_path / "a.ninfer"
    written = write_sample(path, **({"max_file_bytes": limit} if limit else {}))
    with open_artifact(path) as source:
        assert source.directory == written
        assert source.directory.objects == sample.directory.objects
        assert source.directory.bindings == sample.directory.bindings
        assert source.directory.uses == sample.directory.uses
        assert source.directory.metadata == {"name": "exämple"}
        assert source.read(0, source.directory.payload_bytes) == sample.read(0, sample.directory.payload_bytes)
        artifact, original = Artifact(source), Artifact(sample)
        for name in written.bindings:
            assert np.array_equal(artifact.decode(name), original.decode(name))
    sizes = [file.stat().st_size for file in tmp_path.iterdir()]
    assert len(sizes) == len(written.files)
    assert max(sizes) <= (limit or max(sizes))


def test_artifact_id(write_sample: Write, tmp_path: Path) -> None:
    assert write_sample(tmp_path / "a", artifact_id=bytes(range(16))).artifact_id == bytes(range(16)).hex()
    assert write_sample(tmp_path / "b").artifact_id != write_sample(tmp_path / "c").artifact_id


@given(name=st.integers(3800, 4100), limit=st.integers(20_480, 40_000))
def test_the_table_of_files_always_fits(name: int, limit: int) -> None:
    """The JSON's length and the number of files depend on each other, worst near a page boundary."""
    directory = plan_directory(
        components={"text": Component({"x": "y" * name})}, objects=[ResourceSpec("r", 300_000)], bindings={}
    )
    text, parsed = writer_module._serialise(directory, "entry", limit, bytes(16))
    assert (32 + len(text)) % 4096 == 0
    assert sum(f.payload_bytes for f in parsed.files) == 300_000
    assert all(start + f.payload_bytes <= limit for start, f in zip([32 + len(text)] + [4096] * 99, parsed.files))


def test_a_limit_without_room_is_refused(write_sample: Write, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no room") as caught:
        write_sample(tmp_path / "a.ninfer", max_file_bytes=8191)
    assert caught.value.where == "files"


def test_nothing_existing_is_replaced(write_sample: Write, tmp_path: Path) -> None:
    for existing in ("a.ninfer", "a.ninfer.part-0002"):
        (tmp_path / existing).write_text("precious")
        with pytest.raises(ArtifactError, match="exists already") as caught:
            write_sample(tmp_path / "a.ninfer", max_file_bytes=12_288)
        assert caught.value.path == existing
        assert (tmp_path / existing).read_text() == "precious"
        assert os.listdir(tmp_path) == [existing]
        (tmp_path / existing).unlink()


@pytest.mark.parametrize("hard_links", [True, False])
def test_a_file_that_appears_meanwhile_is_kept(
    write_sample: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hard_links: bool
) -> None:
    real = os.fsync

    def fsync(fd: int) -> None:
        (tmp_path / "a.ninfer").write_text("precious")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    if not hard_links:
        monkeypatch.setattr(os, "link", no_links)
    with pytest.raises(ArtifactError, match="appeared meanwhile"):
        write_sample(tmp_path / "a.ninfer", max_file_bytes=12_288)
    assert os.listdir(tmp_path) == ["a.ninfer"]
    assert (tmp_path / "a.ninfer").read_text() == "precious"


def no_links(*_: Any) -> None:
    raise OSError(errno.EPERM, "no hard links here")


def test_a_file_system_without_hard_links(write_sample: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", no_links)
    written = write_sample(tmp_path / "a.ninfer", max_file_bytes=12_288)
    assert len(os.listdir(tmp_path)) == len(written.files)
    open_artifact(tmp_path / "a.ninfer").close()


FAULTS = [
    (call, KeyboardInterrupt, after) for call in ("open", "truncate", "pwrite", "fsync", "link") for after in (0, 1)
]
FAULTS += [(call, OSError, 0) for call in ("open", "truncate", "pwrite", "fsync")]


@pytest.mark.parametrize(("call", "error", "after"), FAULTS)
def test_a_failure_leaves_nothing(
    write_sample: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    error: type[BaseException],
    after: int,
) -> None:
    """Each call to the operating system fails once, before or after its effect, until none is left to fail."""
    real, descriptors = getattr(os, call), len(os.listdir("/proc/self/fd"))
    for attempt in range(100):
        calls = iter(range(attempt, -1, -1))

        def faulty(*args: Any, calls: Iterator[int] = calls, **options: Any) -> Any:
            if next(calls, -1) != 0:
                return real(*args, **options)
            if after:
                result = real(*args, **options)
                if call == "open":
                    os.close(result)
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(os, call, faulty)
            try:
                write_sample(tmp_path / "a.ninfer", max_file_bytes=12_288)
            except error:
                pass
            else:
                assert attempt > 0
                return
        assert os.listdir(tmp_path) == []
        assert len(os.listdir("/proc/self/fd")) == descriptors
    pytest.fail("never succeeded")


def test_an_interrupted_producer_leaves_nothing(sample: SyntheticSource, tmp_path: Path) -> None:
    def contents(name: str) -> Iterator[tuple[int, bytes]]:
        assert len(os.listdir(tmp_path)) == 1
        if name == "weight/000003":
            raise KeyboardInterrupt
        record = sample.directory.objects[name]
        yield 0, sample.read(record.offset, record.nbytes)

    with pytest.raises(KeyboardInterrupt):
        write_artifact(tmp_path / "a.ninfer", sample.directory, contents)
    assert os.listdir(tmp_path) == []


def small() -> Directory:
    """One q5 object of 528 bytes: planes [0, 256), [256, 320), [512, 528)."""
    spec, bindings = pack_members("w", "q5_g64_fp16", [("text/a", (2, 130))])
    return plan_directory(components={"text": Component({})}, objects=[spec], bindings=bindings)


@pytest.mark.parametrize(
    ("spans", "reason"),
    [
        ([(0, 256), (256, 320), (512, 528)], None),
        ([(512, 528), (256, 320), (100, 256), (0, 100)], None),
        ([(0, 528)], None),
        ([(0, 256), (256, 320)], "bytes 512..528 were not all written"),
        ([(0, 255), (256, 320), (512, 528)], "bytes 0..256 were not all written"),
        ([(0, 256), (255, 320), (512, 528)], "byte 255 was written twice"),
        ([(0, 528), (0, 528)], "byte 0 was written twice"),
        ([], "not all written"),
        ([(500, 529)], "leave its 528"),
        ([(-1, 5)], "leave its 528"),
    ],
)
def test_every_byte_is_written_once(tmp_path: Path, spans: list[tuple[int, int]], reason: str | None) -> None:
    def write() -> None:
        write_artifact(tmp_path / "a", small(), lambda _: [(a, bytes(b - a)) for a, b in spans])

    if reason is None:
        write()
        assert os.listdir(tmp_path) == ["a"]
        return
    with pytest.raises(ArtifactError, match=reason) as caught:
        write()
    assert caught.value.where == "objects['w']"
    assert os.listdir(tmp_path) == []


def test_objects_in_any_order_and_empty_chunks(tmp_path: Path) -> None:
    directory = plan_directory(
        components={"text": Component({})},
        objects=[ResourceSpec("a", 3), ResourceSpec("b", 4), TensorSpec("t", "fp32", (1,))],
        bindings={},
    )
    with ArtifactWriter(tmp_path / "x", directory) as writer:
        writer.write("t", 0, np.array([1.5], np.float32))
        writer.write("b", 4, b"")
        writer.write("b", 0, memoryview(b"defg"))
        writer.write("a", 1, b"bc")
        writer.write("a", 0, np.array([97], np.uint8))
        writer.publish()
    with open_artifact(tmp_path / "x") as source:
        assert source.read(0, 8) == b"abcdefg\0"
        assert source.read(256, 4) == np.array([1.5], "<f4").tobytes()


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"uses": {("text/a", "x"): Use("text/a", "x")}}, "uses[0].activation_policy"),
        ({"uses": {("text/b", "x"): Use("text/b", "x", "A16Only")}}, "uses[0].parameter"),
        ({"bindings": {"a": Binding((Part("w", 0, 261),), False)}}, "bindings['a'].parts[0].range"),
        ({"components": {}}, "components"),
        ({"metadata": {"name": ""}}, "metadata.name"),
        ({"provenance": {"x": float("nan")}}, "directory"),
        ({"provenance": {"x": {1, 2}}}, "directory"),
        ({"provenance": {"x": "\ud800"}}, "directory"),
    ],
)
def test_a_directory_the_reader_would_refuse_is_not_written(tmp_path: Path, change: dict[str, Any], where: str) -> None:
    with pytest.raises(ArtifactError) as caught:
        ArtifactWriter(tmp_path / "a", attrs.evolve(small(), **change))
    assert caught.value.where == where
    assert os.listdir(tmp_path) == []


def test_four_bit_activations_need_their_divisor(tmp_path: Path) -> None:
    spec, bindings = pack_members("w", "nvfp4", [("text/a", (128, 64))])
    use = Use("text/a", "x", "AllowA4")
    directory = plan_directory(components={"text": Component({})}, objects=[spec], bindings=bindings, uses=[use])
    with pytest.raises(ArtifactError) as caught:
        ArtifactWriter(tmp_path / "a", directory)
    assert caught.value.where == "uses[0].auxiliaries"


def test_progress_counts_to_the_end(sample: SyntheticSource, write_sample: Write, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    write_sample(tmp_path / "a", progress=lambda name, done, total: seen.append((done, total)))
    assert len(seen) == len(sample.directory.objects)
    assert seen == sorted(seen)
    assert seen[-1] == (sample.directory.payload_bytes, sample.directory.payload_bytes)


@pytest.mark.parametrize(
    ("format", "members", "shape", "ranges"),
    [
        ("q4_g64_fp16", [("a", (2, 8)), ("b", (3, 8))], (5, 8), [(0, 16, False), (16, 40, False)]),
        ("bf16", [("a", (3,)), ("b", (4,))], (7,), [(0, 3, False), (3, 7, False)]),
        ("bf16", [("a", (2, 3, 4))], (2, 3, 4), [(0, 24, True)]),
        ("q8_g32_fp16", [("a", (2, 3, 4))], (6, 4), [(0, 24, False)]),
        ("q8_g32_fp16", [("a", (5, 4))], (5, 4), [(0, 20, True)]),
        ("fp32", [("a", ())], (), [(0, 1, True)]),
    ],
)
def test_packing(
    format: str, members: list[tuple[str, tuple[int, ...]]], shape: tuple[int, ...], ranges: list[tuple[int, int, bool]]
) -> None:
    spec, bindings = pack_members("w", format, members)
    assert spec == TensorSpec("w", format, shape)
    expected = {name: Binding((Part("w", a, b),), whole) for (name, _), (a, b, whole) in zip(members, ranges)}
    assert bindings == expected


def test_refused_plans() -> None:
    with pytest.raises(ArtifactError) as caught:
        pack_members("w", "bf16", [("a", (2, 8)), ("b", (2, 9))])
    assert caught.value.where == "objects['w'].shape"
    text = {"text": Component({})}
    for objects, where in [
        ([ResourceSpec("a", 1), ResourceSpec("a", 1)], "objects[1].id"),
        ([TensorSpec("a", "nvfp4", (100, 64))], "objects[0].shape"),
        ([TensorSpec("a", "q3", (100, 64))], "objects[0].format"),
    ]:
        with pytest.raises(ArtifactError) as caught:
            plan_directory(components=text, objects=objects, bindings={})
        assert caught.value.where == where


def test_objects_are_placed_in_order() -> None:
    objects = [ResourceSpec("r", 5), ResourceSpec("s", 300), TensorSpec("t", "fp32", ()), TensorSpec("u", "fp32", ())]
    directory = plan_directory(components={"text": Component({})}, objects=objects, bindings={})
    assert [(o.offset, o.nbytes) for o in directory.objects.values()] == [(0, 5), (5, 300), (512, 4), (768, 4)]
    assert directory.payload_bytes == 772
