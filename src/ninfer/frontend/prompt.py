"""A prompt ready to run: tokens, content identity, digests, and what the answer's meaning depends on."""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt

from ninfer.identity import PrefixIdentity, PromptDigest
from ninfer.inputs import Tool
from ninfer.results import Channel


@attrs.frozen(eq=False, kw_only=True)
class PreparedPrompt:
    """Made by ``prepare``; immutable. Positions are token counts from the start of the prompt.

    tokens: int32 [n], read-only. start_channel: where the answer begins. tools: the declared tools.
    continuation: UTF-8 of the assistant text that is continued, else empty. cache_markers: where the caller
    allows reuse. boundaries: ends of the tool declarations, of the leading system turn, of the prompt.
    rewrite: the deepest position that a following request cannot change, and why (TURN_CLOSURE: thinking of
    this turn goes when the user speaks again; RESPONSE_REPLAY: only the answer may be replaced). chat: False
    for text and token prompts, whose answers have no channels and no tools. prepare_seconds: wall time.
    """

    tokens: npt.NDArray[np.int32]
    identity: PrefixIdentity
    digest: PromptDigest
    start_channel: Channel = "content"
    tools: tuple[Tool, ...] = ()
    continuation: bytes = b""
    cache_markers: tuple[int, ...] = ()
    boundaries: tuple[int, ...] = ()
    rewrite: tuple[int, str] | None = None
    chat: bool = False
    prepare_seconds: float = 0.0

    def __len__(self) -> int:
        return len(self.tokens)


def text_identity(tokens: npt.NDArray[np.int32], frontiers: tuple[int, ...]) -> PrefixIdentity:
    """Identity of a prompt without media: all three rotary axes count tokens. Arrays become read-only."""
    n = len(tokens)
    types = np.zeros(n, np.uint8)
    positions = np.broadcast_to(np.arange(n, dtype=np.int32), (3, n))
    for array in (tokens, types):
        array.flags.writeable = False
    return PrefixIdentity(tokens=tokens, token_types=types, positions=positions, execution_frontiers=frontiers)
