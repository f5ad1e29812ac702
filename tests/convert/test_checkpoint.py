"""The safetensors reader: rows come out as they were written, damage is a ConversionError."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.convert.checkpoint import INDEX, Checkpoint
from ninfer.errors import ConversionError


def write(folder: Path, file: str, tensors: dict[str, np.ndarray]) -> None:
    from safetensors.numpy import save_file

    save_file(tensors, folder / file)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    write(tmp_path, "a.safetensors", {"x": rng.normal(size=(6, 4)).astype("f4"), "v": np.arange(5, dtype="f2")})
    write(tmp_path, "b.safetensors", {"bank": rng.normal(size=(2, 3, 4)).astype("f4")})
    (tmp_path / INDEX).write_text(
        json.dumps({"weight_map": {"x": "a.safetensors", "v": "a.safetensors", "bank": "b.safetensors"}})
    )
    return tmp_path


def test_rows(folder: Path) -> None:
    from safetensors.numpy import load_file

    with Checkpoint(folder) as checkpoint:
        assert {name: info.shape for name, info in checkpoint.tensors.items()} == {
            "x": (6, 4), "v": (5,), "bank": (2, 3, 4)
        }  # fmt: skip
        x, bank = load_file(folder / "a.safetensors")["x"], load_file(folder / "b.safetensors")["bank"]
        np.testing.assert_array_equal(checkpoint.rows(checkpoint.tensors["x"], 2, 5, 4), x[2:5])
        np.testing.assert_array_equal(checkpoint.rows(checkpoint.tensors["bank"], 2, 5, 4), bank.reshape(6, 4)[2:5])
        assert checkpoint.rows(checkpoint.tensors["v"], 1, 3, 1).tolist() == [[1.0], [2.0]]


def test_a_folder_without_an_index(folder: Path) -> None:
    (folder / INDEX).unlink()
    with Checkpoint(folder) as checkpoint:
        assert set(checkpoint.tensors) == {"x", "v", "bank"}
    write(folder, "c.safetensors", {"v": np.zeros(1, "f4")})
    with pytest.raises(ConversionError, match=r"^v: present in both a.safetensors and c.safetensors"):
        Checkpoint(folder)


@pytest.mark.parametrize(
    ("index", "blamed"),
    [
        ({"weight_map": {"x": "gone.safetensors"}}, "gone.safetensors"),
        ({"weight_map": {"y": "a.safetensors"}}, "y"),
        ({"weight_map": {"bank": "a.safetensors", "x": "b.safetensors"}}, "bank"),
        ({"weight_map": {"x": "../a.safetensors"}}, INDEX),
        ({"weight_map": {"x": 3}}, INDEX),
        ({"weight_map": {}}, INDEX),
        ([], INDEX),
    ],
)
def test_indexes_that_do_not_fit(folder: Path, index: Any, blamed: str) -> None:
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ConversionError) as caught:
        Checkpoint(folder)
    assert caught.value.tensor == blamed


def test_files_that_are_not_safetensors(folder: Path) -> None:
    whole = (folder / "b.safetensors").read_bytes()
    for content in (b"", b"\0" * 7, b"version https://git-lfs.github.com/spec/v1\n", whole[:40]):
        (folder / "b.safetensors").write_bytes(content)
        with pytest.raises(ConversionError) as caught:
            Checkpoint(folder)
        assert caught.value.tensor == "b.safetensors"
    (folder / "b.safetensors").write_bytes(whole[:-1])
    with pytest.raises(ConversionError, match=r"^bank: b.safetensors is cut short"):
        Checkpoint(folder)


def test_a_file_cut_while_it_is_read(folder: Path) -> None:
    with Checkpoint(folder) as checkpoint:
        (folder / "b.safetensors").write_bytes((folder / "b.safetensors").read_bytes()[:-8])
        with pytest.raises(ConversionError, match=r"^bank: b.safetensors ended"):
            checkpoint.rows(checkpoint.tensors["bank"], 0, 6, 4)


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConversionError):
        Checkpoint(tmp_path)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
)
_MEMBER = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "I64", "F4", ""]) | _JSON,
        "shape": st.lists(st.integers(-1, 9) | _JSON, max_size=3) | _JSON,
        "data_offsets": st.lists(st.integers(-1, 99) | _JSON, max_size=3) | _JSON,
    },
)


@given(header=st.dictionaries(st.text(max_size=8), _MEMBER, max_size=3) | _JSON, data=st.binary(max_size=100))
def test_any_header_opens_or_is_refused(tmp_path_factory: pytest.TempPathFactory, header: Any, data: bytes) -> None:
    folder = tmp_path_factory.mktemp("header")
    text = json.dumps(header).encode()
    (folder / "m.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    try:
        checkpoint = Checkpoint(folder)
    except ConversionError:
        return
    with checkpoint:
        for info in checkpoint.tensors.values():
            assert all(n >= 0 for n in info.shape)
            assert info.offset + info.nbytes <= 8 + len(text) + len(data)
