"""Messages through Anthropic's own client."""

from __future__ import annotations

from typing import Annotated, Literal

import anthropic
import pytest
from pydantic import BaseModel, Field

from ninfer import Chat
from ninfer.gateway.http import messages
from ninfer.gateway.http.translate import Served

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"name": "get_weather", "description": "Get the current weather for a city.", "input_schema": PARAMETERS,
           "strict": True}  # fmt: skip
ASK = [{"role": "user", "content": "What is 3 plus 4?"}]
PARIS = [{"role": "user", "content": "What is the weather in Paris?"}]


def asked(model, fields):
    extra = {"temperature": 0, "cache": "disabled", **fields.pop("extra_body", {})}
    return {"model": model, "messages": ASK, "max_tokens": 100, "extra_body": extra, **fields}


@pytest.fixture
def create(server, model):
    return lambda **fields: server.anthropic().messages.create(**asked(model, fields))


@pytest.fixture
def stream(server, model):
    return lambda **fields: server.anthropic().messages.stream(**asked(model, fields))


def test_an_answer(server, create):
    answer = create()
    assert [(block.type, block.text) for block in answer.content] == [("text", "3 + 4 = 7")]
    assert (answer.role, answer.stop_reason, answer.stop_sequence) == ("assistant", "end_turn", None)
    assert answer.usage.input_tokens == server.engine.count_tokens(Chat(ASK, thinking=False))
    assert (answer.usage.output_tokens, answer.usage.cache_read_input_tokens) == (8, 0)


def test_how_an_answer_ends(create):
    assert create(max_tokens=3).stop_reason == "max_tokens"
    cut = create(stop_sequences=["7", "="])
    assert (cut.stop_reason, cut.stop_sequence, cut.content[0].text) == ("stop_sequence", "=", "3 + 4 ")
    long = create(messages=[{"role": "user", "content": "word " * 2020}], max_tokens=1000)
    assert long.stop_reason in ("model_context_window_exceeded", "end_turn")


def test_a_stream_says_what_the_aggregate_says(stream, create):
    fields = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    with stream(**fields) as events:
        kinds = [event.type for event in events]
        final = events.get_final_message()
    whole = create(**fields)
    assert [block.type for block in final.content] == ["thinking", "text"]
    assert final.content[0].thinking == whole.content[0].thinking
    assert final.content[1].text == whole.content[1].text == "3 + 4 = 7"
    assert final.usage.output_tokens_details == whole.usage.output_tokens_details
    assert (final.usage.input_tokens, final.usage.output_tokens) == (
        whole.usage.input_tokens,
        whole.usage.output_tokens,
    )
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 2
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


def test_thinking(create):
    assert [block.type for block in create().content] == ["text"]
    assert [block.type for block in create(thinking={"type": "disabled"}).content] == ["text"]
    hidden = create(thinking={"type": "adaptive", "display": "omitted"})
    assert [block.type for block in hidden.content] == ["thinking", "text"]
    assert (hidden.content[0].thinking, hidden.usage.output_tokens_details.thinking_tokens > 8) == ("", True)
    budget = create(thinking={"type": "enabled", "budget_tokens": 6})
    assert 6 <= budget.usage.output_tokens_details.thinking_tokens <= 10
    budget = create(thinking={"type": "adaptive"}, output_config={"effort": "low"}, max_tokens=30)
    assert 6 <= budget.usage.output_tokens_details.thinking_tokens <= 10


def test_hidden_thinking_is_not_streamed(stream):
    with stream(thinking={"type": "adaptive", "display": "omitted"}) as events:
        assert "thinking_delta" not in str(list(events))
        assert [block.type for block in events.get_final_message().content] == ["thinking", "text"]


def test_a_tools_round_trip(create):
    answer = create(messages=PARIS, tools=[WEATHER], thinking={"type": "adaptive"})
    use = answer.content[-1]
    assert (answer.stop_reason, use.type, use.name, use.input) == (
        "tool_use",
        "tool_use",
        "get_weather",
        {"city": "Paris"},
    )
    talk = [*PARIS, {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in answer.content]}]
    result = {
        "type": "tool_result",
        "tool_use_id": use.id,
        "content": [{"type": "text", "text": '{"temperature": 21}'}],
    }
    answer = create(messages=[*talk, {"role": "user", "content": [result]}], tools=[WEATHER])
    assert "21" in answer.content[0].text


def test_the_clients_own_loop_over_tools(server, model):
    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Get the current weather for a city."""
        return '{"temperature": 21}' if city == "Paris" else "?"

    runner = server.anthropic().beta.messages.tool_runner(
        model=model, max_tokens=100, messages=PARIS, tools=[get_weather], extra_body={"temperature": 0}, thread=False
    )
    assert "21" in runner.until_done().content[0].text


def test_calls_stream_whole(stream):
    with stream(messages=PARIS, tools=[WEATHER]) as events:
        deltas = [event.partial_json for event in events if event.type == "input_json"]
    assert deltas == ['{"city":"Paris"}']


def test_tool_choice(create):
    other = {"name": "get_time", "input_schema": {"type": "object", "properties": {}}}
    both = {"tools": [WEATHER, other]}
    named = create(**both, tool_choice={"type": "tool", "name": "get_time", "disable_parallel_tool_use": True})
    assert [block.name for block in named.content] == ["get_time"]
    some = create(**both, tool_choice={"type": "any", "disable_parallel_tool_use": True}, max_tokens=300)
    assert [block.type for block in some.content] == ["tool_use"]
    assert create(**both, messages=PARIS, tool_choice={"type": "none"}).stop_reason != "tool_use"


def test_messages_become_the_engines(server, model):
    blocks = [
        {"type": "text", "text": "So."},
        {"type": "tool_use", "id": "1", "name": "get_weather", "input": {"city": "Oslo"}},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "1", "is_error": True, "content": "no"},
        {"type": "text", "text": "Again?"},
    ]
    counted = server.anthropic().messages.count_tokens(
        model=model,
        system=[{"type": "text", "text": "Be brief."}],
        messages=[*PARIS, {"role": "assistant", "content": blocks}, {"role": "user", "content": results}],
    )
    call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
    chat = Chat(
        [
            {"role": "system", "content": "Be brief."},
            *PARIS,
            {"role": "assistant", "content": "So.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "Error:\nno"},
            {"role": "user", "content": "Again?"},
        ],
        thinking=False,
    )
    assert counted.input_tokens == server.engine.count_tokens(chat)


def test_counting_tokens(server, model):
    counted = server.anthropic().messages.count_tokens(model=model, messages=ASK, tools=[WEATHER])
    assert counted.input_tokens > server.anthropic().messages.count_tokens(model=model, messages=ASK).input_tokens
    before = server.engine.stats().accepted
    with pytest.raises(anthropic.BadRequestError):
        server.anthropic().messages.count_tokens(model=model, messages=ASK, extra_body={"max_tokens": 3})
    assert server.engine.stats().accepted == before


def test_a_session_finds_its_history(server, create, stream):
    server.engine.cache.clear()  # what is kept is a matter of room
    session = {"extra_body": {"session": "a talk", "cache": "read_write"}}
    first = create(**session)
    talk = [
        *ASK,
        {"role": "assistant", "content": first.content[0].text},
        {"role": "user", "content": "What is 5 plus 9?"},
    ]
    second = create(messages=talk, **session)
    assert second.content == create(messages=talk).content
    usage = second.usage
    assert usage.cache_read_input_tokens > 0
    prompt = server.engine.count_tokens(Chat(talk, thinking=False))
    assert usage.cache_read_input_tokens + usage.input_tokens == prompt
    with stream(messages=talk, **session) as events:
        begun = next(iter(events)).message.usage
    assert begun.cache_read_input_tokens + begun.input_tokens == prompt


def test_a_last_assistant_message_is_continued(create):
    assert create(messages=[*ASK, {"role": "assistant", "content": "3 + 4 ="}]).content[0].text == " 7"


def test_cache_markers_reach_the_prompt(server, model):
    mark = {"cache_control": {"type": "ephemeral"}}
    body = {
        "model": model,
        "max_tokens": 4,
        "system": [{"type": "text", "text": "Be brief.", **mark}],
        "tools": [{**WEATHER, **mark}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "What is 3 plus 4?", **mark}]}],
    }
    served = Served(model=model, max_tokens=64, token_bytes=server.engine.token_bytes)
    prompt = server.engine.prepare(messages.read(body, served, {}).prompt)
    assert len(prompt.cache_markers) == 3
    once = {"model": model, "max_tokens": 4, "messages": ASK, **mark}
    assert len(server.engine.prepare(messages.read(once, served, {}).prompt).cache_markers) == 1


class Cat(BaseModel):
    kind: Literal["cat"]
    asleep: bool


class Dog(BaseModel):
    kind: Literal["dog"]
    size: Literal["small", "large"]


class Pet(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]


def test_parsing_into_a_discriminated_union(server, model):
    answer = server.anthropic().messages.parse(model=model, max_tokens=100, messages=ASK, output_format=Pet)
    assert isinstance(answer.parsed_output.pet, Cat | Dog)


def test_structured_outputs(create):
    assert create(extra_body={"structured_outputs": {"regex": "[xyz]{4}"}}).content[0].text.strip("xyz") == ""


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"extra_body": {"colour": 1}}, "colour"),
        ({"extra_body": {"temperature": 1.5}}, "temperature"),
        ({"container": "x"}, "container"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"output_config": {"effort": "low"}}, "output_config.effort"),
        ({"tools": [{**WEATHER, "input_schema": {"type": "object"}}]}, "tools[0].input_schema"),
        (
            {"tools": [{**WEATHER, "input_schema": {**PARAMETERS, "properties": {"city": {"minimun": 1}}}}]},
            "tools[0].input_schema.properties.city.minimun",
        ),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.name"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"minimun": 1}}}},
            "output_config.format.schema.minimun",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        (
            {"messages": [*ASK, {"role": "assistant", "content": [
                {"type": "tool_use", "id": "1", "name": "f", "input": {}}, {"type": "text", "text": "x"}]}, *ASK]},
            "messages[1].content[1]",
        ),
        ({"messages": [*ASK, {"role": "assistant", "content": "x "}]}, "messages[1].content"),
        ({"system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]},
         "system[0].cache_control.ttl"),
        ({"extra_body": {"structured_outputs": {"regex": "["}}}, "structured_outputs.regex"),
        ({"extra_body": {"cache": "disabled", "session": "a"}}, "session"),
        ({"extra_body": {"update_session": False}}, "update_session"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_with_its_place(server, create, fields, path):
    with pytest.raises(anthropic.BadRequestError) as caught:
        create(**fields)
    error = caught.value.body["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(f"{path}: ")
    assert server.idle()


def test_other_errors_in_its_own_words(server, create):
    with pytest.raises(anthropic.NotFoundError) as caught:
        create(model="other")
    assert caught.value.body["error"]["type"] == "not_found_error"
    assert server.get("/v1/messages").json()["type"] == "error"


def test_the_served_model(server, model):
    (listed,) = server.anthropic().models.list()
    assert (listed.id, server.anthropic().models.retrieve(model).display_name) == (model, model)
    assert server.openai().models.retrieve(model).id == model
