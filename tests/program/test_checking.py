"""Indices that kernels would follow out of their buffers."""

from __future__ import annotations

import numpy as np
import pytest
from fakes.program_driver import admit, make_request, prefill
from fakes.symbolic import SymbolicDevice, SymbolicModel

from ninfer.errors import InvariantError
from ninfer.program import ExplicitKV, KVCodec, Shape, open_program
from ninfer.program.checking import Bounds, check_frame

SHAPE = Shape(rows=3, context=256, chunk=64, control=6, codec=KVCodec.FP32, vocabulary=37)
BOUNDS = Bounds(slots=4, rows=3, context=256, columns=64)


def fields() -> dict[str, np.ndarray]:
    names = ("start", "width", "read", "write", "table", "tokens", "lanes", "wide_tokens", "blocks", "draft_table",
             "draft_blocks")  # fmt: skip
    return {name: np.zeros(3, np.int32) for name in names}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("read", 4), ("write", -1), ("table", 3), ("lanes", 3), ("width", 65), ("width", -1), ("start", 256),
        ("start", -1), ("tokens", -1), ("wide_tokens", -7), ("blocks", -1),
        ("draft_table", 3), ("draft_blocks", -1),
    ],
)  # fmt: skip
def test_an_index_outside_is_named(name: str, value: int) -> None:
    good = fields()
    good["width"][1] = 1
    check_frame(good, BOUNDS)
    bad = good | {name: np.array([0, value, 0], np.int32)}
    with pytest.raises(InvariantError, match="columns" if name in ("start", "width") else name):
        check_frame(bad, BOUNDS)


def test_a_program_checks_its_frames_where_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    for asked in ("1", "0"):
        monkeypatch.setenv("NINFER_CHECKS", asked)
        program = open_program(SymbolicDevice(), SymbolicModel(), SHAPE, ExplicitKV(768))
        sequence = admit(program, make_request([1, 2, 3], 4), 0)
        program._units._frames[0].block.fields["table"][2] = 77
        program._units._frames[1].block.fields["table"][2] = 77
        if asked == "1":
            with pytest.raises(InvariantError, match="table"):
                prefill(program, sequence, 64)
        else:
            prefill(program, sequence, 64)
        program.close()
