"""Automata over what a canonical JSON string writes, made from automata over what it means."""

from __future__ import annotations

from ninfer.constraints.automata import DEAD, Dfa
from ninfer.constraints.ir import ESCAPED

_BACKSLASH = 0x5C
_TAILS = sorted(tail for tail in ESCAPED.values())
_INNER = ("\\", "\\u", "\\u0", "\\u00", "\\u000", "\\u001")
"""Unfinished escapes, each a state of its own beside every state that can read one."""


def spelled(dfa: Dfa) -> Dfa:
    """The inside of canonical JSON strings whose values the automaton accepts."""
    if dfa.empty:
        return dfa
    cuts = sorted({*dfa.cuts, 0, 0x20, *(ord(c) + d for tail in (*_TAILS, '"\\') for c in tail for d in (0, 1))})
    column = {cut: i for i, cut in enumerate(cuts)}
    trans: list[list[int]] = [
        [dfa.step(state, cut) if cut >= 0x20 and cut not in ESCAPED else DEAD for cut in cuts]
        for state in range(len(dfa.trans))
    ]
    for state in range(len(dfa.trans)):
        after = {"\\" + tail: dfa.step(state, code) for code, tail in ESCAPED.items()}
        number = {prefix: len(trans) + i for i, prefix in enumerate(_INNER)}
        trans[state][column[_BACKSLASH]] = number["\\"]
        trans += [[DEAD] * len(cuts) for _ in _INNER]
        for written, target in (*after.items(), *number.items()):
            before = state if len(written) == 1 else number[written[:-1]]
            if len(written) > 1:
                trans[before][column[ord(written[-1])]] = target
    accept = dfa.accept + bytearray(len(trans) - len(dfa.trans))
    return Dfa(cuts, trans, accept).trimmed()
