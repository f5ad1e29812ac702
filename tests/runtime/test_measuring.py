"""Prices measured at the start of an engine."""

from __future__ import annotations

import pytest
from fakes.symbolic import SymbolicDevice, SymbolicModel

from ninfer.errors import InvalidRequest
from ninfer.program import ExplicitKV, KVCodec, Shape, open_program
from ninfer.runtime.costs import Q
from ninfer.runtime.measuring import TOKENS_OF_A_UNIT, measure_prefill, measure_rounds, measure_transfers
from ninfer.runtime.prices import HOPE


def test_measuring_gives_usable_prices_and_leaves_nothing():
    for chunk, context in ((32, 128), (4, 64), (1, 1)):
        device = SymbolicDevice()
        transfers = measure_transfers(device)
        assert device.held == 0
        shape = Shape(rows=2, context=context, chunk=chunk, control=1, codec=KVCodec.FP32, vocabulary=37)
        program = open_program(device, SymbolicModel(), shape, ExplicitKV(2 * max(context, 64)))
        before = program.audit()
        prefill = measure_prefill(program, chunk, context)
        assert program.audit() == before
        assert set(transfers) == {"d2h", "h2d", "d2d"}
        assert all(rate.op_ns > 0 and rate.byte_q32 >= 1 for rate in transfers.values())
        assert prefill.chunk_ns > 0
        assert prefill.token_q32 >= (prefill.chunk_ns << Q) // TOKENS_OF_A_UNIT
        program.close()


@pytest.mark.parametrize("kind", [True, "block"])
@pytest.mark.parametrize("window", [1, 3, 7])
def test_measured_rounds_leave_nothing(kind, window):
    shape = Shape(
        rows=3, context=64, chunk=16, control=1, codec=KVCodec.FP32, vocabulary=37, window=window, adaptive=True
    )
    model = SymbolicModel(drafting=kind)
    program = open_program(SymbolicDevice(delayed=True), model, shape, ExplicitKV(3 * 64))
    before = program.audit()
    choices = sorted({0, 1, window})
    prices = measure_rounds(program, 3, choices, 64)
    assert prices.choices == tuple(choices)
    for rows in (1, 2, 3):
        seconds = list(prices.seconds(rows))
        assert len(seconds) == len(choices)
        assert seconds[0] > 0
        assert seconds[1:] == sorted(seconds[1:])
        assert seconds[1] >= HOPE * seconds[0]
    assert program.audit() == before
    with pytest.raises(InvalidRequest) as caught:
        measure_rounds(program, 3, choices, 2 + 6 * (1 + window) - 1)
    assert caught.value.field == "max_context"
    program.close()
