"""The memory that a GPU's Ops work in: lent by a Program out of its plan, by nobody else's leave."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fakes.cuda_driver import FakeDriver

from ninfer._cuda import area, blas
from ninfer._cuda.device import CudaDevice
from ninfer.artifact import Artifact
from ninfer.device import working
from ninfer.errors import InvariantError, OutOfDeviceMemory
from ninfer.models.qwen3_5.bind import bind
from ninfer.models.qwen3_5.synthetic import synthetic_source
from ninfer.ops import Bank, GdnShape, GdnState, Rows, Segment, Stored
from ninfer.program import ExplicitKV, KVCodec, QwenText, Shape, open_program

SHAPE = Shape(rows=2, context=256, chunk=64, control=4, codec=KVCodec.BF16, vocabulary=300)


@pytest.fixture
def gpu(machine: FakeDriver) -> Any:
    device = CudaDevice()
    yield device
    device.close()


def model_on(device: CudaDevice) -> QwenText:
    return QwenText(bind(Artifact(synthetic_source("tiny", "q4-mixed")), device))


def test_opening_and_closing_leaves_nothing_and_takes_what_was_planned(gpu: CudaDevice, machine: FakeDriver) -> None:
    model = model_on(gpu)
    before, live = machine.used, machine.live.copy()
    for _ in range(5):
        program = open_program(gpu, model, SHAPE, ExplicitKV(512))
        planned = program.report.planned_bytes - program.components["graphs"]
        assert machine.used - before == planned
        assert machine.used == sum(program.components.values()) - program.components["graphs"]
        assert program.components["operations"] == gpu.ops.shared_bytes == area.NBYTES
        machine.order.clear()
        program.close()
        assert machine.used == before
        assert machine.order.index("memory") > max(i for i, name in enumerate(machine.order) if name == "graph")
        assert machine.live["graph"] == live["graph"]
        assert machine.live["memory"] == live["memory"]


def test_a_plan_fits_to_the_byte(gpu: CudaDevice, machine: FakeDriver) -> None:
    """What Ops work in is neither forgotten nor counted twice."""
    model = model_on(gpu)
    program = open_program(gpu, model, SHAPE, ExplicitKV(512))
    needed = program.report.planned_bytes
    program.close()
    machine.total = machine.used + needed
    open_program(gpu, model, SHAPE, ExplicitKV(512)).close()
    machine.total -= 1
    with pytest.raises(OutOfDeviceMemory, match="operations 168") as caught:
        open_program(gpu, model, SHAPE, ExplicitKV(512))
    assert caught.value.plan["operations"] == area.NBYTES


def calls(device: CudaDevice, ops: Any) -> dict[str, Callable[[], None]]:
    """Of every Op that works in more than its scratch."""
    arena, places = device.arena(4 << 20), itertools.count(0, 1 << 16)

    def empty(*shape: int, dtype: str = "bf16") -> Any:
        return arena.buffer(next(places), shape, dtype)

    weight = ops.matrix([Segment(Stored("bf16", (64, 64), empty(64 * 128, dtype="u8")), 0, 64)])
    x, y, out, norm, scratch = empty(2, 64), empty(2, 64), empty(2, 64), empty(64), empty(1 << 15, dtype="u8")
    wide, wider, logits = empty(130, 64), empty(130, 64), empty(2, 64, dtype="f32")
    bank, nine, hidden = Bank((weight,), (weight,), (weight,)), empty(9, 64), empty(9, 1, 64)
    ids, weights = empty(9, 1, dtype="i32"), empty(9, 1, dtype="f32")
    chosen = empty(2, 4, dtype="i32"), empty(2, 4, dtype="f32"), empty(2, dtype="f32")
    rows = Rows(1, 1, *(empty(1, dtype="i32") for _ in range(6)), empty(3, 1, dtype="i32"))
    shape, mixed = GdnShape(1, 2, 16, 16, 4), empty(1, 32)
    q, k, v, z, a, b = (empty(1, n) for n in (16, 16, 32, 32, 2, 2))
    fixed = empty(4, shape.channels), empty(2, dtype="f32"), empty(2, dtype="f32"), empty(16)
    state = GdnState(empty(1, 2, 16, 16, dtype="f32"), empty(1, 3, shape.channels))
    return {
        "norm_project": lambda: ops.norm_project([out], x, norm, [weight], 1e-6, scratch),
        "norm_project, many columns": lambda: ops.norm_project([wide], wider, norm, [weight], 1e-6, scratch),
        "project_add": lambda: ops.project_add(x, y, weight),
        "norm_swiglu": lambda: ops.norm_swiglu(out, x, norm, weight, weight, 1e-6, scratch),
        "head": lambda: ops.head(logits, x, weight),
        "gdn": lambda: ops.gdn(mixed, (q, k, v), z, a, b, *fixed, state, None, rows, shape, 1e-6, scratch),
        "moe_route": lambda: ops.moe_route(out, *chosen, x, norm, weight, weight, 1e-6),
        "moe_swiglu": lambda: ops.moe_swiglu(hidden, nine, ids, bank),
        "moe_down_add": lambda: ops.moe_down_add(nine, hidden, ids, weights, bank),
    }


def test_an_op_without_an_area_is_refused_before_anything_runs(gpu: CudaDevice, machine: FakeDriver) -> None:
    for name, op in calls(gpu, gpu.ops).items():
        for _ in range(2):
            with pytest.raises(InvariantError, match="no memory for operations to work in"):
                op()
            assert machine.launches == [], name
            with working(gpu):
                op()
            assert machine.launches, name
            machine.launches.clear()


def test_an_area_is_one_owners(gpu: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(blas.Blas, "use", lambda library, workspace: given.append(workspace.ptr))
    ops, nbytes = gpu.ops, gpu.ops.shared_bytes
    first, second = (gpu.arena(nbytes).buffer(0, (nbytes,), "u8") for _ in range(2))
    ones = np.ones(nbytes, np.uint8)
    gpu.upload(first, ones)
    ops.use(first)
    assert given == [first.ptr]
    with pytest.raises(InvariantError, match="another program"):
        ops.use(second)
    ops.leave(second)
    assert given == [first.ptr]
    tickets = ops._area.tickets  # type: ignore[attr-defined]
    host = gpu.host(tickets.shape, "i32")
    gpu.download(host, tickets)
    assert not host.any(), "whatever the area held"
    ops.leave(first)
    with pytest.raises(InvariantError, match=f"an area of {nbytes - 256} bytes"):
        ops.use(second.head(nbytes - 256))
    ops.use(second)
    parts = [getattr(ops._area, name) for name in ("workspace", "room", "tickets", "scores")]  # type: ignore[attr-defined]
    assert sorted(parts, key=lambda part: part.ptr) == parts
    assert all(part.ptr % 256 == 0 for part in parts)
    assert [part.ptr + part.nbytes for part in parts] == [*(part.ptr for part in parts[1:]), second.ptr + nbytes]
