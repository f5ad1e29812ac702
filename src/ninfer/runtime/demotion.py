"""Retained histories that a caller wants in host memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from ninfer.contract import ProgramPort
from ninfer.errors import NinferError
from ninfer.runtime.choices import Planned
from ninfer.runtime.purity import PlanningFault, Purity
from ninfer.runtime.resources import ResourceManager


class Demotion:
    """Runs at worker boundaries, behind admission, one resource transaction for each wish."""

    def __init__(self, program: ProgramPort, resources: ResourceManager, purity: Purity) -> None:
        self._program = program
        self._resources = resources
        self._purity = purity
        self._wishes: deque[tuple[str | None, Future[int]]] = deque()
        self._moving: Planned | None = None

    @property
    def open(self) -> bool:
        """Whether the open transaction is one of these."""
        return self._moving is not None

    @property
    def waiting(self) -> bool:
        return bool(self._wishes)

    def ask(self, session: str | None) -> Future[int]:
        """Have the histories of a session, or all, moved; the future says how many were."""
        answer: Future[int] = Future()
        self._wishes.append((session, answer))
        return answer

    def attempt(self) -> None:
        """Start on the first wish. Requires that no transaction is open."""
        if self._program.unsettled:
            return
        session, answer = self._wishes[0]
        try:
            planned = self._purity.ask(lambda: self._resources.plan_demotion(session))
        except PlanningFault as fault:
            self._wishes.popleft()
            answer.set_exception(fault.error)
            return
        outcome = self._resources.start(planned) if planned is not None else "refused"
        if outcome == "started":
            self._moving = planned
        else:
            self._wishes.popleft()
            answer.set_result(0 if outcome == "refused" or planned is None else len(planned.ticket.claimed))

    def advance(self) -> None:
        """Poll the move that is open. One whose copies fail leaves every history where it is."""
        outcome, planned = self._resources.progress(), self._moving
        if outcome is None or planned is None:
            return
        self._moving = None
        if outcome == "failed":
            self._resources.abort()
        self._wishes.popleft()[1].set_result(0 if outcome == "failed" else len(planned.ticket.claimed))

    def drop(self, error: Callable[[], NinferError]) -> None:
        """Nothing will be moved any more."""
        self._moving = None
        while self._wishes:
            self._wishes.popleft()[1].set_exception(error())
