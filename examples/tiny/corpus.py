"""The training text of the tiny model: an endless, seeded stream of dialogues, and held-out sets that share no content.

`dialogue(rng)` draws one conversation, `render` puts it through the model's own chat template, `encode` gives token
ids with a mark on those the assistant speaks, and `shard(index)` yields a block of such documents that depends on the
seed and the index alone. Run as a script it prints a few samples.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import extraction
import jinja2.ext
import numpy as np
import reasoning
import smalltalk
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from tooling import tool_dialogue
from turns import Turn
from words import Values

SEED = 20250
HERE = Path(__file__).parent
Dialogue = dict[str, Any]
"""``messages`` and ``tools`` as the template takes them, ``thinking`` (whether the last turn reasons), ``cut`` (whether
that reasoning stops half-way), or ``text`` alone for a document outside any conversation."""

TASKS = (
    (extraction.extract, 26),
    (extraction.extract_many, 4),
    (reasoning.arithmetic, 32),
    (reasoning.long_sum, 2),
    (reasoning.compare, 3),
    (reasoning.lookup, 22),
    (reasoning.dates, 5),
    (reasoning.lists, 8),
    (reasoning.rewrite, 10),
    (smalltalk.greeting, 4),
    (smalltalk.counting, 3),
    (smalltalk.story, 3),
)
MEASURED = (extraction.extract, reasoning.arithmetic, reasoning.lookup)
"""Tasks whose questions are divided between training and the held-out sets, besides those with tools."""


def _turn(v: Values) -> Turn:
    tasks, weights = zip(*TASKS, strict=True)
    task = v.rng.choices(tasks, weights)[0]
    return _owned(v, task) if task in MEASURED else task(v)


def _owned(v: Values, task: Callable[[Values], Turn]) -> Turn:
    """A turn of the task whose question lies on the side of ``v``."""
    return next(turn for turn in iter(lambda: task(v), None) if v.owns(turn.user))


def _messages(turns: list[Turn]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for turn in turns:
        messages.append({"role": "user", "content": turn.user})
        messages.append({"role": "assistant", "content": turn.answer, "reasoning_content": turn.thought})
    return messages


def _chat(v: Values) -> Dialogue:
    """One to six questions in one conversation."""
    turns = [_turn(v)]
    if not turns[0].system and v.coin(0.35):
        turns += [t for t in (_turn(v) for _ in range(v.number(1, 4))) if not t.system]
        if v.coin(0.3):
            told, asked = smalltalk.memory(v)
            turns.insert(v.number(0, len(turns)), told)
            turns.insert(v.number(turns.index(told) + 1, len(turns)), asked)
    system = turns[0].system or (smalltalk.system_text(v) if v.coin(0.1) else "")
    head = [{"role": "system", "content": system}] if system else []
    return {"messages": head + _messages(turns)}


def _tools(v: Values) -> Dialogue:
    """Tool use, sometimes before or after an ordinary question."""
    made = tool_dialogue(v)
    messages = made["messages"]
    answered = messages[-1].get("tool_calls") is None
    if answered and v.coin(0.15):
        messages = messages + _messages([_plain_turn(v)])
    elif v.coin(0.15):
        messages = _messages([_plain_turn(v)]) + messages
    elif v.coin(0.08):
        messages = _messages([_plain_turn(v)])
    if v.coin(0.1):
        messages = [{"role": "system", "content": smalltalk.system_text(v)}, *messages]
    return {"tools": made["tools"], "messages": messages}


def _plain_turn(v: Values) -> Turn:
    return next(t for t in iter(lambda: _turn(v), None) if not t.system)


def dialogue(rng: random.Random) -> Dialogue:
    """One training document."""
    v = Values(rng)
    if v.coin(0.03):
        return {"text": smalltalk.plain_text(v)}
    made = _tools(v) if v.coin(0.22) else _chat(v)
    made["thinking"] = v.coin(0.3)
    made["cut"] = made["thinking"] and v.coin(0.08)
    if made["cut"]:
        last = made["messages"][-1]
        text = last["reasoning_content"]
        made["messages"][-1] = {**last, "reasoning_content": text[: v.number(1, len(text))]}
    return made


# --- held-out sets ----------------------------------------------------------------------------------------------


def held_out_sets(count: int) -> dict[str, list[Dialogue]]:
    """``count`` single questions of each measured kind, from the held-out side of the split."""
    v = Values(random.Random(SEED + 1), held=True)

    def asked(task: Callable[[Values], Turn], thinking: bool) -> Dialogue:
        turn = _owned(v, task)
        head = [{"role": "system", "content": turn.system}] if turn.system else []
        return {"messages": head + _messages([turn]), "thinking": thinking, "cut": False}

    def called(parallel: bool) -> Dialogue:
        return {**tool_dialogue(v, parallel=parallel, finish=False), "thinking": False, "cut": False}

    def reported() -> Dialogue:
        return {**tool_dialogue(v, parallel=False, finish=True), "thinking": False, "cut": False}

    return {
        "extraction": [asked(extraction.extract, False) for _ in range(count)],
        "arithmetic": [asked(reasoning.arithmetic, False) for _ in range(count)],
        "arithmetic, thinking": [asked(reasoning.arithmetic, True) for _ in range(count)],
        "lookup": [asked(reasoning.lookup, False) for _ in range(count)],
        "tool call": [called(False) for _ in range(count)],
        "parallel tool calls": [called(True) for _ in range(count)],
        "answer after tool result": [reported() for _ in range(count)],
    }


# --- rendering and encoding -------------------------------------------------------------------------------------


@cache
def template() -> jinja2.Template:
    """The chat template in the environment that Hugging Face templates expect."""

    def fail(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = fail
    return environment.from_string((HERE / "chat_template.jinja").read_text())


def render(made: Dialogue) -> str:
    """The text of a document. Reasoning is shown only where thinking is on."""
    if "text" in made:
        return made["text"] + "<|endoftext|>"
    messages = made["messages"]
    if not made["thinking"]:
        messages = [{k: x for k, x in m.items() if k != "reasoning_content"} for m in messages]
    return template().render(messages=messages, tools=made.get("tools"))


_SPOKEN = re.compile(r"<\|im_start\|>assistant\n(?:<think>\n\n</think>\n\n|<think>\n)?(.*?<\|im_end\|>)", re.DOTALL)


def spoken_spans(made: Dialogue, text: str) -> list[tuple[int, int]]:
    """Character spans of ``text`` that the assistant writes: answers with their end mark, reasoning with its close."""
    if "text" in made:
        return [(0, len(text))]
    spans = [match.span(1) for match in _SPOKEN.finditer(text)]
    if made["cut"]:
        # A close in the middle of a thought is forced from outside; only what follows it is the model's own.
        start, end = spans[-1]
        spans[-1] = (text.index("</think>\n\n", start) + len("</think>\n\n"), end)
    return spans


def encode(tokenizer: Tokenizer, documents: list[Dialogue]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Per document its token ids [T] uint16 and a mark [T] bool on the tokens the assistant writes."""
    texts = [render(made) for made in documents]
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    result = []
    for made, text, one in zip(documents, texts, encoded, strict=True):
        starts = np.array([start for start, _ in one.offsets])
        mark = np.zeros(len(starts), bool)
        for start, end in spoken_spans(made, text):
            mark |= (starts >= start) & (starts < end)
        result.append((np.array(one.ids, np.uint16), mark))
    return result


def shard(tokenizer_file: str, index: int, size: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """``size`` encoded training documents, the same for a given index wherever and in whatever order it is asked."""
    rng = random.Random(SEED * 1_000_003 + index)
    return encode(_tokenizer(tokenizer_file), [dialogue(rng) for _ in range(size)])


@cache
def _tokenizer(file: str) -> Tokenizer:
    return Tokenizer.from_file(file)


if __name__ == "__main__":
    samples = random.Random(SEED)
    for _ in range(20):
        print(render(dialogue(samples)), end="\n---\n")
