"""The cache options of an engine with every default resolved against its lanes, its device and its machine."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ninfer.errors import InvalidRequest
from ninfer.options import CacheOptions

HOST_CEILING = 8 << 30
"""Most host memory for keys and values unless the options say otherwise, bytes."""
HOST_STATES = 8
"""Recurrent states in host memory where there is a host tier and the options say nothing."""


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Fields as in CacheOptions. retained_kv_tokens: None leaves it to Program."""

    enabled: bool
    device_state_slots: int
    host_state_slots: int
    host_kv_bytes: int
    retained_kv_tokens: int | None
    continuations: int
    shared_prefixes: int
    long_anchors: int
    anchor_gap: int
    aging_window: int
    candidates: int


def resolve(options: CacheOptions, lanes: int, device: str) -> CacheSettings:
    """``device``: its kind, "cpu" or "cuda". Raises InvalidRequest for a cache that lanes or memory rule out."""
    if not options.enabled:
        return CacheSettings(False, 0, 0, 0, 0, lanes, 0, 0, options.anchor_gap, options.aging_window, 1)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    host = options.host_kv_bytes
    if host is None:
        host = 0 if device == "cpu" else min(HOST_CEILING, memory // 10)
    if host > memory:
        raise InvalidRequest(f"{host} bytes exceed the machine's {memory}", field="cache.host_kv_bytes")
    continuations = _default(options.max_continuations, max(2 * lanes, lanes + 4))
    if continuations < lanes:
        raise InvalidRequest(f"{continuations} is less than max_concurrency {lanes}", field="cache.max_continuations")
    return CacheSettings(
        enabled=True,
        device_state_slots=_default(options.device_state_slots, lanes),
        host_state_slots=_default(options.host_state_slots, HOST_STATES if host else 0),
        host_kv_bytes=host,
        retained_kv_tokens=options.retained_kv_tokens,
        continuations=continuations,
        shared_prefixes=_default(options.max_shared_prefixes, max(lanes, 7)),
        long_anchors=options.max_long_anchors,
        anchor_gap=options.anchor_gap,
        aging_window=options.aging_window,
        candidates=options.max_candidates,
    )


def _default(value: int | None, otherwise: int) -> int:
    return otherwise if value is None else value
