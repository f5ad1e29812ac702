"""A chat: its history, its commands, and a person at a terminal."""

from __future__ import annotations

import io
import json
import os
import sys

import pexpect
import pytest

from ninfer.gateway.cli.chat import HELP

COMMAND = ["-m", "ninfer.gateway.cli", "run"]


@pytest.fixture
def type_in(run, monkeypatch):
    """``type_in("line", ..., flags=())``: a chat over these lines."""

    def call(*lines: str, flags=()) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
        return run("--chat", "--no-thinking", *flags)

    return call


@pytest.fixture
def terminal(tiny):
    """``terminal(flags)``: the command with a terminal on all three streams."""
    children = []

    def call(*flags: str, env=None) -> pexpect.spawn:
        child = pexpect.spawn(sys.executable, [*COMMAND, tiny, *flags], encoding="utf-8", timeout=30, env=env)
        children.append(child)
        return child

    yield call
    for child in children:
        child.close(force=True)


def test_what_was_said_is_context(type_in, tmp_path):
    file = tmp_path / "chat.json"
    code, out, err = type_in("My name is Mia.", "", "What is my name?", f"/save {file}")
    assert code == 0
    assert "Mia" in out.splitlines()[-1]
    assert ">" not in out + err
    said = json.loads(file.read_text())
    assert [m["role"] for m in said] == ["user", "assistant"] * 2
    assert [m["content"] for m in said[1::2]] == out.splitlines()


def test_a_saved_chat_goes_on(type_in, tmp_path):
    file = tmp_path / "chat.json"
    type_in("My name is Mia.", f"/save {file}")
    _, out, _ = type_in("What is my name?", flags=("-q", "--messages", str(file)))
    assert "Mia" in out
    assert out.count("\n") == 1


def test_a_first_prompt_is_answered_before_the_first_line(type_in):
    _, out, _ = type_in("What is 8 + 5?", flags=("-p", "What is 17 + 25?"))
    assert out.splitlines() == ["17 + 25 = 42", "8 + 5 = 13"]


def test_clear_forgets_all_but_the_system_message(type_in, tmp_path):
    file = tmp_path / "chat.json"
    type_in("Hello", "/clear", f"/save {file}", flags=("--system", "Be kind."))
    assert json.loads(file.read_text()) == [{"role": "system", "content": "Be kind."}]


def test_retry_answers_again(type_in, tmp_path):
    file = tmp_path / "chat.json"
    _, out, err = type_in("/retry", "What is 8 + 5?", "/retry", f"/save {file}")
    assert out == "8 + 5 = 13\n" * 2
    assert "nothing was asked" in err
    assert len(json.loads(file.read_text())) == 2


def test_thinking_can_be_switched(type_in):
    notes = type_in("What is 17 + 25?", "/thinking on", "What is 17 + 25?", "/thinking off")[2].splitlines()
    assert len(notes) > 2
    assert "prompt +" in notes[0]
    assert "7 + 5" in notes[1]


def test_lines_are_joined_and_commands_explained(type_in):
    _, out, err = type_in("What is \\", "8 + 5?", "/what", "/exit", "What is 8 + 5?")
    assert out == "8 + 5 = 13\n"
    assert HELP in err


def test_calls_are_answered_by_hand(type_in, tmp_path):
    tools, file = tmp_path / "tools.json", tmp_path / "chat.json"
    function = {"name": "get_weather", "description": "Get the current weather for a city."}
    function["parameters"] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools.write_text(json.dumps([{"type": "function", "function": function}]))
    flags = ("-q", "--tools-file", str(tools))
    question, result = "What is the weather in Paris?", '{"temperature": 21, "condition": "sunny"}'
    _, out, _ = type_in(question, result, f"/save {file}", flags=flags)
    call, answer = out.splitlines()
    assert json.loads(call)["name"] == "get_weather"
    assert "21" in answer
    assert [m["role"] for m in json.loads(file.read_text())] == ["user", "assistant", "tool", "assistant"]
    assert type_in(question, flags=flags) == (0, call + "\n", "")


def test_a_refused_turn_leaves_the_chat_as_it_was(type_in, tmp_path):
    file = tmp_path / "chat.json"
    flags = ("-q", "--max-context", "64")
    code, out, err = type_in("word " * 80, "What is 8 + 5?", f"/save {file}", "/save /missing/x", flags=flags)
    assert code == 0
    assert out == "8 + 5 = 13\n"
    assert "exceed" in err
    assert "/missing/x: No such file" in err
    assert len(json.loads(file.read_text())) == 2


def test_a_line_that_is_not_utf_8_ends_the_chat(start, tiny):
    process = start("run", tiny, "-q", "-i", stdin=-1)
    assert process.communicate(b"ab\xff\n")[1] == b"ninfer: standard input: not UTF-8 at byte 2 of a line\n"
    assert process.returncode == 2


def test_a_person_at_a_terminal(terminal):
    child = terminal("--temperature", "0", "--thinking")
    child.expect_exact("be done.")
    child.expect_exact("> ")
    child.sendline("What is 17 + 25?")
    child.expect_exact("\033[2m")
    child.expect_exact("17 + 25 = 42\r\n")
    child.expect("tok/s")
    child.expect_exact("> ")
    child.sendline("Where \\")
    child.expect_exact("... ")
    child.sendintr()
    child.expect_exact("> ")
    child.sendeof()
    child.expect(pexpect.EOF)
    assert child.wait() == 0


def test_an_interrupt_cancels_the_answer_and_keeps_the_chat(terminal):
    child = terminal("--regex", "([ab] ){8000}", "--max-tokens", "20000")
    child.expect_exact("be done.")
    child.expect_exact("> ")
    child.sendline("Go on")
    child.expect("[ab] [ab] ")
    child.sendintr()
    child.expect("cancelled")
    child.expect_exact("> ")
    child.sendline("/exit")
    child.expect(pexpect.EOF)
    assert child.wait() == 0


def test_an_answer_cannot_command_the_terminal(terminal, tmp_path):
    grammar = tmp_path / "form.gbnf"
    grammar.write_text(r'root ::= "\x1b[2Jx\x9by" "\n"')
    child = terminal("-q", "-p", "Hi", "--grammar-file", str(grammar))
    child.expect_exact("␛[2Jx\ufffdy\r\n")
    child.expect(pexpect.EOF)


def test_no_colour_when_it_is_not_wanted(terminal):
    child = terminal("-p", "What is 8 + 5?", env=os.environ | {"NO_COLOR": "1"})
    child.expect(pexpect.EOF)
    assert "tok/s" in child.before
    assert "\033[2m" not in child.before
