"""Each thing a producer must not write is found, named and placed; sound artifacts have no finding."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ninfer.artifact import Finding, geometry, open_artifact, verify

Image = tuple[dict[str, Any], bytes]
Q4, Q5, Q6, Q8, FP8, NVFP4 = (f"weight/{i:06d}" for i in range(6))


@pytest.fixture
def findings(image: Image, frame: Callable[..., bytes], tmp_path: Path) -> Callable[..., list[Finding]]:
    """Findings of the sample after ``patch(root, payload)`` has damaged it."""

    def check(patch: Callable[[dict[str, Any], np.ndarray], None]) -> list[Finding]:
        root, payload = copy.deepcopy(image[0]), np.frombuffer(image[1], np.uint8).copy()
        patch(root, payload)
        file = tmp_path / "entry.ninfer"
        file.write_bytes(frame(json.dumps(root), payload.tobytes()))
        with open_artifact(file) as source:
            return verify(source)

    return check


def place(root: dict[str, Any], object_id: str, plane: str) -> int:
    """Where a plane of an object starts in the payload."""
    record = next(o for o in root["objects"] if o["id"] == object_id)
    g = geometry(record["format"], record["layout"], tuple(record["shape"]))
    return int(record["offset"] + getattr(g, plane).offset)


BYTES = [
    (Q4, "scales", 0, b"\x00\x80", "1 scales [row, group] are negative or not finite, the first at [0, 0]"),
    (
        Q4,
        "scales",
        2 * (3 * 4 + 1),
        b"\x00\x7c",
        "1 scales [row, group] are negative or not finite, the first at [3, 1]",
    ),
    (Q4, "scales", 0, b"\xff\x7d", "1 scales [row, group] are negative or not finite, the first at [0, 0]"),
    (Q5, "scales", 2 * 4, b"\0\0", "1 groups [row, group] have codes under a zero scale, the first at [1, 0]"),
    (Q6, "high", 16, b"\1", "1 padding lanes [row, lane] are not zero, the first at [0, 64]"),
    (Q4, "codes", 32 * 2 + 1, b"\x10", "1 padding lanes [row, lane] are not zero, the first at [0, 131]"),
    (Q4, "scales", 2 * 3, b"\0\x3c", "1 scales [row, group] of padding are not zero, the first at [0, 3]"),
    (Q8, "codes", 33, b"\x80", "1 codes [row, group, lane] are -128, the first at [0, 1, 1]"),
    (Q5, "codes", 5 * 4 * 32, b"\7", "gap bytes 640..768 are not zero"),
    (FP8, "codes", 71, b"\x7f", "1 codes [row, column] are NaN, the first at [1, 1]"),
    (FP8, "codes", 71, b"\xff", "1 codes [row, column] are NaN, the first at [1, 1]"),
    (FP8, "scales", 2, b"\0\x80", "1 scales [row, 0] are negative or not finite, the first at [1, 0]"),
    (FP8, "scales", 2, b"\x80\x7f", "1 scales [row, 0] are negative or not finite, the first at [1, 0]"),
    (FP8, "scales", 4, b"\0\0", "1 rows [row, 0] have codes under a zero scale, the first at [2, 0]"),
    (NVFP4, "scales", 9, b"\x7f", "1 scale bytes [row, byte as stored] are negative or NaN, the first at [1, 1]"),
    (NVFP4, "scales", 9, b"\x80", "1 scale bytes [row, byte as stored] are negative or NaN, the first at [1, 1]"),
    (NVFP4, "divisor", 0, b"\0\0\0\0", "divisor 0.0 is not finite and positive"),
    (NVFP4, "divisor", 0, b"\0\0\x80\xbf", "divisor -1.0 is not finite and positive"),
    (NVFP4, "divisor", 0, b"\0\0\x80\x7f", "divisor inf is not finite and positive"),
]


@pytest.mark.parametrize(("object_id", "plane", "offset", "data", "message"), BYTES)
def test_bytes(
    findings: Callable[..., list[Finding]], object_id: str, plane: str, offset: int, data: bytes, message: str
) -> None:
    def patch(root: dict[str, Any], payload: np.ndarray) -> None:
        at = place(root, object_id, plane) + offset
        payload[at : at + len(data)] = np.frombuffer(data, np.uint8)

    assert findings(patch) == [Finding("error", f"objects[{object_id!r}]", message)]


def test_legal_zeros(findings: Callable[..., list[Finding]]) -> None:
    """Zero scales over zero codes, and negative zeros of row formats, are legal."""

    def patch(root: dict[str, Any], payload: np.ndarray) -> None:
        codes, scales = place(root, Q4, "codes"), place(root, Q4, "scales")
        payload[codes : codes + 32] = 0
        payload[scales : scales + 2] = 0
        codes, scales = place(root, FP8, "codes"), place(root, FP8, "scales")
        payload[codes : codes + 70] = 0x80
        payload[scales : scales + 2] = 0

    assert findings(patch) == []


USES: list[tuple[Callable[[dict[str, Any]], None], str, str, str]] = [
    (lambda r: r["uses"][0].pop("activation_policy"), "warning", "uses[0].activation_policy", "missing"),
    (lambda r: r["uses"][0].pop("auxiliaries"), "warning", "uses[0]", "without a divisor"),
    (lambda r: r["uses"][0]["auxiliaries"].update(x={"object": Q4}), "warning", "uses[0].auxiliaries['x']", "role"),
    (lambda r: r["objects"][0].update(encoding="zstd"), "error",
     "objects['resource/text/tokenizer.json'].encoding", "unknown encoding"),
    (lambda r: r["objects"][2].update(format="t2"), "error", "objects['weight/000000'].format", "unknown format"),
    (lambda r: r["objects"][2].update(shape=[8, 300]), "error", "objects['weight/000000'].bytes", "expected"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "severity", "where", "message"), USES)
def test_records(
    findings: Callable[..., list[Finding]],
    change: Callable[[dict[str, Any]], None],
    severity: str,
    where: str,
    message: str,
) -> None:
    (finding,) = findings(lambda root, payload: change(root))
    assert (finding.severity, finding.where) == (severity, where)
    assert message in finding.message


@pytest.mark.parametrize(
    ("binding", "message"),
    [
        ({"object": "weight/000006"}, "one fp32 element"),
        ({"object": "weight/000007"}, "one fp32 element"),
        ({"parts": [{"object": "weight/000007", "range": [2, 3]}]}, "is not finite and positive"),
        ({"parts": [{"object": "weight/000006", "range": [2, 3]}]}, "one fp32 element"),
    ],
)
def test_divisors(findings: Callable[..., list[Finding]], binding: dict[str, Any], message: str) -> None:
    def patch(root: dict[str, Any], payload: np.ndarray) -> None:
        root["uses"][0]["auxiliaries"]["activation_input_divisor"] = binding
        at = place(root, "weight/000007", "codes")
        payload[at : at + 28].view("<f4")[:] = -1

    (finding,) = findings(patch)
    assert (finding.severity, finding.where) == ("error", "uses[0].auxiliaries['activation_input_divisor']")
    assert message in finding.message


def test_gaps(findings: Callable[..., list[Finding]]) -> None:
    def patch(root: dict[str, Any], payload: np.ndarray) -> None:
        payload[root["objects"][2]["offset"] - 1] = 1

    (finding,) = findings(patch)
    assert (finding.severity, finding.where) == ("warning", "before objects['weight/000000']")


def test_unreadable_files_are_found(write_sample: Callable[..., Any], tmp_path: Path) -> None:
    write_sample(tmp_path / "entry.ninfer", max_file_bytes=12_288)
    (tmp_path / "entry.ninfer.part-0001").unlink()
    with open_artifact(tmp_path / "entry.ninfer") as source:
        found = verify(source)
        assert found
        assert all(f.severity == "error" for f in found)


def test_large_objects_are_checked_in_blocks(tmp_path: Path) -> None:
    """A fault beyond the first block of rows is counted and placed by its own row."""
    from ninfer.artifact import Component, encode, pack_members, plan_directory, write_artifact

    shape = (3000, 4096)
    spec, bindings = pack_members("w", "fp8_e4m3fn_row_bf16", [("text/a", shape)])
    directory = plan_directory(components={"text": Component({})}, objects=[spec], bindings=bindings)
    data = encode("fp8_e4m3fn_row_bf16", np.ones(shape, np.float32))
    data[2999 * 4096 + 7] = data[1500 * 4096] = 0x7F
    write_artifact(tmp_path / "a", directory, lambda _: [(0, data)])
    seen: list[int] = []
    with open_artifact(tmp_path / "a") as source:
        (finding,) = verify(source, progress=lambda name, done, total: seen.append(total - done))
    assert finding.message == "2 codes [row, column] are NaN, the first at [1500, 0]"
    assert seen == [0]
