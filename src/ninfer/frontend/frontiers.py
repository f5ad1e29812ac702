"""Where a history must be split when it is executed, and which generated positions a re-rendered history
keeps.

An assistant turn with thinking is rendered ``<|im_start|>assistant\\n<think>\\n`` thinking
``\\n</think>\\n\\n`` content. A frontier lies behind the canonical close ``\\n</think>\\n\\n``, where a token
ends there. It is a function of the token ids alone, so a history has the same frontiers whether it was
generated here or comes back in a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt

from ninfer.frontend.protocol import THINK_CLOSE, THINK_OPEN, TURN_OPEN
from ninfer.frontend.tokenizer import Tokenizer


@attrs.frozen
class Frontiers:
    """The token patterns of one vocabulary. ``None`` ids: the vocabulary has no such token, hence no frontiers."""

    think_open: int | None
    think_close: int | None
    header: tuple[int, ...]
    """Tokens of ``<|im_start|>assistant\\n``."""
    tail: tuple[int, ...]
    """Tokens of the two newlines that follow ``</think>``."""
    newline_ended: frozenset[int]
    """Tokens whose bytes end in a newline."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Frontiers:
        vocabulary = tokenizer.vocabulary
        return cls(
            think_open=vocabulary.ids.get(THINK_OPEN),
            think_close=vocabulary.ids.get(THINK_CLOSE),
            header=tuple(tokenizer.encode(f"{TURN_OPEN}assistant\n")),
            tail=tuple(tokenizer.encode("\n\n")),
            newline_ended=frozenset(vocabulary.bytes.ending_with(ord("\n"))),
        )

    def find(self, tokens: npt.NDArray[np.int32]) -> tuple[int, ...]:
        """All frontiers of a token sequence, ascending."""
        if self.think_open is None or self.think_close is None:
            return ()
        closes = np.flatnonzero(tokens == self.think_close)
        found = []
        for opening in np.flatnonzero(tokens == self.think_open).tolist():
            if not self.opens_turn(tokens, opening):
                continue
            later = closes[np.searchsorted(closes, opening) :]
            if later.size and self.closes(tokens, int(later[0])):
                found.append(int(later[0]) + 1 + len(self.tail))
        return tuple(found)

    def opens_turn(self, tokens: npt.NDArray[np.int32], opening: int) -> bool:
        """Whether the ``<think>`` at ``opening`` is the first token of an assistant turn."""
        start = opening - len(self.header)
        return start >= 0 and tuple(tokens[start:opening].tolist()) == self.header

    def closes(self, tokens: npt.NDArray[np.int32] | Sequence[int], closing: int) -> bool:
        """Whether the ``</think>`` at ``closing`` is a canonical close."""
        after = tuple(int(t) for t in tokens[closing + 1 : closing + 1 + len(self.tail)])
        return closing > 0 and int(tokens[closing - 1]) in self.newline_ended and after == self.tail
