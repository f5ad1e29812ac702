"""Deterministic automata over Unicode scalar values, the alphabet cut into intervals.

Used for what grammars cannot say: several patterns at once, patterns with length bounds, text that must not contain a
delimiter. All automata are trimmed: from every state an accepting state can be reached.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable

from ninfer.constraints.chars import ANY, END, SURROGATES, Ranges, contains
from ninfer.constraints.limits import MAX_DFA_STATES, Work, check_states
from ninfer.constraints.nfa import DEAD, determinised
from ninfer.constraints.regex import Pattern


class Dfa:
    """A trimmed automaton. ``cuts`` holds interval starts, ascending from 0: a character c has symbol
    ``bisect_right(cuts, c) - 1``. ``trans[state][symbol]`` is a state or DEAD; state 0 is the start. An empty language
    has no states."""

    __slots__ = ("accept", "cuts", "trans")

    def __init__(self, cuts: list[int], trans: list[list[int]], accept: bytearray) -> None:
        self.cuts = cuts
        self.trans = trans
        self.accept = accept

    # -- construction

    @classmethod
    def from_regex(cls, pattern: Pattern, *, search: bool, work: Work | None = None) -> Dfa:
        """The texts that match the whole pattern, or with ``search`` contain a match of it."""
        return cls(*determinised(pattern, search=search, work=work or Work())).trimmed()

    @classmethod
    def length(cls, low: int, high: int | None) -> Dfa:
        """Texts of ``low`` to ``high`` characters."""
        top = low if high is None else high
        if top < low:
            return cls([0], [], bytearray())
        check_states(top + 1)
        following = [i + 1 if i < top else (top if high is None else DEAD) for i in range(top + 1)]
        return cls.over(ANY, [[n] for n in following], bytearray(low <= i for i in range(top + 1)))

    @classmethod
    def without(cls, word: str) -> Dfa:
        """Texts that do not contain the word, which is not empty."""
        fallback = [0] * (len(word) + 1)
        for i in range(1, len(word)):
            j = fallback[i]
            while j and word[i] != word[j]:
                j = fallback[j]
            fallback[i + 1] = j + 1 if word[i] == word[j] else 0
        cuts = sorted({0, *SURROGATES} | {ord(c) + d for c in word for d in (0, 1)})
        trans = []
        for state in range(len(word)):
            row = []
            for cut in cuts:
                j = state
                while j and ord(word[j]) != cut:
                    j = fallback[j]
                j = j + 1 if ord(word[j]) == cut else 0
                row.append(DEAD if j == len(word) or not contains(ANY, cut) else j)
            trans.append(row)
        return cls(cuts, trans, bytearray([1]) * len(word)).trimmed()

    @classmethod
    def words(cls, words: Iterable[str], work: Work | None = None) -> Dfa:
        """Exactly these texts."""
        work = work or Work()
        trie: list[dict[int, int]] = [{}]
        accept = bytearray(1)
        for word in words:
            at = 0
            for char in word:
                if ord(char) not in trie[at]:
                    check_states(len(trie) + 1)
                    trie[at][ord(char)] = len(trie)
                    trie.append({})
                    accept.append(0)
                at = trie[at][ord(char)]
            accept[at] = 1
        cuts = sorted({0} | {code + d for edges in trie for code in edges for d in (0, 1)})
        work.spend(len(trie) * len(cuts))
        return cls(cuts, [[edges.get(cut, DEAD) for cut in cuts] for edges in trie], accept).trimmed()

    @classmethod
    def over(cls, ranges: Ranges, rows: list[list[int]], accept: bytearray) -> Dfa:
        """An automaton whose only symbol is a set; ``rows[state][0]`` is where its characters lead."""
        cuts = sorted({0} | {edge for r in ranges for edge in r if edge < END})
        inside = [contains(ranges, cut) for cut in cuts]
        return cls(cuts, [[row[0] if i else DEAD for i in inside] for row in rows], accept).trimmed()

    # -- queries

    @property
    def empty(self) -> bool:
        """Whether no text is accepted."""
        return not self.trans

    def step(self, state: int, char: int) -> int:
        """The state after a code point, or DEAD."""
        return self.trans[state][bisect_right(self.cuts, char) - 1]

    def accepts(self, text: str) -> bool:
        state = DEAD if self.empty else 0
        for char in text:
            if state == DEAD:
                return False
            state = self.step(state, ord(char))
        return state != DEAD and bool(self.accept[state])

    def edges(self, state: int) -> list[tuple[int, Ranges]]:
        """Where a state leads and on which characters, grouped by target."""
        grouped: dict[int, list[tuple[int, int]]] = {}
        row = self.trans[state]
        for i, target in enumerate(row):
            if target != DEAD:
                high = self.cuts[i + 1] if i + 1 < len(self.cuts) else END
                ranges = grouped.setdefault(target, [])
                if ranges and ranges[-1][1] == self.cuts[i]:
                    ranges[-1] = (ranges[-1][0], high)
                else:
                    ranges.append((self.cuts[i], high))
        return [(target, tuple(ranges)) for target, ranges in grouped.items()]

    # -- operations

    def product(self, *others: Dfa, limit: int = MAX_DFA_STATES, work: Work | None = None) -> Dfa:
        """The texts that all automata accept. Raises ConstraintLimit above ``limit`` states."""
        machine = self
        for other in others:
            machine = machine._product(other, limit, work or Work())
        return machine

    def _product(self, other: Dfa, limit: int, work: Work) -> Dfa:
        if self.empty or other.empty:
            return Dfa([0], [], bytearray())
        cuts = sorted({*self.cuts, *other.cuts})
        mine = [bisect_right(self.cuts, c) - 1 for c in cuts]
        theirs = [bisect_right(other.cuts, c) - 1 for c in cuts]
        width = len(other.trans)
        number = {0: 0}
        queue, trans, accept = deque([0]), [], bytearray()
        while queue:
            pair = queue.popleft()
            a, b = divmod(pair, width)
            row_a, row_b = self.trans[a], other.trans[b]
            work.spend(4 * len(cuts))
            row = []
            for i, j in zip(mine, theirs):
                x, y = row_a[i], row_b[j]
                if x == DEAD or y == DEAD:
                    row.append(DEAD)
                    continue
                key = x * width + y
                target = number.get(key)
                if target is None:
                    target = number[key] = len(number)
                    check_states(target + 1, limit)
                    queue.append(key)
                row.append(target)
            trans.append(row)
            accept.append(self.accept[a] & other.accept[b])
        return Dfa(cuts, trans, accept).trimmed()

    def complement(self) -> Dfa:
        """All other texts."""
        cuts = sorted({*self.cuts, *SURROGATES})
        mine = [bisect_right(self.cuts, c) - 1 for c in cuts]
        sink = len(self.trans)
        scalar = [contains(ANY, c) for c in cuts]
        trans = [
            [(sink if row[i] == DEAD else row[i]) if ok else DEAD for i, ok in zip(mine, scalar)] for row in self.trans
        ]
        trans.append([sink if ok else DEAD for ok in scalar])
        return Dfa(cuts, trans, bytearray([not a for a in self.accept] + [1])).trimmed()

    def trimmed(self) -> Dfa:
        """Without states that cannot be reached or cannot accept, and without cuts that separate nothing."""
        before: list[list[int]] = [[] for _ in self.trans]
        for state, row in enumerate(self.trans):
            for target in set(row):
                if target != DEAD:
                    before[target].append(state)
        alive = bytearray(self.accept)
        stack = [s for s in range(len(self.trans)) if self.accept[s]]
        while stack:
            for source in before[stack.pop()]:
                if not alive[source]:
                    alive[source] = 1
                    stack.append(source)
        if not self.trans or not alive[0]:
            return Dfa([0], [], bytearray())
        number, order = {0: 0}, [0]
        for state in order:
            for target in self.trans[state]:
                if target != DEAD and alive[target] and target not in number:
                    number[target] = len(order)
                    order.append(target)
        trans = [[number.get(t, DEAD) if t != DEAD and alive[t] else DEAD for t in self.trans[s]] for s in order]
        columns = [tuple(row[i] for row in trans) for i in range(len(self.cuts))]
        kept = [i for i in range(len(columns)) if i == 0 or columns[i] != columns[i - 1]]
        return Dfa(
            [self.cuts[i] for i in kept], [[row[i] for i in kept] for row in trans],
            bytearray(self.accept[s] for s in order),
        )  # fmt: skip

    def minimise(self, work: Work | None = None) -> Dfa:
        """The smallest equivalent automaton (Hopcroft 1971); the missing edges count as one dead state."""
        n, symbols = len(self.trans), range(len(self.cuts))
        if n < 2:
            return self
        work = work or Work()
        inverse: list[dict[int, list[int]]] = [{} for _ in symbols]
        for state, row in enumerate(self.trans):
            for symbol, target in enumerate(row):
                inverse[symbol].setdefault(n if target == DEAD else target, []).append(state)
        for symbol in symbols:
            inverse[symbol].setdefault(n, []).append(n)
        blocks = [
            b for b in ({s for s in range(n) if self.accept[s]}, {s for s in range(n) if not self.accept[s]}) if b
        ]
        if len(blocks) == 2:
            blocks[1].add(n)
        else:
            blocks.append({n})
        of = [0] * (n + 1)
        for i, block in enumerate(blocks):
            for state in block:
                of[state] = i
        waiting = {0 if len(blocks[0]) < len(blocks[1]) else 1}
        while waiting:
            splitter = list(blocks[waiting.pop()])
            for symbol in symbols:
                back = inverse[symbol]
                touched: dict[int, list[int]] = {}
                for target in splitter:
                    for state in back.get(target, ()):
                        touched.setdefault(of[state], []).append(state)
                work.spend(len(splitter))
                for i, part in touched.items():
                    if len(part) == len(blocks[i]):
                        continue
                    new = len(blocks)
                    fresh = set(part)
                    blocks[i] -= fresh
                    blocks.append(fresh)
                    for state in part:
                        of[state] = new
                    if i in waiting or len(fresh) <= len(blocks[i]):
                        waiting.add(new)
                    else:
                        waiting.add(i)
        number, order = {of[0]: 0}, [0]
        for state in order:
            for target in self.trans[state]:
                if target != DEAD and of[target] not in number:
                    number[of[target]] = len(order)
                    order.append(target)
        trans = [[DEAD if t == DEAD else number[of[t]] for t in self.trans[s]] for s in order]
        return Dfa(self.cuts, trans, bytearray(self.accept[s] for s in order)).trimmed()
