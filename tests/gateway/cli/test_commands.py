"""The command line over a real artifact: what goes where, and how it ends."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from ninfer.artifact import open_artifact
from ninfer.gateway.cli import main, parser
from ninfer.gateway.cli.engine import engine_options
from ninfer.options import CacheOptions, EngineOptions, SpecOptions


def test_run_streams_the_answer_to_standard_output(artifact, capsys):
    code = main(["run", str(artifact), "-p", "Hi", "--max-tokens", "5", "--temperature", "0", "--no-thinking"])
    out, err = capsys.readouterr()
    assert code == 0
    assert out.endswith("\n")
    assert "5 completion tokens" in err
    assert (
        main(["run", str(artifact), "-p", "Hi", "--max-tokens", "5", "--temperature", "0", "-q", "--no-thinking"]) == 0
    )
    quiet, err = capsys.readouterr()
    assert (quiet, err) == (out, "")


def test_run_reads_standard_input(artifact, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi"))
    assert main(["run", str(artifact), "--max-tokens", "1", "-q"]) == 0
    assert capsys.readouterr().err == ""


def test_run_holds_the_answer_to_a_form(artifact, capsys, tmp_path):
    schema, grammar = tmp_path / "schema.json", tmp_path / "form.gbnf"
    schema.write_text('{"enum": ["yes", 7]}')
    grammar.write_text('root ::= "é" [0-9]', "utf-8")
    command = ["run", str(artifact), "-p", "Hi", "--temperature", "0", "-q", "--no-thinking"]
    for flags, answers in [
        (["--choice", "left", "--choice", "right"], {"left", "right"}),
        (["--regex", "[ab]c"], {"ac", "bc"}),
        (["--json-schema-file", str(schema)], {'"yes"', "7"}),
        (["--grammar-file", str(grammar)], {f"é{i}" for i in range(10)}),
    ]:
        assert main([*command, *flags]) == 0
        assert capsys.readouterr().out.rstrip("\n") in answers
    assert main([*command, "--json-object", "--max-tokens", "3"]) in (0, 3)
    assert capsys.readouterr().out.startswith("{")
    assert main([*command, "--regex", "(a"]) == 2
    assert "offset 0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*command, "--json-object", "--regex", "a"])


def test_inspect_and_verify(artifact, capsys, tmp_path):
    assert main(["inspect", str(artifact)]) == 0
    assert "q8_g32_fp16" in capsys.readouterr().out
    assert main(["inspect", str(artifact), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["components"][0]["name"] == "text"
    assert main(["verify", str(artifact)]) == 0
    capsys.readouterr()
    damaged = tmp_path / "damaged.ninfer"
    data = bytearray(artifact.read_bytes())
    with open_artifact(artifact) as source:
        matrix = next(o for o in source.directory.objects.values() if getattr(o, "format", "") == "q8_g32_fp16")
        start = len(data) - source.directory.payload_bytes
    data[start + matrix.offset + 1] = 0x80  # -128 is no code of this format
    damaged.write_bytes(data)
    assert main(["verify", str(damaged)]) == 1
    out = capsys.readouterr().out
    assert matrix.id in out
    assert out.startswith("error: ")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["run", "missing.ninfer", "-p", "x"], 1, "missing.ninfer"),
        (["inspect", "missing.ninfer"], 1, "missing.ninfer"),
        (["convert", "missing-folder", "out.ninfer", "--recipe", "q8"], 1, "config.json"),
        (["convert", "missing-folder", "out.ninfer", "--recipe", "q3"], 2, "recipe"),
        (["bench", "--synthetic", "9000b"], 2, "geometry"),
        (["bench", "--synthetic", "tiny", "--batches", "9"], 2, "max_concurrency"),
        (["bench", "missing.ninfer", "--recipe", "q6"], 2, "--recipe: has no effect without --synthetic"),
        (["bench", "missing.ninfer", "--only", "attention"], 2, "--only: has no effect without --ops"),
        (["bench", "missing.ninfer", "--spec", "mtp", "--contexts", "9"], 2, "--contexts: has no effect with --spec"),
        (["bench", "--ops", "--json", "-"], 2, "--json: has no effect with --ops"),
        (["bench", "--ops", "--draft-tokens", "3"], 2, "--draft-tokens: has no effect with --ops"),
        (["bench", "--ops", "--kv-capacity", "64"], 2, "--kv-capacity: has no effect with --ops"),
        (["run", "missing.ninfer", "-p", "x", "--draft-tokens", "3"], 2, "draft_tokens: has no effect without"),
        (["run", "missing.ninfer", "-p", "x", "--no-cache", "--host-kv-bytes", "9"], 2, "host_kv_bytes: has no effect"),
        (["serve", "missing.ninfer", "--port", "0", "--draft-tokens", "3"], 2, "draft_tokens: has no effect without"),
    ],
)
def test_user_errors_are_one_line_without_a_traceback(arguments, code, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ninfer: ")
    assert says in err
    assert err.count("\n") == 1
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("command", ["run", "serve", "bench"])
def test_every_option_of_an_engine_reaches_it(command):
    kept = {"device_state_slots": 3, "host_state_slots": 4, "host_kv_bytes": 5, "retained_kv_tokens": 6,
            "max_continuations": 7, "max_shared_prefixes": 8}  # fmt: skip
    line = [command, "a.ninfer", "--device", "cpu", "--kv-dtype", "int8", "--kv-capacity", "640", "--spec", "mtp",
            "--draft-tokens", "2"]  # fmt: skip
    for name, value in kept.items():
        line += [f"--{name.replace('_', '-')}", str(value)]
    options = engine_options(parser().parse_args(line))
    assert (options.device, options.kv_dtype, options.kv_capacity) == ("cpu", "int8", 640)
    assert options.cache == CacheOptions(**kept)
    assert options.spec == SpecOptions("mtp", draft_tokens=2)
    assert engine_options(parser().parse_args([command, "a.ninfer"])) == EngineOptions()
    assert not engine_options(parser().parse_args([command, "a.ninfer", "--no-cache"])).cache.enabled


def test_wrong_options_are_refused_before_the_artifact_is_opened(capsys):
    assert main(["run", "missing.ninfer", "-p", "x", "--top-p", "2"]) == 2
    assert "top_p" in capsys.readouterr().err
    for arguments in (["run"], [], ["walk"], ["bench", "--synthetic", "tiny", "--batches", "x"]):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 2


def test_bench_measures_through_the_engine(capsys, tmp_path):
    file = tmp_path / "figures.json"
    arguments = [
        "bench",
        "--synthetic",
        "tiny",
        "--batches",
        "1,2",
        "--tokens",
        "6",
        "--prompt",
        "70",
        "--constraint",
        "--json",
        str(file),
    ]
    assert main(arguments) == 0
    table = capsys.readouterr().out
    assert "of bandwidth" in table
    assert "median    p90" in table
    figures = json.loads(file.read_text())
    assert [row["batch"] for row in figures["decode"]] == [1, 2]
    assert all(row["tokens_per_second"] > 0 and row["bytes_per_round"] > 0 for row in figures["decode"])
    for row in figures["decode"]:
        assert 0 < row["host_median_seconds"] <= row["host_p90_seconds"]
        assert row["host_seconds"] > 0
    assert [row["batch"] for row in figures["constraint"]] == [1, 2]
    assert all(row["ratio"] > 0 and row["mask_seconds"] > 0 for row in figures["constraint"])
    assert figures["prefill"]["tokens_per_second"] > 0
    assert figures["gap_seconds"]["longest"] >= figures["gap_seconds"]["median"] > 0


def test_the_console_script_runs():
    done = subprocess.run(
        [sys.executable, "-m", "ninfer.gateway.cli", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("ninfer 0.")
