"""Responses through OpenAI's own client."""

from __future__ import annotations

import json
from typing import Annotated, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from ninfer import Chat

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "name": "get_weather", "description": "Get the current weather for a city.",
           "parameters": PARAMETERS, "strict": True}  # fmt: skip
ASK = "What is 3 plus 4?"


@pytest.fixture
def create(server, model):
    """Ask; unless said otherwise about the same thing, greedily, and with nothing of earlier answers."""

    def ask(*, extra_body=(), **fields):
        fields = {"model": model, "input": ASK, "temperature": 0, "max_output_tokens": 100, **fields}
        return server.openai().responses.create(**fields, extra_body={"cache": "disabled", **dict(extra_body)})

    return ask


def test_an_answer(server, create):
    answer = create(instructions="Be brief.", metadata={"run": "7"})
    assert answer.output_text == "3 + 4 = 7"
    assert (answer.status, answer.incomplete_details, answer.error) == ("completed", None, None)
    assert [item.type for item in answer.output] == ["message"]
    assert (answer.instructions, answer.metadata, answer.max_output_tokens) == ("Be brief.", {"run": "7"}, 100)
    usage = answer.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (0, 0)


def test_a_length_limit(create):
    answer = create(max_output_tokens=3)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output[-1].status == "incomplete"
    kinds = [event.type for event in create(max_output_tokens=3, stream=True)]
    assert kinds[-1] == "response.incomplete"


def test_a_stream_says_what_the_aggregate_says(create):
    fields = {"reasoning": {"effort": "high"}, "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    events = list(create(stream=True, **fields))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    last, whole = events[-1].response, create(**fields)
    assert last.usage == whole.usage
    assert [item.type for item in last.output] == [item.type for item in whole.output] == ["reasoning", "message"]
    for streamed, item in zip(last.output, whole.output, strict=True):
        assert streamed.content == item.content
    said = {kind: "".join(e.delta for e in events if e.type == f"response.{kind}.delta")
            for kind in ("reasoning_text", "output_text")}  # fmt: skip
    assert said == {"reasoning_text": whole.output[0].content[0].text, "output_text": whole.output_text}
    entries = whole.output[1].content[0].logprobs
    assert "".join(entry.token for entry in entries) == whole.output_text


def test_every_item_is_opened_and_closed_once(create):
    events = list(create(stream=True, reasoning={"effort": "high"}, input="What is the weather in Paris and in Oslo?",
                         tools=[WEATHER]))  # fmt: skip
    opened = [e.item.id for e in events if e.type == "response.output_item.added"]
    closed = [e.item.id for e in events if e.type == "response.output_item.done"]
    assert opened == closed == [item.id for item in events[-1].response.output]
    assert [item.type for item in events[-1].response.output] == ["reasoning", "function_call", "function_call"]


def test_a_call_that_is_whole_stays_so_when_the_answer_is_cut(create):
    fields = {"input": "What is the weather in Paris and in Oslo?", "tools": [WEATHER], "max_output_tokens": 36}
    whole, *_, last = create(**fields), *create(**fields, stream=True)
    for answer in (whole, last.response):
        assert answer.status == "incomplete"
        assert [(item.name, item.status) for item in answer.output] == [("get_weather", "completed")]


def test_the_stream_helper(server, model):
    stream = server.openai().responses.stream(model=model, input=ASK, temperature=0, reasoning={"effort": "low"})
    with stream as events:
        for _ in events:
            pass
        assert events.get_final_response().output_text == "3 + 4 = 7"


# -- tools -------------------------------------------------------------------------------------------------------------


def test_a_tools_round_trip(create):
    talk = [{"role": "user", "content": "What is the weather in Paris?"}]
    answer = create(input=talk, tools=[WEATHER], reasoning={"effort": "high"})
    call = answer.output[-1]
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "get_weather", {"city": "Paris"})
    talk += [item.model_dump(exclude_none=True) for item in answer.output]
    talk.append({"type": "function_call_output", "call_id": call.call_id, "output": '{"temperature": 21}'})
    answer = create(input=talk, tools=[WEATHER])
    assert "21" in answer.output_text
    talk += [item.model_dump(exclude_none=True) for item in answer.output]
    assert create(input=[*talk, {"role": "user", "content": ASK}]).output_text


def test_the_items_of_one_turn_are_one_message(server, create):
    call = {"type": "function_call", "call_id": "1", "name": "get_weather", "arguments": '{"city":"Paris"}'}
    items = [
        {"role": "user", "content": "Look."},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "So.", "annotations": []}],
        },
        call,
        {**call, "call_id": "2"},
        {"type": "function_call_output", "call_id": "1", "output": "sun"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "rain"}]},
    ]
    function = {"name": "get_weather", "arguments": '{"city":"Paris"}'}
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "reasoning_content": "Hm.", "content": "So.",
         "tool_calls": [{"id": id, "type": "function", "function": function} for id in "12"]},
        {"role": "tool", "tool_call_id": "1", "content": "sun"},
        {"role": "tool", "tool_call_id": "2", "content": "rain"},
    ]  # fmt: skip
    assert create(input=items).usage.input_tokens == server.engine.count_tokens(Chat(messages))


def test_namespaces(create):
    crm = {"type": "namespace", "name": "crm", "description": "Customers",
           "tools": [{**WEATHER, "name": name} for name in ("get_weather", "get_time")]}  # fmt: skip
    answer = create(
        input="What is the weather in Paris?", tools=[crm], tool_choice={"type": "function", "name": "get_weather"}
    )
    (call,) = answer.output
    assert (call.namespace, call.name) == ("crm", "get_weather")
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "crm.get_time"}]}
    assert {call.name for call in create(tools=[crm], tool_choice=allowed, max_output_tokens=300).output} == {
        "get_time"
    }
    for tools, path in (
        ([WEATHER, {**crm, "tools": [{**WEATHER, "parameters": {"type": "object"}}]}], "tools[1].tools[0].parameters"),
        ([crm, WEATHER, {**crm, "tools": [WEATHER]}], "tools[2].tools[0]"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            create(tools=tools)
        assert caught.value.param == path
    with pytest.raises(openai.BadRequestError) as caught:
        create(tools=[crm, WEATHER], tool_choice={"type": "function", "name": "get_year"})
    assert caught.value.param == "tool_choice.name"


def test_a_session_finds_its_history(server, create):
    server.engine.cache.clear()  # what is kept is a matter of room
    fields = {"prompt_cache_key": "a response", "extra_body": {"cache": "read_write"}}
    first = create(**fields)
    talk = [{"role": "user", "content": ASK}, *(item.model_dump(exclude_none=True) for item in first.output)]
    talk.append({"role": "user", "content": "What is 5 plus 9?"})
    second = create(input=talk, **fields)
    assert 0 < second.usage.input_tokens_details.cached_tokens < second.usage.input_tokens
    assert second.output_text == create(input=talk).output_text


# -- forms -------------------------------------------------------------------------------------------------------------


class Circle(BaseModel):
    kind: Literal["circle"]
    radius: int = Field(ge=1, le=9)


class Square(BaseModel):
    kind: Literal["square"]
    side: int = Field(ge=1, le=9)


class Drawing(BaseModel):
    shape: Annotated[Circle | Square, Field(discriminator="kind")]


@pytest.mark.parametrize("seed", range(3))
def test_parsing_into_a_discriminated_union(server, model, seed):
    answer = server.openai().responses.parse(model=model, input=ASK, text_format=Drawing, extra_body={"seed": seed})
    assert isinstance(answer.output_parsed.shape, Circle | Square)


def test_a_json_object(create):
    asked = "Extract the name and age as JSON: Mia Novak is 34."
    assert isinstance(json.loads(create(input=asked, text={"format": {"type": "json_object"}}).output_text), dict)


def test_structured_outputs(create):
    assert create(extra_body={"structured_outputs": {"choice": ["red", "green"]}}).output_text in ("red", "green")


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, "reasoning.summary"),
        ({"reasoning": {"effort": "low", "budget": 4}}, "reasoning.budget"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"minimun": 1}}}},
            "text.format.schema.minimun",
        ),
        ({"include": ["reasoning.encrypted_content"]}, "include[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        (
            {"input": [
                {"role": "user", "content": "x"},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "["},
            ]},
            "input[1].arguments",
        ),
        ({"extra_body": {"stop": "x"}}, "stop"),
        ({"extra_body": {"cache": "disabled"}, "prompt_cache_key": "a"}, "prompt_cache_key"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"extra_body": {"prompt_cache_options": {"mode": "explicit"}}}, "prompt_cache_options"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_with_its_place(server, create, fields, path):
    with pytest.raises(openai.BadRequestError) as caught:
        create(**fields)
    assert caught.value.param == path
    assert server.idle()


def test_the_prompt_is_too_long(create):
    with pytest.raises(openai.BadRequestError) as caught:
        create(input="word " * 3000)
    assert caught.value.param == "input"
