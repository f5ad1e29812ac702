"""Channels, stop strings and tool calls do not depend on where the text is cut."""

from __future__ import annotations

import json
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.frontend.decoder import Decoder
from ninfer.frontend.envelope import Envelope, RawCall
from ninfer.frontend.tool_contract import ToolContract
from ninfer.inputs import Tool

TOOLS = (
    Tool(name="get_weather", parameters={"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}),
    Tool(name="run", parameters={"properties": {"code": {"type": "string"}, "options": {"type": "object"}}}),
)


def decoder(*, thinking=False, tools=(), stops=(), stop_in_thinking=False) -> Decoder:
    return Decoder(
        Envelope([ToolContract.lenient(t) for t in tools]) if tools else None, tuple(stops), stop_in_thinking, thinking
    )


def merged(pieces) -> list:
    """Calls, and the text of each channel joined where nothing stands between."""
    out: list = []
    for piece in pieces:
        if out and not isinstance(piece, RawCall) and isinstance(out[-1], list) and out[-1][0] == piece[0]:
            out[-1][1] += piece[1]
        else:
            out.append(piece if isinstance(piece, RawCall) else list(piece))
    return out


def read(decoder: Decoder, chunks, *, complete=True) -> list:
    pieces = []
    for chunk in chunks:
        pieces += decoder.feed(chunk)
        if decoder.stopped:
            break
    return merged(pieces + decoder.finish(complete=complete))


def chunked(data: bytes, size: int) -> list[bytes]:
    return [data[i : i + size] for i in range(0, len(data), size)]


def splits(data: bytes):
    return st.lists(st.integers(0, len(data)), max_size=10).map(
        lambda cuts: [data[a:b] for a, b in zip([0, *sorted(cuts)], [*sorted(cuts), len(data)], strict=True)]
    )


def texts(out, channel) -> str:
    return "".join(piece[1] for piece in out if isinstance(piece, list) and piece[0] == channel)


# -- channels ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "thinking", "content"),
    [
        ("Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
        ("Hm.</think>Yes.", "Hm.", "Yes."),
        ("Hm. \n\n\n</think>\n \nYes.", "Hm. ", " \nYes."),
        ("\n</think>\n\n", "", ""),
        ("</think></think>", "", "</think>"),
        ("a</think>b</think>c", "a", "b</think>c"),
        ("never closed\n\n", "never closed\n\n", ""),
        ("<think>nested</thin</think>ok", "<think>nested</thin", "ok"),
        ("a\n</thinkx\n</think>\nb", "a\n</thinkx", "b"),
        ("a\r\n</think>\r\nb", "a\r", "\r\nb"),
    ],
)
def test_thinking_ends_at_the_first_close(text, thinking, content):
    for size in range(1, len(text) + 1):
        out = read(decoder(thinking=True), chunked(text.encode(), size))
        assert (texts(out, "thinking"), texts(out, "content")) == (thinking, content)


def test_only_what_could_be_the_close_is_held():
    d = decoder(thinking=True)
    assert d.feed(b"Hm.\n\n</thi") == [("thinking", "Hm.")]
    assert d.feed(b"s") == [("thinking", "\n\n</this")]
    assert d.feed(b"\n") == []
    assert d.feed(b"x") == [("thinking", "\nx")]


def test_one_chunk_on_both_sides():
    d = decoder(thinking=True)
    assert d.feed(b"end.\n</think>\n\nStart") == [("thinking", "end."), ("content", "Start")]


def test_content_is_never_thinking_again():
    assert read(decoder(), [b"a<think>b</think>\n\nc"]) == [["content", "a<think>b</think>\n\nc"]]


FRAGMENTS = ["</think>", "\n", "</thi", "nk>", "a", "é", "😀", " ", "<tool_call>", "</tool_call>", "<function=run>",
             "stop",              "<parameter=code>", "</parameter>", "</function>", "st", "op",
             "\n</parameter>"]  # fmt: skip
soup = st.lists(st.sampled_from(FRAGMENTS), max_size=24).map(lambda parts: "".join(parts).encode())


@given(soup, st.data(), st.booleans(), st.booleans(), st.booleans())
def test_any_cut_gives_the_same_answer(data, draw, thinking, with_tools, complete):
    def fresh():
        stops = ("stop", "a\n", "op</")
        return decoder(thinking=thinking, tools=TOOLS if with_tools else (), stops=stops, stop_in_thinking=thinking)

    assert read(fresh(), draw.draw(splits(data)), complete=complete) == read(fresh(), [data], complete=complete)


@given(soup, st.data())
def test_without_tools_and_stops_nothing_is_lost(data, draw):
    out = read(decoder(thinking=True), draw.draw(splits(data)))
    head, closed, tail = data.decode().partition("</think>")
    expected = (head.rstrip("\n") if closed else head, tail.lstrip("\n"))
    assert (texts(out, "thinking"), texts(out, "content")) == expected


# -- stop strings --------------------------------------------------------------------------------------------------


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=3), st.data())
def test_stops_against_a_character_by_character_search(text, stops, data):
    """The earliest end wins; before it, exactly the longest possible beginning of a stop is held back."""
    d = decoder(stops=stops)
    shown, fed, cut = "", "", None
    for character in text:
        fed += character
        shown += "".join(piece[1] for piece in d.feed(character.encode()))
        ends = [fed.rfind(stop) for stop in stops if fed.endswith(stop)]
        if ends:
            cut = min(ends)
            break
        held = max(n for n in range(len(fed) + 1) for s in stops if n < len(s) and fed.endswith(s[:n]))
        assert shown == fed[: len(fed) - held]
    assert d.stopped == ("" if cut is None else fed[cut:])
    if cut is not None:
        assert shown == fed[:cut]
        assert d.finish(complete=True) == []
    expected = text if cut is None else text[:cut]
    whole = decoder(stops=stops)
    assert texts(read(whole, data.draw(splits(text.encode()))), "content") == expected


def test_stops_in_thinking_only_when_asked():
    text = b"Question: why?\n</think>\n\nNo Question: left"
    assert read(decoder(thinking=True, stops=["Question:"]), [text]) == [
        ["thinking", "Question: why?"],
        ["content", "No "],
    ]
    asked = decoder(thinking=True, stops=["Question:"], stop_in_thinking=True)
    assert read(asked, [text]) == []
    assert asked.stopped


def test_a_stop_does_not_reach_over_the_close():
    d = decoder(thinking=True, stops=["ab"], stop_in_thinking=True)
    assert read(d, [b"xa</think>by"]) == [["thinking", "xa"], ["content", "by"]]


def test_stops_act_on_free_text_only():
    call = "<tool_call>\n<function=run>\n<parameter=code>\nstop\n</parameter>\n</function>\n</tool_call>"
    out = read(decoder(tools=TOOLS, stops=["stop"]), [call.encode(), b"\nthen stop here"])
    assert out == [RawCall("run", {"code": "stop"}), ["content", "\nthen "]]
    # White space before a call is free text too.
    assert read(decoder(tools=TOOLS, stops=["\n\n"]), [b"Look.\n\n" + call.encode()]) == [["content", "Look."]]


# -- tool calls ----------------------------------------------------------------------------------------------------


def written(value) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def transcript(seed: int) -> tuple[str, list[RawCall], str]:
    """An answer, its calls, and its text. Values are typed so that the text form is unambiguous."""
    rng = random.Random(seed)
    space = lambda: rng.choice(["\n", "\n", "", " \n", "\n\n  "])  # noqa: E731
    strings = ["Paris", "", " padded ", "two\nlines\n", "\n\nouter\n\n", "5", "null", "é😀東京", "</parameter> inline",
               "a</tool_call>b", "<parameter=x>", "</function>\n</tool_call>",
               "if a < b:\n\treturn '</think>'"]  # fmt: skip
    prose = rng.choice(["", "Let me look. ", "I <tool_call> mean\n\n", "a < b\n", "日本語。"])
    text, calls = prose, []
    for i in range(rng.randint(1, 3)):
        text += rng.choice(["\n", "", "\n\n"]) if i else ""
        name = rng.choice([tool.name for tool in TOOLS])
        arguments: dict = {}
        body = ""
        for _ in range(rng.randint(0, 4)):
            key = rng.choice(["city", "days", "code", "options", "other"])
            typed = {"days": [3, -7], "options": [{}, {"a": [1, None]}], "other": [True, 1.5, "free text"]}
            value = rng.choice(typed.get(key, strings))
            if (key in ("city", "days") and name == "run") or (key in ("code", "options") and name != "run"):
                value = "plain words"
            arguments[key] = value
            body += f"{space()}<parameter={key}>\n{written(value)}\n</parameter>"
        text += f"<tool_call>{space()}<function={name}>{body}{space()}</function>{space()}</tool_call>"
        calls.append(RawCall(name, arguments))
    return text, calls, prose.rstrip()


@pytest.mark.parametrize("seed", range(50))
def test_transcripts_in_every_chunking(seed):
    text, calls, prose = transcript(seed)
    data = f"Hm.\n</think>\n\n{text}".encode()
    expected = [["thinking", "Hm."], *([["content", prose]] if prose else []), *calls]
    for size in range(1, len(data) + 1):
        out = read(decoder(thinking=True, tools=TOOLS), chunked(data, size))
        assert out == expected
        assert [list(a.arguments) for a in out if isinstance(a, RawCall)] == [list(c.arguments) for c in calls]


values = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.lists(
    st.sampled_from(FRAGMENTS), max_size=8
).map("".join)


def writable(value: str) -> bool:
    return "\n</parameter>" not in value and not re.match(r"</parameter>\s*(<parameter=|</function>)", value)


@given(
    st.dictionaries(
        st.text("abcé <&", min_size=1, max_size=6),
        values.filter(writable),
        max_size=4,
    )
)
def test_every_writable_string_survives(arguments):
    """Strings round-trip unchanged unless they hold the one delimiter."""
    properties = {key: {"type": "string"} for key in arguments}
    tool = Tool(name="run", parameters={"properties": properties})
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    text = f"<tool_call>\n<function=run>\n{body}</function>\n</tool_call>"
    assert read(decoder(tools=(tool,)), [text.encode()]) == [RawCall("run", arguments)]


def call(body: str, name: str = "run") -> str:
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ("", {}),
        ("<parameter=code>\na\n</parameter>\n<parameter=code>\nb\n</parameter>\n", {"code": "b"}),
        ("<parameter=code>\n1\n</parameter>\n<parameter=x>\n2\n</parameter>\n<parameter=code>\n3\n</parameter>",
         {"code": "3", "x": 2}),
        ("<parameter=code>inline</parameter>", {"code": "inline"}),
        ("<parameter=code>inline\n</parameter>", {"code": "inline"}),
        ("<parameter=code>\n\n</parameter>", {"code": ""}),
        ("<parameter=code>\n</parameter>", {"code": ""}),
        ("<parameter=code>\n</parameter>\n<parameter=x>\n1\n</parameter>", {"code": "", "x": 1}),
        ("<parameter=code></parameter>", {"code": ""}),
        ("<parameter=code>\n\n\n</parameter>", {"code": "\n"}),
        ('<parameter=options>\n{"a": 1}\n</parameter>', {"options": {"a": 1}}),
        ("<parameter=options>\n{broken\n</parameter>", {"options": "{broken"}),
        ("\t<parameter=undeclared>\n[1]\n</parameter> \r\n", {"undeclared": [1]}),
    ],
)  # fmt: skip
def test_lenient_rules(body, arguments):
    [found] = read(decoder(tools=TOOLS), chunked(call(body).encode(), 3))
    assert found == RawCall("run", arguments)
    assert list(found.arguments) == list(arguments)


def test_a_value_that_only_closes_inline_is_settled_at_the_end():
    text = call("<parameter=code>\na</parameter>")
    assert read(decoder(tools=TOOLS), [text.encode()]) == [RawCall("run", {"code": "a"})]


MALFORMED = [
    call("", name="undeclared"),
    call("stray text"),
    call("<parameter=>\n1\n</parameter>"),
    call("<parameter=a\nb>\n1\n</parameter>"),
    "<tool_call>\nhello\n</tool_call>",
    "<tool_call><tool_call>",
    '<tool_call>\n{"name": "run"}\n</tool_call>',
    "<tool_call>\n<function=run>\n</function>\nmore</tool_call>",
    "<tool_call>\n<function=" + "x" * 400,
    "<tool_call>\n<function=run>\n<parameter=code>\nnever closed",
    "<tool_call>\n<function=ru",
    "<tool_call>\n<function=run>\n</function>\n</tool",
    "<tool_ca",
    "</tool_call>",
]


@pytest.mark.parametrize("text", MALFORMED)
def test_a_malformed_call_stays_text(text):
    for size in (1, 2, 7, len(text)):
        assert read(decoder(tools=TOOLS), chunked(text.encode(), size)) == [["content", text]]


@pytest.mark.parametrize("text", MALFORMED)
def test_a_call_after_a_malformed_one_is_found(text):
    if "never closed" in text or text.endswith(("<function=ru", "</tool", "x")):
        return  # not malformed yet: the next call would be read as its continuation
    found = read(decoder(tools=TOOLS), [(text + "\n" + call("")).encode()])
    assert found == [["content", text], RawCall("run", {})]


def test_an_unfinished_value_swallows_until_its_delimiter():
    """A later call's delimiter ends it; what then breaks the rules becomes text, and the later call is found."""
    text = "<tool_call>\n<function=run>\n<parameter=code>\nnever closed"
    assert read(decoder(tools=TOOLS), [(text + call("")).encode()]) == [["content", text], RawCall("run", {})]


@pytest.mark.parametrize("complete", [True, False])
def test_a_call_cut_by_a_limit_is_not_shown(complete):
    """Finished calls are kept; the unfinished one is text only if the model itself ended there."""
    done, cut = call("<parameter=code>\nx\n</parameter>\n"), "<tool_call>\n<function=run>\n<parameter=co"
    out = read(decoder(tools=TOOLS), [f"Look.\n\n{done}\n{cut}".encode()], complete=complete)
    expected = [["content", "Look."], RawCall("run", {"code": "x"})]
    assert out == [*expected, ["content", "\n" + cut]] if complete else out == expected


def test_no_partial_tool_text_is_released_before_the_end():
    text = "Look.\n\n" + call("<parameter=code>\nx\n</parameter>\n") * 2
    for end in range(len(text)):
        d = decoder(tools=TOOLS)
        shown = texts(merged(d.feed(text[:end].encode())), "content")
        assert "Look.".startswith(shown)


@given(soup, st.data())
def test_resuming_shows_only_what_is_new(data, draw):
    """A prefix read as part of the prompt: then the rest shows what the whole shows, less the prefix."""
    text = data.decode()
    cut = draw.draw(st.integers(0, len(text)))
    d = decoder(tools=TOOLS)
    if any(isinstance(piece, RawCall) for piece in d.feed(text[:cut].encode())):
        return
    d = decoder(tools=TOOLS)
    d.resume(text[:cut])
    out = read(d, [text[cut:].encode()])
    whole = read(decoder(tools=TOOLS), [data])
    assert [c for c in out if isinstance(c, RawCall)] == [c for c in whole if isinstance(c, RawCall)]
    shown, all_shown = texts(out, "content"), texts(whole, "content")
    assert all_shown.endswith(shown.lstrip()) or not shown.strip()
    assert len(shown) <= len(text) - cut
