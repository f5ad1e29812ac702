"""Damaged artifacts end in ArtifactError or in values, never in a crash, a hang or a large allocation."""

from __future__ import annotations

import contextlib
import copy
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ninfer.artifact import Artifact, inspect, open_artifact, verify
from ninfer.artifact.framing import HEADER_BYTES
from ninfer.errors import ArtifactError

Image = tuple[dict[str, Any], bytes]
ALLOWANCE = 64 << 20
own_folder = settings(suppress_health_check=[*settings().suppress_health_check, HealthCheck.function_scoped_fixture])
many = settings(own_folder, max_examples=5 * settings().max_examples)


def use_all_of(path: Path) -> bool:
    """Open an artifact and use everything in it, each on its own; whether it opened."""
    size = sum(file.stat().st_size for file in path.parent.iterdir())
    error = None
    tracemalloc.start()
    try:
        with open_artifact(path) as source:
            artifact, directory = Artifact(source), source.directory
            str(inspect(source))
            json.dumps(inspect(source).to_dict())
            for finding in verify(source):
                assert str(finding)
            for name in directory.bindings:
                attempt(lambda name=name: artifact.decode(name))
            for name, component in directory.components.items():
                for role in component.resources:
                    attempt(lambda name=name, role=role: artifact.resource(name, role))
    except ArtifactError as caught:
        error = caught
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < size + ALLOWANCE
    assert error is None or error.path == path.name
    return error is None


def attempt(call: Callable[[], object]) -> None:
    with contextlib.suppress(ArtifactError):
        call()


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every member and item in a JSON value."""
    steps = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for step, inner in steps for place in [(*path, step), *places(inner, (*path, step))]]


numbers = st.sampled_from([0, 1, -1, 2, 63, 64, 127, 128, 255, 256, 257, 4096, 2**31, 2**32, 2**53, 2**63, 2**64 - 1])
words = st.sampled_from(
    ["", "text", "vision", "object", "parts", "weight/000000", "weight/000005", "resource/text/tokenizer.json"]
    + ["tensor", "resource", "bf16", "fp32", "int32", "q4_g64_fp16", "q5_g64_fp16", "q8_g32_fp16", "nvfp4", "t2"]
    + ["fp8_e4m3fn_row_bf16", "row_split_k128_v1", "contiguous_le_v1", "row_scale_v1", "a\0", "..", "AllowA4"]
)
scalars = st.one_of(numbers, st.integers(-(2**70), 2**70), words, st.none(), st.booleans(), st.floats(0, 300))
values = st.recursive(scalars, lambda v: st.one_of(st.lists(v, max_size=4), st.dictionaries(words, v, max_size=3)))


@many
@given(data=st.data())
def test_damaged_directories(image: Image, frame: Callable[..., bytes], tmp_path: Path, data: st.DataObject) -> None:
    """Members replaced, removed, copied over each other; numbers nudged."""
    root = copy.deepcopy(image[0])
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(places(root)))
        parent = root
        for step in path[:-1]:
            parent = parent[step]
        old = parent[path[-1]]
        action = data.draw(st.sampled_from(["replace", "nudge", "remove", "swap", "repeat"]))
        if action == "nudge" and type(old) is int:
            parent[path[-1]] = old + data.draw(st.sampled_from([-256, -1, 1, 256, old]))
        elif action == "remove":
            del parent[path[-1]]
        elif action == "repeat" and isinstance(parent, list):
            parent.insert(path[-1], copy.deepcopy(old))
        elif action == "swap":
            other = data.draw(st.sampled_from(places(root)))
            inner = root
            for step in other:
                inner = inner[step]
            parent[path[-1]] = copy.deepcopy(inner)
        else:
            parent[path[-1]] = data.draw(values)
    file = tmp_path / "entry.ninfer"
    file.write_bytes(frame(json.dumps(root), image[1]))
    use_all_of(file)


@many
@given(data=st.data())
def test_damaged_bytes(image: Image, frame: Callable[..., bytes], tmp_path: Path, data: st.DataObject) -> None:
    """Bytes of the header, the JSON or the payload changed, inserted, dropped; files cut short or extended."""
    whole = bytearray(frame(json.dumps(image[0]), image[1]))
    json_end = HEADER_BYTES + int.from_bytes(whole[8:16], "little")
    ends = {"header": HEADER_BYTES, "json": json_end, "payload": len(whole)}
    for _ in range(data.draw(st.integers(1, 4))):
        end = ends[data.draw(st.sampled_from(sorted(ends)))]
        at = data.draw(st.integers(0, max(0, min(end, len(whole)) - 1)))
        action = data.draw(st.sampled_from(["flip", "set", "insert", "drop", "cut", "length"]))
        if action == "flip" and whole:
            whole[at] ^= 1 << data.draw(st.integers(0, 7))
        elif action == "set":
            whole[at : at + 1] = data.draw(st.sampled_from([b"\0", b"\xff", b'"', b"[", b"{", b"9", b"\\", b","]))
        elif action == "insert":
            whole[at:at] = data.draw(st.binary(min_size=1, max_size=9))
        elif action == "drop":
            del whole[at : at + data.draw(st.integers(1, 9))]
        elif action == "cut":
            del whole[at:]
        else:
            declared = data.draw(st.one_of(st.integers(0, 2**64 - 1), st.integers(0, len(whole) + 40)))
            whole[8:16] = declared.to_bytes(8, "little")
    file = tmp_path / "entry.ninfer"
    file.write_bytes(whole)
    use_all_of(file)


@own_folder
@given(data=st.data())
def test_damaged_file_sets(write_sample: Callable[..., Any], tmp_path: Path, data: st.DataObject) -> None:
    """One file of several changed, cut, extended or missing."""
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    folder.mkdir()
    count = len(write_sample(folder / "entry.ninfer", max_file_bytes=12_288).files)
    file = sorted(folder.iterdir())[data.draw(st.integers(0, count - 1))]
    whole = bytearray(file.read_bytes())
    match data.draw(st.sampled_from(["flip", "cut", "extend", "remove"])):
        case "flip":
            whole[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        case "cut":
            del whole[data.draw(st.integers(0, len(whole) - 1)) :]
        case "extend":
            whole += bytes(data.draw(st.sampled_from([1, 4096])))
        case "remove":
            file.unlink()
            whole.clear()
    if whole:
        file.write_bytes(whole)
    if (folder / "entry.ninfer").exists():
        use_all_of(folder / "entry.ninfer")


def test_the_undamaged_artifact_passes(image: Image, frame: Callable[..., bytes], tmp_path: Path) -> None:
    file = tmp_path / "entry.ninfer"
    file.write_bytes(frame(json.dumps(image[0]), image[1]))
    assert use_all_of(file)
    with open_artifact(file) as source:
        assert verify(source) == []


@pytest.mark.parametrize(
    "huge",
    [
        {"shape": [2**40, 2**20]},
        {"shape": [2**63]},
        {"shape": [2**16] * 3, "bytes": 2**48},
        {"bytes": 2**63},
        {"offset": 2**62},
        {"shape": [1, 2**60]},
        {"shape": [2**60, 1]},
    ],
)
@pytest.mark.parametrize("index", [2, 6, 7, 8])
def test_huge_declarations(
    image: Image, frame: Callable[..., bytes], tmp_path: Path, huge: dict[str, Any], index: int
) -> None:
    root = copy.deepcopy(image[0])
    root["objects"][index].update(huge)
    root["bindings"] = {"a": {"object": root["objects"][index]["id"]}}
    root["uses"] = []
    file = tmp_path / "entry.ninfer"
    for payload_bytes in (len(image[1]), 2**64 - 1):
        root["files"][0]["payload_bytes"] = payload_bytes
        file.write_bytes(frame(json.dumps(root), image[1]))
        use_all_of(file)
