"""The space of targets: assessed and priced each once, compared, and searched. See ``planner`` for what is looked
for."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ninfer.context import Assessment, CheckpointRef, OwnerLevel, PlanningSession, Shortage, Target
from ninfer.contract import Handle
from ninfer.errors import InvariantError
from ninfer.runtime.costs import CostModel
from ninfer.runtime.question import PlannerBudget, Question, StopReason
from ninfer.runtime.retention import ONE, RETENTIONS
from ninfer.work import RecoveryRecipe


@dataclass(slots=True)
class Assessed:
    """A target and what Program says of it. losses: of each victim, 1/256 nanoseconds. fits: feasible, and the outcome
    has a place in the catalogue."""

    target: Target
    answer: Assessment
    now: int
    losses: tuple[int, ...]
    loss: int
    fits: bool

    @property
    def cost(self) -> int:
        return ONE * self.now + self.loss


@dataclass
class Domain:
    """The victims of one candidate with their ladders, and its target that degrades nobody."""

    owners: tuple[Handle, ...]
    ladders: tuple[tuple[OwnerLevel, ...], ...]
    identity: Assessment


class Search:
    def __init__(self, session: PlanningSession, question: Question, costs: CostModel) -> None:
        self.session = session
        self.question = question
        self.costs = costs
        self.seen: dict[Target, Assessed] = {}
        self.stored = 0
        self.searched = 0
        self._domains: dict[int, Domain] = {}
        self._recovery: dict[Handle, dict[int, int]] = {}
        self._evicted: dict[Handle, int] = {}
        self._prices: dict[int, tuple[object, int]] = {}  # with the object, which keeps its id
        candidates = question.candidates
        self._least = [costs.transfers_ns(c.min_restore) + costs.prefill_ns(c.prefill) for c in candidates]
        self._own_loss = [*question.losses, *[0] * (len(candidates) - len(question.losses))]

    # -- what must be looked at ------------------------------------------------------------------------------------

    def identities(self) -> tuple[Assessed | None, bool]:
        """The best candidate that degrades nobody, and whether nothing can be better than it."""
        best: Assessed | None = None
        open_bounds = []
        for c in self._by_bound():
            if best is not None and best.cost < self._bound(c):
                break
            a = self.assess(Target(c, (0,) * len(self._domain(c).owners)))
            if a.fits and (best is None or self._better(a, best)):
                best = a
            if not a.fits or self._improvable(c, a):
                open_bounds.append(self._bound(c))
        return best, best is not None and all(best.cost < bound for bound in open_bounds)

    def mandatory(self, best: Assessed | None) -> tuple[Assessed | None, bool]:
        """Release everything, then give back what need not go: for up to three sources, and always for the root."""
        maximal = False
        built = 0
        root = len(self.question.candidates) - 1
        for c in [*[c for c in self._by_bound() if c != root], root]:
            if c != root and (built == 3 or (best is not None and self._bound(c) >= best.cost)):
                continue
            a = self.assess(Target(c, tuple(len(ladder) - 1 for ladder in self._domain(c).ladders)))
            if not a.fits:
                continue
            a = self.readmit(a)
            built += 1
            if best is None or self._better(a, best):
                best, maximal = a, True
        return best, maximal

    def readmit(self, a: Assessed) -> Assessed:
        """Lower each victim's level as far as the target stays possible and its cost does not rise.

        The victim that stands to lose most goes first. The result is irreducible: no single victim can be spared more.
        """
        last = [len(ladder) - 1 for ladder in self._domain(a.target.candidate).ladders]
        stake = self.assess(Target(a.target.candidate, tuple(last))).losses
        order = sorted(range(len(last)), key=lambda v: (-stake[v], v))
        a, before = self._spare(a, order), a
        while a is not before:
            before = a
            for v in order:
                a = self._lower(a, v)
        return a

    def _spare(self, a: Assessed, victims: Sequence[int]) -> Assessed:
        """Ask of each victim in turn as little as possible. Halving finds the few that must give something up among the
        many that need not."""
        if len(victims) < 2:
            return self._lower(a, victims[0]) if victims else a
        levels = list(a.target.levels)
        for v in victims:
            levels[v] = 0
        spared = self.assess(Target(a.target.candidate, tuple(levels)))
        if spared.fits and spared.cost <= a.cost:
            return spared
        half = len(victims) // 2
        return self._spare(self._spare(a, victims[:half]), victims[half:])

    def _lower(self, a: Assessed, victim: int) -> Assessed:
        """The least that a victim can give up while all others stay as they are."""
        for level in range(a.target.levels[victim]):
            spared = self.assess(_with_level(a.target, victim, level))
            if spared.fits and spared.cost <= a.cost:
                return spared
        return a

    # -- what may be looked at -------------------------------------------------------------------------------------

    def improve(self, best: Assessed, budget: PlannerBudget, clock: Callable[[], int]) -> tuple[Assessed, StopReason]:
        """Best-first over all targets, by lower bound. An expansion is stored whole or not at all."""
        soft = min(budget.most_ns, max(budget.least_ns, best.now // budget.fraction))
        began = clock()
        queue: list[tuple[int, Target]] = []
        known: set[Target] = set()

        def store(a: Assessed) -> None:
            heapq.heappush(queue, (self._lower_bound(a), a.target))
            known.add(a.target)

        for c in range(len(self.question.candidates)):
            if self._bound(c) <= best.cost:
                store(self.assess(Target(c, (0,) * len(self._domain(c).owners))))
        reason: StopReason = "exhausted"
        while queue:
            bound, target = heapq.heappop(queue)
            if bound > best.cost:
                reason = "bound"
                break
            children = [child for child in self._children(target) if child not in known]
            if len(known) + len(children) > budget.targets:
                reason = "target_budget"
                break
            for child in children:
                if child not in self.seen:
                    if self.searched == budget.assessments:
                        reason = "assessment_budget"
                        break
                    if clock() - began > soft:
                        reason = "time_budget"
                        break
                    self.searched += 1
                a = self.assess(child)
                store(a)
                if a.fits and self._better(a, best):
                    best = a
            else:
                continue
            break
        self.stored = len(known)
        return best, reason

    def _children(self, target: Target) -> list[Target]:
        ladders = self._domain(target.candidate).ladders
        return [
            _with_level(target, v, level + 1) for v, level in enumerate(target.levels) if level + 1 < len(ladders[v])
        ]

    # -- prices ----------------------------------------------------------------------------------------------------

    def assess(self, target: Target) -> Assessed:
        a = self.seen.get(target)
        if a is None:
            domain = self._domain(target.candidate)
            answer = self.session.assess(target) if any(target.levels) else domain.identity
            losses = tuple([self._loss(domain, v, n, answer) if n else 0 for v, n in enumerate(target.levels)])
            loss = sum(losses) + self._own_loss[target.candidate]
            fits = answer.feasible and self._has_place(target, domain, answer)
            a = Assessed(target, answer, self.costs.price(answer.work), losses, loss, fits)
            self.seen[target] = a
        return a

    def _domain(self, c: int) -> Domain:
        domain = self._domains.get(c)
        if domain is None:
            owners = self.session.victims(c)
            source = self.question.candidates[c].ref
            if source is not None and source.owner in owners:
                raise InvariantError(f"the source {source.owner} is among its own victims")
            ladders = tuple(self.session.ladder(c, v) for v in range(len(owners)))
            identity = self.session.assess(Target(c, (0,) * len(owners)))
            domain = self._domains[c] = Domain(owners, ladders, identity)
        return domain

    def _loss(self, domain: Domain, victim: int, level: int, answer: Assessment) -> int:
        """1/256 nanoseconds that a victim loses. That of an evicted one does not depend on the others."""
        owner = domain.owners[victim]
        if not domain.ladders[victim][level].evicted:
            return self._worst_loss(owner, answer)
        loss = self._evicted.get(owner)
        if loss is None:
            loss = self._evicted[owner] = self._worst_loss(owner, answer)
        return loss

    def _worst_loss(self, owner: Handle, answer: Assessment) -> int:
        """Nested checkpoints of one history stand for one future request, so the worst of them counts, not the sum."""
        before = self._recovery.get(owner)
        if before is None:
            recipes = self.session.recovery(owner)
            before = self._recovery[owner] = {q: self.costs.recovery_ns(ways) for q, ways in recipes.items()}
        worst = 0
        for checkpoint, worth in self.question.values[owner].weights.items():
            if worth:
                ref = CheckpointRef(owner, checkpoint)
                worst = max(worst, worth * (self._price(answer.recovery[ref]) - before[checkpoint]))
        return worst

    def _price(self, recipes: tuple[RecoveryRecipe, ...]) -> int:
        """Sessions answer with the same object as long as the answer is the same."""
        known = self._prices.get(id(recipes))
        if known is None:
            known = self._prices[id(recipes)] = (recipes, self.costs.recovery_ns(recipes))
        return known[1]

    def _has_place(self, target: Target, domain: Domain, answer: Assessment) -> bool:
        values, source = self.question.values, self.question.candidates[target.candidate].ref
        for kind, short in self.question.slots_short.items():
            if answer.source == "move" and source is not None:
                short -= source.owner.kind == kind and values[source.owner].placed
            for owner, ladder, level in zip(domain.owners, domain.ladders, target.levels):
                short -= owner.kind == kind and ladder[level].evicted and values[owner].placed
            if short > 0:
                return False
        return True

    def _bound(self, c: int) -> int:
        """No target of the candidate costs less."""
        return ONE * self._least[c] + self._own_loss[c]

    def _lower_bound(self, a: Assessed) -> int:
        """Neither the target nor any that degrades more costs less: levels only remove, so losses only grow."""
        return ONE * self._least[a.target.candidate] + a.loss

    def _by_bound(self) -> list[int]:
        return sorted(range(len(self.question.candidates)), key=lambda c: (self._bound(c), c))

    def _improvable(self, c: int, a: Assessed) -> bool:
        """Whether degrading others could spare a copy: a source that may be consumed is forked for their sake."""
        return self.question.candidates[c].consume and a.answer.source == "fork"

    # -- comparisons -----------------------------------------------------------------------------------------------

    def _better(self, a: Assessed, b: Assessed) -> bool:
        return a.cost < b.cost or (a.cost == b.cost and self._rank(a) < self._rank(b))

    def _rank(self, a: Assessed) -> tuple[object, ...]:
        """Among equal costs: destroy little of value, copy little, compute little, reuse much; at last by number."""
        domain, candidate = self._domain(a.target.candidate), self.question.candidates[a.target.candidate]
        destroyed = [0] * len(RETENTIONS)
        hit: list[int] = []
        evicted = deleted = 0
        for owner, ladder, level in zip(domain.owners, domain.ladders, a.target.levels):
            value, now = self.question.values[owner], ladder[level]
            gone = ladder[0].kept - now.kept
            destroyed[RETENTIONS.index(value.retention)] += len(gone)
            hit += [value.last_use for q in gone if value.hits.get(q)]
            evicted += now.evicted
            deleted += len(gone)
        transfers = a.answer.work.transfers
        return (
            tuple(reversed(destroyed)),
            (len(hit), tuple(sorted(hit, reverse=True))),
            evicted,
            deleted,
            sum(t.ops for t in transfers),
            sum(t.bytes for t in transfers),
            a.answer.work.prefill.tokens,
            -candidate.reused_tokens,
            a.target.candidate != self.question.preferred,
            a.target,
        )

    def at_last_level(self, target: Target) -> list[bool]:
        ladders = self._domain(target.candidate).ladders
        return [level == len(ladder) - 1 for level, ladder in zip(target.levels, ladders)]

    def shortages(self) -> tuple[Shortage, ...]:
        """What the root still lacks when everything inactive is released."""
        root = len(self.question.candidates) - 1
        a = self.assess(Target(root, tuple(len(ladder) - 1 for ladder in self._domain(root).ladders)))
        if a.answer.feasible:
            return tuple(Shortage(f"catalogue.{kind}", n) for kind, n in self.question.slots_short.items())
        return a.answer.shortages


def _with_level(target: Target, victim: int, level: int) -> Target:
    levels = list(target.levels)
    levels[victim] = level
    return Target(target.candidate, tuple(levels))
