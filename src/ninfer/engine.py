"""Engine: one resident model, opened once, serving many requests from any thread or event loop."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import attrs

from ninfer.cache import ContextCache
from ninfer.cancellation import CancelScope, aside, checkpoint
from ninfer.errors import EngineClosed, InvalidRequest
from ninfer.handle import GenerationHandle
from ninfer.inputs import Chat, Message, PromptInput, Tool
from ninfer.intake import INPUTS, Intake
from ninfer.many import run_all
from ninfer.options import EngineOptions, RequestOptions
from ninfer.results import GenerationResult, PauseOutcome
from ninfer.runtime.core import EngineCore
from ninfer.runtime.instance import open_instance
from ninfer.runtime.metrics import EngineStats
from ninfer.runtime.response import Response
from ninfer.runtime.units import Limits

if TYPE_CHECKING:
    from ninfer.artifact import ArtifactSource
    from ninfer.frontend import PreparedPrompt

O = TypeVar("O", EngineOptions, RequestOptions)
ASYNC_THREADS = 16
"""On which ``prepare_async`` and ``submit_async`` work; they are made as they are needed."""


class Engine:
    """A model ready to generate. A context manager (``with`` or ``async with``); ``close`` ends it.

    artifact: path of a ``.ninfer`` file, or an ArtifactSource. options: EngineOptions; keyword arguments replace single
    fields of it. Methods may be called from any thread of the process that made the engine; in a forked process they
    raise EngineClosed. Errors: TypeError for an unknown keyword, InvalidRequest, ArtifactError, OutOfDeviceMemory.
    """

    def __init__(
        self,
        artifact: str | bytes | os.PathLike[Any] | ArtifactSource,
        options: EngineOptions | None = None,
        **overrides: Any,
    ) -> None:
        chosen = _merge(EngineOptions, options, overrides)
        instance = open_instance(artifact, chosen)
        try:
            core = EngineCore(
                instance.program,
                Limits(
                    chosen.max_concurrency,
                    instance.prefill_chunk,
                    chosen.concurrent_prefill,
                    chosen.spec.window,
                    overlap=instance.overlap,
                    pressure=chosen.pause == "pressure",
                    prices=instance.prices,
                ),
                instance.cache,
                instance.costs,
                max_outstanding=chosen.max_outstanding,
                teardown=instance.close,
            )
            core.start()
        except BaseException:
            instance.close()
            raise
        self.options = chosen
        """The options it runs with."""
        self.model_name = instance.model_name
        """The artifact's ``metadata.name``, or its architecture."""
        self.max_context = instance.max_context
        """Tokens of one sequence: prompt and output together."""
        self._device = instance.device_name
        self._frontend = instance.frontend
        self._intake = Intake(instance.frontend, chosen, instance.max_context)
        self._core = core
        self.cache = ContextCache(core)
        """What is kept of finished requests."""
        self._bandwidth = instance.bandwidth
        self._process = os.getpid()
        self._threads = ThreadPoolExecutor(ASYNC_THREADS, "ninfer-async")
        weakref.finalize(self, core.request_close).atexit = False

    # -- life ------------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        o, shown = self.options, attrs.asdict(self._frontend.defaults, filter=lambda a, _: a.name != "seed")
        sampling = ", ".join(f"{name}={value}" for name, value in shown.items())
        most = "at most " if o.spec.adaptive else ""
        drafts = f", spec={o.spec.backend} ({most}{o.spec.window} drafts)" if o.spec.window else ""
        return (
            f"<Engine {self.model_name} on {self._device}, max_concurrency={o.max_concurrency},"
            f" max_context={self.max_context}, max_tokens={o.max_tokens}{drafts}; sampling: {sampling}>"
        )

    @property
    def available(self) -> bool:
        """Whether new requests are taken: not closed, not failed, not in a forked process."""
        return self._core.available and os.getpid() == self._process

    def close(self) -> None:
        """End every request with EngineClosed and free everything. Returns when that is done. Idempotent."""
        if os.getpid() == self._process:
            self._core.close()
            self._threads.shutdown(wait=False)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Engine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import asyncio

        await asyncio.to_thread(self.close)

    def stats(self) -> EngineStats:
        """Counters since the start and gauges now. Never blocks."""
        stats = self._core.stats()
        return attrs.evolve(stats, constraints={**stats.constraints, **self._frontend.constraints.stats()})

    def memory_bandwidth(self) -> float:
        """Bytes a second that large reads of the device's memory reach, measured now: what decoding is compared with.

        Takes less than a second. Requests that run meanwhile disturb the figure and are disturbed by it.
        """
        self._check()
        return self._bandwidth()

    # -- one request -----------------------------------------------------------------------------------------------

    def prepare(self, prompt: PromptInput | PreparedPrompt) -> PreparedPrompt:
        """Render and tokenize on the calling thread. The result can be submitted any number of times.

        Errors: InvalidRequest naming the field or message, ToolContractError.
        """
        self._check()
        with self._scope():
            return self._intake.prepare(prompt)

    async def prepare_async(self, prompt: PromptInput | PreparedPrompt) -> PreparedPrompt:
        """``prepare`` without holding up the event loop. Cancelling the task ends the work."""
        self._check()
        return await aside(self._threads, self._scope(), lambda: self._intake.prepare(prompt))

    def count_tokens(self, prompt: PromptInput | PreparedPrompt) -> int:
        """Tokens the prompt takes, as ``prepare`` would render it."""
        return len(self.prepare(prompt))

    def token_bytes(self, id: int) -> bytes:
        """The UTF-8 bytes one token stands for; they may be part of a character. Raises InvalidRequest."""
        if not 0 <= id < self._frontend.vocab_size:
            raise InvalidRequest(f"expected 0..{self._frontend.vocab_size - 1}, got {id!r}", field="id")
        return self._frontend.token_bytes(id)

    def submit(
        self,
        prompt: PromptInput | PreparedPrompt,
        options: RequestOptions | None = None,
        block: bool = False,
        **overrides: Any,
    ) -> GenerationHandle:
        """Queue a request and return its handle.

        options: RequestOptions; keyword arguments replace single fields. block: wait while the engine holds
        max_outstanding requests instead of raising Overloaded. Ctrl-C, the request's timeout and ``close`` also end
        the wait and the compilation of a constraint. Errors, before anything has changed: TypeError for an unknown
        keyword, InvalidRequest, ContextOverflow, Overloaded, DeadlineExceeded, EngineClosed, EngineFailed.
        """
        self._check()
        chosen = _merge(RequestOptions, options, overrides)
        with self._scope(chosen.timeout) as scope:
            return self._submit(scope, prompt, chosen, block)

    def _submit(
        self, scope: CancelScope, prompt: PromptInput | PreparedPrompt, chosen: RequestOptions, block: bool
    ) -> GenerationHandle:
        """``submit``, inside the scope."""
        core, intake = self._core, self._intake
        prepared = intake.prepare(prompt)
        intake.check(prepared)
        if intake.max_tokens(chosen) == 0:
            return GenerationHandle(intake.empty(prepared, chosen), self, chosen.metadata)
        core.acquire(block)
        try:
            response = Response(core.outstanding.release, core.wake)
            record = intake.record(scope, prepared, chosen, response)
            checkpoint()
            core.enqueue(record)
        except BaseException:
            core.outstanding.release()
            raise
        return GenerationHandle(response, self, chosen.metadata)

    async def submit_async(
        self,
        prompt: PromptInput | PreparedPrompt,
        options: RequestOptions | None = None,
        block: bool = False,
        **overrides: Any,
    ) -> GenerationHandle:
        """``submit`` without holding up the event loop: rendering, tokenizing, compiling and waiting happen on threads.
        Cancelling the task ends them, and leaves nothing behind."""
        self._check()
        chosen = _merge(RequestOptions, options, overrides)

        scope = self._scope(chosen.timeout)

        def work() -> GenerationHandle:
            handle = self._submit(scope, prompt, chosen, block)
            if scope.cancelled:
                handle.close()
            return handle

        return await aside(self._threads, scope, work)

    def warm_up(self) -> None:
        """Answer a short prompt, so that what happens once has happened before the first request.

        It is counted nowhere and leaves nothing behind; requests submitted meanwhile wait for it. An engine that has
        taken a request before is warm, and nothing is done. Errors: the request's own; EngineClosed, EngineFailed.
        """
        self._check()
        chosen = RequestOptions(max_tokens=2, cache="disabled")
        response = Response(lambda: None, lambda: None)
        with self._scope() as scope:
            prepared = self._intake.prepare(Chat([{"role": "user", "content": "."}]))
            self._intake.check(prepared)
            self._core.rehearse(self._intake.record(scope, prepared, chosen, response)).result()
        if response.result is not None and response.result.error is not None:
            raise response.result.error

    def pause(self, handle: GenerationHandle, mode: Literal["auto", "snapshot", "replay"] = "auto") -> PauseOutcome:
        """Take a running request off the device until ``resume``; what it has published and decided stays.

        mode: "snapshot" keeps its state in memory that others may claim, "replay" gives it up and reads it again later,
        "auto" keeps it where it can. Returns when the request stands aside, or says why it does not. Errors:
        InvalidRequest("pause") unless ``EngineOptions.pause`` allows it, StaleHandle for another engine's handle.
        """
        self._check_pause()
        if mode not in ("auto", "snapshot", "replay"):
            raise InvalidRequest(f"expected 'auto', 'snapshot' or 'replay', got {mode!r}", field="mode")
        response = self._own(handle)
        return self._core.ask(lambda worker: worker.pausing.pause(response, mode)).result()

    async def pause_async(
        self, handle: GenerationHandle, mode: Literal["auto", "snapshot", "replay"] = "auto"
    ) -> PauseOutcome:
        """``pause`` without holding up the event loop."""
        import asyncio

        return await asyncio.to_thread(self.pause, handle, mode)

    def resume(self, handle: GenerationHandle) -> None:
        """Have a paused request go on as soon as there is room, before all that were submitted after it. Idempotent.
        Errors as ``pause``; InvalidRequest("handle") for a request that was never paused."""
        self._check_pause()
        response = self._own(handle)
        self._core.ask(lambda worker: worker.pausing.resume(response)).result()

    def stream(
        self, prompt: PromptInput | PreparedPrompt, options: RequestOptions | None = None, **overrides: Any
    ) -> GenerationHandle:
        """``submit``, waiting for a slot: ``for text in engine.stream("Hello").text_deltas(): ...``."""
        return self.submit(prompt, options, True, **overrides)

    @overload
    def generate(
        self, prompt: PromptInput | PreparedPrompt, options: RequestOptions | None = None, **overrides: Any
    ) -> GenerationResult: ...

    @overload
    def generate(
        self,
        prompt: list[Any] | tuple[Any, ...],
        options: RequestOptions | None = None,
        **overrides: Any,
    ) -> list[GenerationResult]: ...

    def generate(
        self, prompt: Any, options: RequestOptions | None = None, **overrides: Any
    ) -> GenerationResult | list[GenerationResult]:
        """Generate and wait: one result for one input, a list of results, in order, for a list or tuple of inputs.

        A single request raises what ``GenerationHandle.result`` raises. A list never raises for one item: see
        ``GenerationResult.error``. It keeps as many requests outstanding as the engine allows, shows a progress bar,
        and cancels what is running when it is interrupted.
        """
        if isinstance(prompt, list | tuple):
            results = self.generate_iter(prompt, options, **overrides)
            return sorted(results, key=lambda result: -1 if result.index is None else result.index)
        with self.submit(prompt, options, True, **overrides) as handle:
            return handle.result()

    def chat(
        self,
        messages: Sequence[Mapping[str, Any] | Message],
        tools: Sequence[Tool | Mapping[str, Any]] = (),
        *,
        thinking: bool | None = None,
        options: RequestOptions | None = None,
        **overrides: Any,
    ) -> GenerationResult:
        """Answer a conversation and wait. The rest of what a Chat can say is said with ``generate(Chat(...))``."""
        return self.generate(Chat(messages, tools, thinking), options, **overrides)

    # -- many requests ---------------------------------------------------------------------------------------------

    def generate_iter(
        self,
        prompts: Iterable[PromptInput | PreparedPrompt],
        options: RequestOptions | None = None,
        **overrides: Any,
    ) -> Iterator[GenerationResult]:
        """Generate for every input; results come as they complete, with ``index`` and, for a failed one, ``error``.

        Inputs are taken one at a time, no earlier than there is room for them. Dropping the iterator cancels what is
        running.
        """
        self._check()
        chosen = _merge(RequestOptions, options, overrides)
        if isinstance(prompts, (*INPUTS, Mapping)) or not isinstance(prompts, Iterable):
            raise InvalidRequest("expected an iterable of inputs", field="prompts")
        if isinstance(prompts, list | tuple) and prompts and all(isinstance(p, Mapping | Message) for p in prompts):
            raise InvalidRequest("a list of messages is one input: wrap it in Chat, or use chat()", field="prompts")
        return run_all(prompts, chosen, self.prepare, self.submit, self.options.progress)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if os.getpid() != self._process:
            raise EngineClosed("this engine belongs to the process that forked this one")
        self._core.check_available()

    def _scope(self, timeout: float | None = None) -> CancelScope:
        """A caller's wait, from now on."""
        return CancelScope(timeout, clock=self._core.clock, alive=self._core.check_available)

    def _check_pause(self) -> None:
        self._check()
        if self.options.pause == "never":
            raise InvalidRequest("the engine was opened with pause='never'", field="pause")

    def _own(self, handle: GenerationHandle) -> Response:
        if not isinstance(handle, GenerationHandle):
            raise InvalidRequest(f"expected a GenerationHandle, got {type(handle).__name__}", field="handle")
        return handle._response


def _merge(kind: type[O], options: O | None, overrides: Mapping[str, Any]) -> O:
    """Options with single fields replaced. An unknown field is a TypeError."""
    if options is not None and not isinstance(options, kind):
        raise InvalidRequest(f"expected {kind.__name__}, got {type(options).__name__}", field="options")
    if options is None:
        return kind(**overrides)
    return attrs.evolve(options, **overrides) if overrides else options
