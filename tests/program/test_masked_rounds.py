"""A round's masks bind every position of every row, whatever the number of drafts and of rows."""

from __future__ import annotations

import pytest
from fakes.program_driver import GREEDY, Masks, accept_all, admit, first, make_request, prefill
from fakes.symbolic import SymbolicDevice, SymbolicModel, hashed_logits

from ninfer.contract import UnitLicense
from ninfer.program import ExplicitKV, KVCodec, Shape, open_program

VOCABULARY, CONTEXT = 5, 64
HIDDEN_OF = {int(hashed_logits(h, VOCABULARY).argmax()): h for h in range(1000, 0, -1)}
"""For each token, what the drafting module must put out to draft it."""


@pytest.mark.parametrize("window", range(8))
def test_every_position_has_its_own_mask(window: int) -> None:
    """The one legal token of each row is drafted again and again: a position without its mask would decide another."""
    model = SymbolicModel(VOCABULARY, drafting=window > 0)
    model.guess = lambda hidden, token: HIDDEN_OF[token]
    for rows in range(1, 9):
        shape = Shape(rows, CONTEXT, 16, 4, KVCodec.FP32, VOCABULARY, window=window)
        program = open_program(SymbolicDevice(True), model, shape, ExplicitKV(rows * CONTEXT))
        legal = {row: {(3 * row + 1) % VOCABULARY} for row in range(rows)}
        sequences = []
        for row in range(rows):
            sequences.append(admit(program, make_request([row, 2], 40, GREEDY, id=row), row))
            prefill(program, sequences[-1], 16)
        masks = Masks(legal)
        assert first(program, sequences, masks) == [tuple(legal[row]) for row in range(rows)]
        for drafts in range(window + 1):
            batch = program.decode(sequences, [UnitLicense(drafts)] * rows, masks)
            produced = accept_all(program, batch)
            assert produced == [tuple(legal[row]) * (1 + drafts) for row in range(rows)]
        for sequence in sequences:
            program.discard(sequence)
        program.close()
