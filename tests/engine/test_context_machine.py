"""The whole control plane over the real Program on a symbolic device: any order of conversations, cancellations and
pauses, copies that take their time or fail, under any pressure. Every answer is what its prompt alone says, and nothing
is lost."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
from fakes.scripted_frontend import ScriptedFrontend
from fakes.scripted_program import EOS, Faults
from fakes.symbolic import WORD, SymbolicDevice, SymbolicModel, hashed_logits, mix
from fakes.world import Clock
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import ninfer
import ninfer.engine
from ninfer import CacheOptions, SamplingParams, TokenPrompt
from ninfer.contract import PreparedRequest
from ninfer.program import ExplicitKV, KVCodec, Retention, Shape, open_program
from ninfer.runtime.core import EngineCore
from ninfer.runtime.costs import GENERIC, CostModel, PrefillRate
from ninfer.runtime.instance import Instance
from ninfer.runtime.settings import resolve

DEEP = os.environ.get("NINFER_HYPOTHESIS_PROFILE") == "full"
VOCABULARY, CONTEXT, PAGE_BYTES = 37, 256, 512
SLOW = CostModel(GENERIC.transfers, PrefillRate(10**6, (10**7) << 32, 0))
"""Prefill so dear that copying is always worth it."""


def spelled(request: PreparedRequest, count: int) -> list[int]:
    """The greedy answer of the symbolic model, one token after the other, from the prompt alone."""
    identity, state, context, answer = request.identity, 0, 0, []
    prompt = identity.tokens.tolist()
    for p in range(len(prompt) + count - 1):
        token = prompt[p] if p < len(prompt) else answer[-1]
        axes = identity.positions[:, p] if p < len(prompt) else [p + identity.rope_delta] * 3
        state = mix(state, token, *axes)
        context = (context + state * (2 * p + 1)) & WORD
        if p >= len(prompt) - 1:
            answer.append(int(np.argmax(hashed_logits(mix(state, context), VOCABULARY))))
    return answer[:count]


class ContextMachine(RuleBasedStateMachine):
    @initialize(
        lanes=st.integers(1, 3),
        spare=st.integers(0, 3),
        extra=st.integers(0, 5),
        host_states=st.integers(0, 4),
        host_pages=st.integers(0, 8),
        kept=st.integers(3, 7),
        shared=st.integers(0, 3),
        concurrent=st.booleans(),
        slow=st.booleans(),
        pressure=st.booleans(),
    )
    def open(self, lanes, spare, extra, host_states, host_pages, kept, shared, concurrent, slow, pressure):
        self.patch = pytest.MonkeyPatch()
        self.device = SymbolicDevice(delayed=True)
        least = max(4, lanes)
        retention = Retention(extra * 64, host_states, host_pages * PAGE_BYTES, PAGE_BYTES)
        shape = Shape(lanes, CONTEXT, 48, 4, KVCodec.FP32, VOCABULARY, spare)
        kv = ExplicitKV((least + min(extra, 4 * lanes + extra - least)) * 64)
        self.program = open_program(self.device, SymbolicModel(VOCABULARY), shape, kv, retention)
        self.frontend = ScriptedFrontend(Faults())
        self.clock = Clock()
        self.requests: dict[int, PreparedRequest] = {}
        self.handles: list[tuple[TokenPrompt, ninfer.GenerationHandle, str]] = []
        self.checked: set[int] = set()
        self.wishes = []
        self.first = self.program.audit()
        options = CacheOptions(max_continuations=kept, max_shared_prefixes=shared, aging_window=3, anchor_gap=64)
        machine = self

        class Core(EngineCore):
            def __init__(self, *parts, **rest):
                super().__init__(*parts, **rest, clock=machine.clock)

            def start(self):
                pass

        def open_instance(artifact, chosen):
            return Instance(
                self.frontend, self.program, "symbolic", "symbolic", CONTEXT, 48, False,
                resolve(options, lanes, "cpu"), SLOW if slow else GENERIC, self.program.close, lambda: 1e9,
            )  # fmt: skip

        fits = self.program.isolated_root_fits

        def watched(request):
            self.requests.setdefault(request.id, request)
            return fits(request)

        self.program.isolated_root_fits = watched
        self.patch.setattr(ninfer.engine, "EngineCore", Core)
        self.patch.setattr(ninfer.engine, "open_instance", open_instance)
        self.engine = ninfer.Engine(
            "artifact", max_concurrency=lanes, concurrent_prefill=concurrent, progress=False, max_outstanding=6,
            pause="pressure" if pressure else "explicit",
        )  # fmt: skip
        resources = self.worker.resources
        resources._choose = replace(resources._choose, clock=lambda: 0)  # no search ends because the machine is busy

    @property
    def worker(self):
        return self.engine._core._worker

    @rule(
        data=st.data(),
        kind=st.sampled_from(["fresh", "again", "again", "longer", "longer", "longer", "edited", "edited"]),
        session=st.sampled_from([None, "a", "b"]),
        cache=st.sampled_from(["read_write"] * 4 + ["disabled"]),
        limit=st.integers(1, 30),
        update=st.booleans(),
        then=st.sampled_from([0, 3, 20, 60]),
    )
    def submit(self, data, kind, session, cache, limit, update, then):
        done = [(p, h) for p, h, _ in self.handles if h.done]
        tokens = [1 + i % 3 for i in range(data.draw(st.integers(1, 180)))]
        if kind != "fresh" and done:
            prompt, handle = done[data.draw(st.integers(0, len(done) - 1))]
            tokens = list(prompt.ids)
            if kind == "longer":
                tokens += handle._final().token_ids
            elif kind == "edited":
                tokens = tokens[: data.draw(st.integers(1, len(tokens)))]
            if kind != "again":
                tokens += data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=20))
        prompt = TokenPrompt(tokens[: CONTEXT - 31])
        session = session if cache == "read_write" else None
        try:
            handle = self.engine.submit(
                prompt, max_tokens=limit, session=session, cache=cache,
                update_session=update or session is None,
                sampling=SamplingParams(temperature=0.0),
            )  # fmt: skip
        except ninfer.Overloaded:
            return
        self.handles.append((prompt, handle, cache))
        self.step(then)

    @rule(times=st.integers(1, 12))
    def step(self, times):
        for _ in range(times):
            self.engine._core.step()

    @rule(i=st.integers(0, 99))
    def cancel(self, i):
        if self.handles:
            self.handles[i % len(self.handles)][1].cancel()

    @rule(i=st.integers(0, 99), mode=st.sampled_from(["auto", "snapshot", "replay"]), then=st.sampled_from([0, 20]))
    def pause(self, i, mode, then):
        if self.handles:
            response = self.handles[i % len(self.handles)][1]._response
            self._ask(lambda worker: worker.pausing.pause(response, mode))
            self.step(then)

    @rule(i=st.integers(0, 99), then=st.sampled_from([0, 3, 20]))
    def resume(self, i, then):
        if self.handles:
            response = self.handles[i % len(self.handles)][1]._response
            answer = self._ask(lambda worker: worker.pausing.resume(response))
            if answer.done() and answer.exception() is not None:
                assert isinstance(answer.exception(), ninfer.InvalidRequest)
            self.step(then)

    def _ask(self, question):
        answer = self.engine._core.ask(question)
        while self.engine._core.step() and not answer.done():
            pass
        return answer

    @rule()
    def read_and_drop(self):
        for _, handle, _ in self.handles:
            if handle.done:
                handle._final()

    @rule(hold=st.booleans())
    def copies_take_their_time(self, hold):
        self.device.copy_queue.hold = hold

    @rule(where=st.sampled_from(["up", "down"]), late=st.booleans())
    def a_copy_fails(self, where, late):
        (self.device.late_faults if late else self.device.faults)[where] = 0

    @rule(session=st.sampled_from([None, "a", "b"]), then=st.sampled_from([0, 1, 5, 20]))
    def demote(self, session, then):
        self.wishes.append(self.engine._core.ask(lambda worker: worker.demotion.ask(session)))
        self.step(1 + then)

    @rule()
    def clear(self):
        answer = self._ask(lambda worker: worker.release_all())
        assert answer.done() or self.worker.resources.open

    @invariant()
    def nothing_is_unexplained(self):
        if not hasattr(self, "engine"):
            return
        assert self.engine.available
        audit = self.program.audit()
        assert audit["lanes"] == len(self.worker.active)
        assert audit["pending_rows"] == 0
        if self.worker.resources.open:  # what a plan deletes may be gone already, and is adopted with its result
            return
        inactive = {handle for handle, _ in self.program.store.histories.live()}
        assert {entry.owner for entry in self.worker.resources.catalogue} == inactive
        for entry in self.worker.resources.catalogue:
            history = self.program.store.histories.get(entry.owner)
            assert entry.checkpoints.keys() == history.checkpoints.keys()

    @invariant()
    def a_protected_head_can_start_when_its_donors_have_ended(self):
        """Whoever has passed it, and even if none of them ever ends."""
        if not hasattr(self, "engine") or self.worker.resources.open:
            return
        protected = self.worker.scheduler.protected
        if protected is not None:
            head = self.worker.requests[protected.request]
            rows = [row.sequence for row in self.worker.active if row.id in protected.donors]
            assert self.worker.resources.prove_backfill(head.entering, rows, None)

    @invariant()
    def every_answer_is_what_its_prompt_says(self):
        for number, (prompt, handle, cache) in enumerate(getattr(self, "handles", ()), 1):
            result = handle._response.result
            if result is None or number not in self.requests or number in self.checked:
                continue
            self.checked.add(number)
            expected = spelled(self.requests[number], len(result.token_ids))
            if EOS in expected:
                expected = expected[: expected.index(EOS) + 1]
            assert list(result.token_ids) == expected
            assert result.usage.cached_tokens <= (0 if cache == "disabled" else len(prompt.ids))
            if result.error is not None:
                assert isinstance(result.error, ninfer.RequestAborted), result.error

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        self.device.copy_queue.hold = False
        self.device.faults.clear()
        self.device.late_faults.clear()
        for _, handle, _ in self.handles:
            self._ask(lambda worker, response=handle._response: worker.pausing.resume(response))
        for _ in range(3000):
            if not self.engine._core.step() and not self.worker.resources.open:
                break
        assert all(handle.done for _, handle, _ in self.handles)
        assert all(wish.result(timeout=0).result(timeout=0) >= 0 for wish in self.wishes)
        self.every_answer_is_what_its_prompt_says()
        answer = self.engine._core.ask(lambda worker: worker.release_all())
        self.engine._core.step()
        answer.result(timeout=0)
        assert self.program.audit() == self.first
        assert len(self.worker.resources.catalogue.index) == 0
        for _, handle, _ in self.handles:
            handle.close()
        self.engine.close()
        assert self.device.held == 0
        self.patch.undo()


TestContext = ContextMachine.TestCase
TestContext.settings = settings(
    settings.default, max_examples=2000 if DEEP else 100, stateful_step_count=60 if DEEP else 30
)
