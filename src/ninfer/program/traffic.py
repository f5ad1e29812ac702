"""What the rounds of a Program had to move: the floor that a measured time is compared with."""

from __future__ import annotations

from collections.abc import Sequence

from ninfer.program.layout import PoolLayout
from ninfer.program.memory import Shape
from ninfer.program.text import TextModel


class Traffic:
    """Counts executed tokens, and the bytes decode rounds had to read and write: weights once per round (those of a
    drafting module once per draft), keys and values of every cached token once, state once in each direction."""

    def __init__(self, model: TextModel, layouts: Sequence[PoolLayout], shape: Shape, state_bytes: int) -> None:
        rows, K = range(1, shape.rows + 1), shape.window
        self._window = K
        self._weights = {(B, W): model.weight_bytes(B * W) for B in rows for W in range(1, K + 2)}
        proposal = model.proposal
        self._draftable = (shape.vocabulary if proposal is None else proposal.shape[0]) if K else 0
        self._drafting = {(B, S): model.draft_bytes(B, S) for B in rows for S in range(K + 1)}
        self.kv_token = sum(plane.bytes_per_token for layout in layouts for plane in layout.planes)
        self.state = state_bytes
        self.count_anew()

    def count_anew(self) -> None:
        self.prefill_tokens = self.decode_rounds = self.decode_tokens = self.decode_bytes = 0

    def launched(self, frontiers: Sequence[int], columns: int, ahead: int) -> None:
        """A round goes on from these frontiers in so many recorded columns a row, and drafts ``ahead`` for each. What
        it decides is added to ``decode_tokens``."""
        B = len(frontiers)
        weights = self._weights[B, max(columns, 1)] + self._drafting[B, ahead]
        self.decode_rounds += 1
        self.decode_bytes += weights + (sum(frontiers) + B) * self.kv_token + 2 * B * self.state

    def counters(self) -> dict[str, int]:
        K = self._window
        return {
            **{f"weight_bytes.{B}": n + self._drafting[B, K] for (B, W), n in self._weights.items() if W == K + 1},
            "draft_vocabulary": self._draftable,
            "kv_bytes_per_token": self.kv_token,
            "state_bytes_per_row": self.state,
            "prefill_tokens": self.prefill_tokens,
            "decode_rounds": self.decode_rounds,
            "decode_tokens": self.decode_tokens,
            "decode_bytes": self.decode_bytes,
        }
