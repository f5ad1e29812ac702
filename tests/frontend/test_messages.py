"""Messages and tool declarations: what is accepted, how it is brought to one form, what is refused and where."""

from __future__ import annotations

import pytest

from ninfer.errors import InvalidRequest, ToolContractError
from ninfer.frontend.messages import read_messages
from ninfer.frontend.tools import argument_types, decode_argument, read_tools
from ninfer.inputs import Chat, Message, Tool
from ninfer.results import ToolCall

USER = {"role": "user", "content": "q"}


def values(*messages):
    return [turn.value for turn in read_messages(messages)]


def test_forms_of_a_message():
    assert values(USER) == [USER]
    assert values(Message(role="user", content="q")) == [USER]
    assert values({"role": "developer", "content": "s"}) == [{"role": "system", "content": "s"}]
    parts = [{"type": "text", "text": "a"}, {"text": "b", "cache_marker": True}]
    [turn] = read_messages([{"role": "user", "content": parts, "cache_marker": True}])
    assert turn.value["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert (turn.marked, turn.marked_parts) == (True, (1,))


def test_keys_that_say_nothing_are_ignored():
    """As an SDK dumps its own message objects."""
    dumped = {
        "role": "assistant",
        "content": "c",
        "refusal": None,
        "audio": None,
        "annotations": [],
        "tool_calls": None,
    }
    assert values(USER, dumped)[1] == {"role": "assistant", "content": "c"}


@pytest.mark.parametrize(
    "call",
    [
        {"id": "i", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": [null]}'}},
        {"id": "i", "function": {"name": "f", "arguments": {"b": 1, "a": [None]}}},
        {"id": "i", "index": 0, "type": "function", "function": {"name": "f", "arguments": {"b": 1, "a": (None,)}}},
        ToolCall(id="i", name="f", arguments={"b": 1, "a": [None]}, arguments_json=""),
    ],
)
def test_forms_of_a_tool_call(call):
    turn = values(USER, {"role": "assistant", "content": None, "tool_calls": [call]})[1]
    function = {"name": "f", "arguments": {"b": 1, "a": [None]}}
    assert turn["tool_calls"] == [{"type": "function", "function": function, "id": "i"}]
    assert list(turn["tool_calls"][0]["function"]["arguments"]) == ["b", "a"]


@pytest.mark.parametrize("arguments", [None, "", "{}", {}])
def test_no_arguments(arguments):
    call = {"function": {"name": "f", "arguments": arguments}}
    assert values({"role": "assistant", "tool_calls": [call]})[0]["tool_calls"][0]["function"]["arguments"] == {}


def assistant(**keys):
    return {"role": "assistant", "content": "c", **keys}


TEXT = {"type": "text", "text": "x"}


def parts(*content):
    return {"role": "user", "content": list(content)}


def calling(**function):
    return assistant(tool_calls=[{"function": {"name": "f", **function}}])


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ("text", "messages[1]"),
        ([USER], "messages[1]"),
        ({"content": "x"}, "messages[1].role"),
        ({"role": "robot", "content": "x"}, "messages[1].role"),
        ({"role": ["user"], "content": "x"}, "messages[1].role"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "tool", "content": None}, "messages[1].content"),
        ({"role": "user", "content": 3}, "messages[1].content"),
        ({"role": "user", "content": b"x"}, "messages[1].content"),
        ({"role": "user", "content": iter([TEXT])}, "messages[1].content"),  # a second reading would find nothing
        ({"role": "user", "content": {"type": "text", "text": "x"}}, "messages[1].content"),
        ({"role": "user", "content": "a\udc80"}, "messages[1].content"),
        ({"role": "user", "content": ["x"]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": [{"type": "text", "text": 3}]}, "messages[1].content[0].text"),
        (parts(TEXT, {"type": "image", "image": "x"}), "messages[1].content[1]"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"image": "x", "text": "y"}]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "file", "file": "x"}]}, "messages[1].content[0].type"),
        (parts({**TEXT, "detail": "high"}), "messages[1].content[0].detail"),
        (parts({**TEXT, "cache_marker": 1}), "messages[1].content[0].cache_marker"),
        ({**USER, "cache_marker": "yes"}, "messages[1].cache_marker"),
        ({**USER, "images": ["x"]}, "messages[1].images"),
        ({**USER, "reasoning_content": "r"}, "messages[1].reasoning_content"),
        ({**USER, "tool_calls": [{}]}, "messages[1].tool_calls"),
        ({**USER, "tool_call_id": "i"}, "messages[1].tool_call_id"),
        ({**USER, "name": 3}, "messages[1].name"),
        (assistant(reasoning_content=3), "messages[1].reasoning_content"),
        (assistant(tool_calls="f"), "messages[1].tool_calls"),
        (assistant(tool_calls=iter([])), "messages[1].tool_calls"),
        (assistant(tool_calls={"function": {}}), "messages[1].tool_calls"),
        (assistant(tool_calls=["f"]), "messages[1].tool_calls[0]"),
        (assistant(tool_calls=[{"name": "f"}]), "messages[1].tool_calls[0].name"),
        (assistant(tool_calls=[{"type": "custom", "function": {"name": "f"}}]), "messages[1].tool_calls[0].type"),
        (assistant(tool_calls=[{"id": 7, "function": {"name": "f"}}]), "messages[1].tool_calls[0].id"),
        (assistant(tool_calls=[{"function": {"arguments": {}}}]), "messages[1].tool_calls[0].function.name"),
        (calling(name=""), "messages[1].tool_calls[0].function.name"),
        (calling(arguments="{"), "messages[1].tool_calls[0].function.arguments"),
        (calling(arguments="[1]"), "messages[1].tool_calls[0].function.arguments"),
        (calling(arguments=[1]), "messages[1].tool_calls[0].function.arguments"),
        (calling(arguments={"a": float("nan")}), "messages[1].tool_calls[0].function.arguments.a"),
        (calling(arguments={"a": {1}}), "messages[1].tool_calls[0].function.arguments.a"),
        (calling(arguments={1: 2}), "messages[1].tool_calls[0].function.arguments"),
        (calling(arguments={"a": ["\ud800"]}), "messages[1].tool_calls[0].function.arguments.a[0]"),
        (calling(strict=True), "messages[1].tool_calls[0].function.strict"),
    ],
)  # fmt: skip
def test_refusals_name_the_place(frontend, message, field):
    with pytest.raises(InvalidRequest) as refusal:
        frontend.prepare(Chat([USER, message]))
    assert refusal.value.field == field


def test_endless_nesting_is_refused():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidRequest):
        read_messages([calling(arguments={"a": deep})])
    looped: dict = {}
    looped["self"] = looped
    with pytest.raises(InvalidRequest):
        read_tools([Tool(name="f", parameters=looped)])


@pytest.mark.parametrize("field", ["thinking", "preserve_thinking", "continue_final", "escape_special"])
@pytest.mark.parametrize("value", ["yes", 1])
def test_switches_are_bools(frontend, field, value):
    with pytest.raises(InvalidRequest) as refusal:
        frontend.prepare(Chat([USER], **{field: value}))
    assert refusal.value.field == field


def test_no_messages(frontend):
    with pytest.raises(InvalidRequest) as refusal:
        frontend.prepare(Chat([]))
    assert refusal.value.field == "messages"


# -- tools ---------------------------------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}


def mapping(**function):
    return {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA, **function}}


def test_forms_of_a_declaration():
    [one] = read_tools([Tool(name="f", description="d", parameters=SCHEMA, cache_marker=True)])
    [two] = read_tools([{**mapping(strict=False), "cache_marker": True}])
    assert one.tool == two.tool
    assert one.value == mapping()
    assert two.value == mapping(strict=False)  # a caller's own mapping is printed as it stands
    [bare] = read_tools([{"function": {"name": "f"}}])
    assert (bare.tool.description, bare.tool.parameters) == ("", {})


@pytest.mark.parametrize(
    ("tools", "error", "field"),
    [
        ("f", InvalidRequest, "tools"),
        ({"function": {}}, InvalidRequest, "tools"),
        ([3], InvalidRequest, "tools[0]"),
        ([{"name": "f"}], InvalidRequest, "tools[0]"),
        ([mapping(), {"type": "web_search", "function": {"name": "g"}}], InvalidRequest, "tools[1].type"),
        ([{"function": {"description": "d"}}], InvalidRequest, "tools[0].name"),
        ([mapping(strict=1)], InvalidRequest, "tools[0].function.strict"),
        ([Tool(name="f", cache_marker=1)], InvalidRequest, "tools[0]"),
        ([mapping(), Tool(name="f")], ToolContractError, "tools[1]"),
        ([Tool(name="")], ToolContractError, "tools[0]"),
        ([Tool(name="a>b")], ToolContractError, "tools[0]"),
        ([Tool(name="a\nb")], ToolContractError, "tools[0]"),
        ([Tool(name="a" * 257)], ToolContractError, "tools[0]"),
        ([mapping(parameters=[1])], ToolContractError, "tools[0]"),
        ([mapping(parameters=[])], ToolContractError, "tools[0]"),
        ([mapping(parameters={"properties": ["x"]})], ToolContractError, "tools[0]"),
        ([mapping(parameters={"properties": 5})], ToolContractError, "tools[0]"),
        ([mapping(parameters={"properties": None})], ToolContractError, "tools[0]"),
        ([Tool(name="f", parameters={"properties": {"a>": {}}})], ToolContractError, "tools[0]"),
        ([Tool(name="f", parameters={"properties": {"": {}}})], ToolContractError, "tools[0]"),
        ([Tool(name="f", parameters={"x": {1, 2}})], InvalidRequest, "tools[0].parameters.x"),
    ],
)  # fmt: skip
def test_refused_declarations(frontend, tools, error, field):
    with pytest.raises(InvalidRequest) as refusal:
        frontend.prepare(Chat([USER], tools=tools))
    assert type(refusal.value) is error
    assert refusal.value.field == field


def types(schema, **root):
    return argument_types(Tool(name="f", parameters={"properties": {"x": schema}, **root})).get("x", frozenset())


def test_declared_types():
    assert types({"type": "string"}) == {"string"}
    assert types({"type": ["string", "null"]}) == {"string", "null"}
    assert types({"anyOf": [{"type": "integer"}, {"const": None}]}) == {"integer", "null"}
    assert types({"enum": ["a", 1]}) == {"string", "integer"}
    assert types({"allOf": [{"type": ["string", "integer"]}, {"type": "integer"}, {"minimum": 1}]}) == {"integer"}
    assert types({"$ref": "#/$defs/a~1b"}, **{"$defs": {"a/b": {"type": "number"}}}) == {"number"}
    for silent in ({}, True, {"type": "date"}, {"type": 3}, {"anyOf": [{"type": "string"}, {}]}, {"$ref": "#/no"},
                   {"$ref": "http://x"}, {"minimum": 3}):  # fmt: skip
        assert types(silent) == frozenset()


def test_references_may_go_round():
    knot = {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}, {"type": "string"}]}
    assert types({"$ref": "#/$defs/a"}, **{"$defs": {"a": knot}}) == frozenset()


ANY = frozenset()


@pytest.mark.parametrize(
    ("raw", "declared", "value"),
    [
        ("5", {"string"}, "5"),
        (" padded \n", {"string"}, " padded \n"),
        ("5", {"integer"}, 5),
        (" 5\n", {"integer"}, 5),
        ("5.0", {"integer"}, 5),
        ("5.5", {"integer"}, 5.5),
        ("5", {"number"}, 5),
        ("1e400", {"number"}, "1e400"),
        ("NaN", {"number"}, "NaN"),
        ("9" * 5000, {"integer"}, "9" * 5000),
        ("True", {"boolean"}, True),
        ("false", {"boolean"}, False),
        ("yes", {"boolean"}, "yes"),
        ("None", {"null", "integer"}, None),
        ("[1, {}]", {"array"}, [1, {}]),
        ("[1,", {"array"}, "[1,"),
        ('{"a": "\\ud800"}', {"object"}, '{"a": "\\ud800"}'),
        ("123", {"string", "null"}, "123"),
        ("null", {"string", "null"}, None),
        ('"x"', {"string", "null"}, '"x"'),
        ("5", {"string", "integer"}, 5),
        ("5", ANY, 5),
        ('"x"', ANY, "x"),
        ("x", ANY, "x"),
        ("", ANY, ""),
        ("[" * 100_000, ANY, "[" * 100_000),
    ],
)
def test_arguments_take_the_declared_type_as_a_hint(raw, declared, value):
    decoded = decode_argument(raw, frozenset(declared))
    assert decoded == value
    assert type(decoded) is type(value)
