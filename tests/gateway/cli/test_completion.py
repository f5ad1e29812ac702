"""Completion scripts, tried in the shells that are there."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from ninfer.gateway.cli import main
from ninfer.gateway.cli.completion import SHELLS


@pytest.fixture
def script(capsys, tmp_path):
    def write(shell: str):
        assert main(["completion", shell]) == 0
        file = tmp_path / f"ninfer.{shell}"
        file.write_text(capsys.readouterr().out)
        return file

    return write


@pytest.mark.parametrize("shell", SHELLS)
def test_the_shell_reads_the_script(shell, script):
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    subprocess.run([shell, "-n", script(shell)], check=True)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("ninfer ru", {"run"}),
        ("ninfer run --json-", {"--json-object", "--json-schema-file"}),
        ("ninfer completion ", {"bash", "zsh", "fish"}),
        ("ninfer run mod", {"model.ninfer"}),
        ("ninfer run --messages c", {"chat.json"}),
        ("ninfer run --system c", set()),
    ],
)
def test_bash_completes(line, found, script, tmp_path):
    for name in ("model.ninfer", "chat.json"):
        (tmp_path / name).touch()
    words = line.split(" ")
    code = f"""
        source {script("bash")}
        COMP_WORDS=({" ".join(words[:-1])} "{words[-1]}"); COMP_CWORD={len(words) - 1}
        COMP_LINE="{line}"; COMP_POINT={len(line)}; COMPREPLY=()
        $(complete -p ninfer | sed 's/.*-F \\([^ ]*\\).*/\\1/') ninfer "{words[-1]}" "{words[-2]}" 2>/dev/null
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == found
