"""Files: framing refusals, lazy continuations, range reads, and what becomes resident."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ninfer.artifact import (
    Artifact,
    ArtifactFile,
    Component,
    Directory,
    ResourceSpec,
    SyntheticSource,
    TensorSpec,
    open_artifact,
    plan_directory,
    write_artifact,
)
from ninfer.errors import ArtifactError

Write = Callable[..., Directory]


@pytest.fixture
def whole(write_sample: Write, tmp_path: Path) -> Path:
    path = tmp_path / "model.ninfer"
    write_sample(path)
    return path


@pytest.fixture
def split(write_sample: Write, tmp_path: Path) -> Path:
    """The sample in files of at most 12 kB."""
    path = tmp_path / "model.ninfer"
    assert len(write_sample(path, max_file_bytes=12_288).files) > 2
    return path


def refusal(path: Path, **options: Any) -> ArtifactError:
    with pytest.raises(ArtifactError) as caught:
        open_artifact(path, **options)
    assert caught.value.path == path.name
    return caught.value


@pytest.mark.parametrize(
    ("damage", "where", "reason"),
    [
        (lambda b: b"", "header", "shorter"),
        (lambda b: b[:31], "header", "shorter"),
        (lambda b: b"GGUF" + b[4:], "header.magic", "not a .ninfer"),
        (lambda b: b[:7] + b"\2" + b[8:], "header.magic", "version 2"),
        (lambda b: b[:7] + b"\1" + b[8:], "header.magic", "version 1"),
        (lambda b: b[:7] + b"\4" + b[8:], "header.magic", "not a .ninfer"),
        (lambda b: b"NINPRT\0\3" + b[8:], "header.magic", "entry file"),
        (lambda b: b[:8] + bytes(8) + b[16:], "header.json_bytes", "0 bytes"),
        (lambda b: b[:8] + b"\xff" * 8 + b[16:], "header.json_bytes", "18446744073709551615"),
        (lambda b: b[:8] + (len(b) - 31).to_bytes(8, "little") + b[16:], "header.json_bytes", "in a file of"),
        (lambda b: b[:-1], "files[0].payload_bytes", "its directory says"),
        (lambda b: b + b"\0", "files[0].payload_bytes", "its directory says"),
        (lambda b: b[:32] + b"[" + b[33:], "directory", "invalid JSON"),
    ],
)
def test_entry_refusals(whole: Path, damage: Callable[[bytes], bytes], where: str, reason: str) -> None:
    whole.write_bytes(damage(whole.read_bytes()))
    error = refusal(whole)
    assert error.where == where
    assert reason in str(error)


def test_what_is_not_a_file_is_refused(tmp_path: Path) -> None:
    assert "No such file" in str(refusal(tmp_path / "absent.ninfer"))
    refusal(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    assert "not a regular file" in str(refusal(tmp_path / "fifo"))


def test_directory_limit(whole: Path) -> None:
    assert refusal(whole, max_directory_bytes=100).where == "header.json_bytes"


def test_padded_and_unpadded_json(whole: Path, image: tuple[Any, bytes], frame: Callable[..., bytes]) -> None:
    import json

    whole.write_bytes(frame(json.dumps(image[0], indent=1), image[1]))
    with open_artifact(whole) as source:
        assert Artifact(source).decode("text/norm").shape == (130,)


def test_reads_across_files(split: Path, sample: SyntheticSource) -> None:
    total = sample.directory.payload_bytes
    expected = sample.read(0, total)
    rng = np.random.default_rng(0)
    with open_artifact(split) as source:
        begins = np.cumsum([0] + [f.payload_bytes for f in source.directory.files])
        spans = [(0, total), (total, 0), *((int(b) - 1, 2) for b in begins[1:-1])]
        spans += [(int(a), int(b - a)) for a, b in np.sort(rng.integers(0, total, (50, 2)))]
        for offset, nbytes in spans:
            assert source.read(offset, nbytes) == expected[offset : offset + nbytes]
            view = source.view(offset, nbytes)
            assert view.tobytes() == expected[offset : offset + nbytes]
            assert not view.flags.writeable
        for offset, nbytes in [(0, total + 1), (total + 1, 0), (-1, 2), (1, -1), (2**64, 1)]:
            with pytest.raises(ArtifactError, match="leaves the payload"):
                source.read(offset, nbytes)


def test_continuations_open_when_needed(split: Path) -> None:
    for part in split.parent.glob("*.part-*"):
        part.unlink()
    with open_artifact(split) as source:
        first = source.directory.files[0].payload_bytes
        source.read(0, first)
        with pytest.raises(ArtifactError) as caught:
            source.view(first - 1, 2)
        assert caught.value.path == "model.ninfer.part-0001"


@pytest.mark.parametrize(
    ("damage", "where"),
    [
        (lambda b: b"NINFER\0\3" + b[8:], "header.magic"),
        (lambda b: b[:8] + b"\2" + b[9:], "header.part_index"),
        (lambda b: b[:31] + bytes([b[31] ^ 1]) + b[32:], "header.artifact_id"),
        (lambda b: b[:20], "header.artifact_id"),
        (lambda b: b[:-1], "files[1].payload_bytes"),
        (lambda b: b + b"\0", "files[1].payload_bytes"),
    ],
)
def test_continuation_refusals(split: Path, damage: Callable[[bytes], bytes], where: str) -> None:
    part = split.with_name("model.ninfer.part-0001")
    part.write_bytes(damage(part.read_bytes()))
    with open_artifact(split) as source:
        offset = source.directory.files[0].payload_bytes
        for _ in range(2):
            with pytest.raises(ArtifactError) as caught:
                source.read(offset, 1)
            assert (caught.value.path, caught.value.where) == (part.name, where)


def test_views_outlive_the_source_and_reads_do_not(split: Path, sample: SyntheticSource) -> None:
    before = len(os.listdir("/proc/self/fd"))
    source = open_artifact(split)
    view = source.view(0, 100)
    source.read(0, source.directory.payload_bytes)
    source.close()
    source.close()
    assert view.tobytes() == sample.read(0, 100)
    with pytest.raises(ArtifactError, match="closed"):
        source.read(0, 1)
    del view, source
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_refused_file_leaves_no_descriptor(split: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    split.write_bytes(split.read_bytes()[:-1])
    refusal(split)
    assert len(os.listdir("/proc/self/fd")) == before


def test_threads_share_a_source(split: Path, sample: SyntheticSource) -> None:
    total = sample.directory.payload_bytes
    expected, wrong = sample.read(0, total), []
    with open_artifact(split) as source:

        def work(step: int) -> None:
            for offset in range(0, total - step, step):
                if source.view(offset, step).tobytes() != expected[offset : offset + step]:
                    wrong.append(offset)

        threads = [threading.Thread(target=work, args=(step,)) for step in (997, 4096, 1231, 6000)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def resident_file_bytes() -> int:
    """Bytes of mapped files in this process's memory."""
    status = Path("/proc/self/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssFile", "RssShmem"))


def test_only_what_is_touched_becomes_resident(tmp_path: Path) -> None:
    big, small = 1 << 24, 1 << 10  # elements
    directory = plan_directory(
        components={"text": Component({}, resources={"r": "r"})},
        objects=[ResourceSpec("r", 5), TensorSpec("big", "fp32", (big,)), TensorSpec("small", "fp32", (small,))],
        bindings={},
    )
    contents = {"r": b"hello", "big": np.ones(big, np.float32), "small": np.ones(small, np.float32)}
    write_artifact(tmp_path / "a.ninfer", directory, lambda name: [(0, contents[name])])
    with open_artifact(tmp_path / "a.ninfer") as source:
        artifact = Artifact(source)
        before = resident_file_bytes()
        held = [artifact.parent("big"), artifact.parent("small")]
        assert held[1].data.view("<f4").sum() == small
        assert artifact.resource("text", "r") == b"hello"
        assert resident_file_bytes() - before < 8 << 20
        assert held[0].data.view("<f4").sum() == big
        assert resident_file_bytes() - before > 60 << 20


def test_a_parameter_reads_only_its_own_objects(whole: Path) -> None:
    class Counting(ArtifactFile):
        viewed: list[tuple[int, int]] = []

        def view(self, offset: int, nbytes: int) -> np.ndarray:
            self.viewed.append((offset, nbytes))
            return super().view(offset, nbytes)

    with Counting(whole, 1 << 20) as source:
        artifact = Artifact(source)
        values = artifact.decode("text/key", (2, 130))
        assert len(source.viewed) == 1
        stored = source.directory.objects["weight/000000"]
        assert source.viewed[0] == (stored.offset, stored.nbytes)
        tensor, begin, end = artifact.parts("text/key")[0]
        assert (tensor.shape, begin, end) == ((8, 130), 6 * 130, 8 * 130)
        assert artifact.parts("text/query")[0][0] is tensor
        assert np.array_equal(artifact.decode("text/query", (6, 130)).shape, (6, 130))
        assert values.shape == (2, 130)


def test_parameters_of_several_parts(whole: Path, image: tuple[Any, bytes], frame: Callable[..., bytes]) -> None:
    """Rows, pieces of rows and different formats concatenate in the order of the parts."""
    import json

    root = json.loads(json.dumps(image[0]))
    spans = [("weight/000000", 100, 300), ("weight/000006", 5, 8), ("weight/000001", 0, 57)]
    root["bindings"]["mixed"] = {"parts": [{"object": o, "range": [a, b]} for o, a, b in spans]}
    whole.write_bytes(frame(json.dumps(root), image[1]))
    with open_artifact(whole) as source:
        artifact = Artifact(source)
        decoded = {o: np.concatenate([artifact.decode(n).reshape(-1) for n in names]) for o, names in {
            "weight/000000": ["text/query", "text/key"], "weight/000006": ["text/norm"], "weight/000001": ["text/up"],
        }.items()}  # fmt: skip
        expected = np.concatenate([decoded[o][a:b] for o, a, b in spans])
        assert np.array_equal(artifact.decode("mixed", (26, 10)), expected.reshape(26, 10))
        assert np.array_equal(artifact.decode("mixed"), expected)
        for name, shape in (("mixed", (26, 11)), ("text/norm", (10, 13)), ("absent", (1,))):
            with pytest.raises(ArtifactError) as caught:
                artifact.decode(name, shape)
            assert caught.value.where == f"bindings[{name!r}]"
        with pytest.raises(ArtifactError, match="no such resource"):
            artifact.resource("text", "absent")
        assert not artifact.has("absent")
        assert artifact.has("mixed")
