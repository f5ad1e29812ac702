"""Checkpoints that cannot become artifacts, wrong arguments, interruptions: one clear error, nothing left behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer.convert import convert
from ninfer.errors import ArtifactError, ConversionError, InvalidRequest

Copied = Callable[[str], Path]


def edit(folder: Path, name: str, change: Callable[[Any], dict[str, Any]]) -> None:
    """Rewrites the shard that holds tensor ``name``; ``change`` gives what takes its place."""
    from safetensors.torch import load_file, save_file

    index = json.loads((folder / "model.safetensors.index.json").read_text())
    file = index["weight_map"].pop(name)
    tensors = load_file(folder / file)
    added = change(tensors.pop(name))
    save_file({k: v.contiguous() for k, v in (tensors | added).items()}, folder / file)
    index["weight_map"] |= dict.fromkeys(added, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def refused(folder: Path, recipe: str = "q8", **options: Any) -> ConversionError:
    out = folder.parent / "out"
    out.mkdir(exist_ok=True)
    with pytest.raises(ConversionError) as caught:
        convert(folder, out / "m.ninfer", recipe=recipe, progress=False, **options)
    assert not list(out.iterdir())
    assert str(caught.value).startswith(caught.value.tensor)
    return caught.value


EMBEDDING, NORM = "model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"
TENSORS = (
    EMBEDDING, NORM, "model.layers.0.linear_attn.A_log", "model.layers.0.linear_attn.conv1d.weight",
    "model.layers.3.self_attn.q_proj.weight", "lm_head.weight", "mtp.fc.weight",
)  # fmt: skip


@pytest.mark.parametrize("name", TENSORS)
def test_a_missing_tensor(copied: Copied, name: str) -> None:
    folder = copied("dense")
    edit(folder, name, lambda tensor: {})
    assert refused(folder).tensor == name


@pytest.mark.parametrize("name", TENSORS)
def test_a_misshaped_tensor(copied: Copied, name: str) -> None:
    folder = copied("dense")
    edit(folder, name, lambda tensor: {name: tensor[1:]})
    error = refused(folder)
    assert error.tensor == name
    assert "shape" in error.reason
    folder.rename(folder.parent / "old")
    flat = copied("dense")
    edit(flat, name, lambda tensor: {name: tensor.reshape(1, *tensor.shape)})
    assert refused(flat).tensor == name


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("recipe", ["bf16", "q8"])
def test_a_tensor_that_is_not_finite(copied: Copied, name: str, recipe: str) -> None:
    folder = copied("dense")

    def spoil(tensor: Any) -> dict[str, Any]:
        tensor.reshape(-1)[-2] = float("-inf") if recipe == "q8" else float("nan")
        return {name: tensor}

    edit(folder, name, spoil)
    error = refused(folder, recipe)
    assert error.tensor == name
    assert "finite" in error.reason


@pytest.mark.parametrize("recipe", ["q4-mixed", "bf16"])
def test_a_value_too_large_for_the_format(copied: Copied, recipe: str) -> None:
    folder = copied("dense")
    name = "model.layers.1.mlp.down_proj.weight"

    def spoil(tensor: Any) -> dict[str, Any]:
        tensor = tensor.float()
        tensor[5, 5] = 3.4e38  # finite in binary32; neither a bfloat16 nor within reach of a binary16 scale
        return {name: tensor}

    edit(folder, name, spoil)
    error = refused(folder, recipe)
    assert error.tensor == name
    assert error.reason.startswith("row 5")


def test_nothing_to_import(copied: Copied) -> None:
    assert refused(copied("dense"), "import").tensor == "config.json"


def test_an_integer_tensor(copied: Copied) -> None:
    folder = copied("dense")
    edit(folder, NORM, lambda tensor: {NORM: tensor.long()})
    assert refused(folder).reason.startswith("dtype I64")


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.gate_proj.bias",
        "model.layers.4.input_layernorm.weight",
        "visual.x",
        "model.visual.x",
        "mtp.x",
    ],
)
def test_an_unknown_tensor(copied: Copied, name: str) -> None:
    folder = copied("dense")
    edit(folder, NORM, lambda tensor: {NORM: tensor, name: tensor.clone()})
    if name == "model.visual.x":  # the config has no vision tower: its tensors are left out with it
        convert(folder, folder.parent / "m", recipe="bf16", progress=False)
    else:
        assert refused(folder).tensor == name


def test_leftovers_of_components_that_were_not_chosen(copied: Copied) -> None:
    folder = copied("dense")
    edit(folder, "mtp.fc.weight", lambda tensor: {})
    assert refused(folder).tensor == "mtp.fc.weight"
    convert(folder, folder.parent / "m", recipe="bf16", components=("text",), progress=False)


def test_older_fused_layouts(copied: Copied) -> None:
    folder = copied("dense")
    name = "model.layers.0.linear_attn.in_proj_qkvz.weight"
    edit(folder, "model.layers.0.linear_attn.in_proj_qkv.weight", lambda tensor: {name: tensor})
    error = refused(folder)
    assert error.tensor == name
    assert "Qwen3-Next" in error.reason


def test_a_tied_head_that_differs(copied: Copied, tmp_path: Path) -> None:
    folder = copied("tied")
    edit(folder, EMBEDDING, lambda tensor: {EMBEDDING: tensor, "lm_head.weight": tensor.clone()})
    convert(folder, tmp_path / "m", recipe="bf16", progress=False)
    edit(folder, "lm_head.weight", lambda tensor: {"lm_head.weight": tensor * 2})
    assert refused(folder).tensor == "lm_head.weight"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", b"[]"),
        ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b'\xff\xfe{"a"'),
        ("chat_template.jinja", None),
        ("chat_template.jinja", b" \n"),
        ("chat_template.jinja", b"\xff"),
        ("generation_config.json", None),
        ("generation_config.json", b"3"),
        ("config.json", None),
    ],
)
def test_resources_at_fault(copied: Copied, name: str, content: bytes | None) -> None:
    folder = copied("dense")
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    assert refused(folder).tensor == name


@pytest.mark.parametrize("name", ["preprocessor_config.json", "video_preprocessor_config.json"])
def test_processors_must_cut_the_towers_patches(copied: Copied, name: str) -> None:
    folder = copied("dense-vl")
    (folder / name).write_text(json.dumps({"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}))
    error = refused(folder)
    assert error.tensor == name
    assert error.reason.startswith("patch_size: 14")
    (folder / name).unlink()
    assert refused(folder).tensor == name
    convert(folder, folder.parent / "m", recipe="bf16", components=["text"], progress=False)


def test_modules_the_checkpoint_does_not_have(copied: Copied) -> None:
    folder = copied("dense-vl")
    assert "mtp" in str(refused(folder, components=("text", "mtp")))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 2  # without tensors it says nothing
    (folder / "config.json").write_text(json.dumps(config))
    convert(folder, folder.parent / "m", recipe="bf16", progress=False)


@pytest.mark.parametrize("member", [{"mtp_num_hidden_layers": 2}, {"mtp_use_dedicated_embeddings": True}])
def test_other_mtp_modules(copied: Copied, member: dict[str, Any]) -> None:
    folder = copied("dense")
    config = json.loads((folder / "config.json").read_text()) | member
    (folder / "config.json").write_text(json.dumps(config))
    assert refused(folder).tensor == "config.json"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"recipe": "q3"}, "recipe"),
        ({"recipe": ["q8"]}, "recipe"),
        ({"progress": "yes"}, "progress"),
        ({"name": ""}, "name"),
        ({"name": 3}, "name"),
        ({"components": ("mtp",)}, "components"),
        ({"components": ("text", "audio")}, "components"),
        ({"components": "text"}, "components"),
        ({"shard_bytes": 1000}, "shard_bytes"),
        ({"shard_bytes": 1e9}, "shard_bytes"),
    ],
)
def test_wrong_arguments(tmp_path: Path, options: dict[str, Any], field: str) -> None:
    """Refused before the source folder, which does not exist, is looked at."""
    with pytest.raises(InvalidRequest) as caught:
        convert(tmp_path / "absent", tmp_path / "m", **{"recipe": "q8", **options})
    assert caught.value.field == field


def test_outputs_that_cannot_be(built: Any, tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(b"precious")
    for out in (tmp_path / "m", tmp_path / "nowhere" / "m"):
        with pytest.raises(InvalidRequest) as caught:
            convert(built("dense")[0], out, recipe="q8", progress=False)
        assert caught.value.field == "out"
    assert (tmp_path / "m").read_bytes() == b"precious"


def test_no_local_path_enters_the_artifact(built: Any, tmp_path: Path) -> None:
    source = built("moe-vl")[0]
    convert(source, tmp_path / "m.ninfer", recipe="q4-mixed", progress=False)
    content = (tmp_path / "m.ninfer").read_bytes()
    for word in (source.name, source.parent.name, tmp_path.name, str(Path.home()), "safetensors"):
        assert word.encode() not in content


def test_progress_counts_the_source(built: Any, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    report = convert(built("moe-vl")[0], tmp_path / "m", recipe="q8", progress=lambda *args: seen.append(args))
    counts = [done for _, done, _ in seen]
    assert counts == sorted(counts)
    assert counts[-1] == report.source_bytes
    assert {(stage, total) for stage, _, total in seen} == {("convert", report.source_bytes)}


@settings(max_examples=15)
@given(
    fraction=st.floats(0, 1),
    kind=st.sampled_from(["tied", "moe-vl"]),
    error=st.sampled_from([KeyboardInterrupt, OSError]),
)
def test_an_interrupted_conversion_leaves_nothing(
    built: Any, tmp_path_factory: pytest.TempPathFactory, fraction: float, kind: str, error: type[BaseException]
) -> None:
    folder = tmp_path_factory.mktemp("interrupted")

    def interrupt(stage: str, done: int, total: int) -> None:
        assert list(folder.iterdir())  # temporary files are there, the artifact is not
        assert not (folder / "m").exists()
        if done >= fraction * total:
            raise error

    with pytest.raises(error):
        convert(built(kind)[0], folder / "m", recipe="q4-mixed", shard_bytes=1 << 20, progress=interrupt)
    assert not list(folder.iterdir())


def test_a_full_disk_leaves_nothing(built: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    real, written = os.pwrite, []

    def pwrite(fd: int, data: Any, offset: int) -> int:
        written.append(len(data))
        if sum(written) > 100_000:
            raise OSError(28, "No space left on device")
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises((OSError, ArtifactError), match="No space left"):
        convert(built("dense")[0], tmp_path / "m", recipe="q8", progress=False)
    assert not list(tmp_path.iterdir())


def test_bars_do_not_disturb(built: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    convert(built("tied")[0], tmp_path / "a", recipe="q8")  # not a terminal: silent
    assert capfd.readouterr() == ("", "")
    convert(built("tied")[0], tmp_path / "b", recipe="q8", progress=True)
    assert "convert: 100%" in capfd.readouterr().err
    assert np.fromfile(tmp_path / "a", "u1").size == np.fromfile(tmp_path / "b", "u1").size
