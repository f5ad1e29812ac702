"""Many requests of one caller: as many at once as the engine takes, results as they come."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from ninfer.errors import Overloaded
from ninfer.handle import GenerationHandle
from ninfer.options import ProgressCallback, RequestOptions
from ninfer.progress import Meter
from ninfer.results import GenerationResult

if TYPE_CHECKING:
    from ninfer.frontend import PreparedPrompt


def run_all(
    prompts: Iterable[Any],
    options: RequestOptions,
    prepare: Callable[[Any], PreparedPrompt],
    submit: Callable[[PreparedPrompt, RequestOptions, bool], GenerationHandle],
    progress: bool | ProgressCallback | None,
) -> Iterator[GenerationResult]:
    """The results of all prompts, with ``index``. prepare, submit, progress: an engine's. Inputs are taken one at a
    time; when the iterator is dropped, what is running is cancelled."""
    total = len(prompts) if isinstance(prompts, Sequence) else None
    running: dict[int, GenerationHandle] = {}
    finished: queue.SimpleQueue[int] = queue.SimpleQueue()
    tokens, began = 0, time.monotonic()

    def start(index: int, prompt: PreparedPrompt) -> None:
        handle = submit(prompt, options, not running)  # with nothing of ours to wait for, wait for others
        running[index] = handle
        handle._response.watch(lambda: finished.put(index))

    with Meter("generate", total, progress, unit="request") as meter:

        def done(result: GenerationResult, index: int) -> GenerationResult:
            nonlocal tokens
            tokens += result.usage.completion_tokens
            meter(1, f"{tokens / max(time.monotonic() - began, 1e-9):.0f} tok/s")
            return attrs.evolve(result, index=index)

        items = enumerate(prompts)
        item = next(items, None)
        try:
            while item is not None or running:
                full = False
                if item is not None:
                    index, prompt = item
                    try:
                        prepared = prepare(prompt)
                        item = (index, prepared)
                        start(index, prepared)
                    except Overloaded:
                        full = True
                    except Exception as error:
                        failed = GenerationResult(finish_reason="error", error=error, metadata=options.metadata)
                        item = next(items, None)
                        yield done(failed, index)
                    else:
                        item = next(items, None)
                while running and (full or item is None or not finished.empty()):
                    index = finished.get()
                    handle = running.pop(index, None)
                    if handle is not None:  # a watcher may be called twice
                        full = False
                        yield done(handle._final(), index)
        finally:
            for handle in running.values():
                handle.close()
