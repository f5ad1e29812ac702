"""Requests that stand aside: on their caller's wish, or for an older one that lacks room.

A paused request keeps its record, its place by number, its output session with the matcher, and all it has published.
It loses its lane. Resuming takes it through ordinary admission, with a full reservation, to where it stood; nothing is
published, sampled or counted twice.
"""

from __future__ import annotations

from typing import Literal

from ninfer.errors import InvalidRequest, StaleHandle
from ninfer.results import PauseOutcome
from ninfer.runtime.record import RequestRecord, RequestState
from ninfer.runtime.requests import Requests, stop_reason
from ninfer.runtime.resources import ResourceManager
from ninfer.runtime.response import Response
from ninfer.runtime.scheduler import Scheduler

STABLE = (RequestState.PREFILL, RequestState.DECODE_READY, RequestState.CONTROL_READY)
"""States of a row that no unit and no transaction is busy with."""

MAX_PRESSURE_PAUSES = 1
"""How often one request may have to make room for older ones."""

Mode = Literal["auto", "snapshot", "replay"]


class Pausing:
    """Pauses at worker boundaries at which no resource transaction is open. pressure: also on its own account."""

    def __init__(self, requests: Requests, resources: ResourceManager, scheduler: Scheduler, pressure: bool) -> None:
        self._requests = requests
        self._resources = resources
        self._scheduler = scheduler
        self._pressure = pressure
        self._paused: list[RequestRecord] = []

    @property
    def paused(self) -> bool:
        """Whether some request is."""
        return bool(self._paused)

    def end_stopped(self, now: float) -> None:
        """End the paused requests that have been cancelled or whose time is up."""
        for record in tuple(self._paused):
            ending = stop_reason(record, now)
            if ending is not None:
                self._paused.remove(record)
                self._requests.complete(record, ending)

    def pause(self, response: Response, mode: Mode) -> PauseOutcome:
        """Pause the request. "auto" keeps its state where that is whole."""
        record = self._find(response)
        if record is None:
            return PauseOutcome.ALREADY_FINISHED
        if response.cancel_requested:
            return PauseOutcome.CANCELLED
        if record.ending is not None:
            return PauseOutcome.ALREADY_FINISHED
        if record.state not in STABLE:
            return PauseOutcome.NOT_PAUSABLE
        return PauseOutcome.SNAPSHOT if self._suspend(record, mode != "replay") else PauseOutcome.REPLAY

    def resume(self, response: Response) -> None:
        """Have a paused request wait for a lane again, where its number belongs. One that has been resumed, or has
        ended, is left alone. Raises InvalidRequest for one that was not paused."""
        record = self._find(response)
        if record is None or (record.state is not RequestState.PAUSED and record.resumed is not None):
            return
        if record.state is not RequestState.PAUSED:
            raise InvalidRequest("the request is not paused", field="handle")
        self._requeue(record)

    def relieve(self, head: RequestRecord) -> bool:
        """Pause the youngest rows that make room for an older request, if some do; they wait behind it."""
        if not self._pressure:
            return False
        victims: list[RequestRecord] = []
        younger = [row for row in self._requests.active if row.id > head.id and _may_yield(row)]
        for row in sorted(younger, key=lambda row: -row.id):
            victims.append(row)
            sequences = [victim.sequence for victim in victims if victim.sequence is not None]
            if self._resources.prove_backfill(head.entering, sequences, None):
                for victim in victims:
                    self._suspend(victim, snapshot=True)
                    victim.pauses += 1
                    self._requeue(victim)
                return True
        return False

    def _suspend(self, row: RequestRecord, snapshot: bool) -> bool:
        row.resumed, point = self._resources.pause(row.lane, snapshot)
        self._requests.suspend(row)
        self._paused.append(row)
        return point

    def _requeue(self, record: RequestRecord) -> None:
        self._paused.remove(record)
        record.state = RequestState.WAITING
        self._scheduler.requeue(record.id)

    def _find(self, response: Response) -> RequestRecord | None:
        """The request of a response, or None when it has ended. Raises StaleHandle for one of another engine."""
        record = next((record for record in self._requests if record.response is response), None)
        if record is None and response.result is None:
            raise StaleHandle("the handle belongs to another engine")
        return record


def _may_yield(row: RequestRecord) -> bool:
    fresh = row.progressed and row.pauses < MAX_PRESSURE_PAUSES
    return fresh and row.state in STABLE and row.ending is None and not row.response.cancel_requested
