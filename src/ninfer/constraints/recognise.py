"""Exact membership in a Grammar, character by character.

Every rule becomes a small automaton whose edges read a character, read a token or call a rule. All ways of reading the
input advance together; calls share one graph of frames, one frame per (rule, position), as in generalised LL parsing
(Scott and Johnstone, 2010). A call in tail position adds no frame of its own, so right recursion costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from threading import RLock

from ninfer.cancellation import checkpoint
from ninfer.constraints.automata import Dfa
from ninfer.constraints.chars import Ranges, intersection
from ninfer.constraints.ir import (
    DIRECT,
    ESCAPED,
    Alt,
    Auto,
    Class,
    Counted,
    Grammar,
    Lit,
    Node,
    NotTok,
    Ref,
    Rep,
    Seq,
    Tok,
)

_ONE_CHARACTER = Auto(Dfa.length(1, 1), "json")


@dataclass(slots=True, eq=False)
class State:
    """One point inside a rule. A state without edges is where its rule ends. ``lay`` makes the edges of a state when it
    is first reached, so that a grammar costs what is read of it. ``run``: the one text that can be read, up to a state.
    """

    silent: tuple[State, ...] = ()
    chars: tuple[tuple[Ranges, State], ...] = ()
    calls: tuple[tuple[str, State], ...] = ()
    tokens: tuple[tuple[Tok | NotTok, State], ...] = ()
    strings: tuple[tuple[Auto | Counted, State], ...] = ()
    lay: Callable[[State], None] | None = None
    run: tuple[str, State] | None = None

    @property
    def final(self) -> bool:
        return not (self.silent or self.chars or self.calls or self.tokens or self.strings)


@dataclass(slots=True, eq=False)
class Frame:
    """A call of a rule at one position: where to go on when it ends."""

    position: int
    returns: dict[tuple[int, int], tuple[State, Frame | None]] = field(default_factory=dict)
    ended: bool = False


class Machine:
    """A grammar prepared for recognition. Shared by any number of runs and threads.

    whole_strings: automata and counted strings stay whole, as edges of their own, for a reader that knows them; a Run
    does not.
    """

    def __init__(self, grammar: Grammar, *, whole_strings: bool = False) -> None:
        self._whole_strings = whole_strings
        self._laying = RLock()
        self.starts = {name: State(lay=partial(self._rule, body)) for name, body in grammar.rules.items()}
        self.root = self.starts[grammar.root]

    def accepts(self, text: str | bytes) -> bool:
        """Whether the whole text is in the language. Bytes must be UTF-8."""
        run = Run(self)
        return run.feed(text) and run.complete

    def ready(self, state: State) -> State:
        """The state with its edges."""
        if state.lay is not None:
            with self._laying:
                if state.lay is not None:
                    state.lay(state)
                    state.lay = None
        return state

    def _rule(self, body: Node, at: State) -> None:
        self._add(body, at, State())

    def _add(self, node: Node, at: State, end: State) -> None:
        """Lay the node's edges from ``at`` to ``end``."""
        if isinstance(node, Lit):
            _literals((node.text,), end, at)
        elif isinstance(node, Class):
            at.chars += ((node.ranges, end),)
        elif isinstance(node, Seq):
            self._sequence(node.parts, end, at)
        elif isinstance(node, Alt):
            texts = tuple(dict.fromkeys(option.text for option in node.options if isinstance(option, Lit)))
            if texts:
                _literals(texts, end, at)
            for option in node.options:
                if not isinstance(option, Lit):
                    self._add(option, at, end)
            if not node.options:
                at.chars += (((), end),)
        elif isinstance(node, Rep):
            self._repeat(node, at, end)
        elif isinstance(node, Ref):
            at.calls += ((node.rule, end),)
        elif self._whole_strings and isinstance(node, Auto | Counted):
            at.strings += ((node, end),)
        elif isinstance(node, Auto):
            self._automaton(node, at, end)
        elif isinstance(node, Counted):
            self._counted(node, at, end)
        else:
            at.tokens += ((node, end),)

    def _sequence(self, parts: tuple[Node, ...], end: State, at: State) -> None:
        if len(parts) > 1:
            self._add(parts[0], at, State(lay=partial(self._sequence, parts[1:], end)))
        elif parts:
            self._add(parts[0], at, end)
        else:
            at.silent += (end,)

    def _repeat(self, node: Rep, at: State, end: State) -> None:
        def copy(done: int, at: State) -> None:
            """Lay what may follow ``done`` copies: the end, and one copy more."""
            if node.high is None and done == node.low:
                hub = State()
                at.silent += (hub,)
                hub.silent += (end,)
                self._add(node.item, hub, hub)
                return
            if done >= node.low:
                at.silent += (end,)
            if done != node.high:
                self._add(node.item, at, State(lay=partial(copy, done + 1)))

        copy(0, at)

    def _automaton(self, node: Auto, at: State, end: State) -> None:
        states = [State() for _ in node.dfa.trans]
        if not states:
            at.chars += (((), end),)
            return
        at.silent += (states[0],)
        for i, state in enumerate(states):
            if node.dfa.accept[i]:
                state.silent += (end,)
            for target, ranges in node.dfa.edges(i):
                if node.spelling == "raw":
                    state.chars += ((ranges, states[target]),)
                else:
                    _spelled(state, ranges, states[target])
            if state.final:
                state.chars += (((), end),)

    def _counted(self, node: Counted, at: State, end: State) -> None:
        self._repeat(Rep(_ONE_CHARACTER, node.low, node.high), at, end)


def _only(char: str) -> Ranges:
    return ((ord(char), ord(char) + 1),)


def _spelled(at: State, ranges: Ranges, end: State) -> None:
    """Edges for one character of a set as a canonical JSON string writes it."""
    direct, tails = _written(ranges)
    if direct:
        at.chars += ((direct, end),)
    if tails:
        at.chars += ((_only("\\"), State(lay=partial(_literals, tails, end))),)


@lru_cache(maxsize=256)
def _written(ranges: Ranges) -> tuple[Ranges, tuple[str, ...]]:
    """Of a set, the characters that stand for themselves, and what the others are written as after a backslash."""
    tails = (tail for code, tail in ESCAPED.items() if any(low <= code < high for low, high in ranges))
    return intersection(ranges, DIRECT), tuple(tails)


def _literals(texts: tuple[str, ...], end: State, at: State) -> None:
    """One of several texts; what they begin with alike is read once."""
    by_first: dict[str, list[str]] = {}
    for text in texts:
        by_first.setdefault(text[:1], []).append(text[1:])
    if "" in by_first:
        at.silent += (end,)
        del by_first[""]
    for first, rests in by_first.items():
        run = (rests[0], end) if len(rests) == 1 else None
        after = State(lay=partial(_literals, tuple(rests), end), run=run) if any(rests) else end
        at.chars += ((_only(first), after),)


class Run:
    """One reading of an input. ``viable`` says whether some continuation may still be accepted."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._position = 0
        self._active: dict[tuple[int, int], tuple[State, Frame | None]] = {}
        self._frames: dict[str, Frame] = {}
        self.complete = False
        self._expand([(machine.root, None)])

    @property
    def viable(self) -> bool:
        return bool(self._active) or self.complete

    def feed(self, text: str | bytes) -> bool:
        """Read text; False, and no longer viable, when it leaves the language's prefixes."""
        if isinstance(text, bytes):
            try:
                text = text.decode()
            except UnicodeDecodeError:
                self._active, self.complete = {}, False
                return False
        for i, char in enumerate(text):
            if i % 256 == 0:
                checkpoint()
            code = ord(char)
            self._advance(
                [
                    (target, frame)
                    for state, frame in self._active.values()
                    for ranges, target in state.chars
                    if any(low <= code < high for low, high in ranges)
                ]
            )
            if not self.viable:
                return False
        return True

    def feed_token(self, token: int) -> bool:
        """Read one token that has no text, or is named by id."""
        self._advance(
            [
                (target, frame)
                for state, frame in self._active.values()
                for terminal, target in state.tokens
                if (token in terminal.ids) == isinstance(terminal, Tok)
            ]
        )
        return self.viable

    def _advance(self, configurations: list[tuple[State, Frame | None]]) -> None:
        self._position += 1
        self._frames = {}
        self._expand(configurations)

    def _expand(self, agenda: list[tuple[State, Frame | None]]) -> None:
        """Follow silent edges, calls and returns; keep the configurations that read something."""
        seen: dict[tuple[int, int], tuple[State, Frame | None]] = {}
        self.complete = False
        while agenda:
            state, frame = agenda.pop()
            key = (id(state), id(frame))
            if key in seen:
                continue
            seen[key] = (state, frame)
            self._machine.ready(state)
            agenda.extend((target, frame) for target in state.silent)
            for rule, after in state.calls:
                self._call(rule, after, frame, agenda)
            if state.final:
                if frame is None:
                    self.complete = True
                else:
                    frame.ended = frame.ended or frame.position == self._position
                    agenda.extend(frame.returns.values())
        self._active = {k: c for k, c in seen.items() if c[0].chars or c[0].tokens}

    def _call(self, rule: str, after: State, frame: Frame | None, agenda: list[tuple[State, Frame | None]]) -> None:
        callee = self._frames.get(rule)
        if callee is None:
            callee = self._frames[rule] = Frame(self._position)
            agenda.append((self._machine.starts[rule], callee))
        # The frames of earlier positions gain no more returns, so a call in tail position may inherit them.
        tail = self._machine.ready(after).final and frame is not None and frame.position < self._position
        returns = frame.returns.values() if tail and frame is not None else ((after, frame),)
        for state, parent in returns:
            key = (id(state), id(parent))
            if key not in callee.returns:
                callee.returns[key] = (state, parent)
                if callee.ended:
                    agenda.append((state, parent))
