"""The control plane's side of a Program, one call at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ninfer.context import (
    AdoptionTicket,
    CheckpointRef,
    ResourcePlan,
    ResourceResult,
    Shortage,
    StartStatus,
    Target,
    TransactionStatus,
)
from ninfer.contract import (
    Handle,
    LimitReason,
    PendingBatch,
    PreparedRequest,
    RequestId,
    RowDecision,
    RowMask,
    SamplingSpec,
    UnitLicense,
)
from ninfer.identity import PrefixIdentity, digest_chain
from ninfer.program.program import Program

GREEDY = SamplingSpec(0.0, 1.0, 0, 0.0, 0.0, 0.0, 0)


def make_request(
    tokens: Sequence[int],
    output: int = 8,
    sampling: SamplingSpec = GREEDY,
    rope_delta: int = 0,
    frontiers: tuple[int, ...] = (),
    id: int = 0,
) -> PreparedRequest:
    n = len(tokens)
    positions = np.stack([np.arange(n), np.arange(n) + 3, np.arange(n) * 2]).astype(np.int32)
    identity = PrefixIdentity(
        np.array(tokens, np.int32), np.zeros(n, np.uint8), positions, rope_delta, execution_frontiers=frontiers
    )
    return PreparedRequest(
        RequestId(id), id, identity, digest_chain(identity), output, output, LimitReason.OUTPUT_LIMIT, sampling
    )


def ticket(plan: ResourcePlan) -> AdoptionTicket:
    return AdoptionTicket(plan.id, plan.lane, plan.manifest)


def plan_start(
    program: Program,
    request: PreparedRequest,
    lane: int,
    ref: CheckpointRef | None = None,
    consume: bool = True,
    levels: dict[Handle, int] | None = None,
) -> ResourcePlan | tuple[Shortage, ...]:
    """A plan from one candidate, with victims at the levels given (-1: evicted); what is missing if there is none."""
    candidate = program.inspect(ref, request, consume)
    assert candidate is not None, f"{ref} does not match"
    session = program.open_session(request, lane, [candidate], list(levels or {}))
    return seal(session, levels or {})


def seal(session, levels: dict[Handle, int]) -> ResourcePlan | tuple[Shortage, ...]:
    victims = session.victims(0)
    numbers = [levels[v] % len(session.ladder(0, i)) for i, v in enumerate(victims)]
    target = Target(0, tuple(numbers))
    assessment = session.assess(target)
    return session.seal(target) if assessment.feasible else assessment.shortages


def run(program: Program, plan: ResourcePlan | tuple[Shortage, ...]) -> ResourceResult:
    """Start a plan and see it through."""
    assert isinstance(plan, ResourcePlan), plan
    assert program.start(plan, ticket(plan)) is StartStatus.STARTED
    for _ in range(4):
        if program.poll() is not TransactionStatus.RUNNING:
            break
    assert program.poll() is TransactionStatus.READY
    return program.commit_transaction()


def admit(program: Program, request: PreparedRequest, lane: int, ref: CheckpointRef | None = None, **how) -> Handle:
    result = run(program, plan_start(program, request, lane, ref, **how))
    assert result.sequence is not None
    return result.sequence


def prefill(program: Program, sequence: Handle, chunk: int) -> None:
    while program.prefill_remaining(sequence):
        program.prefill(sequence, chunk)


def accept_all(program: Program, batch: PendingBatch) -> list[tuple[int, ...]]:
    rows = program.wait(batch)
    program.commit(batch, [RowDecision(len(row.tokens)) for row in rows])
    return [row.tokens for row in rows]


def first(program: Program, sequences: Sequence[Handle], masks=None) -> list[tuple[int, ...]]:
    return accept_all(program, program.finalize_prefill(sequences, masks))


def step(program: Program, sequences: Sequence[Handle], masks=None) -> list[tuple[int, ...]]:
    return accept_all(program, program.decode(sequences, [UnitLicense()] * len(sequences), masks))


class Masks:
    """A provider of fixed masks: row -> legal ids; an empty set is a dead end."""

    def __init__(self, legal: dict[int, set[int]], fault: Exception | None = None) -> None:
        self.legal = legal
        self.fault = fault
        self.fills = 0

    def constrained_rows(self) -> Sequence[int]:
        return sorted(self.legal)

    def fill(self, row: int, drafts: Sequence[int], slots: np.ndarray) -> RowMask:
        assert len(slots) == 1 + len(drafts)
        self.fills += 1
        if self.fault is not None:
            raise self.fault
        slots[:] = mask_words(self.legal[row], slots.shape[1])
        return RowMask(len(slots), dead=0 if self.legal[row] else (1 << len(slots)) - 1)


def mask_words(legal: set[int], words: int) -> np.ndarray:
    mask = np.zeros(words, np.uint32)
    for token in legal:
        mask[token >> 5] |= np.uint32(1 << (token & 31))
    return mask
