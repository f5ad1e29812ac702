"""The language of one whole assistant turn: what surrounds the text a constraint is about."""

from __future__ import annotations

from functools import cache

import attrs

from ninfer.constraints.automata import Dfa
from ninfer.constraints.ir import Auto, Grammar, Lit, Node, Ref, Tok, seq


@attrs.frozen
class PhaseMarker:
    """A marker of the chat protocol. ``token``: the id that alone stands for it; None when it is ordinary text."""

    text: str
    token: int | None

    @property
    def node(self) -> Node:
        return Lit(self.text) if self.token is None else Tok((self.token,))


@cache
def free_text(without: str) -> Node:
    """Any text that does not contain ``without``."""
    return Auto(Dfa.without(without), "raw")


def after_thinking(turn: Grammar, close: PhaseMarker) -> Grammar:
    """A turn that begins inside the thinking: free text, the canonical close, then ``turn``."""
    opening = seq(free_text(close.text), "\n", close.node, "\n\n", Ref(turn.root))
    return Grammar({**turn.rules, "<thinking>": opening}, "<thinking>", turn.free_form)
