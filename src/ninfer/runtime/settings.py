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
    """Fields as in CacheOptions."""

    enabled: bool
    device_state_slots: int
    host_state_slots: int
    host_kv_bytes: int
    retained_kv_tokens: int
    continuations: int
    shared_prefixes: int
    long_anchors: int
    anchor_gap: int
    aging_window: int
    candidates: int


def resolve(options: CacheOptions, lanes: int, device: str, room: int = 0) -> CacheSettings:
    """``device``: its kind, "cpu" or "cuda". room: tokens of KV that are kept unless the options say otherwise. Raises
    InvalidRequest for a cache with less room than lanes."""
    if not options.enabled:
        return CacheSettings(False, 0, 0, 0, 0, lanes, 0, 0, options.anchor_gap, options.aging_window, 1)
    host = options.host_kv_bytes
    if host is None:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        host = 0 if device == "cpu" else min(HOST_CEILING, memory // 10)
    continuations = _default(options.max_continuations, max(2 * lanes, lanes + 4))
    if continuations < lanes:
        raise InvalidRequest(f"{continuations} is less than max_concurrency {lanes}", field="cache.max_continuations")
    return CacheSettings(
        enabled=True,
        device_state_slots=_default(options.device_state_slots, lanes),
        host_state_slots=_default(options.host_state_slots, HOST_STATES if host else 0),
        host_kv_bytes=host,
        retained_kv_tokens=_default(options.retained_kv_tokens, room),
        continuations=continuations,
        shared_prefixes=_default(options.max_shared_prefixes, max(lanes, 7)),
        long_anchors=options.max_long_anchors,
        anchor_gap=options.anchor_gap,
        aging_window=options.aging_window,
        candidates=options.max_candidates,
    )


def _default(value: int | None, otherwise: int) -> int:
    return otherwise if value is None else value
