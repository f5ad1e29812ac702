"""Questions about plans, which must change nothing, and what becomes of one that fails."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from ninfer.contract import ProgramPort
from ninfer.errors import EngineFailed, InvalidRequest, NinferError, RequestAborted

log = logging.getLogger("ninfer")
T = TypeVar("T")

MAX_FAULTS = 3
"""Faults in a row that the engine does not outlive."""


class PlanningFault(Exception):
    """Planning failed before anything had changed. ``error`` goes to whoever it was for."""

    def __init__(self, error: NinferError) -> None:
        super().__init__(str(error))
        self.error = error


class Purity:
    """Asks, and counts the faults since something planned was carried out."""

    def __init__(self, program: ProgramPort) -> None:
        self._program = program
        self._faults = 0

    def ask(self, question: Callable[[], T]) -> T:
        """The answer. Raises PlanningFault for a refusal, and for a fault that left everything as it was; a fault that
        did not, and the third in a row, comes out as it is and ends the engine."""
        before = self._facts()
        try:
            return question()
        except InvalidRequest as refusal:
            raise PlanningFault(refusal) from None
        except Exception as error:
            self._faults += 1
            if self._facts() != before or isinstance(error, EngineFailed) or self._faults >= MAX_FAULTS:
                raise
            log.error("planning a request failed", exc_info=error)
            raise PlanningFault(RequestAborted(f"planning failed: {error!r}", cause=error)) from None

    def carried_out(self) -> None:
        self._faults = 0

    def _facts(self) -> tuple[int, int]:
        return self._program.resource_revision, self._program.audit_digest()
