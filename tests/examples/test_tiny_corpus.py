"""The training text of the tiny model: right answers, the family's protocol, no leak into the held-out sets."""

from __future__ import annotations

import json
import random
import re

import pytest

DRAWS = 300


def questions(made):
    return [m["content"] for m in made.get("messages", ()) if m["role"] == "user"]


@pytest.fixture
def parts(tiny):
    return tiny("corpus", "extraction", "reasoning", "tooling", "words")


def test_documents_follow_from_the_seed(parts):
    first = [parts.corpus.dialogue(random.Random(3)) for _ in range(5)]
    assert [parts.corpus.render(d) for d in first] == [
        parts.corpus.render(parts.corpus.dialogue(random.Random(3))) for _ in range(5)
    ]


def test_sums_and_their_steps_are_right(parts):
    v = parts.words.Values(random.Random(1))
    for _ in range(DRAWS):
        turn = parts.reasoning.arithmetic(v)
        equations = re.findall(r"^([\d *+-]+) = ([\d+ ]+?)(?: = (-?\d+))?(?:,|$)", turn.answer)
        assert equations or turn.answer.isdigit()
        for parts_of in equations:
            assert len({eval(side) for side in parts_of if side}) == 1, turn
        for left, right in re.findall(r"^([\d *+-]+) = (-?\d+)", turn.thought, re.MULTILINE):
            assert eval(left) == int(right), turn.thought
        assert turn.thought.splitlines()[-1].endswith(f"= {re.findall(r'-?[0-9]+', turn.answer)[-1]}")


@pytest.mark.parametrize("task", ["extract", "extract_many"])
def test_records_hold_what_the_text_says(parts, task):
    v = parts.words.Values(random.Random(2))
    for _ in range(DRAWS):
        turn = getattr(parts.extraction, task)(v)
        answer = json.loads(turn.answer)
        assert turn.answer == json.dumps(answer, ensure_ascii=False, separators=(",", ":"))
        for record in answer if isinstance(answer, list) else [answer]:
            for key, value in record.items():
                spoken = parts.extraction._spoken(key, value) if value is not None else "null"
                assert spoken.lower() in turn.user.lower() + turn.system.lower(), (turn, key)


def test_people_are_where_they_went_last(parts):
    v = parts.words.Values(random.Random(4))
    seen = 0
    for _ in range(DRAWS):
        turn = parts.reasoning._who_is_where(v)
        person = re.search(r"Where is (\w+)\?", turn.user)
        if person:
            seen += 1
            steps = re.findall(rf"\b{person[1]} \w+ (?:in|to) the (\w+)\.", turn.system + " " + turn.user)
            expected = f"{person[1]} is in the {steps[-1]}." if steps else "The text does not say where"
            assert turn.answer.startswith(expected)
    assert seen > DRAWS // 2


def test_calls_fit_their_declarations(parts):
    v = parts.words.Values(random.Random(5))
    kinds = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list}
    for _ in range(DRAWS):
        made = parts.tooling.tool_dialogue(v)
        declared = {t["function"]["name"]: t["function"]["parameters"] for t in made["tools"]}
        for message in made["messages"]:
            for call in message.get("tool_calls", ()):
                schema = declared[call["function"]["name"]]
                arguments = call["function"]["arguments"]
                assert set(schema.get("required", ())) <= set(arguments) <= set(schema["properties"])
                for key, value in arguments.items():
                    entry = schema["properties"][key]
                    assert isinstance(value, kinds[entry["type"]])
                    assert value in entry.get("enum", [value])


def test_no_held_out_question_is_trained_on(parts):
    rng = random.Random(6)
    trained = {q for _ in range(5000) for q in questions(parts.corpus.dialogue(rng))}
    for name, made in parts.corpus.held_out_sets(100).items():
        asked = {d["messages"][-2]["content"] if d["messages"][-2]["role"] == "user" else "" for d in made} - {""}
        assert not asked & trained, name


def test_the_mark_covers_what_the_assistant_writes(parts):
    made = {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "old"},
            {"role": "user", "content": "b"},
            {"role": "assistant", "content": "new", "reasoning_content": "why"},
        ],
        "thinking": True,
        "cut": False,
    }
    text = parts.corpus.render(made)
    written = [text[start:end] for start, end in parts.corpus.spoken_spans(made, text)]
    assert written == ["old<|im_end|>", "why\n</think>\n\nnew<|im_end|>"]
    assert [text[a:b] for a, b in parts.corpus.spoken_spans({**made, "cut": True}, text)][-1] == "new<|im_end|>"
    made["thinking"] = False
    text = parts.corpus.render(made)
    assert [text[a:b] for a, b in parts.corpus.spoken_spans(made, text)] == ["old<|im_end|>", "new<|im_end|>"]


def test_the_template_speaks_the_protocol_of_the_family(parts, test_data):
    """Against a template of the family: the same text, but for the words of the tool instructions."""
    source = (test_data / "qwen3.5-4b.chat_template.jinja").read_text()
    reference = parts.corpus.template().environment.from_string(source)
    instructions = re.compile(r"(?<=system\n# Tools).*?</tool_call>(?:\n\n<IMPORTANT>.*?</IMPORTANT>)?", re.DOTALL)
    rng = random.Random(7)
    for _ in range(DRAWS):
        made = parts.corpus.dialogue(rng)
        if "text" in made:
            continue
        for opener in (True, False):
            for thinking in (True, False):
                given = {
                    "messages": made["messages"],
                    "tools": made.get("tools"),
                    "add_generation_prompt": opener,
                    "enable_thinking": thinking,
                }
                ours = parts.corpus.template().render(given)
                theirs = reference.render(given)
                # The reference writes Python's spelling of values other than text, lists and objects.
                theirs = re.sub(r"(?<=>\n)(True|False)(?=\n</parameter>)", lambda m: m[1].lower(), theirs)
                assert instructions.sub("", ours) == instructions.sub("", theirs)
                declared = [
                    [line for line in text.splitlines() if line.startswith('{"type"')] for text in (ours, theirs)
                ]
                assert declared[0] == declared[1]


def test_the_template_thinks_only_when_asked(parts):
    given = {"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": True}
    assert parts.corpus.template().render(given).endswith("assistant\n<think>\n\n</think>\n\n")
    assert parts.corpus.template().render(given, enable_thinking=True).endswith("assistant\n<think>\n")
