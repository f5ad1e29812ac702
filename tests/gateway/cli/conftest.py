"""The trained model that ships with the repository, and the command in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ninfer.gateway.cli import main

COMMAND = [sys.executable, "-m", "ninfer.gateway.cli"]


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """Tests that were started in the background ignore interrupts, and what they start would, too."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny():
    return str(Path(__file__).parents[3] / "examples" / "tiny" / "tiny.ninfer")


@pytest.fixture
def run(tiny, capsys):
    """``run("-p", "Hi")``: exit code, standard output and standard error of ``ninfer run`` on the trained model."""

    def call(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["run", tiny, "--temperature", "0", *arguments])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def start():
    """``start(arguments, **popen)``: the command as a process of its own."""
    running = []

    def call(*arguments: str, **options) -> subprocess.Popen:
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        options["env"] = os.environ | options.get("env", {})
        running.append(subprocess.Popen([*COMMAND, *arguments], **options))
        return running[-1]

    yield call
    for process in running:
        process.kill()
        process.wait()
