"""Chat Completions through OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Literal

import openai
import pytest
from pydantic import BaseModel, Field

ASK = [{"role": "user", "content": "What is 3 plus 4?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather for a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


@pytest.fixture
def create(server, model):
    """Ask; unless said otherwise about the same thing, greedily, and with nothing of earlier answers."""

    def ask(*, extra_body=(), **fields):
        fields = {"model": model, "messages": ASK, "temperature": 0, "max_tokens": 100, **fields}
        return server.openai().chat.completions.create(**fields, extra_body={"cache": "disabled", **dict(extra_body)})

    return ask


def text_of(stream):
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def test_an_answer(server, create):
    answer = create()
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "3 + 4 = 7", "stop")
    usage = answer.usage
    assert usage.prompt_tokens == server.engine.count_tokens("What is 3 plus 4?")
    assert usage.completion_tokens == 8
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert (usage.prompt_tokens_details.cached_tokens, usage.completion_tokens_details.reasoning_tokens) == (0, 0)


def test_a_stream_says_what_the_aggregate_says(create):
    chunks = list(create(stream=True, stream_options={"include_usage": True}))
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert text_of(chunks) == "3 + 4 = 7"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == create().usage
    assert all(chunk.usage is None for chunk in create(stream=True))


def test_a_length_limit(create):
    answer = create(max_tokens=3)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("3 + ", "length")
    assert create(max_tokens=openai.NOT_GIVEN, max_completion_tokens=3).choices == answer.choices


def test_stops(create):
    assert create(stop="=").choices[0].message.content == "3 + 4 "
    assert create(stop=["7", "="]).choices[0].message.content == "3 + 4 "


def test_a_seed_repeats_an_answer(create):
    write = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 2, "top_p": 1.0, "max_tokens": 12}
    texts = [create(**write, seed=seed, extra_body={"top_k": 0}).choices[0].message.content for seed in (5, 5, 6)]
    assert texts[0] == texts[1] != texts[2]


def test_logprobs(create):
    whole = create(logprobs=True, top_logprobs=2).choices[0]
    entries = whole.logprobs.content
    assert "".join(entry.token for entry in entries) == whole.message.content
    assert bytes(byte for entry in entries for byte in entry.bytes).decode() == whole.message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
        assert entry.logprob <= 0
    streamed = [
        entry
        for chunk in create(logprobs=True, top_logprobs=2, stream=True)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert streamed == entries
    assert all(not entry.top_logprobs for entry in create(logprobs=True).choices[0].logprobs.content)
    assert create().choices[0].logprobs is None


def test_reasoning_has_a_field_of_its_own(create):
    answer = create(reasoning_effort="high")
    message = answer.choices[0].message
    assert message.reasoning_content.startswith("3 + 4 = 7")
    assert message.content == "3 + 4 = 7"
    assert answer.usage.completion_tokens_details.reasoning_tokens > 8
    chunks = list(create(reasoning_effort="high", stream=True))
    thought = "".join(getattr(chunk.choices[0].delta, "reasoning_content", None) or "" for chunk in chunks)
    assert (thought, text_of(chunks)) == (message.reasoning_content, message.content)
    assert not hasattr(create(reasoning_effort="none").choices[0].message, "reasoning_content")


@pytest.mark.parametrize(
    ("fields", "limit"),
    [({"extra_body": {"thinking_budget": 6}}, 6), ({"reasoning_effort": "minimal", "max_tokens": 60}, 6)],
)
def test_thinking_stays_within_its_budget(server, create, fields, limit):
    usage = create(**fields).usage.completion_tokens_details
    forced = 4  # the close itself is counted
    assert limit <= usage.reasoning_tokens <= limit + forced


def test_a_budget_and_an_effort_are_one_too_many(create):
    with pytest.raises(openai.BadRequestError) as caught:
        create(reasoning_effort="low", extra_body={"thinking_budget": 6})
    assert caught.value.param == "thinking_budget"


def test_developer_is_system(create):
    said = [create(messages=[{"role": role, "content": "Be brief."}, *ASK]) for role in ("system", "developer")]
    assert said[0].usage == said[1].usage
    assert said[0].choices[0].message == said[1].choices[0].message


def test_a_session_finds_its_history(server, create):
    server.engine.cache.clear()  # what is kept is a matter of room
    talk, cached = list(ASK), []
    for _ in range(3):
        fields = {"messages": talk, "prompt_cache_key": "a talk", "extra_body": {"cache": "read_write"}}
        answer, fresh = create(**fields), create(messages=talk)
        assert answer.choices == fresh.choices
        assert fresh.usage.prompt_tokens_details.cached_tokens == 0
        *_, last = create(**fields, stream=True, stream_options={"include_usage": True})
        assert last.usage.prompt_tokens == answer.usage.prompt_tokens
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
        talk += [
            answer.choices[0].message.model_dump(exclude_none=True),
            {"role": "user", "content": "What is 5 plus 9?"},
        ]
    assert 0 < cached[1] < cached[2] < answer.usage.prompt_tokens


def test_metadata_comes_back(create):
    assert create(metadata={"run": "7"}).metadata == {"run": "7"}


# -- tools -------------------------------------------------------------------------------------------------------------


def test_a_tools_round_trip(create):
    talk = [{"role": "user", "content": "What is the weather in Paris?"}]
    answer = create(messages=talk, tools=[WEATHER]).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    (call,) = answer.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    talk += [answer.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21}'}]
    answer = create(messages=talk, tools=[WEATHER]).choices[0]
    assert answer.finish_reason == "stop"
    assert "21" in answer.message.content


def test_calls_stream_whole(create):
    chunks = list(
        create(messages=[{"role": "user", "content": "What is the weather in Paris?"}], tools=[WEATHER], stream=True)
    )
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert [(call.index, call.function.name, call.function.arguments) for call in calls] == [
        (0, "get_weather", '{"city":"Paris"}')
    ]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_tool_choice(create):
    other = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}
    both = {"tools": [WEATHER, other]}
    named = create(**both, tool_choice={"type": "function", "function": {"name": "get_time"}}, max_tokens=64)
    assert [call.function.name for call in named.choices[0].message.tool_calls] == ["get_time"]
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "get_weather"}}]}
    some = create(**both, tool_choice={"type": "allowed_tools", "allowed_tools": allowed}, max_tokens=300)
    assert {call.function.name for call in some.choices[0].message.tool_calls} == {"get_weather"}
    assert create(**both, tool_choice="required", parallel_tool_calls=False).choices[0].finish_reason == "tool_calls"
    assert create(**both, tool_choice="none").choices[0].message.tool_calls is None


def test_parallel_calls_and_at_most_one(create):
    talk = [{"role": "user", "content": "What is the weather in Paris and in Oslo?"}]
    assert len(create(messages=talk, tools=[WEATHER]).choices[0].message.tool_calls) == 2
    assert len(create(messages=talk, tools=[WEATHER], parallel_tool_calls=False).choices[0].message.tool_calls) == 1


# -- forms -------------------------------------------------------------------------------------------------------------


class Person(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=130)


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(ge=1, le=9)


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str = Field(max_length=8)


class Pet(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]


def test_parsing_into_a_model(server, model):
    talk = [{"role": "user", "content": "Extract the name and age as JSON: Mia Novak is 34."}]
    parse = server.openai().chat.completions.parse
    answer = parse(model=model, messages=talk, response_format=Person, temperature=0).choices[0].message
    assert isinstance(answer.parsed, Person)
    assert answer.parsed.age == 34


@pytest.mark.parametrize("seed", range(4))
def test_parsing_into_a_discriminated_union(server, model, seed):
    parse = server.openai().chat.completions.parse
    answer = parse(model=model, messages=ASK, response_format=Pet, temperature=1.5, seed=seed, max_tokens=200)
    assert isinstance(answer.choices[0].message.parsed.pet, Cat | Dog)


def test_the_stream_helper_parses_too(server, model):
    with server.openai().chat.completions.stream(model=model, messages=ASK, response_format=Person, seed=1) as stream:
        kinds = [event.type for event in stream]
    assert kinds.count("content.done") == 1
    assert isinstance(stream.get_final_completion().choices[0].message.parsed, Person)


def test_a_json_object(create):
    talk = [{"role": "user", "content": "Extract the name and age as JSON: Mia Novak is 34."}]
    answer = create(messages=talk, response_format={"type": "json_object"})
    assert isinstance(json.loads(answer.choices[0].message.content), dict)


@pytest.mark.parametrize(
    ("form", "fits"),
    [
        ({"grammar": 'root ::= "yes" | "no"'}, lambda text: text in ("yes", "no")),
        ({"regex": "[a-c]{3}"}, lambda text: len(text) == 3 and set(text) <= set("abc")),
        ({"choice": ["red", "green"]}, lambda text: text in ("red", "green")),
    ],
)
def test_structured_outputs(create, form, fits):
    assert fits(create(extra_body={"structured_outputs": form}).choices[0].message.content)


# -- errors ------------------------------------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "minimun": 1}}, "additionalProperties": False}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


def strict(schema):
    return [{"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}]


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"extra_body": {"colour": 1}}, "colour"),
        ({"n": 2}, "n"),
        ({"logit_bias": {"1": 2}}, "logit_bias"),
        ({"store": True}, "store"),
        ({"temperature": 3}, "temperature"),
        ({"extra_body": {"top_k": 65}}, "top_k"),
        ({"extra_body": {"temperature": "hot"}}, "temperature"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"extra_body": {"stream": False}, "stream_options": {"include_usage": True}}, "stream_options"),
        ({"max_completion_tokens": 3}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*ASK, {"role": "user", "content": "x", "name": "Ada"}]}, "messages[1].name"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [*ASK, {"role": "assistant", "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}]}]},
            "messages[1].tool_calls[0].function.arguments",
        ),
        ({"tools": strict(SCHEMA)}, "tools[0].function.parameters.properties.a.minimun"),
        ({"tools": strict({"type": "object"})}, "tools[0].function.parameters"),
        ({"tools": [{"type": "function", "function": {"name": "a>b"}}]}, "tools[0].function.name"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice.function.name",
        ),
        ({"response_format": FORM}, "response_format.json_schema.schema.properties.a.minimun"),
        ({"extra_body": {"structured_outputs": {"regex": "["}}}, "structured_outputs.regex"),
        ({"extra_body": {"structured_outputs": {"grammar": "x"}}}, "structured_outputs.grammar"),
        ({"extra_body": {"structured_outputs": {"choice": []}}}, "structured_outputs.choice"),
        ({"extra_body": {"structured_outputs": {}}}, "structured_outputs"),
        ({"extra_body": {"structured_outputs": {"regex": "a", "choice": ["a"]}}}, "structured_outputs"),
        ({"extra_body": {"structured_outputs": {"regex": "a"}}, "response_format": FORM}, "structured_outputs"),
        ({"extra_body": {"structured_outputs": {"regex": "a"}}, "tools": [WEATHER]}, "structured_outputs.regex"),
        ({"extra_body": {"guided_regex": "a"}}, "guided_regex"),
        ({"extra_body": {"cache": "disabled"}, "prompt_cache_key": "a"}, "prompt_cache_key"),
        ({"extra_body": {"update_session": False}}, "update_session"),
        ({"response_format": {"type": "json_object"}, "stop": "x"}, "stop"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_honoured_is_refused_with_its_place(server, create, fields, path, stream):
    with pytest.raises(openai.BadRequestError) as caught:
        create(stream=stream, **fields)
    assert caught.value.param == path
    assert caught.value.type == "invalid_request_error"
    assert path.split(".")[0].split("[")[0] in caught.value.message
    assert server.idle()


def test_a_prompt_that_is_too_long(create):
    with pytest.raises(openai.BadRequestError) as caught:
        create(messages=[{"role": "user", "content": "word " * 3000}])
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


def test_another_model(create):
    with pytest.raises(openai.NotFoundError) as caught:
        create(model="other")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_numbers_of_a_schema_are_read_as_written(create):
    number = {"type": "number", "minimum": 0.1}
    body = {"type": "object", "properties": {"a": number}, "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": body}}
    assert create(response_format=form).choices
    assert create(tools=strict(body)).choices


async def _leave(server, model):
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="key", max_retries=0)
    async with client:
        talk = [{"role": "user", "content": "Hello"}]
        stream = await client.chat.completions.create(
            model=model,
            messages=talk,
            stream=True,
            max_tokens=1500,
            extra_body={"structured_outputs": {"regex": "[ab]{1500}"}},
        )
        async for _ in stream:
            break
        await stream.close()


def test_closing_a_stream_ends_the_request(server, model):
    before = server.engine.stats().finished.get("cancelled", 0)
    asyncio.run(_leave(server, model))
    assert server.idle()
    assert server.engine.stats().finished.get("cancelled", 0) == before + 1
