"""docs/cli.md lists every command and option there is, as the parsers describe them.

``python tests/gateway/cli/test_documentation.py`` writes the lists anew.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from ninfer.gateway.cli import EXIT_CODES, parser
from ninfer.gateway.cli.chat import HELP

PAGE = Path(__file__).parents[3] / "docs" / "cli.md"
HEADING = "## Every option\n"


def commands() -> dict[str, tuple[str, argparse.ArgumentParser]]:
    """What ``ninfer --help`` says of each command, and its parser."""
    (subparsers,) = (a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    helps = {choice.dest: choice.help for choice in subparsers._choices_actions}
    return {name: (helps[name], child) for name, child in subparsers.choices.items()}


def row(action: argparse.Action) -> str:
    value = action.metavar or (",".join(map(str, action.choices)) if action.choices else action.dest.upper())
    takes = f" {value}" if action.nargs != 0 else ""
    names = [f"`{name}{takes}`" for name in action.option_strings] or [f"`{value}`"]
    return f"| {', '.join(names)} | {action.help} |"


def reference() -> str:
    sections = []
    for name, (summary, child) in commands().items():
        sections.append(f"\n### ninfer {name}\n\n{summary[0].upper()}{summary[1:]}.\n\n| option | |\n|---|---|\n")
        sections.append("".join(row(action) + "\n" for action in child._actions if action.dest != "help"))
    return HEADING + "".join(sections)


def test_the_page_has_every_option():
    _, lists = PAGE.read_text("utf-8").split(HEADING)
    assert HEADING + lists == reference(), f"run {Path(__file__).name}"


def test_the_page_has_every_exit_code_and_line_of_a_chat():
    page = PAGE.read_text("utf-8")
    for code in re.findall(r"^  (\d+) ", EXIT_CODES, re.MULTILINE):
        assert f"| {code} |" in page
    for command in re.findall(r"/\w+", HELP):
        assert f"`{command}" in page


@pytest.mark.parametrize("name", commands())
def test_every_option_says_what_it_is(name, capsys):
    summary, child = commands()[name]
    assert summary
    for action in child._actions:
        assert action.help, action
        assert action.help == action.help.strip(), action
    with pytest.raises(SystemExit) as end:
        parser().parse_args([name, "--help"])
    assert end.value.code == 0
    assert "usage: ninfer " + name in capsys.readouterr().out


if __name__ == "__main__":
    before, _ = PAGE.read_text("utf-8").split(HEADING)
    PAGE.write_text(before + reference(), "utf-8")
