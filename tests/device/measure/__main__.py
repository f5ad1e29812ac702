"""Measure a GPU: ``python tests/device/measure [--out FOLDER] [--only STAGE,...] [--seconds N]``.

A stage is an entry of ``STAGES`` in any module of this folder. Each runs in a process of its own within a limit of its
own, so one that fails, hangs or faults says why and costs no other. What came out is printed last, as one table; the
folder keeps it as ``results.json``, and as ``log.txt`` what the stages said.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).resolve().parent
TESTS = HERE.parents[1]
sys.path[:1] = [str(TESTS), str(TESTS.parent / "src")]  # instead of this folder: its modules are named device.measure.x

from device.measure.stage import Rows, Stage, environment  # noqa: E402

WARM = "from ninfer._cpu.kernel import compile_all; compile_all()"
"""What the stages that compare with the host wait for; it is done beside the others."""


def stages() -> dict[str, Stage]:
    modules = sorted(path.stem for path in HERE.glob("*.py") if path.stem not in ("__main__", "stage"))
    return {name: one for module in modules for name, one in import_module(f"device.measure.{module}").STAGES.items()}


def main() -> int:
    known = stages()
    parser = argparse.ArgumentParser("measure", description=__doc__, epilog=f"Stages: {', '.join(known)}")
    parser.add_argument("--out", type=Path, default=Path("measured"))
    parser.add_argument("--only", default=",".join(known), help="stages, in the order given")
    parser.add_argument("--seconds", type=float, default=240, help="for all stages together")
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if arguments.stage:
        return _one(arguments.stage, known[arguments.stage], out)
    wanted = [name.strip() for name in arguments.only.split(",")]
    if unknown := [name for name in wanted if name not in known]:
        parser.error(f"no stage {', '.join(unknown)}; there are {', '.join(known)}")
    return _all({name: known[name] for name in wanted}, out, time.monotonic() + arguments.seconds)


def _all(wanted: dict[str, Stage], out: Path, end: float) -> int:
    """Run the stages one after another; the number of those that failed."""
    table: Rows = []
    failed = 0
    warm = None
    if any(stage.compares for stage in wanted.values()):
        warm = subprocess.Popen([sys.executable, "-c", WARM], env=environment())
    with tempfile.TemporaryDirectory() as work:
        for name, stage in wanted.items():
            if stage.compares and warm:
                warm.wait()
            limit = min(stage.limit, end - time.monotonic())
            if limit < 5:
                table.append((name, "not run: no time left"))
                continue
            rows, ended = _run(name, Path(work), limit)
            failed += ended is not None
            table += rows
            print(f"{name}: {ended or 'done'}", flush=True)
            (out / "results.json").write_text(json.dumps(table, indent=1))
        logs = [f"==== {file.name}\n{file.read_text()}" for file in sorted(Path(work).glob("*.log"))]
        (out / "log.txt").write_text("\n".join(logs))
    if warm:
        warm.wait()
    print("\n".join(f"{what:<52} {figure}" for what, figure in table))
    return failed


def _one(name: str, stage: Stage, out: Path) -> int:
    """The stage's own process: its rows into a file, a line each, as they come."""
    from device import prebuilt

    prebuilt.use_named()
    try:
        with _file(name, out).open("w") as file:
            for row in stage.measure(out):
                print(json.dumps(row), file=file, flush=True)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def _run(name: str, work: Path, limit: float) -> tuple[Rows, str | None]:
    """Start a stage and wait for it: its rows, and how it failed, if it did."""
    command = [sys.executable, str(HERE), "--out", str(work), "--stage", name]
    begin = time.monotonic()
    log = work / f"{name.replace(' ', '_')}.log"
    with log.open("w") as file:
        child = subprocess.Popen(
            command, env=environment(), stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            child.wait(limit)
            ended = f"exit {child.returncode}" if child.returncode else None
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)  # and whatever the stage started
            child.wait()
            ended = f"stopped after {limit:.0f} s"
    rows: Rows = []
    if _file(name, work).exists():
        rows = [tuple(json.loads(line)) for line in _file(name, work).read_text().splitlines()]
    if ended:
        said = log.read_text().strip().splitlines()
        print(f"---- {name}: {ended}", *said[-30:], sep="\n", flush=True)
        rows.append((f"{name} FAILED", f"{ended}; {said[-1][:150] if said else ''}"))
    rows.append((f"stage {name}", f"{time.monotonic() - begin:.0f} s"))
    return rows, ended


def _file(name: str, work: Path) -> Path:
    return work / f"{name.replace(' ', '_')}.rows"


if __name__ == "__main__":
    sys.exit(main())
