"""Prices for the planner, measured once on the device that an engine runs on, in some milliseconds."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ninfer.context import AdoptionTicket, Target
from ninfer.contract import (
    LimitReason,
    PreparedRequest,
    ProgramPort,
    RequestId,
    RowDecision,
    SamplingSpec,
    SequenceHandle,
    UnitLicense,
)
from ninfer.device import Device
from ninfer.errors import InvalidRequest
from ninfer.identity import PrefixIdentity, digest_chain
from ninfer.runtime.costs import PrefillRate, Q, TransferRate
from ninfer.runtime.prices import Prices

ROUNDS = 6
"""Decode rounds that are run to time one, the first and the last of which do not count."""
SWEEPS = 2
"""How often that is done for each number of drafts, in turn: the device may be slow at first, or serve others."""
SMALL, LARGE = 4 << 10, 4 << 20
"""Bytes of the two copies of each direction: one that shows what a call costs, one that shows what a byte costs."""
PROMPT = 8
"""Tokens of the measured prefill, beyond the first."""
TOKENS_OF_A_UNIT = 64
"""A token is taken to cost at least that part of a unit of one token, most of which is reading the weights."""
PAIRS_OF_A_TOKEN = 8192
"""Tokens in the context at which attention is taken to cost as much as everything else about a token."""


def measure_transfers(device: Device) -> Mapping[str, TransferRate]:
    """Time copies of each direction. To be called before anything is recorded on the device."""
    arena = device.arena(2 * LARGE)
    try:
        near, far = arena.buffer(0, (LARGE,), "u8"), arena.buffer(LARGE, (LARGE,), "u8")
        host = device.host((LARGE,), "u8")
        return {
            "d2h": _rate(device, lambda n: device.download(host[:n], near.head(n))),
            "h2d": _rate(device, lambda n: device.upload(near.head(n), host[:n])),
            "d2d": _rate(device, lambda n: device.copy(far.head(n), near.head(n))),
        }
    finally:
        arena.close()


def measure_prefill(program: ProgramPort, chunk: int, context: int) -> PrefillRate:
    """Time short prompts, of at most ``chunk`` and ``context`` tokens. Leaves nothing behind."""
    longer = min(PROMPT, chunk - 1, context - 1)
    one = min(_prompt_ns(program, 1) for _ in range(2))  # the first one also touches every weight
    more = _prompt_ns(program, 1 + max(longer, 0))
    token_q32 = max(((more - one) << Q) // max(longer, 1), (one << Q) // TOKENS_OF_A_UNIT)
    return PrefillRate(one, token_q32, token_q32 // PAIRS_OF_A_TOKEN)


def measure_rounds(program: ProgramPort, rows: int, choices: Sequence[int], context: int) -> Prices:
    """Time decode rounds of one row and of ``rows`` rows, with each of the ascending ``choices`` of drafts. Leaves
    nothing behind. Raises InvalidRequest for a context that holds none."""
    needed = 2 + ROUNDS * (1 + choices[-1])
    if context < needed:
        raise InvalidRequest(f"{context} tokens: adaptive drafts need {needed} to be measured", field="max_context")
    measured = {}
    for count in sorted({1, rows}):
        sweeps = [[_round_ns(program, count, drafts) for drafts in choices] for _ in range(SWEEPS)]
        measured[count] = [min(times) / 1e9 for times in zip(*sweeps)]
    return Prices(choices, measured)


def _rate(device: Device, copy: Callable[[int], None]) -> TransferRate:
    def nanoseconds(n: int) -> int:
        event = device.event()
        began = time.perf_counter_ns()
        copy(n)
        event.record()
        event.wait()
        return time.perf_counter_ns() - began

    small, large = (min(nanoseconds(n) for _ in range(3)) for n in (SMALL, LARGE))
    return TransferRate(0, small, max(1, (max(0, large - small) << Q) // LARGE))


def _prompt_ns(program: ProgramPort, tokens: int) -> int:
    """Nanoseconds from the start of a prompt's prefill to its first token."""
    sequence = _admit(program, 0, tokens, 1)
    began = time.perf_counter_ns()
    program.prefill(sequence, tokens)
    batch = program.finalize_prefill((sequence,), None)
    program.wait(batch)
    took = time.perf_counter_ns() - began
    program.commit(batch, [RowDecision(1, terminal=True)])
    program.discard(sequence)
    return took


def _round_ns(program: ProgramPort, rows: int, drafts: int) -> float:
    """Nanoseconds of a decode round of ``rows`` rows that verifies and makes ``drafts`` drafts of each."""
    sequences = [_admit(program, lane, 1, 2 + ROUNDS * (1 + drafts)) for lane in range(rows)]
    for sequence in sequences:
        program.prefill(sequence, 1)
    batch = program.finalize_prefill(sequences, None)
    marks = []
    for _ in range(ROUNDS):
        program.commit(batch, [RowDecision(len(row.tokens)) for row in program.wait(batch)])
        marks.append(time.perf_counter_ns())
        batch = program.decode(sequences, [UnitLicense(drafts, drafts)] * rows, None)
    program.wait(batch)
    program.abort_pending(batch)
    for sequence in sequences:
        program.discard(sequence)
    return statistics.median(b - a for a, b in itertools.pairwise(marks[1:]))


def _admit(program: ProgramPort, lane: int, prompt: int, output: int) -> SequenceHandle:
    """A sequence that finds nothing and leaves nothing."""
    ids = np.zeros(prompt, np.int32)
    positions = np.broadcast_to(np.arange(prompt, dtype=np.int32), (3, prompt))
    identity = PrefixIdentity(ids, np.zeros(prompt, np.uint8), positions)
    sampling = SamplingSpec(0.0, 1.0, 1, 0.0, 0.0, 0.0, 0)
    request = PreparedRequest(
        RequestId(lane), lane, identity, digest_chain(identity), output, output, LimitReason.OUTPUT_LIMIT, sampling,
        participation="disabled",
    )  # fmt: skip
    root = program.inspect(None, request, False)
    assert root is not None
    plan = program.open_session(request, lane, (root,), ()).seal(Target(0, ()))
    program.start(plan, AdoptionTicket(plan.id, plan.lane, plan.manifest))
    program.poll()
    sequence = program.commit_transaction().sequence
    assert sequence is not None
    return sequence
