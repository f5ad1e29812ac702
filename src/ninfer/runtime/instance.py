"""An opened model: everything behind an engine, built in order and taken down in the opposite one."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ninfer.contract import ProgramPort
from ninfer.errors import ArtifactError, InvalidRequest
from ninfer.options import EngineOptions
from ninfer.progress import Meter
from ninfer.runtime.costs import GENERIC, CostModel
from ninfer.runtime.measuring import measure_prefill, measure_rounds, measure_transfers
from ninfer.runtime.prices import Prices
from ninfer.runtime.settings import CacheSettings, resolve

if TYPE_CHECKING:
    from ninfer.artifact import Artifact, ArtifactSource
    from ninfer.frontend import Frontend

DEFAULT_CONTEXT = 32768
"""Tokens of one sequence where the options say nothing."""


@dataclass(frozen=True, slots=True)
class Instance:
    """max_context: tokens of one sequence. prefill_chunk: tokens of one unit. overlap: the device works beside the
    host. cache: its options, resolved. costs: what work takes on this device. prices: what decode rounds cost, where
    their drafts adapt. ``close`` frees everything, once."""

    frontend: Frontend
    program: ProgramPort
    model_name: str
    device_name: str
    max_context: int
    prefill_chunk: int
    overlap: bool
    cache: CacheSettings
    costs: CostModel
    close: Callable[[], None]
    bandwidth: Callable[[], float]
    prices: Prices | None = None


def open_instance(artifact: str | bytes | os.PathLike[Any] | ArtifactSource, options: EngineOptions) -> Instance:
    """Read an artifact, make its language model resident and plan everything that requests will need.

    A source handed in stays its owner's to close. Raises ArtifactError, InvalidRequest naming an option that this model
    or machine cannot honour, OutOfDeviceMemory; what had been opened by then is closed again.
    """
    from ninfer.artifact import Artifact, open_artifact
    from ninfer.models.qwen3_5.bind import bind, check
    from ninfer.program import ExplicitKV, QwenText, Retention, Shape, open_program
    from ninfer.program.widths import round_widths
    from ninfer.runtime.devices import DEFAULT_CHUNK, codec, open_device

    with ExitStack() as opened:
        if isinstance(artifact, str | bytes | os.PathLike):
            source: ArtifactSource = open_artifact(artifact)
            opened.callback(source.close)
        elif hasattr(artifact, "directory"):
            source = artifact
        else:
            raise InvalidRequest(f"expected a path or an ArtifactSource, got {artifact!r}", field="artifact")
        contents = Artifact(source)
        components: tuple[str, ...] = ("text",) if options.spec.backend == "none" else ("text", options.spec.backend)
        if missing := set(components) - set(contents.directory.components):
            raise InvalidRequest(f"the artifact has no component {', '.join(missing)}", field="spec.backend")
        proposal = contents.directory.components["text"].proposal if options.spec.window else None
        if options.spec.proposal_head and proposal is None:
            raise InvalidRequest("the artifact has no head for drafting", field="spec.proposal_head")
        if proposal is not None and options.spec.proposal_head is not False:
            components += ("proposal",)
        selection = check(contents, components)
        config, longest = selection.text, selection.dflash and selection.dflash.block
        if longest and options.spec.window >= longest:
            raise InvalidRequest(f"a block of {longest} drafts at most {longest - 1}", field="spec.draft_tokens")
        context = _context(options, config.max_position_embeddings)
        # a large vocabulary takes a second, in which the device opens and the weights arrive
        with ThreadPoolExecutor(1, "ninfer-frontend") as beside:
            building = beside.submit(_frontend, contents, config.vocab_size, options)
            device = open_device(options)
            opened.callback(device.close)
            with Meter("load", None, options.progress, delay=0.5) as meter:
                model = bind(contents, device, components, progress=meter.reach)
            frontend = building.result()
        opened.callback(frontend.constraints.close)
        if model.proposal and model.proposal.largest >= frontend.vocab_size:
            reason = f"{model.proposal.largest} is no token: there are {frontend.vocab_size}"
            raise ArtifactError(reason, path=contents.source.name, where="proposal/token_ids")
        chunk = min(options.prefill_chunk or DEFAULT_CHUNK[device.kind], context)
        room = context * options.max_concurrency if isinstance(options.kv_capacity, str) else 0
        cache = resolve(options.cache, options.max_concurrency, device.kind, room)
        shape = Shape(
            rows=options.max_concurrency,
            context=context,
            chunk=chunk,
            control=len(frontend.close_tokens),
            codec=codec(options, device),
            vocabulary=frontend.vocab_size,
            window=options.spec.window,
            adaptive=options.spec.adaptive,
            spare=cache.device_state_slots,
        )
        kept = Retention(cache.retained_kv_tokens, cache.host_state_slots, cache.host_kv_bytes)
        kv = None if isinstance(options.kv_capacity, str) else ExplicitKV(options.kv_capacity)
        transfers = measure_transfers(device) if cache.enabled else GENERIC.transfers
        program = open_program(device, QwenText(model), shape, kv, kept)
        opened.callback(program.close)
        costs = CostModel(transfers, measure_prefill(program, chunk, context)) if cache.enabled else GENERIC
        choices = [width - 1 for width in round_widths(device, shape)]
        prices = measure_rounds(program, shape.rows, choices, context) if shape.adaptive else None
        program.count_anew()
        _settle_memory()
        name = contents.directory.metadata.get("name")
        return Instance(
            frontend=frontend,
            program=program,
            model_name=name if isinstance(name, str) and name else config.architecture,
            device_name=device.name,
            max_context=context,
            prefill_chunk=chunk,
            overlap=device.asynchronous,
            cache=cache,
            costs=costs,
            prices=prices,
            close=opened.pop_all().close,
            bandwidth=device.read_bandwidth,
        )


def _frontend(artifact: Artifact, vocab_rows: int, options: EngineOptions) -> Frontend:
    from ninfer.frontend import Frontend, FrontendResources

    def read(role: str) -> bytes:
        return artifact.resource("text", role)

    name = artifact.source.name
    try:
        template = read("chat_template.jinja").decode()
    except UnicodeDecodeError as error:
        raise ArtifactError(f"not UTF-8: {error}", path=name, where="chat_template.jinja") from None
    resources = FrontendResources(
        tokenizer_json=read("tokenizer.json"),
        tokenizer_config=read("tokenizer_config.json"),
        chat_template=template,
        generation_config=read("generation_config.json"),
        vocab_rows=vocab_rows,
    )
    try:
        return Frontend(resources, grammar_cache_bytes=options.grammar_cache_bytes, timed=options.phase_timings)
    except ArtifactError as error:
        raise ArtifactError(error.reason, path=name, where=error.where) from None


_settled_objects = 0
"""Objects of the process after the last collection here."""


def _settle_memory() -> None:
    """Parsing a large vocabulary leaves some 50 MB of freed memory, which glibc keeps unless it is asked. And what was
    opened is a hundred thousand objects that Python's collector has yet to call old: it would stop everybody for 50 ms
    to do so, in the first hundreds of decode rounds. Afterwards it waits until there are a quarter more, and so do
    engines opened later."""
    global _settled_objects
    if 4 * len(gc.get_objects()) > 5 * _settled_objects:
        gc.collect()
        _settled_objects = len(gc.get_objects())
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _context(options: EngineOptions, limit: int) -> int:
    if options.max_context is None:
        return min(limit, DEFAULT_CONTEXT)
    if options.max_context > limit:
        raise InvalidRequest(f"{options.max_context} exceeds the model's {limit}", field="max_context")
    return options.max_context
