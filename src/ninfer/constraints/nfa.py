"""Regular expressions as automata: a nondeterministic one is laid out, then its reachable subsets become states."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from ninfer.constraints.chars import ANY, END, Ranges
from ninfer.constraints.limits import MAX_NFA_STATES, Work, check_states
from ninfer.constraints.regex import Chars, Concat, Node, Pattern, Repeat, Union
from ninfer.errors import ConstraintLimit

DEAD = -1


def determinised(pattern: Pattern, *, search: bool, work: Work) -> tuple[list[int], list[list[int]], bytearray]:
    """Interval starts, transitions (DEAD where there is none) and accepting states of a pattern, from state 0."""
    nfa = _Nfa(work)
    start, final = nfa.state(), nfa.state()
    for alternative in pattern:
        at = start
        if search and not alternative.start:
            at = nfa.loop(start)
        end = nfa.add(alternative.body, at)
        if search and not alternative.end:
            end = nfa.loop(end)
            nfa.universal = end
        nfa.epsilon[end].append(final)
    return nfa.determinise(start, final)


class _Nfa:
    """States with epsilon edges and character edges, built from a syntax tree."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.epsilon: list[list[int]] = []
        self.moves: list[tuple[Ranges, int] | None] = []
        self.universal = -1
        """A state from which every text is accepted, if there is one."""

    def state(self) -> int:
        if len(self.epsilon) >= MAX_NFA_STATES:
            raise ConstraintLimit(f"a pattern expands to more than {MAX_NFA_STATES} states", limit="states")
        self.epsilon.append([])
        self.moves.append(None)
        return len(self.epsilon) - 1

    def move(self, at: int, ranges: Ranges) -> int:
        """A state after one character of the set, from ``at``."""
        source, target = self.state(), self.state()
        self.epsilon[at].append(source)
        self.moves[source] = (ranges, target)
        return target

    def loop(self, at: int) -> int:
        """A state after any characters, from ``at``."""
        hub = self.state()
        self.epsilon[at].append(hub)
        self.epsilon[self.move(hub, ANY)].append(hub)
        return hub

    def add(self, node: Node, at: int) -> int:
        """Attach a node after ``at``; returns its end state."""
        if isinstance(node, Chars):
            return self.move(at, node.ranges)
        if isinstance(node, Concat):
            for part in node.parts:
                at = self.add(part, at)
            return at
        end = self.state()
        if isinstance(node, Union):
            for option in node.options:
                self.epsilon[self.add(option, at)].append(end)
            return end
        assert isinstance(node, Repeat)
        for _ in range(node.low):
            at = self.add(node.item, at)
        if node.high is None:
            hub = self.state()
            self.epsilon[at].append(hub)
            self.epsilon[self.add(node.item, hub)].append(hub)
            at = hub
        else:
            for _ in range(node.high - node.low):
                self.epsilon[at].append(end)
                at = self.add(node.item, at)
        self.epsilon[at].append(end)
        return end

    def closure(self, states: Iterable[int]) -> frozenset[int]:
        """The states with a character edge, and those without any edge, reachable without reading."""
        seen = set(states)
        stack = list(seen)
        while stack:
            for target in self.epsilon[stack.pop()]:
                if target not in seen:
                    seen.add(target)
                    stack.append(target)
        self.work.spend(len(seen))
        if self.universal in seen:  # what else is reachable no longer matters
            seen = {self.universal, *self.epsilon[self.universal]}
        return frozenset(s for s in seen if self.moves[s] is not None or not self.epsilon[s])

    def determinise(self, start: int, final: int) -> tuple[list[int], list[list[int]], bytearray]:
        cuts = sorted({0} | {e for m in self.moves if m for r in m[0] for e in r if e < END})
        symbols: dict[Ranges, list[int]] = {}
        for move in self.moves:
            if move and move[0] not in symbols:
                symbols[move[0]] = [
                    i for low, high in move[0] for i in range(bisect_left(cuts, low), len(cuts)) if cuts[i] < high
                ]
                self.work.spend(len(cuts))
        first = self.closure([start])
        number, order = {first: 0}, [first]
        trans: list[list[int]] = []
        known: dict[frozenset[int], frozenset[int]] = {}
        for subset in order:
            targets: dict[int, set[int]] = {}
            self.work.spend(len(cuts))
            for state in subset:
                move = self.moves[state]
                if move:
                    self.work.spend(len(symbols[move[0]]))
                    for symbol in symbols[move[0]]:
                        targets.setdefault(symbol, set()).add(move[1])
            row = [DEAD] * len(cuts)
            for symbol, states in targets.items():
                core = frozenset(states)
                closed = known.get(core)
                if closed is None:
                    closed = known[core] = self.closure(core)
                if closed not in number:
                    number[closed] = len(order)
                    check_states(len(order) + 1)
                    order.append(closed)
                row[symbol] = number[closed]
            trans.append(row)
        return cuts, trans, bytearray(final in subset for subset in order)
