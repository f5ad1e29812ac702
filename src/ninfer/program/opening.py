"""Start a Program: size the KV pool, refuse what does not fit, and build what was planned."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace

from ninfer.device import Device
from ninfer.errors import InvalidRequest, OutOfDeviceMemory
from ninfer.program.capacity import (
    AutomaticKV,
    ExplicitKV,
    KVCapacityProfile,
    Retention,
    largest_that_fits,
    resolve_capacity,
)
from ninfer.program.layout import PAGE, PoolLayout, build_pool_layouts, pages
from ninfer.program.memory import Memory, Shape, lay_out, measure
from ninfer.program.program import Program
from ninfer.program.scope import ArenaScope
from ninfer.program.store import Store
from ninfer.program.stores.host import HostArena
from ninfer.program.stores.images import StateStore
from ninfer.program.stores.pages import DevicePagePool
from ninfer.program.stores.rows import ExecutionRows
from ninfer.program.stores.spaces import KVStore
from ninfer.program.text import TextModel
from ninfer.program.traffic import Traffic
from ninfer.program.transfers import Transfers
from ninfer.program.units import Units
from ninfer.program.widths import recording_bytes

log = logging.getLogger("ninfer")


def automatic_kv(device: Device) -> AutomaticKV:
    """The default policy: on the host at most a quarter of its memory, elsewhere all that is free but 1 GiB."""
    if device.kind == "cpu":
        return AutomaticKV(headroom_bytes=0, ceiling_bytes=device.memory().total // 4)
    return AutomaticKV()


def open_program(
    device: Device,
    model: TextModel,
    shape: Shape,
    kv: ExplicitKV | AutomaticKV | None = None,
    retention: Retention | None = None,
) -> Program:
    """A Program over a bound model whose weights are resident.

    Raises InvalidRequest("kv_capacity") for an explicit size outside the legal range, InvalidRequest naming an option
    of the cache that this machine cannot honour, and OutOfDeviceMemory with the bytes of every component when the
    smallest plan does not fit.
    """
    retention = retention or Retention()
    free, taken, graphs = device.memory().free, dict(device.taken()), recording_bytes(device, shape)
    layouts = build_pool_layouts(model.kv_geometries, shape.codec, device.activation)
    state_bytes = model.state_bytes(device.activation)
    _check_host(retention, layouts, measure(device, model, shape, shape.rows)["state"] // shape.slots)

    def total(kv_pages: int) -> int:
        return sum(measure(device, model, shape, kv_pages).values()) + graphs

    try:
        profile, report = resolve_capacity(
            kv or automatic_kv(device), S=shape.context, C=shape.rows, Q=pages(retention.tokens), K=shape.window,
            pools=model.kv_geometries.keys(), layout_bytes=total, free_bytes=free,
        )  # fmt: skip
    except OutOfDeviceMemory as error:
        plan = taken | measure(device, model, shape, max(pages(shape.context), shape.rows)) | {"graphs": graphs}
        advice = _what_fits(device, model, shape, error.free)
        raise OutOfDeviceMemory(f"{error}: {_table(plan)}; {advice}", plan=plan, free=error.free) from None
    arena = device.arena(report.planned_bytes - graphs)
    with ExitStack() as unless_built:
        unless_built.callback(arena.close)
        scope = ArenaScope(arena)
        memory = lay_out(scope, device, model, shape, profile.pages[layouts[0].kind])
        unless_built.callback(device.ops.leave, memory.shared)
        device.ops.use(memory.shared)
        rows = ExecutionRows([layout.kind for layout in layouts], shape.rows, profile.logical_pages)
        units = Units(device, arena, memory, shape, rows)
        unless_built.pop_all()
    components = taken | scope.cursor.components | {"graphs": graphs}
    log.info("memory of %s: %s", device.name, _table(components))
    store = _open_store(device, memory, shape, profile, layouts, rows, retention)
    return Program(shape, components, report, store, units, Traffic(model, layouts, shape, state_bytes))


def _open_store(
    device: Device,
    memory: Memory,
    shape: Shape,
    profile: KVCapacityProfile,
    layouts: tuple[PoolLayout, ...],
    rows: ExecutionRows,
    retention: Retention,
) -> Store:
    host = HostArena(layouts, retention.host_kv_bytes, retention.superblock)
    kinds = [layout.kind for layout in layouts]
    planes = {kind: memory.model.planes(kind) for kind in kinds}
    return Store(
        profile=profile,
        kv={k: KVStore(DevicePagePool(k, profile.pages[k]), rows, profile.logical_pages, host) for k in kinds},
        states=StateStore(shape.slots, retention.host_states),
        arena=host,
        transfers=Transfers(device, planes, (*memory.model.images, memory.stored), host, ahead=device.kind == "cuda"),
        rows=shape.rows,
        spare=shape.spare,
        chunk=shape.chunk,
    )


def _check_host(retention: Retention, layouts: tuple[PoolLayout, ...], state_bytes: int) -> None:
    """Host memory is promised at the start and taken as it is used, so a promise beyond the machine is refused."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    wanted = retention.host_kv_bytes + retention.host_states * state_bytes
    if wanted > total:
        raise InvalidRequest(f"a host tier of {wanted} bytes, the machine has {total}", field="cache.host_kv_bytes")
    largest = max(layout.host_stride for layout in layouts)
    if 0 < retention.host_kv_bytes < largest:
        raise InvalidRequest(f"{retention.host_kv_bytes} bytes hold no page of {largest}", field="cache.host_kv_bytes")


def _what_fits(device: Device, model: TextModel, shape: Shape, budget: int) -> str:
    """For each option that makes the smallest plan smaller, its largest value that fits while the others stay."""

    def needed(smaller: Shape) -> int:
        plan = measure(device, model, smaller, max(pages(smaller.context), smaller.rows))
        return sum(plan.values()) + recording_bytes(device, smaller)

    options: Mapping[str, tuple[int, int, int, Callable[[int], Shape]]] = {
        "max_context": (1, pages(shape.context), PAGE, lambda n: replace(shape, context=n * PAGE)),
        "max_concurrency": (1, shape.rows, 1, lambda n: replace(shape, rows=n)),
        "cache.device_state_slots": (0, shape.spare, 1, lambda n: replace(shape, spare=n)),
        "prefill_chunk": (1, pages(shape.chunk), PAGE, lambda n: replace(shape, chunk=n * PAGE)),
    }
    fitting = []
    for name, (low, high, unit, changed) in options.items():
        most = largest_that_fits(low, high, lambda n: needed(changed(n)), budget)  # noqa: B023
        if needed(changed(most)) <= budget:
            fitting.append(f"{name} {most * unit}")
    advice = " or ".join(fitting) if fitting else f"none of {', '.join(options)} alone can be made small enough"
    drafts = '; spec "none" needs less too' if shape.window else ""
    return f"what would fit: {advice}{drafts}"


def _table(plan: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {nbytes / 2**20:.1f} MiB" for name, nbytes in plan.items())
