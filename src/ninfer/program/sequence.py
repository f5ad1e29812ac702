"""What Program knows of one active sequence."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ninfer.contract import Handle, PreparedRequest
from ninfer.program.layout import PoolKind
from ninfer.program.stores.images import ActiveStateBinding

if TYPE_CHECKING:
    from ninfer.program.history import Checkpoint


class Phase(enum.Enum):
    """PREFILL: nothing decided after the prompt yet. DECODE: the last token of the ledger is the anchor, decided and
    not executed. ENDED: only ``finish`` or ``discard`` may follow."""

    PREFILL = "prefill"
    DECODE = "decode"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class SequenceRecord:
    """The ledger has room for prompt and output; ``length`` accepted tokens, of which ``frontier`` are executed.

    lane: row of the penalty counts. read, slot: state slots that units read and write, the same one unless the state
    was forked and nothing has been written yet. row, draft_row: of the block tables. drafts: what was drafted behind
    the anchor and not verified yet. real, whole, seed: sampling parameters as the device reads them. boundaries: ledger
    lengths at which re-rendering the history reproduces the same tokens. checkpoints: captured on the way, by id.
    intact: the state is the one at ``frontier``; a unit that ended badly may have left another. mapped: tokens that
    have pages in every pool, as far as the last unit that mapped some has seen.
    """

    request: PreparedRequest
    lane: int
    binding: ActiveStateBinding
    spaces: dict[PoolKind, Handle]
    read: int
    slot: int
    row: int
    ledger: npt.NDArray[np.int32]
    real: tuple[float, ...]
    whole: tuple[int, ...]
    seed: tuple[int, int]
    length: int
    draft_row: int | None = None
    drafts: tuple[int, ...] = ()
    frontier: int = 0
    phase: Phase = Phase.PREFILL
    boundaries: list[int] = field(default_factory=list)
    checkpoints: dict[int, Checkpoint] = field(default_factory=dict)
    next_checkpoint: int = 0
    intact: bool = True
    mapped: int = 0

    @property
    def prompt(self) -> int:
        return len(self.request.identity.tokens)

    @property
    def everything(self) -> bool:
        """Whether tokens are drawn from the whole vocabulary."""
        sampling = self.request.sampling
        return sampling.top_k == 0 and sampling.temperature > 0

    @property
    def room(self) -> int:
        """Tokens that may still be decided."""
        return len(self.ledger) - self.length

    def append(self, tokens: Sequence[int]) -> None:
        """Accept decided tokens."""
        for at, token in enumerate(tokens, self.length):
            self.ledger[at] = token
        self.length += len(tokens)


def new_record(
    request: PreparedRequest, lane: int, frontier: int, binding: ActiveStateBinding, slots: tuple[int, int],
    spaces: dict[PoolKind, Handle], row: int, draft_row: int | None,
) -> SequenceRecord:  # fmt: skip
    """A sequence whose ledger is the prompt, of which ``frontier`` tokens are executed. slots: read and written."""
    prompt, s = request.identity.tokens, request.sampling
    ledger = np.zeros(len(prompt) + request.effective_output, np.int32)
    length = len(prompt)
    ledger[:length] = prompt
    if request.resume is not None:
        ledger[length] = request.resume.anchor
        length += 1
    return SequenceRecord(
        request=request,
        lane=lane,
        binding=binding,
        spaces=spaces,
        read=slots[0],
        slot=slots[1],
        row=row,
        draft_row=draft_row,
        ledger=ledger,
        real=(s.temperature, s.top_p, s.min_p, s.presence_penalty, s.frequency_penalty),
        whole=(s.top_k, s.logprobs, 0, lane),
        seed=(s.seed & 0xFFFFFFFF, s.seed >> 32),
        length=length,
        frontier=frontier,
        phase=Phase.DECODE if frontier < length and frontier == len(prompt) else Phase.PREFILL,
    )


def prefill_end(record: SequenceRecord, chunk: int) -> int:
    """Where a prefill unit of up to ``chunk`` tokens ends: it never crosses an execution frontier of the prompt."""
    end = min(record.frontier + chunk, record.prompt)
    return min([end, *(f for f in record.request.identity.execution_frontiers if record.frontier < f < end)])
