"""The tests of the Ops under compute-sanitizer: accesses out of bounds, races in shared memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from .stage import ROOT, TESTS, Row, Stage

LIMIT = 55
API = re.compile(r"Program hit (?P<error>\w+).* on CUDA API call to (?P<call>\w+)")


def findings(report: str) -> tuple[list[str], Counter[str]]:
    """The faults of a report, and the return codes of driver calls, which it counts among its errors.

    A finding starts with an unindented line; what belongs to it is indented. A driver call that fails is one too, also
    where a library only asks whether an entry point or an attribute exists: those touch no memory.
    """
    faults, codes = [], Counter[str]()
    for line in report.splitlines():
        text = line.removeprefix("========= ")
        if text == line or text.startswith((" ", "COMPUTE-SANITIZER")) or "SUMMARY" in text:
            continue
        if found := API.match(text):
            codes[f"{found['call']}: {found['error']}"] += 1
        elif text.strip():
            faults.append(text)
    return faults, codes


def sanitizer(out: Path) -> Iterator[Row]:
    """All files and both tools at once, a process each; what does not end in time says how far it came."""
    runs = []
    for tool in ("memcheck", "racecheck"):
        for path in sorted((TESTS / "kernels").glob("test_*.py")):
            if path.stem == "test_model":
                continue
            name = f"{tool} {path.stem.removeprefix('test_')}"
            report, log = out / f"{name.replace(' ', '_')}.report", out / f"{name.replace(' ', '_')}.log"
            command = ["compute-sanitizer", "--tool", tool, "--log-file", str(report), sys.executable, "-m", "pytest"]
            command += ["-v", "--tb=line", "--timeout", "0", "-p", "no:cacheprovider", str(path)]
            environment = os.environ | {"NINFER_TEST_DEVICE": "cuda:0"}
            with log.open("w") as file:
                child = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
            runs.append((name, child, report, log))
    end = time.monotonic() + LIMIT - 8
    codes = Counter[str]()
    for name, child, report, log in runs:
        try:
            ended = f"exit {child.wait(max(0.0, end - time.monotonic()))}"
        except subprocess.TimeoutExpired:
            child.kill()
            ended = "stopped"
        passed = log.read_text().count(" PASSED")
        if not report.exists():
            yield name, f"{passed} passed, {ended}, no report"
            continue
        faults, returned = findings(report.read_text())
        codes |= returned
        yield name, f"{passed} passed, {ended}, {len(faults)} faults, {returned.total()} failed driver calls"
        for fault, n in Counter(faults).most_common(5):
            yield f"{name}: fault", f"{n} x {fault[:150]}"
    for call, n in codes.most_common():
        yield "failed driver calls, most a process", f"{n} x {call}"


STAGES = {"sanitizer": Stage(LIMIT, sanitizer)}
