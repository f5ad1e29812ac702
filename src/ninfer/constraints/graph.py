"""The graph of reductions reachable from a schema, and which of them have a finite value at all."""

from __future__ import annotations

from collections.abc import Iterable

from ninfer.constraints.branches import Branch, Claims, Keyed, Listed
from ninfer.constraints.exclusive import check_exclusive
from ninfer.constraints.objects import Fields, settle
from ninfer.constraints.reduce import Reducer
from ninfer.errors import UnsatisfiableSchema

Settled = Branch | Fields


class Graph:
    """Every list of claims reachable from the root, as settled branches. ``productive`` holds those with a value."""

    def __init__(self, root: Claims, reducer: Reducer) -> None:
        self.root = root
        self.work = reducer.work
        self.nodes: dict[Claims, tuple[Settled, ...]] = {}
        pending = [root]
        while pending:
            claims = pending.pop()
            if claims not in self.nodes:
                branches = reducer.reduce(claims)
                self.work.spend(100 * len(branches))
                settled = [settle(b, reducer.candidates) if isinstance(b, Keyed) else b for b in branches]
                self.nodes[claims] = tuple(settled)
                pending.extend(c for b in settled for c in _inside(b))
        check_exclusive(reducer)
        self.productive = self._productive()
        if root not in self.productive:
            raise UnsatisfiableSchema("no value satisfies the schema", pointer=self._blame())

    def live(self, claims: Claims) -> list[Settled]:
        """The branches that have a value."""
        return [b for b in self.nodes[claims] if self._live(b, self.productive)]

    def _productive(self) -> set[Claims]:
        """The least fixpoint: what has a value, given what was found to have one."""
        users: dict[Claims, list[Claims]] = {}
        for claims, branches in self.nodes.items():
            for inner in {c for b in branches for c in _inside(b)}:
                users.setdefault(inner, []).append(claims)
        done: set[Claims] = set()
        waiting = list(self.nodes)
        while waiting:
            claims = waiting.pop()
            if claims not in done and any(self._live(b, done) for b in self.nodes[claims]):
                done.add(claims)
                waiting.extend(users.get(claims, ()))
        return done

    def _live(self, branch: Settled, done: set[Claims]) -> bool:
        """Whether a branch has a value made of values known to exist."""
        if isinstance(branch, Listed):
            self.work.spend(len(branch.prefix) + 1)
            first = branch.prefix[: branch.low]
            return all(c in done for c in first) and (branch.low <= len(branch.prefix) or branch.tail in done)
        if isinstance(branch, Fields):
            self.work.spend(len(branch.fields) + 1)
            if any(f.required and f.claims not in done for f in branch.fields):
                return False
            count = sum(f.claims in done for f in branch.fields)
            return count >= branch.low or any(o.claims in done for o in branch.others)
        return True

    def _blame(self) -> str:
        """Where the reason lies: follow what is required and impossible down from the root."""
        claims, seen = self.root, {self.root}
        while True:
            needed = [c for b in self.nodes[claims] for c in _needed(b) if c not in self.productive and c not in seen]
            if not needed:
                return claims[-1].schema.pointer
            claims = needed[0]
            seen.add(claims)


def _inside(branch: Settled) -> Iterable[Claims]:
    """The claims about what a branch contains."""
    if isinstance(branch, Listed):
        return (*branch.prefix, branch.tail)
    if isinstance(branch, Fields):
        return (*(f.claims for f in branch.fields), *(o.claims for o in branch.others))
    return ()


def _needed(branch: Settled) -> Iterable[Claims]:
    """Those of them that must be satisfied."""
    if isinstance(branch, Listed):
        return (*branch.prefix[: branch.low], *((branch.tail,) if branch.low > len(branch.prefix) else ()))
    if isinstance(branch, Fields):
        return (f.claims for f in branch.fields if f.required)
    return ()
