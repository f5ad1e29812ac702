"""Any order of submits, steps, reads, cancellations, drops, deadlines and faults keeps what an engine promises."""

from __future__ import annotations

import gc

import pytest
from fakes.scripted_frontend import CLOSE
from fakes.scripted_program import EOS, script
from fakes.world import World
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import ninfer
from ninfer.contract import effective_output
from ninfer.runtime.record import RequestState

PROGRAM_CALLS = (
    "start", "poll", "commit_transaction", "abort_transaction", "prefill", "finalize_prefill", "decode", "control",
    "wait", "commit", "finish", "discard",
)  # fmt: skip
LANE_OF = {
    RequestState.PREFILL: "active",
    RequestState.CAPTURE: "active",
    RequestState.DECODE_READY: "active",
    RequestState.CONTROL_READY: "active",
    RequestState.TERMINAL_PENDING: "terminal_pending",
}


class Fault(Exception):
    pass


class Request:
    """A submitted request, and what its consumer has seen of it."""

    def __init__(self, handle: ninfer.GenerationHandle, prompt: tuple[int, ...], limit: int, budget: int | None):
        self.handle: ninfer.GenerationHandle | None = handle
        self.response = handle._response
        self.prompt, self.limit, self.budget = prompt, limit, budget
        self.seen: list[ninfer.results.Event] = []
        self.let_go = False
        self.cancelled = False

    def read(self, most: int) -> None:
        while self.handle is not None and most and self.response.ready():
            self.seen.append(next(self.handle))
            most -= 1


class EngineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.requests: list[Request] = []
        self.proof: tuple[int, int] | None = None
        self.failed = False

    @initialize(
        lanes=st.integers(1, 3),
        pages=st.integers(5, 16),
        polls=st.integers(0, 2),
        drafts=st.integers(0, 3),
        chunk=st.integers(1, 8),
        outstanding=st.integers(1, 6),
        concurrent=st.booleans(),
        queue_timeout=st.sampled_from([None, 3.0]),
        overlap=st.booleans(),
        cache=st.sampled_from([None, (1, 1), (3, 2), (9, 7)]),
    )
    def open(self, lanes, pages, polls, drafts, chunk, outstanding, concurrent, queue_timeout, overlap, cache):
        self.world = World(
            self.patch,
            threaded=False,
            program={"pages": pages, "page": 4, "context": 32, "polls": polls, "drafts": drafts},
            prefill_chunk=chunk,
            overlap=overlap,
            max_concurrency=lanes,
            max_outstanding=outstanding,
            concurrent_prefill=concurrent,
            queue_timeout=queue_timeout,
            cache=ninfer.CacheOptions(enabled=False)
            if cache is None
            else ninfer.CacheOptions(
                max_continuations=max(cache[0], lanes), max_shared_prefixes=cache[1], aging_window=2
            ),
        )
        self._watch_admissions()

    def _watch_admissions(self) -> None:
        """The first waiting request goes first; past it, only whoever was just proved not to hold it up."""
        program, scheduler = self.world.program, self.world.worker.scheduler
        start, prove = program.start, program.prove_backfill

        def proving(head, donors, extra):
            holds = prove(head, donors, extra)
            self.proof = (head.id, extra.id) if holds and extra is not None else None
            return holds

        def starting(plan, ticket):
            if plan.request is not None and plan.request != scheduler.waiting[0]:
                assert self.proof == (scheduler.waiting[0], plan.request)
            return start(plan, ticket)

        program.prove_backfill, program.start = proving, starting

    # what users do

    @rule(
        eos=st.sampled_from([0, 1, 2, 5, 9, 202, 255]),
        length=st.integers(1, 20),
        limit=st.integers(0, 14),
        budget=st.sampled_from([None, None, 0, 1, 3]),
        timeout=st.sampled_from([None, None, 2.0]),
        logprobs=st.sampled_from([None, 1]),
        cache=st.sampled_from(["read_write", "read_write", "disabled"]),
        session=st.sampled_from([None, None, "a", "b"]),
        update=st.booleans(),
        back=st.integers(0, 9),
    )
    def submit(self, eos, length, limit, budget, timeout, logprobs, cache, session, update, back):
        prompt = [eos] + [9] * (length - 1)
        if back and len(self.requests) >= back and (result := self.requests[-back].response.result) is not None:
            prompt = [*self.requests[-back].prompt, *result.token_ids, 9][:31]  # go on with an earlier answer
        text = "".join(map(chr, prompt))
        chat = ninfer.Chat([{"role": "user", "content": text}], thinking=budget is not None)
        session = session if cache == "read_write" else None
        options = ninfer.RequestOptions(
            max_tokens=limit,
            thinking_budget=budget,
            timeout=timeout,
            logprobs=logprobs,
            cache=cache,
            session=session,
            update_session=update or session is None,
            sampling=ninfer.SamplingParams(seed=len(self.requests)),
        )
        free = self.world.engine.stats().outstanding < self.world.engine.options.max_outstanding
        try:
            handle = self.world.engine.submit(chat, options)
        except ninfer.Overloaded:
            assert not free
            return
        except ninfer.EngineFailed:
            assert self.failed
            return
        assert not self.failed
        assert free or limit == 0
        self.requests.append(Request(handle, tuple(prompt), limit, budget))

    @rule(times=st.integers(1, 9))
    def step(self, times):
        self.world.step(times)
        self.failed = not self.world.engine.available

    @rule(i=st.integers(0, 99), most=st.integers(1, 30))
    def read(self, i, most):
        if self.requests:
            self.requests[i % len(self.requests)].read(most)

    @rule(i=st.integers(0, 99))
    def result(self, i):
        request = self.requests[i % len(self.requests)] if self.requests else None
        if request is None or request.handle is None:
            return
        result = request.response.result
        if result is None:
            with pytest.raises(TimeoutError):
                request.handle.result(timeout=0)
        elif result.error is not None:
            with pytest.raises(type(result.error)) as caught:
                request.handle.result(timeout=0)
            assert caught.value.partial is result
        else:
            assert request.handle.result(timeout=0) is result

    @rule(i=st.integers(0, 99), how=st.sampled_from(["cancel", "close", "drop"]))
    def stop(self, i, how):
        request = self.requests[i % len(self.requests)] if self.requests else None
        if request is None or request.handle is None:
            return
        calls = len(self.world.program.calls)
        request.cancelled |= not request.handle.done
        if how == "cancel":
            request.handle.cancel()
        else:
            request.let_go = True
            if how == "close":
                request.handle.close()
            else:
                request.handle = None
                gc.collect(0)
        assert len(self.world.program.calls) == calls

    @rule(seconds=st.sampled_from([0.5, 1.6, 3.5]))
    def time_passes(self, seconds):
        self.world.clock.now += seconds

    # what goes wrong

    @rule(lane=st.integers(0, 2))
    def no_legal_token(self, lane):
        self.world.program.fail_rows = {lane}

    @rule(call=st.sampled_from(["preview", "preview_control", "session.commit", "session.finish"]))
    def session_fault(self, call):
        self._arm(call, "before")

    @rule(call=st.sampled_from(["open_session", "isolated_root_fits", "inspect", "assess", "open_capture"]))
    def planning_fault(self, call):
        self._arm(call, "before")

    @rule()
    def stale_plan(self):
        self.world.program.stale_starts = 1

    @rule()
    def copy_fault(self):
        self.world.program.fail_copies = 1

    @rule()
    def clear_cache(self):
        if not self.failed:
            answer = self.world.engine._core.ask(lambda worker: worker.release_all())
            self.world.step()
            if answer.done() and self.world.engine.available:
                assert len(self.world.worker.resources.catalogue) <= len(self.world.worker.active) + 1
            self.failed = not self.world.engine.available

    @precondition(lambda self: len(self.requests) > 3)
    @rule(call=st.sampled_from(PROGRAM_CALLS), when=st.sampled_from(["before", "after"]))
    def program_fault(self, call, when):
        self._arm(call, when)

    def _arm(self, call, when):
        faults = self.world.program.faults
        if not self.failed:
            faults.fired.clear()
            faults.armed.clear()
            faults.arm(call, Fault(call), when)

    # what always holds

    @invariant()
    def nobody_broke_a_rule(self):
        assert self.world.violations() == []

    @invariant()
    def what_is_catalogued_is_what_program_keeps(self):
        if self.failed:
            return
        resources, kept = self.world.worker.resources, self.world.program.kept
        assert {entry.owner for entry in resources.catalogue} == set(kept.owners)
        for entry in resources.catalogue:
            points = kept.owners[entry.owner].points
            assert {q: p.key.frontier for q, p in entry.checkpoints.items()} == {q: f for q, (f, _) in points.items()}
        assert len(resources.catalogue.index) == sum(len(owner.points) for owner in kept.owners.values())
        promised = sum(lane.publishes for lane in resources._lanes)
        held = resources.catalogue.count("continuation") - self._going(resources)
        assert held + promised <= resources.catalogue.capacity["continuation"]

    def _going(self, resources) -> int:
        """Retained requests that the open transaction, if it commits, takes over or deletes: their places are promised
        to its request."""
        planned = resources._open
        if planned is None or planned.request is None:
            return 0
        going = {
            o for o, gone in planned.ticket.claimed.items() if gone == resources.catalogue.get(o).checkpoints.keys()
        }
        if planned.source.ref is not None and planned.source.consume:
            going.add(planned.source.ref.owner)
        return sum(owner.kind == "continuation" for owner in going)

    @invariant()
    def lanes_rows_and_sequences_agree(self):
        worker, audit = self.world.worker, self.world.program.audit()
        states = [state.value for state in worker.resources.lane_states()]
        rows = {row.lane: LANE_OF[row.state] for row in worker.active}
        assert len(rows) == len(worker.active)
        assert {i: s for i, s in enumerate(states) if s in ("active", "terminal_pending")} == rows
        assert states.count("materializing") <= audit["open"] == worker.resources.open
        assert audit["pending"] == 0
        if not self.failed:
            assert audit["lanes"] == len(rows)

    @invariant()
    def capacity_is_held_by_the_unfinished_and_the_unread(self):
        for request in self.requests:
            seen_end = bool(request.seen) and isinstance(request.seen[-1], ninfer.GenerationResult)
            request.let_go |= seen_end
        held = [r for r in self.requests if r.limit and not (r.response.result and r.response._consumer_done)]
        assert self.world.engine.stats().outstanding == len(held)
        for request in self.requests:
            assert request.response._consumer_done >= request.let_go

    @invariant()
    def events_are_in_order_and_say_what_was_computed(self):
        for request in self.requests:
            self._check_events(request)
            if request.response.result is not None:
                self._check_result(request, request.response.result)

    def _check_events(self, request):
        seen = request.seen
        kinds = [type(e).__name__ for e in seen]
        assert kinds.count("GenerationStart") <= 1
        assert kinds.count("GenerationResult") <= 1
        if "GenerationStart" in kinds:
            assert kinds[0] == "GenerationStart"
        elif kinds:
            assert kinds == ["GenerationResult"], "output without a start"
        if "GenerationResult" in kinds:
            assert kinds[-1] == "GenerationResult"
            assert seen[-1] is request.response.result
            shown = tuple(t for e in seen if isinstance(e, ninfer.Delta) for t in e.token_ids)
            silent = 7 in seen[-1].token_ids  # a tool call's tokens are in no delta
            assert silent or shown == seen[-1].token_ids or isinstance(seen[-1].error, ninfer.RequestAborted)

    def _check_result(self, request, result):
        output, limit = effective_output(len(request.prompt), request.limit, 32)
        tokens = result.token_ids
        assert len(tokens) <= max(output, 0)
        assert tokens == self._expected(request, len(tokens))
        assert result.usage.prompt_tokens == len(request.prompt)
        assert 0 <= result.usage.cached_tokens <= len(request.prompt)
        assert result.usage.completion_tokens == len(tokens)
        if result.finish_reason == "stop":
            assert tokens[-1] == EOS
        elif result.finish_reason == "length":
            assert len(tokens) == output
            assert result.stop_reason == limit.value
        elif result.finish_reason == "cancelled":
            assert request.cancelled
        elif result.finish_reason == "tool_calls":
            assert tokens[-1] == 7
        else:
            assert isinstance(result.error, ninfer.NinferError)
            assert result.error.partial is result

    def _expected(self, request, count):
        """The script's tokens, with the forced close where the thinking budget ends."""

        class Scripted:
            identity = type("I", (), {"tokens": __import__("numpy").array(request.prompt, "int32")})
            sampling = type("S", (), {"seed": self.requests.index(request)})

        output, _ = effective_output(len(request.prompt), request.limit, 32)
        budget = request.budget
        if budget is not None:
            budget = min(budget, output - len(CLOSE) if output >= len(CLOSE) else output)
        expected: list[int] = []
        while len(expected) < count:
            if budget is not None and len(expected) == budget:
                expected += CLOSE
            else:
                expected.append(script(Scripted, len(expected)))
        return tuple(expected[:count])

    def teardown(self):
        if not hasattr(self, "world"):
            return
        for request in self.requests:
            request.handle = None
        gc.collect(0)
        self.world.program.faults.armed.clear()
        if not self.failed:
            self.world.drain()
        assert all(request.response.result is not None for request in self.requests)
        assert self.world.engine.stats().outstanding == 0
        if self.world.engine.available:
            self.world.clear_cache()
            assert dict(self.world.program.audit()) == self.world.baseline
            assert len(self.world.worker.resources.sessions) == 0
        self.world.engine.close()
        assert self.world.violations() == []
        assert self.world.program.closed == 1
        self.patch.undo()


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(settings.default, stateful_step_count=40, max_examples=150)


class TestEngineDeep(EngineMachine.TestCase):
    pytestmark = pytest.mark.full
    settings = settings(settings.default, stateful_step_count=120, max_examples=2000)
