"""Published byte sequences, sizes and hashes of the container's formats, layouts and framing."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from ninfer.artifact import (
    Artifact,
    decode,
    encode,
    geometry,
    open_artifact,
    plane_view,
    swizzle_scales,
    unswizzle_scales,
)
from ninfer.artifact.framing import split_payload
from ninfer.artifact.layouts import Geometry, Plane

GROUPED = {"q4_g64_fp16": 4, "q5_g64_fp16": 5, "q6_g64_fp16": 6, "q8_g32_fp16": 8}
TEXT = (
    '{"components":{"text":{"config":{},"resources":{"chat_template.jinja":"r"}}},"objects":[{"id":"r","kind":"resource",'
    '"encoding":"raw_bytes_v1","offset":0,"bytes":5},{"id":"w","kind":"tensor","shape":[2,2],"format":"bf16",'
    '"layout":"contiguous_le_v1","offset":256,"bytes":8},{"id":"s","kind":"tensor","shape":[],"format":"fp32",'
    '"layout":"contiguous_le_v1","offset":512,"bytes":4}],"bindings":{"text/a":{"object":"w"},"text/b":{"parts":['
    '{"object":"w","range":[2,4]},{"object":"w","range":[0,2]}]}},"uses":[{"parameter":"text/a","input":"text/x",'
    '"activation_policy":"AllowA4","auxiliaries":{"activation_input_divisor":{"object":"s"}}}],"files":[{"path":null,'
    '"payload_bytes":516}]}'
)


def sha256(data: bytes | np.ndarray) -> str:
    return hashlib.sha256(bytes(data)).hexdigest()


def test_whole_file(tmp_path: Path) -> None:
    assert len(TEXT) == 675
    header = bytes.fromhex("4e494e4645520003e00f000000000000000102030405060708090a0b0c0d0e0f")
    words = np.array([0x0000, 0x8000, 0x3F80, 0x7FC1], "<u2").tobytes()
    payload = b"hello" + bytes(251) + words + bytes(248) + np.array([2.0], "<f4").tobytes()
    whole = header + TEXT.encode().ljust(4064) + payload
    assert len(whole) == 4612
    assert sha256(whole) == "037403a3bb3838872c3f1d43b4cdff9a69e19d2a0f36b52d0ee9e27bd5f31cdf"
    path = tmp_path / "golden.ninfer"
    path.write_bytes(whole)
    with open_artifact(path) as source:
        artifact = Artifact(source)
        assert source.directory.artifact_id == "000102030405060708090a0b0c0d0e0f"
        assert artifact.resource("text", "chat_template.jinja") == b"hello"
        assert artifact.decode("text/b").view(np.uint32).tolist() == [0x3F800000, 0x7FC10000, 0, 0x80000000]
        use = source.directory.uses["text/a", "text/x"]
        assert artifact.decode(use.auxiliaries["activation_input_divisor"]) == 2.0
        assert artifact.decode("text/a").shape == (2, 2)


@pytest.mark.parametrize(
    ("format", "columns", "scale", "codes", "start", "end", "high", "digest"),
    [
        ("q4_g64_fp16", 64, 0x3092, [7, -4, 2, -7], "c702", "90", "",
         "e952a0485a63dceeec41502cf9354c89dd422477b815fde34c8139d47ef11922"),
        ("q5_g64_fp16", 64, 0x2C44, [15, -8, 4, -15], "8f04", "10", "0200000000000080",
         "03602f2afe6f31532053f85cc1e327951aab60a84a08f35977f5e3dac23fb51f"),
        ("q6_g64_fp16", 64, 0x2821, [31, -16, 8, -31], "0f08", "10", "0d000000000000000000000000000080",
         "c7cc30f049e09424b61721ccd200551ca52e30986cf186d0fbb40b5f4bafd100"),
        ("q8_g32_fp16", 32, 0x2008, [127, -64, 32, -127], "7fc020", "81", "",
         "bc50ddffd5d9b24ad0fc834c3fb9d751eb3c4ddcfe85a8f728bd352b2ef0fcc1"),
    ],
)  # fmt: skip
def test_grouped_encoder(
    format: str, columns: int, scale: int, codes: list[int], start: str, end: str, high: str, digest: str
) -> None:
    values = np.zeros((1, columns), np.float32)
    values[0, [0, 1, 2, -1]] = [1, -0.5, 0.25, -1]
    data = encode(format, values)
    g = geometry(format, None, values.shape)
    assert g.scales is not None
    assert data[:32].tobytes().hex().startswith(start)
    assert data[31:32].tobytes().hex() == end
    if g.high is not None:
        assert data[256:].tobytes().hex().startswith(high + "00" * (len(high) // 2))
    assert plane_view(data, g.scales, None, "<u2")[0, 0] == scale
    assert sha256(data) == digest
    multiplier = np.array([scale], np.uint16).view(np.float16).astype(np.float32)
    assert decode(format, data, values.shape)[0, [0, 1, 2, -1]].tolist() == (multiplier * codes).tolist()


@pytest.mark.parametrize(
    ("format", "bits", "starts", "digest"),
    [
        ("q5_g64_fp16", 5, ("50fa943ed8721cb6", "8fe3701c8fe3701c"),
         "46cc6273931b91f231b68220cb6e25ff0e2b80ebd9322cb233b53c6f554f3c93"),
        ("q6_g64_fp16", 6, ("50fa943ed8721cb6", "aa3f50a9ff40a5fe0095fa0355ea0f54"),
         "5a1516d26bfdfef0f62b046559c5620f0cbffdf85e233a7bf9522048576dda1f"),
    ],
)  # fmt: skip
def test_grouped_layout(format: str, bits: int, starts: tuple[str, str], digest: str) -> None:
    """A matrix whose encoding has the published codes: the encoder inverts the decoder on them."""
    rows, columns = np.arange(2)[:, None], np.arange(130)
    codes = (7 * rows + 5 * columns) % (1 << bits) - (1 << (bits - 1))
    scales = 2.0 ** -(rows + columns // 64)
    data = _stored(format, codes, scales)
    assert data.nbytes == 528
    assert data.tobytes().hex().startswith(starts[0])
    assert data[256:].tobytes().hex().startswith(starts[1])
    assert data[512:].tobytes().hex() == "003c0038003400000038003400300000"
    assert sha256(data) == digest
    assert np.array_equal(decode(format, data, (2, 130)), codes * scales)


def _stored(format: str, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """A grouped object written bit by bit, straight from the layout's definition."""
    bits, (rows, columns) = GROUPED[format], codes.shape
    g = geometry(format, None, codes.shape)
    assert g.scales is not None
    data = np.zeros(g.nbytes, np.uint8)
    group = 32 if bits == 8 else 64
    for n in range(rows):
        for k in range(columns):
            u, lane, index = int(codes[n, k]) % (1 << bits), k % group, n * g.groups + k // group
            if bits == 8:
                data[index * 32 + lane] = u
            else:
                data[index * 32 + lane // 2] |= (u & 15) << (4 * (lane % 2))
            for extra in range(bits - 4 if bits in (5, 6) else 0):
                assert g.high is not None
                t = lane * (bits - 4) + extra
                high_per_group = 8 * (bits - 4)
                data[g.high.offset + index * high_per_group + t // 8] |= (u >> (4 + extra) & 1) << (t % 8)
            at = g.scales.offset + 2 * index
            data[at : at + 2] = np.array([scales[n, k]], "<f2").view(np.uint8)
    return data


def test_fp8_row() -> None:
    data = encode("fp8_e4m3fn_row_bf16", np.array([[1, -0.5, 0], [0, -0.0, 0]], np.float32))
    assert data.nbytes == 260
    assert data[:6].tobytes().hex() == "7ef600000000"
    assert data[256:].view("<u2").tolist() == [0x3B12, 0]
    assert sha256(data) == "7e6beddad0b6c8e8c00aa93e1a48726f7b34232d6946d5efe87f9425048ac25a"


def test_nvfp4_layout() -> None:
    rows, groups = np.arange(256)[:, None], np.arange(8)
    natural = ((31 * rows + 7 * groups) & 0x7E).astype(np.uint8)
    codes = (13 * np.arange(256 * 64) & 255).astype(np.uint8)
    data = np.concatenate([codes, swizzle_scales(natural), np.array([2.0], "<f4").view(np.uint8)])
    assert data.nbytes == 18_436 == geometry("nvfp4", None, (256, 128)).nbytes
    assert data[16384:16400].tobytes().hex() == "00060e1460666e7440464e5420262e34"
    assert sha256(data) == "bf9209e66dd58b5f8fd7df57f8f736535bfabeba84854c7d6e4c396cbf3f79b3"
    assert np.array_equal(unswizzle_scales(data[16384:-4], 256, 8), natural)


def test_nvfp4_scale_places() -> None:
    spots = {(0, 0): 0, (0, 3): 3, (0, 4): 512, (1, 0): 16, (31, 0): 496, (32, 0): 4, (96, 3): 15}
    for (row, group), place in (spots | {(127, 7): 1023, (128, 0): 1024, (255, 7): 2047}).items():
        natural = np.zeros((256, 8), np.uint8)
        natural[row, group] = 1
        assert int(np.flatnonzero(swizzle_scales(natural))[0]) == place


def test_nvfp4_encoder() -> None:
    values = np.zeros((128, 64), np.float32)
    values[0, :6] = [1, -0.5, 0.25, 0.1, -0.05, 0.01]
    values[0, 16:19] = [0.3, -0.2, 0.0125]
    data = encode("nvfp4", values)
    assert data[-4:].tobytes() == bytes.fromhex("00002845")
    assert data[:16].tobytes().hex() == "d713090000000000e701000000000000"
    assert unswizzle_scales(data[4096:-4], 128, 4)[0].tolist() == [0x7E, 0x70, 0, 0]


@pytest.mark.parametrize(
    ("format", "shape", "groups", "base", "high", "scale", "total"),
    [
        ("q5_g64_fp16", (2, 130), 4, 256, 64, 16, 528),
        ("q4_g64_fp16", (7168, 5120), 80, 18_350_080, 0, 1_146_880, 19_496_960),
        ("q5_g64_fp16", (7168, 5120), 80, 18_350_080, 4_587_520, 1_146_880, 24_084_480),
        ("q5_g64_fp16", (1152, 4304), 68, 2_506_752, 626_688, 156_672, 3_290_112),
        ("q8_g32_fp16", (5120, 10240), 320, 52_428_800, 0, 3_276_800, 55_705_600),
        ("q4_g64_fp16", (131072, 5120), 80, 335_544_320, 0, 20_971_520, 356_515_840),
        ("fp8_e4m3fn_row_bf16", (14336, 5120), 1, 73_400_320, 0, 28_672, 73_428_992),
        ("nvfp4", (14336, 5120), 320, 36_700_160, 0, 4_587_520, 41_287_684),
        ("nvfp4", (34816, 5120), 320, 89_128_960, 0, 11_141_120, 100_270_084),
    ],
)
def test_sizes(format: str, shape: tuple[int, int], groups: int, base: int, high: int, scale: int, total: int) -> None:
    g = geometry(format, None, shape)
    assert (g.groups, g.codes.nbytes, g.high.nbytes if g.high else 0, g.nbytes) == (groups, base, high, total)
    assert g.scales is not None
    assert g.scales.nbytes == scale


def test_direct_bytes() -> None:
    words = np.array([0x0000, 0x8000, 0x3F80, 0x7FC1], np.uint32) << np.uint32(16)
    assert encode("bf16", words.view(np.float32).reshape(2, 2)).tobytes().hex() == "00000080803fc17f"
    assert encode("fp32", np.array(2.0, np.float32)).tobytes().hex() == "00000040"
    assert geometry("bf16", None, ()) == Geometry(
        geometry("bf16", None, ()).format, (), 1, 1, 0, Plane(0, 2, 2), None, None, None, 2
    )


def test_split() -> None:
    assert split_payload(140_246_016, 65_536, 64_000_000) == [63_934_464, 63_995_904, 12_315_648]
    assert split_payload(27_610, 4096, 12_288) == [8192, 8192, 8192, 3034]
    assert split_payload(27_610, 4096, 27_610 + 4096) == [27_610]
    assert split_payload(16_384, 4096, 12_288) == [8192, 8192]


def test_text_is_the_writers_spelling_of_itself() -> None:
    """The published directory survives parse and serialise, up to member order."""
    from ninfer.artifact.directory import to_json
    from ninfer.artifact.parsing import parse_directory

    root = json.loads(TEXT)
    parsed = parse_directory(root, entry_name="x", artifact_id="")
    assert to_json(parsed) == root | {"metadata": {}, "provenance": {}}
