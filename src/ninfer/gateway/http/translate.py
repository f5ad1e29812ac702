"""What the protocols have in common: the same few questions to the engine, asked in different words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any, Protocol

import attrs

from ninfer.constraints import OutputConstraint
from ninfer.gateway.http.body import Spelled, schema_text
from ninfer.gateway.http.errors import ApiError, BadRequest
from ninfer.gateway.http.shapes import Field, Flag, Free, Integer, Many, Real, Record, Text, field, fixed, neutral
from ninfer.inputs import Chat, Tool
from ninfer.options import RequestOptions, SamplingParams
from ninfer.results import Delta, Event, GenerationResult, TokenLogprob

MAX_TOKENS = 1 << 24
EFFORTS = {"minimal": 0.1, "low": 0.2, "medium": 0.5, "high": 0.8, "xhigh": 0.95, "max": 1.0}
"""Share of the output budget that thinking of each effort may take, before its close is forced."""


class Encoder(Protocol):
    """Writes one answer in a protocol's words."""

    def frames(self, event: Event) -> bytes:
        """The server-sent events that say what ``event`` says; the result of a request that failed is not given."""

    def failure(self, error: ApiError) -> bytes:
        """The server-sent events of an answer that breaks off."""

    def whole(self, result: GenerationResult, logprobs: list[TokenLogprob]) -> dict[str, Any]:
        """The whole answer. logprobs: of the tokens behind the content."""


@attrs.frozen(kw_only=True)
class Call:
    """A request in the library's words, and who writes its answer."""

    prompt: Chat
    options: RequestOptions
    stream: bool
    encoder: Encoder


@attrs.frozen(kw_only=True)
class Served:
    """What a protocol may know of the engine. max_tokens: its default output budget. token_bytes: of a token id."""

    model: str
    max_tokens: int
    token_bytes: Callable[[int], bytes]


Paths = dict[str, str]
"""Fields of Chat and RequestOptions, as errors name them, to the fields of the body they came from."""


def check_model(name: str, served: Served) -> None:
    """Refuse every model but the one that is served."""
    if name != served.model:
        raise ApiError(404, "model_not_found", f"the model {name!r} is not served here, only {served.model!r}", "model")


# -- fields of more than one protocol ------------------------------------------------------------------------

CACHE_BREAKPOINT = field(
    "prompt_cache_breakpoint",
    Record((fixed("mode", "a marker", "explicit"), fixed("ttl", "the engine keeps what it has room for", "30m"))),
    "the prompt may be reused up to the end of this part",
)
TOP_K = field("top_k", Integer(0, 64), "candidates of each token; 0: the whole vocabulary")
SCHEMA_FORMAT = Record(
    (
        field("schema", Free(), "JSON Schema of the answer", required=True),
        neutral("name", Text(), "names the format for the reader of the request"),
        neutral("description", Text(), "not shown to the model: say in the prompt what fields mean"),
        neutral("strict", Flag(), "the schema is enforced either way"),
    )
)
SESSION = "names the conversation; its next request finds this one's history first, and may take it over"
EXTENSIONS: tuple[Field, ...] = (
    field("cache", Text(("read_write", "disabled")), "disabled: start from nothing and leave nothing"),
    field("update_session", Flag(), "false: this request's history does not become the session's"),
    field("min_p", Real(0, 1), "probability of a candidate, relative to the likeliest"),
    field(
        "structured_outputs",
        Record(
            (
                field("grammar", Text(), "GBNF text; entry rule `root`"),
                field("regex", Text(), "a regular expression that the whole answer matches"),
                field("choice", Many(Text(), 1), "the texts one of which is the answer"),
            )
        ),
        "a language for the answer: exactly one of its members; not together with a response format",
    ),
)
"""Fields of our own that every protocol takes."""


def sampling_of(body: Mapping[str, Any]) -> SamplingParams:
    """The members of a body that are named as those of SamplingParams."""
    names = (a.name for a in attrs.fields(SamplingParams))
    return SamplingParams(**{name: body[name] for name in names if name in body})


def cache_of(body: Mapping[str, Any], session: str, paths: Paths) -> dict[str, Any]:
    """RequestOptions about reuse. session: the member that names the conversation."""
    paths["session"] = session
    named = {"session": body[session]} if session in body else {}
    return {**named, **{name: body[name] for name in ("cache", "update_session") if name in body}}


def thinking_of(effort: str | None, budget: int) -> tuple[bool | None, int | None]:
    """Whether to think and for how many tokens at most. budget: of the whole output, tokens."""
    if effort is None or effort == "none":
        return (None if effort is None else False), None
    return True, int(EFFORTS[effort] * budget)


# -- constraints ---------------------------------------------------------------------------------------------


def constraint_of(
    body: Mapping[str, Any], form: Mapping[str, Any] | None, place: str, schema_place: str, paths: Paths
) -> OutputConstraint | None:
    """The constraint of an answer. form: the protocol's own response format, at ``place``, its schema at
    ``schema_place``. Raises BadRequest when there are two of them, ConstraintError."""
    direct = body.get("structured_outputs")
    kind = form["type"] if form is not None else "text"
    if direct is None:
        paths["constraint"] = schema_place if kind == "json_schema" else place
        if kind == "json_object":
            return OutputConstraint.json_object()
        if kind == "json_schema":
            assert form is not None
            return OutputConstraint.json_schema(_schema_text(form["schema"], schema_place))
        return None
    if kind != "text":
        raise BadRequest("structured_outputs", f"cannot be combined with {place}")
    if len(direct) != 1:
        raise BadRequest("structured_outputs", "expected exactly one of grammar, regex and choice")
    ((name, source),) = direct.items()
    paths["constraint"] = f"structured_outputs.{name}"
    make: Mapping[str, Callable[[Any], OutputConstraint]] = {
        "grammar": OutputConstraint.grammar,
        "regex": OutputConstraint.regex,
        "choice": OutputConstraint.choice,
    }
    return make[name](source)


def _schema_text(schema: Any, place: str) -> str:
    try:
        return schema_text(schema)
    except RecursionError:
        raise BadRequest(place, "nested too deep") from None


# -- tools ---------------------------------------------------------------------------------------------------

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def tool_of(declared: Mapping[str, Any], schema: str, path: str, marker: bool = False) -> Tool:
    """A function as a protocol declares it, its parameters in the member ``schema``."""
    parameters = declared.get(schema, NO_PARAMETERS)
    strict = declared.get("strict", False)
    if strict:
        _check_spelling(parameters, f"{path}.{schema}")
    return Tool(
        name=declared["name"],
        description=declared.get("description", ""),
        parameters=parameters,
        strict=strict,
        cache_marker=marker,
    )


def _check_spelling(parameters: Any, path: str) -> None:
    """Numbers that a strict schema could not hold to, since reading them has already changed them."""
    try:
        for place, number in _numbers(parameters, path):
            if Decimal(number.text) != Decimal(repr(float(number))):
                raise BadRequest(place, f"the number {number.text} has more digits than a reader keeps")
    except RecursionError:
        raise BadRequest(path, "nested too deep") from None


def _numbers(value: Any, path: str) -> Iterator[tuple[str, Spelled]]:
    if isinstance(value, Spelled):
        yield path, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _numbers(item, f"{path}.{name}")
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _numbers(item, f"{path}[{i}]")


# -- log-probabilities ---------------------------------------------------------------------------------------


def logprob_entries(logprobs: list[TokenLogprob], served: Served) -> list[dict[str, Any]]:
    """Log-probabilities in the form OpenAI's protocols share."""
    return [
        {
            **_token(entry.token_id, entry.logprob, served),
            "top_logprobs": [_token(token, logprob, served) for token, logprob in entry.top],
        }
        for entry in logprobs
    ]


def without_close(event: Delta, served: Served) -> Delta:
    """The first content after thinking, without the tokens of the close in between."""
    wanted, tail, kept = event.text.encode(), b"", 0
    while kept < len(event.logprobs) and not tail.endswith(wanted):
        kept += 1
        tail = served.token_bytes(event.logprobs[-kept].token_id) + tail
    return attrs.evolve(event, logprobs=event.logprobs[len(event.logprobs) - kept :])


def _token(token: int, logprob: float, served: Served) -> dict[str, Any]:
    data = served.token_bytes(token)
    return {"token": data.decode("utf-8", "replace"), "bytes": list(data), "logprob": logprob}
