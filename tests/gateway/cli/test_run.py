"""One answer on the command line: what it is made of, where it goes, how it ends."""

from __future__ import annotations

import io
import json
import re
import signal
import sys

import pytest

ENDLESS = ("-p", "Hi", "--regex", "([ab] ){8000}", "--max-tokens", "20000")
SUM = "What is 17 + 25?"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather for a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def test_the_answer_alone_is_on_standard_output(run):
    code, out, err = run("-p", SUM, "--thinking")
    assert (code, out) == (0, "17 + 25 = 42\n")
    assert "carry 1" in err
    assert "prompt + " in err.splitlines()[-1]
    assert "\033" not in err
    assert run("-p", SUM, "--thinking", "--quiet") == (0, out, "")


def test_a_thinking_budget_shortens_thinking(run):
    said = [run("-p", SUM, "--thinking")[2], run("-p", SUM, "--thinking", "--thinking-budget", "5")[2]]
    whole, short = (int(re.search(r"\+ (\d+) completion tokens", text)[1]) for text in said)
    assert short < whole


def test_sampling_options_reach_the_model(run):
    hot = ("-p", "Hello", "-q", "--temperature", "50", "--top-k", "0", "--top-p", "1", "--max-tokens", "8")
    answers = [run(*hot, "--seed", seed)[1] for seed in ("1", "2", "1")]
    assert answers[0] == answers[2] != answers[1]
    assert run(*hot, "--seed", "1", "--min-p", "1") == run("-p", "Hello", "-q", "--max-tokens", "8")
    repeated = ("--raw", "-p", "a a a a", "-q", "--regex", "([ab] ){12}")
    assert run(*repeated)[1] != run(*repeated, "--presence-penalty", "2", "--frequency-penalty", "2")[1]


def test_stop_ends_before_the_text(run):
    assert run("-p", SUM, "--stop", " =", "-q")[1] == "17 + 25\n"


def test_messages_from_a_file_and_from_standard_input(run, tmp_path, monkeypatch):
    history = [
        {"role": "user", "content": "What is 8 + 5?"},
        {"role": "assistant", "content": "8 + 5 = 13"},
        {"role": "user", "content": SUM},
    ]
    file = tmp_path / "chat.json"
    file.write_text(json.dumps(history))
    assert run("--messages", str(file), "-q")[1] == "17 + 25 = 42\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(history[:2])))
    assert run("--messages", "-", "-p", SUM, "-q")[1] == "17 + 25 = 42\n"
    file.write_text(json.dumps([history[0], {"role": "assistant", "content": "8 + 5 ="}]))
    assert run("--messages", str(file), "--continue", "-q")[1] == " 13\n"


def test_raw_text_is_continued(run):
    chat = "<|im_start|>user\nWhat is 17 + 25?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n17 +"
    assert run("--raw", "-p", chat, "-q")[1] == " 25 = 42\n"


def test_tool_calls_are_one_json_object_a_line(run, tmp_path):
    file = tmp_path / "tools.json"
    file.write_text(json.dumps([WEATHER]))
    question = ("-p", "What is the weather in Paris?", "--tools-file", str(file), "--no-thinking")
    code, out, err = run(*question)
    assert code == 0
    assert [json.loads(line) for line in out.splitlines()] == [{"name": "get_weather", "arguments": {"city": "Paris"}}]
    assert "tool_calls" in err
    assert "get_weather" not in run(*question, "--tool-choice", "none")[1]
    assert "get_weather" in run("-p", "Hello", *question[2:], "--tool-choice", "get_weather")[1]
    assert run(*question, "--tool-choice", "other")[0] == 2


def test_a_cut_form_is_an_error_to_a_script(run):
    assert run("-p", "Hi", "--json-object", "--max-tokens", "2", "-q")[0] == 3
    assert run("-p", "Hi", "--regex", "[ab]c", "-q")[0] == 0
    assert run("-p", SUM, "--max-tokens", "2", "-q")[0] == 0


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["-p", "x", "--top-p", "2"], "top_p"),
        (["-p", "x", "--max-context", "0"], "max_context"),
        (["-p", "x", "--device", "tpu"], "device"),
        (["-p", "x", "--messages", "{}"], "expected a JSON array"),
        (["-p", "x", "--messages", "[1]"], "[0]: expected an object"),
        (["-p", "x", "--messages", "[\n1,"], "line 2 column 3"),
        (["-p", "x", "--messages", "\udcff"], "not UTF-8 at byte 0"),
        (["-p", "x", "--messages", "[" * 100_000], "recursion"),
        (["--messages", '[{"role": "robot", "content": "x"}]'], "messages[0].role"),
        (["--messages", "[]"], "messages"),
        (["-p", "x", "--tools-file", '[{"function": {"name": ""}}]'], "tools[0]"),
        (["-p", "x", "--json-schema-file", '{"type": "text"}'], "/type"),
        (["-p", "x", "--grammar-file", "root ::= x"], "line 1"),
        (["-p", "x", "--regex", "(a"], "--regex: offset 0"),
        (["-p", "x", "--choice", "\udcff"], "--choice: choice 0"),
        (["-p", "\udcff"], "surrogate"),
        (["-p", "x", "--regex", "a", "--stop", "b"], "stop"),
        (["-p", "x", "--raw", "--thinking"], "--thinking"),
        (["--raw", "-i"], "--raw"),
        (["-i", "--continue"], "--continue"),
    ],
)
def test_what_is_refused_is_told_in_one_line(run, flags, says, tmp_path):
    for i, flag in enumerate(flags):
        if flag in ("--messages", "--tools-file", "--json-schema-file", "--grammar-file"):
            file = tmp_path / "file"
            file.write_bytes(flags[i + 1].encode(errors="surrogateescape"))
            flags = [*flags[: i + 1], str(file), *flags[i + 2 :]]
    code, out, err = run(*flags)
    assert (code, out) == (2, "")
    assert err.startswith("ninfer: ")
    assert says in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("flags", [["--top-k", "x"], ["--json-object", "--regex", "a"], ["--nonsense"]])
def test_wrong_usage_is_exit_code_2(run, flags):
    with pytest.raises(SystemExit) as end:
        run("-p", "x", *flags)
    assert end.value.code == 2


def test_a_prompt_longer_than_the_context_is_refused(run):
    code, out, err = run("-p", "word " * 100, "--max-context", "32")
    assert (code, out) == (2, "")
    assert "exceed" in err


def test_a_deadline_is_an_error_after_what_was_said(run):
    code, _, err = run("-p", SUM, "--timeout", "1e-6", "-q")
    assert code == 1
    assert err.startswith("ninfer: ")


def test_text_is_utf_8_whatever_the_locale(start, tiny, tmp_path):
    grammar = tmp_path / "form.gbnf"
    grammar.write_text('root ::= "λ → 🙂"', "utf-8")
    latin = {"LC_ALL": "C", "PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    process = start("run", tiny, "-q", "--grammar-file", str(grammar), stdin=-1, env=latin)
    assert process.communicate("ünï".encode())[0] == "λ → 🙂\n".encode()
    assert process.returncode == 0
    process = start("run", tiny, "-q", stdin=-1)
    assert process.communicate(b"ab\xff")[1] == b"ninfer: standard input: not UTF-8 at byte 2\n"
    assert process.returncode == 2


def test_a_reader_that_leaves_ends_the_command_quietly(start, tiny):
    process = start("run", tiny, "-q", *ENDLESS)
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 141


def test_a_full_disk_is_an_error(start, tiny):
    with open("/dev/full", "wb") as full:
        process = start("run", tiny, "-p", SUM, "-q", stdout=full)
        assert process.stderr.read() == b"ninfer: No space left on device\n"
    assert process.wait() == 1


def test_a_closed_output_is_no_error(start, tiny):
    assert start("run", tiny, "-p", SUM, preexec_fn=lambda: __import__("os").close(1)).wait() == 0


def test_an_interrupt_keeps_what_was_said(start, tiny):
    process = start("run", tiny, *ENDLESS)
    process.stdout.read(5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert out.endswith(b"\n")
    assert b"cancelled" in err
    assert process.returncode == 130
