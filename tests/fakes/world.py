"""An Engine over the scripted program and frontend, with a worker thread or stepped by hand under a manual clock."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
from fakes.scripted_frontend import ScriptedFrontend
from fakes.scripted_program import ScriptedProgram

import ninfer
import ninfer.engine
from ninfer.runtime.core import EngineCore
from ninfer.runtime.costs import GENERIC
from ninfer.runtime.instance import Instance
from ninfer.runtime.settings import resolve


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class World:
    """``program`` options are ScriptedProgram's; the others EngineOptions. ``drafts`` switches both sides. overlap: as
    over a device that works beside the host. Nothing is kept of finished requests unless ``cache`` says so."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        *,
        threaded: bool = True,
        program: dict[str, Any] | None = None,
        prefill_chunk: int = 8,
        overlap: bool = False,
        **options: Any,
    ) -> None:
        options.setdefault("max_concurrency", 2)
        options.setdefault("cache", ninfer.CacheOptions(enabled=False))
        self.program = ScriptedProgram(options["max_concurrency"], **(program or {}))
        self.frontend = ScriptedFrontend(self.program.faults)
        self.clock = Clock()
        self.threaded = threaded
        self.kept: list[ninfer.GenerationHandle] = []
        world, drafts = self, self.program.drafts

        class Core(EngineCore):
            def __init__(self, program: Any, limits: Any, *parts: Any, **rest: Any) -> None:
                clock = {} if threaded else {"clock": world.clock}
                super().__init__(program, dataclasses.replace(limits, drafts=drafts), *parts, **rest, **clock)
                if not threaded:  # no planner's search ends because the machine is busy
                    resources = self._worker.resources
                    resources._choose = dataclasses.replace(resources._choose, clock=lambda: 0)

            def start(self) -> None:
                if threaded:
                    super().start()

        def open_instance(artifact: Any, options: Any) -> Instance:
            p = self.program
            return Instance(
                self.frontend,  # type: ignore[arg-type]
                p, "scripted", "nothing", p.context, prefill_chunk, overlap,
                resolve(options.cache, options.max_concurrency, "cpu"), GENERIC, p.close, lambda: 1e9,
            )  # fmt: skip

        patch.setattr(ninfer.engine, "EngineCore", Core)
        patch.setattr(ninfer.engine, "open_instance", open_instance)
        self.baseline = dict(self.program.audit())
        self.engine = ninfer.Engine("artifact", progress=False, **options)

    def submit(self, prompt: Any, **options: Any) -> ninfer.GenerationHandle:
        """Submit, and keep the handle alive."""
        self.kept.append(self.engine.submit(prompt, **options))
        return self.kept[-1]

    @property
    def worker(self) -> Any:
        return self.engine._core._worker

    def step(self, times: int = 1) -> bool:
        """Run worker boundaries by hand; whether the last one left work."""
        busy = False
        for _ in range(times):
            busy = self.engine._core.step()
        return busy

    def drain(self, limit: int = 2000) -> None:
        """Step until nothing is left to do."""
        for _ in range(limit):
            if not self.step() and not self.worker.resources.open:
                return
        raise AssertionError("the engine does not come to rest")

    def wait(self) -> None:
        """Let the worker's thread come to rest."""
        for _ in range(5000):
            stats = self.engine.stats()
            if not (stats.outstanding or stats.active or stats.waiting):
                return
            time.sleep(0.002)
        raise AssertionError("the engine does not come to rest")

    def violations(self) -> list[str]:
        return self.program.violations + [v for s in self.frontend.sessions for v in s.violations]

    def check_at_rest(self) -> None:
        """Capacity and memory are back where they started, and nobody broke a rule."""
        assert self.violations() == []
        for handle in self.kept:
            handle.close()
        assert self.engine.stats().outstanding == 0
        assert self.engine.stats().active == self.engine.stats().waiting == 0
        self.clear_cache()
        assert dict(self.program.audit()) == self.baseline

    def clear_cache(self) -> int:
        """Drop what is kept of finished requests."""
        answer = self.engine._core.ask(lambda worker: worker.release_all())
        if not self.threaded:
            self.step()
        return answer.result(timeout=60)
