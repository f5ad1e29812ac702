"""Start a Program: size the KV pool, refuse what does not fit, and build what was planned."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from ninfer.contract import Device
from ninfer.errors import OutOfDeviceMemory
from ninfer.program.capacity import AutomaticKV, ExplicitKV, resolve_capacity
from ninfer.program.kv import ExecutionRows, KVStore
from ninfer.program.layout import build_pool_layouts, pages
from ninfer.program.memory import Shape, lay_out, measure
from ninfer.program.pages import DevicePagePool
from ninfer.program.program import Program
from ninfer.program.scope import ArenaScope
from ninfer.program.state import StateStore
from ninfer.program.text import TextModel
from ninfer.program.traffic import Traffic
from ninfer.program.transactions import Transactions
from ninfer.program.units import Units

log = logging.getLogger("ninfer")


def automatic_kv(device: Device) -> AutomaticKV:
    """The default policy: on the host at most a quarter of its memory, elsewhere all that is free but 1 GiB."""
    if device.kind == "cpu":
        return AutomaticKV(headroom_bytes=0, ceiling_bytes=device.memory().total // 4)
    return AutomaticKV()


def open_program(device: Device, model: TextModel, shape: Shape, kv: ExplicitKV | AutomaticKV | None = None) -> Program:
    """A Program over a bound model whose weights are resident.

    Raises InvalidRequest("kv_capacity") for an explicit size outside the legal range, and OutOfDeviceMemory with the
    bytes of every component when the smallest plan does not fit.
    """
    free, taken = device.memory().free, dict(device.taken())

    def total(kv_pages: int) -> int:
        return sum(measure(device, model, shape, kv_pages).values())

    try:
        profile, report = resolve_capacity(
            kv or automatic_kv(device), S=shape.context, C=shape.rows, Q=0, layout_bytes=total, free_bytes=free
        )
    except OutOfDeviceMemory as error:
        plan = taken | measure(device, model, shape, max(pages(shape.context), shape.rows))
        advice = "smaller max_context, max_concurrency or prefill_chunk need less"
        raise OutOfDeviceMemory(f"{error}: {_table(plan)}; {advice}", plan=plan, free=error.free) from None
    layouts = build_pool_layouts(model.kv_geometry, shape.codec)
    arena = device.arena(report.planned_bytes)
    try:
        scope = ArenaScope(arena)
        kv_pages = {layout.kind: profile.pages[layout.kind] for layout in layouts}
        memory = lay_out(scope, device, model, shape, kv_pages[layouts[0].kind])
        rows = ExecutionRows(list(kv_pages), shape.rows, profile.logical_pages)
        before = device.memory().free
        units = Units(device, arena, memory, shape, rows)
        graphs = max(0, before - device.memory().free) if device.asynchronous else 0
    except BaseException:
        arena.close()
        raise
    stores = {
        kind: KVStore(DevicePagePool(kind, count), rows, profile.logical_pages) for kind, count in kv_pages.items()
    }
    components = taken | scope.cursor.components | {"graphs": graphs}
    log.info("memory of %s: %s", device.name, _table(components))
    state_bytes = model.state_bytes(device.activation)
    return Program(
        shape,
        components,
        report,
        Transactions(profile, stores, StateStore(shape.rows)),
        units,
        Traffic(model, layouts, shape.rows, state_bytes),
    )


def _table(plan: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {nbytes / 2**20:.1f} MiB" for name, nbytes in plan.items())
