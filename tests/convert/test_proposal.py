"""A reduced head for drafting: which tokens it scores, and that its rows are theirs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.artifact import Artifact, encode
from ninfer.convert import convert
from ninfer.convert.proposal import proposed_ids
from ninfer.errors import InvalidRequest
from ninfer.models.qwen3_5.bind import check

SIZE, SPECIAL = 60, (3, 50, 58)
TOKENIZER = json.dumps({
    "model": {"vocab": {f"t{i}": i for i in range(SIZE - 2)}},
    "added_tokens": [{"id": i, "special": i in SPECIAL} for i in (3, 50, 58, 59)],
}).encode()  # fmt: skip


def saved(tmp_path: Path, counts: Any) -> Path:
    np.save(tmp_path / "counts.npy", np.asarray(counts))
    return tmp_path / "counts.npy"


@given(st.lists(st.integers(0, 5), min_size=SIZE, max_size=SIZE), st.integers(32, SIZE))
def test_the_most_frequent_tokens_and_every_special_one(tmp_path_factory: Any, counts: list[int], rows: int) -> None:
    path = saved(tmp_path_factory.mktemp("counts"), [[*counts, 9, 9], [0] * (SIZE + 2)])
    ids = proposed_ids(path, rows, TOKENIZER).tolist()
    assert len(set(ids)) == len(ids) == rows
    assert set(SPECIAL) <= set(ids)
    assert ids == sorted(ids, key=lambda i: (-counts[i], i))
    left_out = [i for i in range(SIZE) if i not in ids]
    taken = [i for i in ids if i not in SPECIAL]
    for out in left_out:
        assert all((-counts[i], i) < (-counts[out], out) for i in taken)


def test_all_tokens_by_default(tmp_path: Path) -> None:
    assert proposed_ids(saved(tmp_path, np.arange(SIZE)), None, TOKENIZER).tolist() == list(range(SIZE))[::-1]


def test_given_ids_keep_their_order(tmp_path: Path) -> None:
    ids = [*range(40, 60), *range(20)]
    file = tmp_path / "ids.json"
    file.write_text(json.dumps(ids))
    assert proposed_ids(ids, None, TOKENIZER).tolist() == proposed_ids(file, None, TOKENIZER).tolist() == ids


@pytest.mark.parametrize(
    ("given", "rows", "field"),
    [
        (list(range(31)), None, "proposal_head"), ([*range(40), 7], None, "proposal_head"),
        ([*range(40), SIZE], None, "proposal_head[40]"), ([*range(40), -1], None, "proposal_head[40]"),
        ([True, *range(40)], None, "proposal_head[0]"), ([*range(40), "x"], None, "proposal_head[40]"),
        (list(range(40)), 40, "proposal_rows"), ("missing.json", None, "proposal_head"),
        ("missing.npy", None, "proposal_head"),
    ],
)  # fmt: skip
def test_bad_ids_are_refused(given: Any, rows: int | None, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        proposed_ids(given, rows, TOKENIZER)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("counts", "rows", "field"),
    [
        (np.ones(SIZE - 1, int), None, "proposal_head"), (np.ones(SIZE), None, "proposal_head"),
        (-np.ones(SIZE, int), None, "proposal_head"), (np.ones((1, 1, SIZE), int), None, "proposal_head"),
        (np.ones(SIZE, int), 31, "proposal_rows"), (np.ones(SIZE, int), SIZE + 1, "proposal_rows"),
        (np.ones(SIZE, int), True, "proposal_rows"), (np.ones(SIZE, int), 40.0, "proposal_rows"),
    ],
)  # fmt: skip
def test_bad_counts_are_refused(tmp_path: Path, counts: Any, rows: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        proposed_ids(saved(tmp_path, counts), rows, TOKENIZER)
    assert caught.value.field == field


@pytest.mark.parametrize("text", ["{}", "[", "\x00"])
def test_files_that_are_something_else_are_refused(tmp_path: Path, text: str) -> None:
    for name in ("ids.json", "counts.npy"):
        (tmp_path / name).write_text(text)
        with pytest.raises(InvalidRequest) as caught:
            proposed_ids(tmp_path / name, None, TOKENIZER)
        assert caught.value.field == "proposal_head"


IDS = [5, 6, 7, 300, 2, 1, 0, *range(100, 130), 299, 8]


@pytest.mark.parametrize(("recipe", "format"), [("bf16", "bf16"), ("q8", "q4_g64_fp16")])
def test_a_converted_head_has_the_rows_of_its_tokens(
    built: Callable[[str], tuple[Path, dict[str, np.ndarray]]], opened: Callable[[Path], Artifact], copied: Any,
    tmp_path: Path, recipe: str, format: str,
) -> None:  # fmt: skip
    folder, (_, tensors) = copied("dense"), built("dense")
    tokenizer = {"model": {"vocab": {f"t{i}": i for i in range(310)}}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    done: list[tuple[int, int]] = []
    convert(
        folder, tmp_path / "m.ninfer", recipe=recipe, proposal_head=IDS,
        progress=lambda _, now, total: done.append((now, total)),
    )  # fmt: skip
    assert done[-1][0] == done[-1][1]
    artifact = opened(tmp_path / "m.ninfer")
    assert artifact.directory.components["text"].proposal.rows == len(IDS)
    assert artifact.decode("proposal/token_ids", (len(IDS),)).tolist() == IDS
    (part,) = artifact.binding("proposal/head").parts
    assert artifact.geometry(part.object).format.name == format
    (stored, _, _) = next(iter(artifact.parts("proposal/head")))
    assert bytes(stored.data) == bytes(encode(format, tensors["lm_head.weight"][IDS]))
    assert {site for name, site in artifact.directory.uses if name == "proposal/head"} == {"mtp/final_hidden"}
    check(artifact, ("text", "mtp", "proposal"))


def test_a_head_for_nobody_is_refused(built: Callable[[str], tuple[Path, Any]], tmp_path: Path) -> None:
    for options, field in (({"proposal_head": IDS}, "proposal_head"), ({"proposal_rows": 64}, "proposal_rows")):
        with pytest.raises(InvalidRequest) as caught:
            convert(built("tied")[0], tmp_path / "m.ninfer", recipe="bf16", progress=False, **options)
        assert caught.value.field == field
    assert not list(tmp_path.iterdir())
