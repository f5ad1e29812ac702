"""Answers and events satisfy the types of the official clients, which themselves check nothing when they read."""

from __future__ import annotations

import json

import pytest
from anthropic.types import Message, MessageTokensCount, ModelInfo, RawMessageStreamEvent
from openai.types import Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
PARIS = [{"role": "user", "content": "What is the weather in Paris?"}]
SUM = [{"role": "user", "content": "What is 3 plus 4?"}]

CHAT = {"messages": SUM, "logprobs": True, "top_logprobs": 2, "reasoning_effort": "high", "metadata": {"a": "b"}}
CHAT_TOOLS = {
    "messages": PARIS,
    "tools": [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}],
}
RESPONSES = {"input": SUM, "top_logprobs": 2, "reasoning": {"effort": "high"}, "instructions": "Be brief.",
             "text": {"format": {"type": "text"}}}  # fmt: skip
RESPONSES_TOOLS = {
    "input": PARIS,
    "tools": [
        {"type": "function", "name": "get_weather", "parameters": PARAMETERS},
        {"type": "namespace", "name": "n", "description": "More", "tools": [{"type": "function", "name": "f"}]},
    ],
    "tool_choice": {"type": "function", "name": "get_weather"},
}
FORM = {"type": "json_schema", "name": "x", "schema": {"type": "boolean"}}
MESSAGES = {"messages": SUM, "thinking": {"type": "adaptive"}, "max_tokens": 64}
MESSAGES_TOOLS = {"messages": PARIS, "tools": [{"name": "get_weather", "input_schema": PARAMETERS}], "max_tokens": 64}


@pytest.mark.parametrize(
    ("path", "body", "whole", "event"),
    [
        ("/v1/chat/completions", CHAT, ChatCompletion, ChatCompletionChunk),
        ("/v1/chat/completions", CHAT_TOOLS, ChatCompletion, ChatCompletionChunk),
        ("/v1/responses", RESPONSES, Response, ResponseStreamEvent),
        ("/v1/responses", RESPONSES_TOOLS, Response, ResponseStreamEvent),
        ("/v1/responses", {"input": "x", "text": {"format": FORM}}, Response, ResponseStreamEvent),
        (
            "/v1/responses",
            {"input": "x", "max_output_tokens": 1, "metadata": {"a": "b"}},
            Response,
            ResponseStreamEvent,
        ),
        ("/v1/messages", MESSAGES, Message, RawMessageStreamEvent),
        ("/v1/messages", MESSAGES_TOOLS, Message, RawMessageStreamEvent),
        ("/v1/messages", {**MESSAGES, "max_tokens": 1}, Message, RawMessageStreamEvent),
    ],
)
def test_answers_and_events_are_of_the_clients_types(server, model, path, body, whole, event):
    body = {"model": model, "temperature": 0, **body}
    TypeAdapter(whole).validate_json(server.post(path, body).text)
    events = TypeAdapter(event)
    lines = server.post(path, {**body, "stream": True}).text.splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    if path == "/v1/chat/completions":
        assert data.pop() == "[DONE]"
    assert len(data) >= 3
    for item in data:
        events.validate_json(item)


def test_the_rest_is_too(server, model):
    counted = server.post("/v1/messages/count_tokens", {"model": model, "messages": SUM})
    TypeAdapter(MessageTokensCount).validate_json(counted.text)
    listed = server.get("/v1/models").json()
    assert set(listed) == {"object", "data"}
    TypeAdapter(list[Model]).validate_json(json.dumps(listed["data"]))
    listed = server.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    TypeAdapter(list[ModelInfo]).validate_json(json.dumps(listed["data"]))
