"""What the playground computes, run in a JavaScript engine without a document."""

from __future__ import annotations

import json
from importlib.resources import files

import pytest
import quickjs
from hypothesis import given
from hypothesis import strategies as st

SCRIPT = (files("ninfer.gateway.http") / "playground" / "core.js").read_text("utf-8")


@pytest.fixture(scope="module")
def js():
    """``js("expression of a, b", a=..., b=...)``: its value; arguments and value pass as JSON. Raises JSException."""
    context = quickjs.Context()
    exported = [line.split()[2].split("(")[0] for line in SCRIPT.splitlines() if line.startswith("export ")]
    context.module(SCRIPT + f"\nObject.assign(globalThis, {{ {', '.join(exported)} }});")

    def call(expression: str, **values):
        given = "".join(f"const {name} = {json.dumps(value)};" for name, value in values.items())
        text = context.eval(f"(() => {{ {given} return JSON.stringify({expression}) ?? null; }})()")
        return None if text is None else json.loads(text)

    return call


SETTINGS = {
    "model": "m",
    "system": "",
    "temperature": "",
    "maxTokens": "",
    "seed": "",
    "effort": "",
    "tools": "",
    "form": {"kind": "", "text": ""},
}
FEED = "((reader) => pieces.flatMap((piece) => reader.feed(piece)))(new EventReader())"


def test_events_are_read(js):
    stream = 'event: x\ndata: {"a":1}\n\n: comment\n\ndata:one\r\ndata: two\r\n\r\ndata: é\r\rdata: unfinished\n'
    assert js(FEED, pieces=[stream]) == ['{"a":1}', "one\ntwo", "é"]


@given(data=st.data())
def test_events_do_not_depend_on_how_the_stream_was_cut(js, data):
    stream = "data: a\r\n\r\ndata: b\ndata: c\n\ndata: \r\rdata: d\n\n"
    places = sorted(data.draw(st.sets(st.integers(0, len(stream)))))
    pieces = [stream[i:j] for i, j in zip([0, *places], [*places, len(stream)])]
    assert js(FEED, pieces=pieces) == js(FEED, pieces=[stream]) == ["a", "b\nc", "", "d"]


def chunk(delta=None, finish=None, **more):
    choices = [] if delta is None and finish is None else [{"delta": delta or {}, "finish_reason": finish}]
    return json.dumps({"choices": choices, **more})


def answer(js, *events):
    """The answer after events at 100, 200, ... ms."""
    add = "events.forEach((event, i) => addEvent(answer, event, 100 * (i + 1)))"
    return js(f"((answer) => ({add}, answer))(newAnswer(0))", events=events)


CALL = {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}
USAGE = {
    "prompt_tokens": 40,
    "completion_tokens": 11,
    "prompt_tokens_details": {"cached_tokens": 30},
    "completion_tokens_details": {"reasoning_tokens": 4},
}


def test_an_answer_grows(js):
    grown = answer(
        js,
        chunk({"role": "assistant", "content": ""}),
        chunk({"reasoning_content": "Hm. "}),
        chunk({"content": "Yes"}),
        chunk({"content": "."}),
        chunk({"tool_calls": [CALL]}),
        chunk(finish="tool_calls"),
        chunk(usage=USAGE),
        "[DONE]",
    )
    assert (grown["thinking"], grown["content"], grown["finish"]) == ("Hm. ", "Yes.", "tool_calls")
    assert grown["calls"] == [{"id": "c1", "name": "f", "arguments": '{"x":1}'}]
    assert (grown["first"], grown["last"]) == (200, 500)
    assert js("assistantMessage(a)", a=grown) == {
        "role": "assistant",
        "content": "Yes.",
        "reasoning_content": "Hm. ",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}],
    }
    assert js("statistics(a)", a=grown) == (
        "40 prompt tokens (30 from the cache) · 11 tokens (4 thinking) · first after 200 ms · 28 tok/s"
    )


def test_speed_leaves_out_what_came_at_once(js):
    add = "[[a, 50], [a, 50], [a, 150], [a, 250], [u, 250]].forEach(([event, now]) => addEvent(answer, event, now))"
    run = f"((answer) => ({add}, statistics(answer)))(newAnswer(0))"
    usage = chunk(usage={"prompt_tokens": 1, "completion_tokens": 4})
    assert js(run, a=chunk({"content": "a"}), u=usage).endswith("first after 50 ms · 10 tok/s")
    at_once = run.replace("150", "50").replace("250", "50")
    assert js(at_once, a=chunk({"content": "a"}), u=usage).endswith("80 tok/s with the prompt")


def test_an_answer_without_a_word_is_no_turn(js):
    empty = answer(js, chunk({"role": "assistant", "content": ""}), chunk(finish="length"))
    assert js("assistantMessage(a)", a=empty) is None
    assert js("statistics(a)", a=empty) == "cut: the budget is used up"


def test_an_error_in_the_stream_is_kept(js):
    assert answer(js, chunk({"content": "a"}), json.dumps({"error": {"message": "no"}}))["error"] == "no"


def test_a_request_says_what_was_chosen(js):
    messages = [{"role": "user", "content": "Hi"}]
    plain = {"model": "m", "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
    assert json.loads(js("requestBody(s, m)", s=SETTINGS, m=messages)) == plain
    tool = {"type": "function", "function": {"name": "f"}}
    chosen = SETTINGS | {
        "system": "Be kind.",
        "temperature": "0",
        "maxTokens": "5",
        "seed": "7",
        "effort": "none",
        "tools": json.dumps([tool]),
    }
    assert json.loads(js("requestBody(s, m)", s=chosen, m=messages)) == plain | {
        "messages": [{"role": "system", "content": "Be kind."}, *messages],
        "temperature": 0,
        "max_completion_tokens": 5,
        "seed": 7,
        "reasoning_effort": "none",
        "tools": [tool],
    }


@pytest.mark.parametrize(
    ("kind", "text", "member"),
    [
        ("json_object", "ignored", {"response_format": {"type": "json_object"}}),
        ("regex", "a+", {"structured_outputs": {"regex": "a+"}}),
        ("grammar", 'root ::= "a"', {"structured_outputs": {"grammar": 'root ::= "a"'}}),
        ("choice", "a\n\n b \n", {"structured_outputs": {"choice": ["a", " b "]}}),
    ],
)
def test_an_output_form_is_asked_for(js, kind, text, member):
    body = json.loads(js("requestBody(s, [])", s=SETTINGS | {"form": {"kind": kind, "text": text}}))
    assert {name: body[name] for name in body if name in ("response_format", "structured_outputs")} == member


def test_a_schema_is_sent_as_it_was_typed(js):
    schema = '{"type": "object", "properties": {"b": {"const": 1.0}, "10": {}, "2": {}}}'
    body = js("requestBody(s, [])", s=SETTINGS | {"form": {"kind": "json_schema", "text": schema}})
    assert schema in body
    assert json.loads(body)["response_format"]["json_schema"]["schema"] == json.loads(schema)


@pytest.mark.parametrize(
    ("text", "says"), [("{", "not JSON"), ("{}", "array"), ('[{"name": "f"}]', "tool 0"), ("[null]", "tool 0")]
)
def test_wrong_tools_are_told(js, text, says):
    with pytest.raises(quickjs.JSException, match=says):
        js("parseTools(t)", t=text)


def test_sums_over_a_conversation(js):
    assert js("totals([{usage: u}, {usage: null}, {usage: u}])", u=USAGE) == (
        "80 prompt tokens, 75 % from the cache · 22 generated"
    )
    assert js("totals([])").startswith("0 prompt tokens, 0 %")


def test_a_refusal_is_told_whatever_its_body_is(js):
    assert js("refusal(400, t)", t='{"error": {"message": "stop: too long"}}') == "stop: too long"
    for text in ("<html>", "", '"x"', '{"error": {}}', "null"):
        assert js("refusal(502, t)", t=text) == "the server answered 502"


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("", [(False, "", "")]),
        ("a\nb", [(False, "", "a\nb")]),
        ("a\n```py\nx = 1\n```\nb", [(False, "", "a"), (True, "py", "x = 1"), (False, "", "b")]),
        ("```\nopen\n```x", [(True, "", "open\n```x")]),
        ("```", []),
    ],
)
def test_code_is_told_from_prose(js, text, pieces):
    found = [(piece["code"], piece["language"], piece["text"]) for piece in js("segments(t)", t=text)]
    assert found == pieces


@given(st.text(alphabet="a`\n p"))
def test_no_line_of_an_answer_is_lost(js, text):
    shown = "\n".join(piece["text"] for piece in js("segments(t)", t=text))
    kept = [line for line in text.split("\n") if "```" not in line]
    assert [line for line in shown.split("\n") if "```" not in line] == kept or not kept


def test_json_is_indented_and_all_else_is_left(js):
    assert js("pretty(t)", t='{"a":[1]}') == '{\n  "a": [\n    1\n  ]\n}'
    assert js("pretty(t)", t='{"a":') == '{"a":'
