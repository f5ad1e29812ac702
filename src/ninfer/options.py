"""What a caller may choose: once for an engine, or for each request. Frozen, validated when constructed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import attrs

from ninfer.errors import InvalidRequest
from ninfer.inputs import token_ids

ProgressCallback = Callable[[str, int, int], None]
"""Called as ``callback(stage, done, total)`` from the thread that works; it must not raise."""


def _refuse(message: str, name: str) -> InvalidRequest:
    return InvalidRequest(message, field=name)


def _integer(low: int, high: int | None = None, *, optional: bool = False) -> Callable[[Any, Any, Any], None]:
    def check(_: Any, attribute: Any, value: Any) -> None:
        if optional and value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int):
            raise _refuse(f"expected an integer, got {value!r}", attribute.name)
        if value < low or (high is not None and value > high):
            bound = f">= {low}" if high is None else f"{low}..{high}"
            raise _refuse(f"expected {bound}, got {value}", attribute.name)

    return check


def _real(
    low: float, high: float, *, open_low: bool = False, optional: bool = False
) -> Callable[[Any, Any, Any], None]:
    def check(_: Any, attribute: Any, value: Any) -> None:
        if optional and value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
            raise _refuse(f"expected a finite number, got {value!r}", attribute.name)
        if value > high or value < low or (open_low and value == low):
            raise _refuse(f"expected {'(' if open_low else '['}{low}, {high}], got {value}", attribute.name)

    return check


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def _choice(*allowed: Any) -> Callable[[Any, Any, Any], None]:
    def check(_: Any, attribute: Any, value: Any) -> None:
        if not any(type(value) is type(a) and value == a for a in allowed):
            raise _refuse(f"expected one of {', '.join(map(repr, allowed))}, got {value!r}", attribute.name)

    return check


def _boolean(_: Any, attribute: Any, value: Any) -> None:
    if not isinstance(value, bool):
        raise _refuse(f"expected a bool, got {value!r}", attribute.name)


def _device(_: Any, attribute: Any, value: Any) -> None:
    if not isinstance(value, str) or not re.fullmatch(r"auto|cpu|cuda:[0-9]{1,3}", value):
        raise _refuse(f"expected 'auto', 'cpu' or 'cuda:N', got {value!r}", attribute.name)


def _kv_capacity(_: Any, attribute: Any, value: Any) -> None:
    if not (isinstance(value, str) and value == "auto"):
        _integer(1)(_, attribute, value)


def _progress(_: Any, attribute: Any, value: Any) -> None:
    if value is not None and not isinstance(value, bool) and not callable(value):
        raise _refuse(f"expected None, a bool or a callable, got {value!r}", attribute.name)


def _strings(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, Sequence):
        raise _refuse(f"expected a string or a sequence of strings, got {value!r}", "stop")
    return tuple(value)


def _stop_strings(_: Any, attribute: Any, value: tuple[Any, ...]) -> None:
    for i, item in enumerate(value):
        if not isinstance(item, str) or not item:
            raise _refuse(f"expected a non-empty string, got {item!r}", f"{attribute.name}[{i}]")
        try:
            item.encode()
        except UnicodeEncodeError:
            raise _refuse("lone surrogate", f"{attribute.name}[{i}]") from None


def _ids(value: Any) -> tuple[int, ...]:
    return () if value is None else token_ids(value, "stop_token_ids")


def _without_effect(options: Any, switch: str, reason: str) -> None:
    """Refuse every field but ``switch`` that says something."""
    for a in attrs.fields(type(options)):
        if a.name != switch and getattr(options, a.name) != a.default:
            raise _refuse(f"has no effect {reason}", a.name)


@runtime_checkable
class Constraint(Protocol):
    """What an :class:`~ninfer.OutputConstraint` is to a request."""

    @property
    def kind(self) -> str: ...

    @property
    def source(self) -> str | tuple[str, ...]: ...

    def accepts(self, text: str | bytes) -> bool: ...

    def check(self) -> None: ...


def _names(value: Any) -> Any:
    return value if value is None or isinstance(value, str) or not isinstance(value, Iterable) else tuple(value)


def _allowed(_: Any, attribute: Any, value: Any) -> None:
    if value is not None and not (isinstance(value, tuple) and all(isinstance(name, str) for name in value)):
        raise _refuse(f"expected a sequence of tool names, got {value!r}", attribute.name)


@attrs.frozen(kw_only=True)
class ToolChoice:
    """Whether and which declared tools an answer calls.

    mode: "auto" (text, calls, or text and then calls), "required" (calls only, at least one) or "none" (text only; the
    declarations stay in the prompt). allowed_names: the tools that may be called, default all. parallel: more than one
    call. constraints: "basic" holds every answer of a prompt with tools to the form of calls and to declared names;
    "automatic" only where something asks for it: a strict tool, a JSON constraint, or any other field here.
    """

    mode: str = attrs.field(default="auto", validator=_choice("auto", "required", "none"))
    allowed_names: tuple[str, ...] | None = attrs.field(default=None, converter=_names, validator=_allowed)
    parallel: bool = attrs.field(default=True, validator=_boolean)
    constraints: str = attrs.field(default="basic", validator=_choice("basic", "automatic"))


def _as_choice(value: Any) -> Any:
    """A ToolChoice from "auto", "required", "none", or the one tool to call."""
    if not isinstance(value, str):
        return value
    if value in ("auto", "required", "none"):
        return ToolChoice(mode=value)
    return ToolChoice(mode="required", allowed_names=(value,), parallel=False)


def _tool_choice(_: Any, attribute: Any, value: Any) -> None:
    if not isinstance(value, ToolChoice):
        raise _refuse(f"expected a ToolChoice or a string, got {value!r}", attribute.name)


def _constraint(_: Any, attribute: Any, value: Any) -> None:
    if value is not None and not isinstance(value, Constraint):
        raise _refuse(f"expected an OutputConstraint, got {value!r}", attribute.name)


def _sampling(_: Any, attribute: Any, value: Any) -> None:
    if value is not None and not isinstance(value, SamplingParams):
        raise _refuse(f"expected SamplingParams, got {value!r}", attribute.name)


def _cache(_: Any, attribute: Any, value: Any) -> None:
    if not isinstance(value, CacheOptions):
        raise _refuse(f"expected CacheOptions, got {value!r}", attribute.name)


def _session(_: Any, attribute: Any, value: Any) -> None:
    if value is not None and not (isinstance(value, str) and value):
        raise _refuse(f"expected None or a non-empty string, got {value!r}", attribute.name)


def _metadata(_: Any, attribute: Any, value: Any) -> None:
    if value is not None and not isinstance(value, Mapping):
        raise _refuse(f"expected a mapping, got {value!r}", attribute.name)


@attrs.frozen(kw_only=True)
class SamplingParams:
    """How a token is drawn from its distribution (docs/sampling.md). ``None`` takes the engine's default.

    temperature: >= 0; 0 is greedy. top_p: (0, 1]. top_k: 1..64, or 0 for the whole legal vocabulary.
    min_p: [0, 1]. presence_penalty, frequency_penalty: [-2, 2], on this request's own generated tokens.
    seed: 0..2**64-1; ``None`` draws a fresh one, reported in the result. Errors: InvalidRequest naming the field.
    """

    temperature: float | None = attrs.field(default=None, validator=_real(0.0, 100.0, optional=True))
    top_p: float | None = attrs.field(default=None, validator=_real(0.0, 1.0, open_low=True, optional=True))
    top_k: int | None = attrs.field(default=None, validator=_integer(0, 64, optional=True))
    min_p: float | None = attrs.field(default=None, validator=_real(0.0, 1.0, optional=True))
    presence_penalty: float | None = attrs.field(default=None, validator=_real(-2.0, 2.0, optional=True))
    frequency_penalty: float | None = attrs.field(default=None, validator=_real(-2.0, 2.0, optional=True))
    seed: int | None = attrs.field(default=None, validator=_integer(0, 2**64 - 1, optional=True))

    def over(self, base: SamplingParams) -> SamplingParams:
        """These parameters, with ``base`` where a field is ``None``."""
        chosen = {a.name: getattr(self, a.name) for a in attrs.fields(SamplingParams)}
        return attrs.evolve(base, **{k: v for k, v in chosen.items() if v is not None})


@attrs.frozen
class SpecOptions:
    """Speculative decoding: tokens are drafted cheaply and verified together; every token's distribution stays that of
    ordinary sampling. Errors: InvalidRequest naming the field.

    backend: "none", "mtp" (the model's own multi-token-prediction module), "dflash" or "dflash2" (block-drafting
    companions). The artifact must hold it. draft_tokens: most tokens drafted for a round, 1..7; ``None``: 3 with "mtp",
    else 7. adaptive: rounds have as many drafts as pay, judged by how the last ones fared and by what rounds take,
    which the engine measures; but a request that names its seed and draws has all of them in every round, so that it
    can be repeated. proposal_head: draft with the artifact's reduced head, whose tokens alone are then drafted;
    ``None``: where it has one. With "none" everything else is refused: it would have no effect.
    """

    backend: str = attrs.field(default="none", validator=_choice("none", "mtp", "dflash", "dflash2"))
    draft_tokens: int | None = attrs.field(default=None, validator=_integer(1, 7, optional=True), kw_only=True)
    adaptive: bool = attrs.field(default=False, validator=_boolean, kw_only=True)
    proposal_head: bool | None = attrs.field(default=None, validator=attrs.validators.optional(_boolean), kw_only=True)

    def __attrs_post_init__(self) -> None:
        if self.backend == "none":
            _without_effect(self, "backend", "without a backend")

    @property
    def window(self) -> int:
        """Drafts of a round; 0 without speculation."""
        return 0 if self.backend == "none" else self.draft_tokens or (3 if self.backend == "mtp" else 7)


def _as_spec(value: Any) -> Any:
    return SpecOptions(value) if isinstance(value, str) else value


def _spec(_: Any, attribute: Any, value: Any) -> None:
    if not isinstance(value, SpecOptions):
        raise _refuse(f"expected SpecOptions or the name of a backend, got {value!r}", attribute.name)


@attrs.frozen(kw_only=True)
class CacheOptions:
    """How much of finished requests an engine keeps, so that later ones need not read it again. docs/context-cache.md.
    Errors: InvalidRequest naming the field.

    enabled: keep anything at all; False leaves every request as if its ``cache`` were "disabled", and every other
    field is refused. device_state_slots: recurrent states kept on the device beside those of active requests,
    default max_concurrency. host_state_slots: recurrent states kept in host memory, default 8 where there is a host
    tier, else 0. host_kv_bytes: host memory for keys and values, taken as it is used, which needs a state there
    too; default 0 on the CPU, else the smaller of 8 GiB and a tenth of the machine's memory. retained_kv_tokens:
    device KV beyond what active requests may need, tokens; default as much again (with an explicit kv_capacity: 0).
    max_continuations: finished requests that are kept, at least max_concurrency, default max(2 x max_concurrency,
    max_concurrency + 4). max_shared_prefixes: prefixes kept for any request, default max(max_concurrency, 7).
    max_long_anchors: further resume points inside one long prompt. anchor_gap: tokens between such points, at
    least. aging_window: admissions in which an unused entry loses half its worth. max_candidates: resume points
    examined for one request.
    """

    enabled: bool = attrs.field(default=True, validator=_boolean)
    device_state_slots: int | None = attrs.field(default=None, validator=_integer(0, optional=True))
    host_state_slots: int | None = attrs.field(default=None, validator=_integer(0, optional=True))
    host_kv_bytes: int | None = attrs.field(default=None, validator=_integer(0, optional=True))
    retained_kv_tokens: int | None = attrs.field(default=None, validator=_integer(0, optional=True))
    max_continuations: int | None = attrs.field(default=None, validator=_integer(1, optional=True))
    max_shared_prefixes: int | None = attrs.field(default=None, validator=_integer(0, optional=True))
    max_long_anchors: int = attrs.field(default=2, validator=_integer(0, 16))
    anchor_gap: int = attrs.field(default=8192, validator=_integer(64))
    aging_window: int = attrs.field(default=32, validator=_integer(1))
    max_candidates: int = attrs.field(default=12, validator=_integer(1))

    def __attrs_post_init__(self) -> None:
        if not self.enabled:
            _without_effect(self, "enabled", "with enabled=False")
        if self.host_state_slots == 0 and self.host_kv_bytes:
            raise _refuse("has no effect with host_state_slots=0", "host_kv_bytes")
        if self.max_long_anchors == 0 and self.anchor_gap != attrs.fields(CacheOptions).anchor_gap.default:
            raise _refuse("has no effect with max_long_anchors=0", "anchor_gap")


@attrs.frozen(kw_only=True)
class EngineOptions:
    """Fixed when an engine starts. Errors: InvalidRequest naming the field.

    device: "cpu", "cuda:N", or "auto": the first GPU, else the CPU. max_concurrency: requests active at once, 1..8.
    max_context: tokens of one sequence, default min(model, 32768). max_outstanding: waiting + active + unread results.
    queue_timeout: seconds a request may wait for a lane. max_tokens: default output budget of a request, tokens.
    prefill_chunk: tokens of one prefill unit, default 512 on the CPU and 2048 on a GPU. concurrent_prefill: admit while
    another request prefills. kv_capacity: tokens of the KV pool, or "auto" (max_concurrency x max_context, at most 25 %
    of RAM, or what a GPU has free less 1 GiB). kv_dtype: how keys and values are kept: "auto" (fp32 on the CPU, bf16 on
    a GPU), "fp32" (CPU alone), "bf16", or "int8" (codes of 8 bits with an fp16 scale for every 64, about half of bf16).
    pause: "never", "explicit" (``Engine.pause`` and ``resume``), or "pressure" (also younger requests for an older one
    that lacks room). spec: SpecOptions, or the name of a backend. cache: CacheOptions. grammar_cache_bytes: compiled
    constraints that are kept, bytes. phase_timings: measure the host time of constraint work in each result.
    progress: None (bars in a terminal or notebook), a bool, or ``callback(stage, done, total)``.
    """

    device: str = attrs.field(default="auto", validator=_device)
    max_concurrency: int = attrs.field(default=4, validator=_integer(1, 8))
    max_context: int | None = attrs.field(default=None, validator=_integer(1, optional=True))
    max_outstanding: int = attrs.field(default=64, validator=_integer(1))
    queue_timeout: float | None = attrs.field(
        default=None, validator=_real(0.0, math.inf, open_low=True, optional=True)
    )
    max_tokens: int = attrs.field(default=1024, validator=_integer(0))
    prefill_chunk: int | None = attrs.field(default=None, validator=_integer(1, 65536, optional=True))
    concurrent_prefill: bool = attrs.field(default=False, validator=_boolean)
    kv_capacity: int | str = attrs.field(default="auto", validator=_kv_capacity)
    kv_dtype: str = attrs.field(default="auto", validator=_choice("auto", "fp32", "bf16", "int8"))
    pause: str = attrs.field(default="never", validator=_choice("never", "explicit", "pressure"))
    spec: SpecOptions = attrs.field(default=SpecOptions(), converter=_as_spec, validator=_spec)
    cache: CacheOptions = attrs.field(default=CacheOptions(), validator=_cache)
    grammar_cache_bytes: int = attrs.field(default=256 << 20, validator=_integer(0))
    phase_timings: bool = attrs.field(default=False, validator=_boolean)
    progress: bool | ProgressCallback | None = attrs.field(default=None, validator=_progress)


@attrs.frozen(kw_only=True)
class RequestOptions:
    """Chosen per request. Errors: InvalidRequest naming the field.

    max_tokens: output budget, tokens; ``None`` takes the engine's default; 0 returns at once, empty. sampling:
    SamplingParams. stop: string or strings that end the content; the matched text is not published. stop_token_ids:
    further ids that end the request. ignore_eos: do not end at the model's own stop ids. thinking_stop: let
    ``stop``, which it needs, also end the thinking channel. thinking_budget: tokens of thinking before the
    canonical close is forced, >= 0. constraint: an OutputConstraint that the content must satisfy; with one, only
    the model's own stop ids end the answer, so stop, stop_token_ids and ignore_eos are refused. tool_choice:
    ToolChoice, or "auto", "required", "none" or a tool's name. cache: "read_write", or "disabled" to start from
    nothing and leave nothing. session: names the conversation the request belongs to; its next request finds this
    one's history first, and may take it over. It needs the cache. update_session: whether this request's history
    becomes the session's, which must be named. timeout: seconds for the whole request. logprobs: ``None``, or 0..20
    alternatives beside each emitted token. metadata: kept with the handle, never read.
    """

    max_tokens: int | None = attrs.field(default=None, validator=_integer(0, optional=True))
    sampling: SamplingParams | None = attrs.field(default=None, validator=_sampling)
    stop: tuple[str, ...] = attrs.field(default=(), converter=_strings, validator=_stop_strings)
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), converter=_ids)
    ignore_eos: bool = attrs.field(default=False, validator=_boolean)
    thinking_stop: bool = attrs.field(default=False, validator=_boolean)
    thinking_budget: int | None = attrs.field(default=None, validator=_integer(0, optional=True))
    constraint: Constraint | None = attrs.field(default=None, validator=_constraint)
    tool_choice: ToolChoice = attrs.field(default=ToolChoice(), converter=_as_choice, validator=_tool_choice)
    cache: Literal["read_write", "disabled"] = attrs.field(
        default="read_write", validator=_choice("read_write", "disabled")
    )
    session: str | None = attrs.field(default=None, validator=_session)
    update_session: bool = attrs.field(default=True, validator=_boolean)
    timeout: float | None = attrs.field(default=None, validator=_real(0.0, math.inf, open_low=True, optional=True))
    logprobs: int | None = attrs.field(default=None, validator=_integer(0, 20, optional=True))
    metadata: Mapping[str, Any] | None = attrs.field(default=None, validator=_metadata)

    def __attrs_post_init__(self) -> None:
        if self.thinking_stop and not self.stop:
            raise _refuse("has no effect without stop", "thinking_stop")
        if self.cache == "disabled" and self.session is not None:
            raise _refuse("has no effect with cache='disabled'", "session")
        if not self.update_session and self.session is None:
            raise _refuse("has no effect without session", "update_session")
