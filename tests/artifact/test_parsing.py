"""Every refusal of the directory names its place; what is merely unusual opens."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ninfer.artifact import Artifact, open_artifact
from ninfer.artifact.jsontext import parse_json
from ninfer.artifact.parsing import parse_directory
from ninfer.errors import ArtifactError

DELETE = object()


def named(value: Any) -> str:
    return "deleted" if value is DELETE else str(value)[:40]


Image = tuple[dict[str, Any], bytes]
T = ["components", "text"]


def edit(root: Any, path: list[Any], value: Any) -> None:
    for step in path[:-1]:
        root = root[step]
    if value is DELETE:
        del root[path[-1]]
    else:
        root[path[-1]] = value


REFUSED: list[tuple[list[Any], Any, str]] = [
    (["extra"], 1, "directory"),
    (["components"], DELETE, "directory"),
    (["objects"], DELETE, "directory"),
    (["bindings"], DELETE, "directory"),
    (["uses"], DELETE, "directory"),
    (["files"], DELETE, "directory"),
    (["files"], [], "files"),
    (["files"], {}, "files"),
    (["files", 0], 1, "files[0]"),
    (["files", 0, "path"], "x", "files[0].path"),
    (["files", 0, "path"], DELETE, "files[0]"),
    (["files", 0, "size"], 1, "files[0]"),
    (["files", 0, "payload_bytes"], 0, "files[0].payload_bytes"),
    (["files", 0, "payload_bytes"], True, "files[0].payload_bytes"),
    (["files", 0, "payload_bytes"], 1.0, "files[0].payload_bytes"),
    (["files", 0, "payload_bytes"], 2**64, "files[0].payload_bytes"),
    (["files"], [{"path": None, "payload_bytes": 2**64 - 1}, {"path": "b", "payload_bytes": 1}], "files"),
    *(
        (["files"], [{"path": None, "payload_bytes": 1}, {"path": p, "payload_bytes": 1}], "files[1].path")
        for p in (None, "", "a/b", "a\\b", ".", "..", "entry.ninfer", "a\0", 3)
    ),
    (["files"], [{"path": p, "payload_bytes": 1} for p in (None, "b", "b")], "files[2].path"),
    (["objects"], [], "objects"),
    (["objects", 2, "kind"], "blob", "objects[2].kind"),
    (["objects", 2, "kind"], DELETE, "objects[2].kind"),
    (["objects", 2], None, "objects[2]"),
    (["objects", 2, "encoding"], "raw_bytes_v1", "objects[2]"),
    (["objects", 0, "shape"], [1], "objects[0]"),
    (["objects", 3, "id"], "weight/000000", "objects[3].id"),
    (["objects", 3, "id"], "resource/text/tokenizer.json", "objects[3].id"),
    (["objects", 2, "id"], "", "objects[2].id"),
    (["objects", 2, "id"], 5, "objects[2].id"),
    (["objects", 2, "id"], "a\0b", "objects[2].id"),
    (["objects", 2, "format"], None, "objects[2].format"),
    (["objects", 2, "layout"], "", "objects[2].layout"),
    (["objects", 0, "encoding"], [], "objects[0].encoding"),
    (["objects", 2, "shape"], [1] * 17, "objects[2].shape"),
    (["objects", 2, "shape"], [0, 1], "objects[2].shape[0]"),
    (["objects", 2, "shape"], [1, -1], "objects[2].shape[1]"),
    (["objects", 2, "shape"], [1, 2.0], "objects[2].shape[1]"),
    (["objects", 2, "shape"], [2**32, 2**32], "objects[2].shape"),
    (["objects", 2, "shape"], 8, "objects[2].shape"),
    (["objects", 2, "offset"], -1, "objects[2].offset"),
    (["objects", 2, "offset"], 0, "objects[2].offset"),
    (["objects", 2, "offset"], False, "objects[2].offset"),
    (["objects", 3, "offset"], 256, "objects[3].offset"),
    (["objects", 2, "bytes"], 0, "objects[2].bytes"),
    (["objects", 2, "bytes"], 2**63, "objects[2].bytes"),
    (["objects", 2, "bytes"], 2**64, "objects[2].bytes"),
    (["components"], [], "components"),
    (["components", "text"], DELETE, "components"),
    (["components", ""], {"config": {}}, "components"),
    ([*T, "config"], DELETE, "components['text']"),
    ([*T, "config"], [], "components['text'].config"),
    ([*T, "other"], {}, "components['text']"),
    (["components", "vision", "target"], "audio", "components['vision'].target"),
    (["components", "vision", "target"], None, "components['vision'].target"),
    ([*T, "resources"], [], "components['text'].resources"),
    ([*T, "resources", "r"], "weight/000000", "components['text'].resources['r']"),
    ([*T, "resources", "r"], "nothing", "components['text'].resources['r']"),
    ([*T, "resources", "r"], 1, "components['text'].resources['r']"),
    (["components", "vision", "proposal"], {"domain": "full"}, "components['vision'].proposal"),
    *(
        ([*T, "proposal"], value, "components['text'].proposal" + suffix)
        for value, suffix in [
            ({"domain": "full", "rows": 3}, ""), ({"domain": "indexed"}, ""), ({"domain": "half"}, ""),
            ({"domain": "indexed", "rows": 0}, ".rows"), ({}, ""), (None, ""), ({"domain": "full", "x": 1}, ""),
        ]
    ),
    (["bindings"], [], "bindings"),
    (["bindings", ""], {"object": "weight/000000"}, "bindings"),
    *(
        (["bindings", "a"], value, "bindings['a']" + suffix)
        for value, suffix in [
            ({}, ""), (None, ""), ({"object": "weight/000000", "parts": []}, ""), ({"x": 1}, ""),
            ({"parts": []}, ".parts"), ({"parts": {}}, ".parts"), ({"object": "nothing"}, ".object"),
            ({"object": "resource/text/tokenizer.json"}, ".object"), ({"object": None}, ".object"),
            ({"parts": [1]}, ".parts[0]"), ({"parts": [{"object": "weight/000000"}]}, ".parts[0]"),
            ({"parts": [{"object": "nothing", "range": [0, 1]}]}, ".parts[0].object"),
        ]
    ),
    *(
        (["bindings", "a"], {"parts": [{"object": "weight/000000", "range": span}]}, "bindings['a'].parts[0].range")
        for span in ([1, 1], [2, 1], [-1, 1], [0, 1041], [0], [0, 1, 2], [0, 1.0], [False, 1], "01", None, [0, 2**70])
    ),
    (["uses"], {}, "uses"),
    (["uses", 0], "x", "uses[0]"),
    (["uses", 0, "parameter"], "unbound", "uses[0].parameter"),
    (["uses", 0, "parameter"], ["a"], "uses[0].parameter"),
    (["uses", 0, "input"], "", "uses[0].input"),
    (["uses", 0, "input"], DELETE, "uses[0]"),
    (["uses", 0, "policy"], "A16Only", "uses[0]"),
    (["uses", 0, "activation_policy"], "A8Only", "uses[0].activation_policy"),
    (["uses", 0, "activation_policy"], None, "uses[0].activation_policy"),
    (["uses", 0, "activation_policy"], [], "uses[0].activation_policy"),
    (["uses", 0, "auxiliaries"], [], "uses[0].auxiliaries"),
    (["uses", 0, "auxiliaries", "x"], {"object": "no"}, "uses[0].auxiliaries['x'].object"),
    (["uses", 1], {"parameter": "text/gate", "input": "text/in"}, "uses[1]"),
    (["metadata"], [], "metadata"),
    (["metadata", "name"], "", "metadata.name"),
    (["metadata", "name"], 1, "metadata.name"),
    (["provenance"], None, "provenance"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value", "where"), REFUSED, ids=named)
def test_refused(image: Image, path: list[Any], value: Any, where: str) -> None:
    root = copy.deepcopy(image[0])
    edit(root, path, value)
    with pytest.raises(ArtifactError) as caught:
        parse_directory(root, entry_name="entry.ninfer", artifact_id="")
    assert caught.value.where == where


ACCEPTED: list[tuple[list[Any], Any]] = [
    (["metadata"], DELETE),
    (["provenance"], DELETE),
    (["bindings", "unknown/parameter"], {"parts": [{"object": "weight/000000", "range": [1, 4]}] * 3}),
    (["components", "audio"], {"config": {"any": [None]}, "target": "vision"}),
    (["components", "text", "proposal"], {"domain": "full"}),
    (["objects", 2, "format"], "t2_g128_fp16"),
    (["objects", 2, "layout"], "of the future"),
    (["objects", 0, "encoding"], "zstd"),
    (["objects", 2, "shape"], [1040]),
    (["uses", 0, "activation_policy"], DELETE),
    (["uses", 0, "auxiliaries", "hadamard_signs"], {"object": "weight/000006"}),
    (["metadata"], {"name": "x", "other": {"deep": [1e-6]}}),
]


@pytest.mark.parametrize(("path", "value"), ACCEPTED, ids=named)
def test_opens(image: Image, frame: Callable[..., bytes], tmp_path: Path, path: list[Any], value: Any) -> None:
    root = copy.deepcopy(image[0])
    edit(root, path, value)
    file = tmp_path / "entry.ninfer"
    file.write_bytes(frame(json.dumps(root), image[1]))
    with open_artifact(file) as source:
        assert Artifact(source).decode("text/norm").shape == (130,)


@pytest.mark.parametrize(
    ("index", "member", "value", "where"),
    [
        (2, "format", "t2_g128_fp16", "objects['weight/000000'].format"),
        (2, "layout", "of the future", "objects['weight/000000'].layout"),
        (2, "layout", "row_scale_v1", "objects['weight/000000'].layout"),
        (2, "shape", [8, 13, 10], "objects['weight/000000'].shape"),
        (2, "shape", [8, 512], "objects['weight/000000'].bytes"),
        (2, "bytes", 1000, "objects['weight/000000'].bytes"),
        (2, "offset", 257, "objects['weight/000000'].offset"),
    ],
)
def test_refused_when_first_used(
    image: Image, frame: Callable[..., bytes], tmp_path: Path, index: int, member: str, value: Any, where: str
) -> None:
    root = copy.deepcopy(image[0])
    root["objects"][index][member] = value
    file = tmp_path / "entry.ninfer"
    file.write_bytes(frame(json.dumps(root), image[1]))
    with open_artifact(file) as source:
        artifact = Artifact(source)
        artifact.decode("text/up")
        with pytest.raises(ArtifactError) as caught:
            artifact.parts("text/query")
        assert (caught.value.path, caught.value.where) == ("entry.ninfer", where)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b'{"a":1,"a":2}', "duplicate member 'a'"),
        (b'[[{"x":{"b":1,"c":2,"b":1}}]]', "duplicate member 'b'"),
        (b"\xef\xbb\xbf{}", "byte-order mark"),
        (b"{} x", "Extra data"),
        (b"{}{}", "Extra data"),
        (b"", "Expecting value"),
        (b"[NaN]", "NaN"),
        (b"[-Infinity]", "Infinity"),
        (b"[1e999]", "out of range"),
        (b'["\\ud800"]', "lone surrogate"),
        (b'[{"\\udc00x":[1]}]', "lone surrogate"),
        (b'{"a":"\xff"}', "utf-8"),
        (b'{"a":"\xed\xa0\x80"}', "utf-8"),
        (b'["\n"]', "control character"),
        (b"[" * 100_000, "too deeply"),
        (b'{"a":' * 100_000, "too deeply"),
        (b"[1" + b"0" * 5000 + b"]", "digits"),
        (b"[01]", "delimiter"),
        (b"{'a':1}", "property name"),
    ],
)
def test_json_refusals(text: bytes, reason: str, frame: Callable[..., bytes], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_json(text)
    if text:
        file = tmp_path / "entry.ninfer"
        file.write_bytes(frame(text, b"\0" * 8))
        with pytest.raises(ArtifactError) as caught:
            open_artifact(file)
        assert caught.value.where == "directory"


def test_json_kept() -> None:
    assert parse_json(b' {"\\ud83d\\ude00": [1, -0, 1e-06, 123456789012345678901234567890]}  \n') == {
        "\U0001f600": [1, 0, 1e-06, 123456789012345678901234567890]
    }
