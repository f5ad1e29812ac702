"""What `make demo` runs: a streamed chat answer, a tool call, four requests at once, and the closing statistics."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import ninfer

ARTIFACT = Path(__file__).parent / "tiny" / "tiny.ninfer"
GREEDY = ninfer.SamplingParams(temperature=0)

WEATHER = ninfer.Tool(
    name="get_weather",
    description="Get the current weather for a city.",
    parameters={"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
)


def stream(engine: ninfer.Engine, question: str, **chat: object) -> None:
    """Ask and print the answer as its tokens are committed."""
    print(f"\n> {question}")
    prompt = ninfer.Chat([{"role": "user", "content": question}], **chat)  # type: ignore[arg-type]
    channel = None
    for event in engine.stream(prompt, max_tokens=200, sampling=GREEDY):
        if isinstance(event, ninfer.Delta):
            if channel not in (None, event.channel):
                print("\n---")
            channel = event.channel
            print(event.text, end="", flush=True)
        elif isinstance(event, ninfer.ToolCallEvent):
            print(f"calls {event.call.name}({event.call.arguments_json})", end="")
        elif isinstance(event, ninfer.GenerationResult):
            print(f"\n  [{event.statistics()}]")


def main(artifact: Path = ARTIFACT) -> None:
    with ninfer.Engine(artifact, max_concurrency=4, max_context=2048) as engine:
        print(engine)
        started = time.perf_counter()
        stream(engine, "What is 17 + 25?", thinking=True)
        stream(engine, "What is the weather in Paris?", tools=[WEATHER], thinking=False)

        print("\n> four requests at once")
        questions = [
            "Ada is in the garden. Ben is in the kitchen. Where is Ada?",
            "Extract the record as JSON: Name: Mia Novak, Age: 34, City: Oslo.",
            "Sort these words: pear, apple, fig",
            "What is 8 + 5?",
        ]
        chats = [ninfer.Chat([{"role": "user", "content": q}], thinking=False) for q in questions]
        results = engine.generate(chats, max_tokens=100, sampling=GREEDY)
        for question, result in zip(questions, results, strict=True):
            print(f"  {question}\n    {result.text}")
        stats, seconds = engine.stats(), time.perf_counter() - started
        print(
            f"\n{stats.accepted} requests, {stats.prompt_tokens} prompt + {stats.completion_tokens} completion tokens"
            f" in {stats.decode_rounds} decode rounds and {seconds:.2f} s"
        )
    print(f"\nA chat: ninfer run {artifact}\nA server, with a page to try it: ninfer serve {artifact}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
