"""Chat Completions through OpenAI's own client."""

from __future__ import annotations

ASK = [{"role": "user", "content": "What is 3 plus 4?"}]


def test_an_answer(server, model):
    answer = server.openai().chat.completions.create(model=model, messages=ASK, temperature=0, max_tokens=32)
    choice = answer.choices[0]
    assert choice.message.content == "3 + 4 = 7"
    assert choice.finish_reason == "stop"
    assert answer.usage.prompt_tokens == server.engine.count_tokens("What is 3 plus 4?")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
