"""Prometheus metrics. Every label takes its values from a fixed set, so that no request can add a series."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from ninfer import EngineStats
from ninfer.gateway.http.log import Entry

PROTOCOLS = ("chat_completions", "responses", "messages", "count_tokens")
OUTCOMES = ("stop", "length", "tool_calls", "cancelled", "refused", "overloaded", "timeout", "failed")
"""How requests end. cancelled: the client left, or took nothing; refused: 4xx; failed: 5xx."""
TOKENS = ("prompt", "cached", "completion", "thinking")

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Counts of one server, with its engine's own read at each scrape."""

    def __init__(self, stats: Callable[[], EngineStats], available: Callable[[], bool]) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "ninfer_requests", "Requests by how they ended", ("protocol", "outcome"), registry=self._registry
        )
        self.tokens = Counter(
            "ninfer_tokens", "Tokens of requests, by kind", ("protocol", "kind"), registry=self._registry
        )
        self.seconds = Histogram(
            "ninfer_request_seconds", "First byte of a request to the last of its answer", ("protocol",),
            buckets=_SECONDS, registry=self._registry,
        )  # fmt: skip
        self.first = Histogram(
            "ninfer_time_to_first_token_seconds", "First byte of a request to the first token", ("protocol",),
            buckets=_SECONDS, registry=self._registry,
        )  # fmt: skip
        self.running = Gauge("ninfer_requests_running", "Requests read or answered now", registry=self._registry)
        for protocol in PROTOCOLS:
            self.seconds.labels(protocol)
            for outcome in OUTCOMES:
                self.requests.labels(protocol, outcome)
        self._registry.register(_EngineCollector(stats, available))

    def settle(self, entry: Entry) -> None:
        """Count a request that has ended, however it ended."""
        self.requests.labels(entry.protocol, entry.outcome).inc()
        self.seconds.labels(entry.protocol).observe(entry.seconds)
        if entry.first_event is not None:
            self.first.labels(entry.protocol).observe(entry.first_event - entry.began)
        if entry.result is not None:
            for kind in TOKENS:
                self.tokens.labels(entry.protocol, kind).inc(getattr(entry.result.usage, f"{kind}_tokens"))

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self._registry)


class _EngineCollector:
    """The engine's gauges and counters."""

    def __init__(self, stats: Callable[[], EngineStats], available: Callable[[], bool]) -> None:
        self._stats, self._available = stats, available

    def collect(self) -> Iterator[Any]:
        stats = self._stats()
        gauges: Mapping[str, tuple[str, float]] = {
            "available": ("Whether the engine takes requests", self._available()),
            "waiting": ("Requests that wait for a lane", stats.waiting),
            "active": ("Requests that hold a lane", stats.active),
            "outstanding": ("Requests waiting, active or unread", stats.outstanding),
        }
        for name, (what, value) in gauges.items():
            yield GaugeMetricFamily(f"ninfer_engine_{name}", what, value=float(value))
        for name in ("prefill_units", "control_units", "decode_rounds", "decode_rows", "decode_drafts"):
            yield CounterMetricFamily(f"ninfer_engine_{name}", name.replace("_", " "), value=getattr(stats, name))
        seconds = stats.decode_ns / 1e9
        yield CounterMetricFamily("ninfer_engine_decode_seconds", "Time of decode rounds", value=seconds)
        context = _flat(attrs.asdict(stats.context))
        for source, what in ((stats.constraints, "constraints"), (stats.memory, "memory"), (context, "context")):
            family = GaugeMetricFamily(
                f"ninfer_engine_{what}", f"The engine's own account of its {what}", labels=["of"]
            )
            for key, value in source.items():
                family.add_metric([key], value)
            yield family


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Numbers by dotted name."""
    found: dict[str, float] = {}
    for name, value in values.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return found
