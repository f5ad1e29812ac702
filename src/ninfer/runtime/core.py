"""EngineCore: the worker thread, its mailbox, and whether new requests are taken."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from ninfer.cancellation import POLL_SECONDS, checkpoint
from ninfer.contract import ProgramPort, RequestId
from ninfer.errors import EngineClosed, EngineFailed, InvalidRequest, NinferError, Overloaded, StaleHandle
from ninfer.runtime.costs import CostModel
from ninfer.runtime.metrics import EngineStats
from ninfer.runtime.record import RequestRecord
from ninfer.runtime.response import Outstanding
from ninfer.runtime.settings import CacheSettings
from ninfer.runtime.units import Limits
from ninfer.runtime.worker import Worker

log = logging.getLogger("ninfer")
T = TypeVar("T")
_running: weakref.WeakSet[EngineCore] = weakref.WeakSet()


class EngineCore:
    """Callers' threads hand requests in; one worker alone touches Program, lanes and records.

    ``teardown`` runs once, on the worker, when every request has ended. ``start`` makes a thread the worker; without
    it, the caller of ``step`` is.
    """

    def __init__(
        self,
        program: ProgramPort,
        limits: Limits,
        cache: CacheSettings,
        costs: CostModel,
        *,
        max_outstanding: int,
        teardown: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self.outstanding = Outstanding(max_outstanding)
        self._program = program
        self._hire = partial(Worker, program, limits, cache, costs, clock, self._quiet)
        self._worker = self._hire()
        self._teardown = teardown
        self._arrivals: deque[RequestRecord] = deque()
        self._questions: deque[tuple[Callable[[Worker], Any], Future[Any]]] = deque()
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._gate = threading.Lock()
        self._ids = itertools.count(1)
        self._failure: EngineFailed | None = None
        self._closing = False
        self._closed = False
        self._thread: threading.Thread | None = None

    # -- any thread ------------------------------------------------------------------------------------------------

    @property
    def available(self) -> bool:
        """Whether new requests are taken."""
        return self._failure is None and not self._closing

    def check_available(self) -> None:
        """Raise EngineFailed or EngineClosed when new requests are not taken."""
        if not self.available:
            raise self._refusal()

    def acquire(self, block: bool) -> None:
        """Take an outstanding slot. Raises Overloaded when ``block`` is false and there is none, and what ends the
        caller's scope."""
        while not self.outstanding.acquire(POLL_SECONDS if block else 0):
            checkpoint()
            if not block:
                raise Overloaded(f"{self.outstanding.limit} requests are outstanding")

    def enqueue(self, record: RequestRecord) -> None:
        """Hand over a request that holds a slot; the order of these calls is the order of the queue."""
        with self._gate:
            self.check_available()
            number = next(self._ids)
            record.request = replace(record.request, id=RequestId(number), ticket=number)
            record.queued = self.clock()
            self._arrivals.append(record)
        self.wake()

    def wake(self) -> None:
        """Have the worker look again. Takes no lock: finalizers call it."""
        self._wakes.put(None)

    def ask(self, question: Callable[[Worker], T]) -> Future[T]:
        """Have the worker run ``question`` at a boundary at which no resource transaction is open."""
        answer: Future[T] = Future()
        with self._gate:
            self.check_available()
            self._questions.append((question, answer))
        self.wake()
        return answer

    def rehearse(self, record: RequestRecord) -> Future[None]:
        """Run a request that needs no slot to its end while everybody else waits, unless one has been accepted before.
        No counter tells of it."""
        return self.ask(partial(self._rehearse, record))

    def stats(self) -> EngineStats:
        """The counters and gauges now."""
        return self._worker.metrics.snapshot(
            waiting=len(self._worker.scheduler.waiting) + len(self._arrivals),
            active=len(self._worker.active),
            outstanding=self.outstanding.in_use,
        )

    def start(self) -> None:
        """Run the worker in a thread of its own."""
        self._thread = threading.Thread(target=self._work, name="ninfer-worker", daemon=True)
        self._thread.start()
        _running.add(self)
        atexit.unregister(_close_all)  # last registered, first called: before anything it needs is taken down
        atexit.register(_close_all)

    def request_close(self) -> None:
        """Have the worker end every request and then the engine. Returns at once and takes no lock."""
        if not self._closing:
            self._closing = True
            self.wake()

    def close(self) -> None:
        """End every request with EngineClosed, then run the teardown. Returns when that is done. Idempotent."""
        self.request_close()
        if self._thread is None:
            self._shut_down()
        elif self._thread is not threading.current_thread():
            self._thread.join()

    def _refusal(self) -> NinferError:
        """A fresh error, so that each request can carry its own partial result."""
        if self._failure is not None:
            return EngineFailed(str(self._failure), cause=self._failure.cause)
        return EngineClosed("the engine is closed")

    # -- the worker ------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Take what arrived and run one worker boundary, unless that is to end a round first. True when the next one
        has work right away."""
        try:
            while self._arrivals and not self._worker.launched:
                self._worker.admission.accept(self._arrivals.popleft())
            while self._questions and not self._worker.resources.open and not self._worker.launched:
                question, answer = self._questions.popleft()
                try:
                    answer.set_result(question(self._worker))
                except (InvalidRequest, StaleHandle) as refusal:
                    answer.set_exception(refusal)
                except BaseException as error:  # whoever asked must not wait for ever
                    answer.set_exception(EngineFailed(f"{type(error).__name__}: {error}", cause=error))
                    raise
            busy = self._worker.boundary()
            return busy or (bool(self._questions) and not self._worker.resources.open)
        except BaseException as error:
            self._fail(error)
            return False

    def _quiet(self) -> bool:
        return not (self._arrivals or self._questions or self._closing)

    def _rehearse(self, record: RequestRecord, worker: Worker) -> None:
        """By a worker of its own, whose counts and catalogue go with it."""
        if worker.metrics.accepted:
            return
        aside = self._hire()
        aside.admission.accept(record)
        while record.response.result is None:
            if not aside.boundary():
                time.sleep(aside.seconds_to_next() or 0)
        self._program.count_anew()
        worker.metrics.observe(self._program, worker.resources)

    def _work(self) -> None:
        while not self._closing:
            if not self.step():
                self._sleep()
        self._shut_down()

    def _sleep(self) -> None:
        with contextlib.suppress(queue.Empty):
            self._wakes.get(timeout=self._worker.seconds_to_next())
            while True:
                self._wakes.get_nowait()

    def _fail(self, cause: BaseException) -> None:
        """Shared state can no longer be explained: no new requests, and the present ones end with EngineFailed."""
        message = str(cause) if isinstance(cause, EngineFailed) else f"{type(cause).__name__}: {cause}"
        log.error("the engine failed", exc_info=cause)
        with self._gate:
            self._failure = EngineFailed(message, cause=cause)
        self._end_everything()

    def _shut_down(self) -> None:
        with self._gate:
            if self._closed:
                return
            self._closed = True
        self._end_everything()
        try:
            self._teardown()
        except Exception as error:
            log.error("closing the model failed", exc_info=error)

    def _end_everything(self) -> None:
        while self._arrivals:
            self._worker.requests.adopt(self._arrivals.popleft())
        self._worker.end_everything(self._refusal)
        while self._questions:
            self._questions.popleft()[1].set_exception(self._refusal())


def _close_all() -> None:
    """Stop the workers before the interpreter goes away under them."""
    for core in tuple(_running):
        core.close()
