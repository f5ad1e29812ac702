"""Runs a bound model on a device, the way Program does, and hands its results to the host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ninfer.device import ITEM_BYTES, Buffer, Device
from ninfer.models.qwen3_5.forward import fold, forward, hidden, logits, plan_workspace
from ninfer.models.qwen3_5.state import allocate_kv, allocate_record, allocate_state
from ninfer.models.qwen3_5.weights import Model
from ninfer.ops import Rows

Array = npt.NDArray[Any]
ROW_INPUTS = ("start", "width", "read", "write", "table", "tokens", "positions", "accepted")


class Allocating:
    """A Scope of separate arenas; ``planned`` lists what was asked for."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.planned: list[tuple[str, tuple[int, ...], str]] = []

    def buffer(self, name: str, shape: tuple[int, ...], dtype: str) -> Buffer:
        self.planned.append((name, shape, dtype))
        nbytes = max(1, math.prod(shape) * ITEM_BYTES[dtype])
        return self.device.arena(-(-nbytes // 256) * 256).buffer(0, shape, dtype)


@dataclass
class Row:
    """One row of a pass: its tokens, the cache ordinal of the first, rotary positions [3, n] (text when None)."""

    tokens: Sequence[int]
    start: int
    lane: int = 0
    positions: Array | None = None
    write: int | None = None
    """State slot to write; the lane's own when None."""


class Runner:
    """``lanes`` sequences of up to ``context`` tokens; lane i reads state slot i and owns every block of table row i.
    Slots beyond the lanes are spare."""

    def __init__(
        self,
        device: Device,
        model: Model,
        *,
        lanes: int = 1,
        tokens: int = 256,
        context: int = 256,
        kv_dtype: str = "f32",
    ) -> None:
        self.device, self.model, self.config = device, model, model.config
        scope = self.scope = Allocating(device)
        blocks = -(-context // 64)
        self.kv = allocate_kv(self.config, scope, self.config.full_layers, lanes * blocks, lanes, blocks, kv_dtype)
        self.state = allocate_state(self.config, scope, device, lanes + 1)
        self.record = allocate_record(self.config, scope, device, tokens)
        self.ws = plan_workspace(self.config, scope, device, tokens, context)
        self.final = scope.buffer("hidden", (tokens, self.config.hidden_size), device.activation)
        self.scores = scope.buffer("logits", (tokens, self.config.vocab_size), "f32")
        self.inputs = {name: scope.buffer("rows", (8 + 3 * tokens,), "i32") for name in ROW_INPUTS}
        if self.kv:  # a scattered table, so that pages are not in order
            table = np.random.default_rng(0).permutation(lanes * blocks).astype(np.int32).reshape(lanes, blocks)
            self.put(self.kv[0].blocks, table)

    def put(self, buffer: Buffer, value: Array) -> Buffer:
        self.device.upload(buffer, np.ascontiguousarray(value))
        self.wait()
        return buffer

    def get(self, buffer: Buffer) -> Array:
        out = self.device.host(buffer.shape, buffer.dtype)
        self.device.download(out, buffer)
        self.wait()
        return out.copy()

    def wait(self) -> None:
        event = self.device.event()
        event.record()
        event.wait()

    def ints(self, name: str, value: Any) -> Buffer:
        array = np.asarray(value, np.int32)
        return self.put(self.inputs[name].head(*array.shape), array)

    def rows(self, rows: Sequence[Row]) -> Rows:
        B, W = len(rows), max(len(row.tokens) for row in rows)
        tokens, positions = np.zeros((B, W), np.int32), np.zeros((3, B, W), np.int32)
        for b, row in enumerate(rows):
            n = len(row.tokens)
            tokens[b, :n] = row.tokens
            positions[:, b, :n] = np.arange(row.start, row.start + n) if row.positions is None else row.positions
        return Rows(
            B,
            W,
            start=self.ints("start", [row.start for row in rows]),
            width=self.ints("width", [len(row.tokens) for row in rows]),
            read=self.ints("read", [row.lane for row in rows]),
            write=self.ints("write", [row.lane if row.write is None else row.write for row in rows]),
            table=self.ints("table", [row.lane for row in rows]),
            tokens=self.ints("tokens", tokens.reshape(-1)),
            positions=self.ints("positions", positions.reshape(3, -1)),
        )

    def run(self, rows: Sequence[Row], *, record: bool = False) -> list[npt.NDArray[np.float32]]:
        """One pass; logits [n, R] of each row's real columns."""
        packed = self.rows(rows)
        n = packed.B * packed.W
        forward(self.device.ops, self.model, self.ws, packed, self.kv, self.state, self.record if record else None)
        final, scores = self.final.head(n, self.config.hidden_size), self.scores.head(n, self.config.vocab_size)
        hidden(self.device.ops, self.model, self.ws, None, final)
        logits(self.device.ops, self.model, final, scores)
        out = self.get(scores).reshape(packed.B, packed.W, -1)
        return [out[b, : len(row.tokens)] for b, row in enumerate(rows)]

    def prefill(self, tokens: Sequence[int], chunk: int, positions: Array | None = None, lane: int = 0) -> Array:
        """All tokens of a fresh sequence in chunks; logits [T, R]."""
        out = []
        for begin in range(0, len(tokens), chunk):
            end = min(begin + chunk, len(tokens))
            part = None if positions is None else positions[:, begin:end]
            out += self.run([Row(tokens[begin:end], begin, lane, part)])
        return np.concatenate(out)

    def fold(self, rows: Sequence[Row], accepted: Sequence[int]) -> None:
        """Commit the first ``accepted`` columns of the last recorded pass."""
        fold(self.device.ops, self.config, self.state, self.record, self.ints("accepted", accepted), self.rows(rows))

    def snapshot(self, lane: int = 0) -> list[Array]:
        """The recurrent state of a slot, layer by layer: matrices and tails."""
        return [self.get(buffer)[lane] for layer in self.state for buffer in (layer.s, layer.tail)]
