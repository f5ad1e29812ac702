"""Encoders and decoders against step-by-step NumPy oracles, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.artifact import FORMATS, decode, encode, encode_rows, geometry, nvfp4_divisor, plane_view, unswizzle_scales
from ninfer.artifact.decoding import decode_elements, grouped_codes
from ninfer.artifact.formats import E2M1, E4M3, f32_to_bf16
from ninfer.errors import ArtifactError

GROUPED = [f for f, record in FORMATS.items() if record.kind == "grouped"]
MATRIX = [*GROUPED, "fp8_e4m3fn_row_bf16", "nvfp4"]
F32 = np.float32


def awkward(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Rows of every magnitude that can be encoded, with zeros, negative zeros, exact ties, subnormals and outliers."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, columns)) * 2.0 ** rng.integers(-160, 10, (rows, 1))
    x[rng.random(x.shape) < 0.1] = 0.0
    x[rng.random(x.shape) < 0.05] = -0.0
    ties = rng.random(rows) < 0.3
    x[ties] = (rng.integers(-63, 64, x.shape) / 2.0 * 2.0 ** rng.integers(-30, 3, (rows, 1)))[ties]
    x[rng.random(x.shape) < 0.01] *= 40
    x[:: max(1, rows // 7)] = 0.0
    return x.astype(F32)


def nearest(table: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The index of the value of an ascending table nearest to each, ties to the even index; float64 throughout."""
    t, v = table.astype(np.float64), values.astype(np.float64)
    upper = np.clip(np.searchsorted(t, v), 1, len(t) - 1)
    below, above = v - t[upper - 1], t[upper] - v
    take_lower = (below < above) | ((below == above) & ((upper - 1) % 2 == 0))
    return np.where(take_lower, upper - 1, upper)


@pytest.mark.parametrize("format", GROUPED)
@pytest.mark.parametrize("columns", [1, 64, 130, 200, 512])
def test_grouped_encoder(format: str, columns: int) -> None:
    f = FORMATS[format]
    x = awkward(300, columns)
    g = geometry(format, None, x.shape)
    data = encode(format, x)
    padded = np.zeros((300, g.groups * f.group), F32)
    padded[:, :columns] = x
    lanes = padded.reshape(300, g.groups, f.group)
    largest = np.abs(lanes).max(-1)
    scale = (largest / F32(f.qmax)).astype(np.float16)
    scale = np.where((scale == 0) & (largest > 0), np.float16(2.0**-24), scale)
    with np.errstate(divide="ignore", invalid="ignore"):
        inverse = F32(1) / scale.astype(F32)
        codes = np.clip(np.rint(lanes * inverse[..., None]), f.qmin, f.qmax)
    codes[largest == 0] = 0
    assert g.scales is not None
    assert np.array_equal(plane_view(data, g.scales, None, "<f2"), scale)
    assert np.array_equal(grouped_codes(g, data, slice(0, 300)), codes)
    expected = (codes.astype(F32) * scale.astype(F32)[..., None]).reshape(300, -1)[:, :columns]
    assert np.array_equal(decode(format, data, x.shape), expected)


def test_fp8_encoder() -> None:
    x = awkward(400, 150)
    data = encode("fp8_e4m3fn_row_bf16", x)
    rounded = (f32_to_bf16(x).astype(np.uint32) << 16).view(F32)
    largest = np.abs(rounded).max(-1, keepdims=True)
    word = f32_to_bf16(largest / F32(448))
    word[(word == 0) & (largest > 0)] = 1
    scale = (word.astype(np.uint32) << 16).view(F32)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        inverse = F32(1) / scale
        scaled = np.clip(np.where(np.isinf(inverse), rounded / scale, rounded * inverse), -448, 448)
    assert np.isinf(inverse[largest > 0]).any()
    codes = nearest(E4M3[:127], np.abs(scaled)) | np.signbit(scaled) * 128
    codes[largest[:, 0] == 0] = 0
    assert np.array_equal(data[: x.size].reshape(x.shape), codes)
    assert np.array_equal(data[geometry("fp8_e4m3fn_row_bf16", None, x.shape).nbytes - 800 :].view("<u2"), word[:, 0])
    expected = E4M3[codes] * (word.astype(np.uint32) << 16).view(F32)
    assert np.array_equal(decode("fp8_e4m3fn_row_bf16", data, x.shape), expected)


def test_nvfp4_encoder() -> None:
    x = awkward(256, 192)
    x[5] = 0.0
    data, g = encode("nvfp4", x), geometry("nvfp4", None, x.shape)
    divisor = F32(2688.0 / np.abs(x).max())
    assert data[-4:].view("<f4")[0] == divisor
    groups = x.reshape(256, 12, 16)
    largest = np.abs(groups).max(-1)
    scale = nearest(E4M3[:127], np.minimum(largest * divisor / F32(6), F32(448)))
    scale[(scale == 0) & (largest > 0)] = 1
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = groups * divisor / E4M3[scale][..., None]
    scaled[scale == 0] = 0.0
    codes = (nearest(E2M1[:8], np.minimum(np.abs(scaled), 6)) | np.signbit(scaled) * 8).reshape(256, 192)
    assert g.scales is not None
    assert np.array_equal(unswizzle_scales(data[g.scales.offset : -4], 256, 12), scale)
    assert np.array_equal(data[: x.size // 2].reshape(256, 96), codes[:, 0::2] | codes[:, 1::2] << 4)
    expected = E2M1[codes] * np.repeat(E4M3[scale], 16, 1) / divisor
    assert np.array_equal(decode("nvfp4", data, x.shape), expected)


def test_e4m3_and_e2m1_values() -> None:
    assert E4M3[[0x01, 0x07, 0x08, 0x38, 0x7E, 0xFE]].tolist() == [2.0**-9, 7 * 2.0**-9, 2.0**-6, 1.0, 448.0, -448.0]
    assert np.isnan(E4M3[[0x7F, 0xFF]]).all()
    assert np.count_nonzero(np.isnan(E4M3)) == 2
    assert all(a < b for a, b in pairwise(E4M3[:127].tolist()))
    assert np.signbit(E4M3[0x80])
    assert E2M1[:8].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert np.signbit(E2M1[8])


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_bf16_rounds_to_nearest_even(words: list[int]) -> None:
    import torch

    x = np.array(words, np.uint32).view(F32)
    ours = f32_to_bf16(x)
    theirs = torch.from_numpy(x.copy()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    finite = ~np.isnan(x)
    assert np.array_equal(ours[finite], theirs[finite])
    back = (ours[~finite].astype(np.uint32) << 16).view(F32)
    assert np.isnan(back).all()
    assert np.array_equal(np.signbit(back), np.signbit(x[~finite]))


def test_direct_formats_keep_every_bit() -> None:
    words = np.random.default_rng(0).integers(0, 2**32, (3, 50), dtype=np.uint32)
    words[0, :4] = [0x7F800001, 0xFFC00000, 0x80000000, 0x7F800000]
    x = words.view(F32)
    assert np.array_equal(decode("fp32", encode("fp32", x), x.shape).view(np.uint32), words)
    top = (words & np.uint32(0xFFFF0000)).view(F32)
    quiet = ~np.isnan(top)  # a signalling NaN is not a value that arithmetic can pass on
    assert np.array_equal(decode("bf16", encode("bf16", top), top.shape)[quiet], top[quiet])
    ints = words.view(np.int32)
    assert np.array_equal(decode("int32", encode("int32", ints), ints.shape), ints)


@pytest.mark.parametrize("format", MATRIX)
@pytest.mark.parametrize("block", [128, 256])
def test_row_blocks_give_the_same_bytes(format: str, block: int) -> None:
    x = awkward(640, 192)
    g = geometry(format, None, x.shape)
    divisor = nvfp4_divisor(float(np.abs(x).max())) if format == "nvfp4" else None
    data = np.zeros(g.nbytes, np.uint8)
    written = np.zeros(g.nbytes, np.uint8)
    for first in range(0, 640, block):
        for offset, chunk in encode_rows(g, first, x[first : first + block], divisor=divisor):
            data[offset : offset + chunk.size] = chunk
            written[offset : offset + chunk.size] += 1
    assert np.array_equal(data, encode(format, x))
    assert written.max() == 1
    assert written.sum() == sum(plane.nbytes for plane in g.planes())


def test_direct_blocks_give_the_same_bytes() -> None:
    x = awkward(4, 100)
    g, data = geometry("bf16", None, x.shape), np.zeros(800, np.uint8)
    for first in range(0, 400, 70):
        for offset, chunk in encode_rows(g, first, x.reshape(-1)[first : first + 70]):
            data[offset : offset + chunk.size] = chunk
    assert np.array_equal(data, encode("bf16", x))


@pytest.mark.parametrize("format", MATRIX)
@given(data=st.data())
def test_any_range_decodes_as_the_whole_does(format: str, data: st.DataObject) -> None:
    shape = (256, 64) if format == "nvfp4" else (37, 70)
    stored, g = encode(format, awkward(*shape)), geometry(format, None, shape)
    whole = decode(format, stored, shape)
    begin = data.draw(st.integers(0, g.elements - 1))
    end = data.draw(st.integers(begin + 1, g.elements))
    assert np.array_equal(decode_elements(g, stored, begin, end), whole.reshape(-1)[begin:end])
    first = data.draw(st.integers(0, shape[0]))
    last = data.draw(st.integers(first, shape[0]))
    assert np.array_equal(decode(format, stored, shape, slice(first, last)), whole[first:last])


def test_decoding_in_several_blocks() -> None:
    x = awkward(1500, 1100)
    for format in ("q5_g64_fp16", "fp8_e4m3fn_row_bf16"):
        stored = encode(format, x)
        whole = decode(format, stored, x.shape)
        pieces = [decode(format, stored, x.shape, slice(r, r + 100)) for r in range(0, 1500, 100)]
        assert np.array_equal(whole, np.concatenate(pieces))


@pytest.mark.parametrize("format", MATRIX)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_input_is_refused(format: str, value: float) -> None:
    x = awkward(128, 64)
    x[3, 5] = value
    with pytest.raises(ArtifactError) as caught:
        encode(format, x)
    assert format == "nvfp4" or caught.value.where == "values[3, 5]"


def test_nvfp4_names_the_element_when_the_divisor_is_given() -> None:
    x = np.ones((256, 64), F32)
    x[130, 5] = np.nan
    with pytest.raises(ArtifactError, match="not finite") as caught:
        list(encode_rows(geometry("nvfp4", None, x.shape), 128, x[128:], divisor=F32(1)))
    assert caught.value.where == "values[130, 5]"


@pytest.mark.parametrize(
    ("call", "where"),
    [
        (lambda: encode("q4_g64_fp16", np.full((2, 64), 3e38, F32)), "values[0]"),
        (lambda: encode("fp8_e4m3fn_row_bf16", np.full((2, 64), 3.4e38, F32)), "values[0]"),
        (lambda: encode("q4_g64_fp16", np.zeros(64, F32)), "shape"),
        (lambda: encode("nvfp4", np.zeros((100, 64), F32)), "shape"),
        (lambda: encode("nvfp4", np.zeros((128, 96), F32)), "shape"),
        (lambda: encode("q4_g64_fp16", np.zeros((0, 64), F32)), "shape"),
        (lambda: encode("bf16", np.zeros((2, 0), F32)), "shape"),
        (lambda: geometry("bf16", None, (1,) * 17), "shape"),
        (lambda: encode("q3", np.zeros((1, 64), F32)), "format"),
        (lambda: encode("int32", np.zeros(3)), "values"),
        (lambda: encode("int32", np.array([0, 2**31])), "values[1]"),
        (lambda: geometry("bf16", "row_scale_v1", (2,)), "layout"),
        (lambda: geometry("bf16", "gguf_blocks_v1", (2,)), "layout"),
        (lambda: geometry("fp32", None, (2**63,)), "bytes"),
        (lambda: decode("bf16", np.zeros(6, np.uint8), (2,)), "bytes"),
        (lambda: list(encode_rows(geometry("nvfp4", None, (256, 64)), 64, np.zeros((128, 64)))), "values"),
        (lambda: list(encode_rows(geometry("q4_g64_fp16", None, (4, 64)), 2, np.zeros((3, 64)))), "values"),
    ],
)  # fmt: skip
def test_refusals(call: Callable[[], object], where: str) -> None:
    with pytest.raises(ArtifactError) as caught:
        call()
    assert caught.value.where == where
