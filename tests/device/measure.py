"""Measure a GPU: ``python tests/device/measure.py [--out FOLDER] [--only STAGE,...] [--seconds N]``.

Every stage runs in a process of its own with its own time limit, so one that hangs or faults costs no other. What was
checked and timed is printed last, as one table. The folder keeps it as ``report.json``, and ``log.txt`` what was said.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ARTIFACT = ROOT / "examples" / "tiny" / "tiny.ninfer"
Rows = list[tuple[str, str]]

LIMITS = {
    "start": 30, "first token": 60, "model 4b": 40, "model 27b": 45, "model 0.8b": 25, "model 27b long": 60,
    "model 27b fp8": 40, "model 35b": 40, "tests": 60, "sampler": 30, "ops": 60, "kernels": 70, "sanitizer": 55,
    "context": 30, "reuse": 45,
}  # fmt: skip
"""Seconds of each stage."""


@contextmanager
def opened() -> Iterator[Any]:
    """A device for one stage."""
    from ninfer._cuda.device import CudaDevice

    device = CudaDevice(0)
    try:
        yield device
    finally:
        device.close()


def seconds(device: Any, work: Callable[[], object], repeat: int = 20, rounds: int = 5) -> float:
    """Median over ``rounds`` of the mean of ``repeat`` submissions."""
    work()
    return median(device.seconds(lambda: [work() for _ in range(repeat)]) / repeat for _ in range(rounds))


def start(out: Path) -> Rows:
    """How long a device takes to open, what it can read, and how fast weights arrive."""
    import numpy as np

    from ninfer._cuda.products import pack

    rows: Rows = []
    for name in ("first start", "second start"):
        begin = time.perf_counter()
        with opened() as device:
            rows.append((name, f"{time.perf_counter() - begin:.2f} s"))
            if name == "first start":
                continue
            memory = device.memory()
            rows.append((device.name, f"{memory.free / 1e9:.1f} of {memory.total / 1e9:.1f} GB free"))
            rows.append(("read bandwidth", f"{device.read_bandwidth() / 1e12:.3f} TB/s"))
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "weights"
                np.tile(np.random.default_rng(0).integers(0, 256, 64 << 20, dtype=np.uint8), 32).tofile(file)
                for attempt in ("first", "second"):
                    mapped = np.memmap(file, np.uint8, "r")
                    begin = time.perf_counter()
                    device.weights(np.asarray(mapped))
                    event = device.event()
                    event.record()
                    event.wait()
                    rate = mapped.nbytes / (time.perf_counter() - begin)
                    rows.append((f"weights from the page cache, {attempt}", f"{rate / 1e9:.2f} GB/s"))
            empty = device.capture(lambda: None)
            begin = time.perf_counter()
            for _ in range(1000):
                empty.launch()
            rows.append(("host time of a graph launch", f"{1e3 * (time.perf_counter() - begin):.1f} us"))
            buffer = device.arena(1 << 20).buffer(0, (1 << 16,), "u64")
            sweep, words = device.function("sweep", "sweep"), pack(buffer, buffer, 1, 1)
            begin = time.perf_counter()
            for _ in range(1000):
                device.launch(sweep, 1, 512, words)
            rows.append(("host time of a kernel launch", f"{1e3 * (time.perf_counter() - begin):.1f} us"))
    return rows


def sampler(out: Path) -> Rows:
    """Seconds of sampling and verification at the size of a real vocabulary, replayed from a graph."""
    import numpy as np
    from ops.harness import Lab

    from ninfer.ops import Drafts, SampleOut, SampleRows

    V, rows = 248_320, []
    plain = [0.7, 0.9, 0.0, 0.0, 0.0]
    shapes = [
        ("greedy", [0.0, 1.0, 0.0, 0.0, 0.0], 20, -1, False), ("top-k 20", plain, 20, -1, False),
        ("top-k 64, mask, penalties", [0.7, 0.9, 0.0, 1.0, 0.1], 64, -1, True),
        ("top-k 20, 20 log-probabilities", plain, 20, 20, False),
        ("whole vocabulary, top-p 0.9", plain, 0, -1, False),
        ("whole vocabulary, flat", [4.0, 1.0, 0.0, 0.0, 0.0], 0, -1, False),
    ]  # fmt: skip
    rng = np.random.default_rng(0)
    with opened() as device:
        lab = Lab(device)
        for B, W in ((1, 1), (8, 1), (8, 8), (8, 16)):
            logits = lab.put(rng.normal(0, 2, (B * W, V)))
            masks = lab.put(rng.integers(0, 2**32, (B, W, V // 32)), "u32")
            counts = lab.put(rng.integers(0, 2, (B, V)), "i32")
            scratch = lab.scratch(lab.ops.sample_scratch(B * W, V))
            drafts = Drafts(lab.put([max(W - 1, 0)] * B, "i32"), lab.put(np.ones((B, max(W - 1, 1))), "i32"))
            for name, real, top_k, alternatives, masked in shapes if W == 1 else shapes[1:3]:
                inputs = SampleRows(
                    B, W, lab.put([real] * B), lab.put([[top_k, alternatives, masked, b] for b in range(B)], "i32"),
                    lab.put(rng.integers(0, 2**32, (B, 2)), "u32"), lab.put(rng.integers(0, 99, (B, W)), "i64"),
                    lab.put(np.ones((B, W)), "i32"),
                )  # fmt: skip
                outputs = SampleOut(
                    lab.empty(B, W, dtype="i32"), lab.empty(B, W), lab.empty(B, W, 20, dtype="i32"),
                    lab.empty(B, W, 20),
                )  # fmt: skip
                accepted = lab.empty(B, dtype="i32")

                shared = (logits, masks, counts, inputs)
                work = partial(lab.ops.sample, outputs, *shared, scratch)
                if W > 1:
                    work = partial(lab.ops.accept, outputs, accepted, *shared, drafts, scratch)
                graph = device.capture(work)
                spent = seconds(device, graph.launch, 5, 3)
                rows.append((f"sampler, {B} x {W}, {name}", f"{1e6 * spent:.1f} us"))
                graph.close()
    return rows


def ops(out: Path) -> Rows:
    """Seconds of every Op at the sizes of real models."""
    from ninfer._cuda.bench import Bench

    with opened() as device:
        return [
            (row["case"], f"{row['us']:.1f} us, {row['GB/s']:.0f} GB/s, {row['ratio']:.2f} of reads")
            for row in Bench(device, ()).measure()
        ]


def pytest(out: Path, *paths: Path) -> Rows:
    """Run tests on the GPU; what they came to, and why the first ones failed."""
    name = paths[0].stem
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "--timeout", "60", "-p", "no:cacheprovider"]
    environment = os.environ | {"NINFER_TEST_DEVICE": "cuda:0"}
    done = subprocess.run([*command, *map(str, paths)], cwd=ROOT, env=environment, capture_output=True, text=True)
    (out / f"{name}.log").write_text(done.stdout + done.stderr)
    tail = done.stdout.strip().splitlines()
    failed = [line[:150] for line in tail if line.startswith(("FAILED", "ERROR", "E  "))][:12]
    return [
        (name, tail[-1] if tail else done.stderr[-300:]),
        *((f"{name} {i}", line) for i, line in enumerate(failed)),
    ]


def kernels(out: Path) -> Rows:
    """Every Op against float64, a process a file: a fault in one leaves the others."""
    return [row for path in sorted((HERE.parent / "kernels").glob("test_*.py")) for row in pytest(out, path)]


def sanitizer(out: Path) -> Rows:
    """The tests of the Ops under compute-sanitizer: accesses out of bounds (memcheck), races in shared memory
    (racecheck). All at once, a process each; what does not end in time says how far it came."""
    runs = []
    for tool in ("memcheck", "racecheck"):
        for path in sorted((HERE.parent / "kernels").glob("test_*.py")):
            if path.stem == "test_model":
                continue
            name = f"{tool} {path.stem.removeprefix('test_')}"
            report, log = out / f"{name.replace(' ', '_')}.report", out / f"{name.replace(' ', '_')}.log"
            command = ["compute-sanitizer", "--tool", tool, "--log-file", str(report)]
            command += ["--report-api-errors", "no"] if tool == "memcheck" else []
            command += [sys.executable, "-m", "pytest"]
            command += ["-v", "--tb=line", "--timeout", "0", "-p", "no:cacheprovider", str(path)]
            environment = os.environ | {"NINFER_TEST_DEVICE": "cuda:0"}
            with log.open("w") as file:
                child = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
            runs.append((name, child, report, log))
    end = time.monotonic() + LIMITS["sanitizer"] - 8
    rows: Rows = []
    for name, child, report, log in runs:
        try:
            ended = f"exit {child.wait(max(0.0, end - time.monotonic()))}"
        except subprocess.TimeoutExpired:
            child.kill()
            ended = "stopped"
        passed = log.read_text().count(" PASSED")
        found = report.read_text() if report.exists() else ""
        errors = found.count("========= Invalid") + found.count("========= Error: Race")
        summary = [line.removeprefix("========= ") for line in found.splitlines() if "SUMMARY" in line]
        rows.append((name, f"{passed} passed, {ended}, {errors} reported; {' '.join(summary)}"))
        if errors:
            rows += [(name, line[:150]) for line in found.splitlines()[:12]]
    return rows


def context(out: Path) -> Rows:
    """Copies between the device's pages and host memory."""
    from measure_context import copies

    with opened() as device:
        return copies(device)


def reuse(out: Path) -> Rows:
    """The time to the first token of a prompt that is known."""
    from measure_context import reuse as measure

    from ninfer.models.qwen3_5.synthetic import synthetic_source

    return measure("cuda:0", synthetic_source("4b", "bf16"))


def tests(out: Path) -> Rows:
    """The tests of this folder."""
    return pytest(out, HERE / "gpu")


def model(geometry: str, recipe: str, *options: str) -> Callable[[Path], Rows]:
    """``ninfer bench`` of random weights."""

    def measure(out: Path) -> Rows:
        from ninfer.gateway.cli import main as ninfer

        file = out / "bench.json"
        fixed = ("--device", "cuda:0", "--prompt", "8192", "--tokens", "96", "--json", str(file))
        if ninfer(["bench", "--synthetic", geometry, "--recipe", recipe, *fixed, *options]):
            return []
        figures = json.loads(file.read_text())
        rows = [("start", f"{figures['start_seconds']:.1f} s")]
        rows.append(("prefill 8192", f"{figures['prefill']['tokens_per_second']:,.0f} tok/s"))
        for row in figures["decode"]:
            what = f"decode, {row['batch']} rows, {row['context']} tokens"
            speed = f"{row['tokens_per_second']:,.0f} tok/s, {1e3 * row['round_seconds']:.2f} ms"
            host = f"host {1e6 * row['host_seconds']:.0f} us"
            rows.append((what, f"{speed}, {row['bandwidth_ratio']:.0%} of bandwidth, {host}"))
        return [(f"{geometry} {recipe}: {name}", figure) for name, figure in rows]

    return measure


FIRST_TOKEN = """
import importlib, sys, time
begin, file = float(sys.argv[1]), sys.argv[2]
def mark(name, since):
    print(f"{name}\t{time.time() - since:.2f} s", flush=True)
mark("python", begin)
import prebuilt
prebuilt.use_named()
now = time.time()
import ninfer
mark("import", now)
def timed(module, name):
    module = importlib.import_module(module)
    work = getattr(module, name)
    def call(*arguments, **options):
        now = time.time()
        try:
            return work(*arguments, **options)
        finally:
            mark(name, now)
    setattr(module, name, call)
for place in (("runtime.instance", "_frontend"), ("runtime.devices", "open_device"), ("models.qwen3_5.bind", "bind"),
              ("program", "open_program")):
    timed("ninfer." + place[0], place[1])
with ninfer.Engine(file, device="cuda:0", progress=False) as engine:
    mark("engine open", begin)
    engine.generate(ninfer.TokenPrompt(list(range(1, 30))), max_tokens=1)
    mark("first token", begin)
    now = time.time()
mark("close", now)
"""


def first_token(out: Path) -> Rows:
    """From the start of a process to the first token of 4B bf16, its weights in the page cache; where the time goes."""
    from ninfer.artifact.writer import write_artifact
    from ninfer.models.qwen3_5.synthetic import synthetic_source

    source = synthetic_source("4b", "bf16", alike=True)
    objects = source.directory.objects
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "m.ninfer"
        write_artifact(file, source.directory, lambda i: [(0, source.view(objects[i].offset, objects[i].nbytes))])
        rows: Rows = []
        for attempt in ("first", "second"):
            command = [sys.executable, "-c", FIRST_TOKEN, str(time.time()), str(file)]
            done = subprocess.run(command, env=_environment(), capture_output=True, text=True)
            rows += [
                (f"4b {attempt} start: {what}", took)
                for what, took in (line.split("\t") for line in done.stdout.splitlines() if "\t" in line)
            ]
            if done.returncode:
                rows.append((f"4b {attempt} start", done.stderr[-300:]))
    return rows


STAGES: dict[str, Callable[[Path], Rows]] = {
    "start": start,
    "first token": first_token,
    "model 4b": model("4b", "bf16", "--batches", "1,8", "--contexts", "1024"),
    "model 27b": model("27b", "q4-mixed", "--batches", "1,8", "--contexts", "1024"),
    "model 0.8b": model("0.8b", "bf16", "--batches", "1,8", "--contexts", "1024"),
    "model 27b long": model("27b", "q4-mixed", "--batches", "1", "--contexts", "131072"),
    "model 27b fp8": model("27b", "fp8", "--batches", "1,8", "--contexts", "1024"),
    "model 35b": model("35b-a3b", "q4-mixed", "--batches", "1,8", "--contexts", "1024"),
    "tests": tests,
    "sampler": sampler,
    "ops": ops,
    "kernels": kernels,
    "sanitizer": sanitizer,
    "context": context,
    "reuse": reuse,
}
WARM = "from ninfer._cpu.kernel import compile_all; compile_all()"
"""What the comparisons with the host wait for; it is done beside the first stages."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("measured"))
    parser.add_argument("--only", default=",".join(STAGES))
    parser.add_argument("--seconds", type=float, default=240, help="for all stages together")
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.stage:
        import prebuilt

        prebuilt.use_named()
        rows = STAGES[arguments.stage](arguments.out)
        (arguments.out / f"{arguments.stage.replace(' ', '_')}.json").write_text(json.dumps(rows))
        return
    end = time.monotonic() + arguments.seconds
    table: Rows = []
    work = Path(tempfile.mkdtemp())
    warm = subprocess.Popen([sys.executable, "-c", WARM], env=_environment())
    for stage in arguments.only.split(","):
        if stage == "tests":
            warm.wait()
        limit = min(LIMITS[stage], end - time.monotonic())
        if limit < 5:
            table.append((stage, "not run: no time left"))
            continue
        table += _run(stage, work, limit)
        logs = [f"==== {file.name}\n{file.read_text()}" for file in sorted(work.glob("*.log"))]
        (arguments.out / "log.txt").write_text("\n".join(logs))
        (arguments.out / "report.json").write_text(json.dumps(table, indent=1))
    warm.wait()
    print("\n".join(f"{what:<52} {figure}" for what, figure in table))


def _environment() -> dict[str, str]:
    paths = (str(ROOT / "src"), str(ROOT / "tests"), str(HERE), os.environ.get("PYTHONPATH", ""))
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def _run(stage: str, out: Path, limit: float) -> Rows:
    """Run one stage in its own process; its rows, or what went wrong."""
    result = out / f"{stage.replace(' ', '_')}.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, str(Path(__file__).resolve()), "--out", str(out.resolve()), "--stage", stage]
    begin = time.monotonic()
    child = subprocess.Popen(
        command, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        printed, error = child.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)  # and whatever the stage started
        printed, error = child.communicate()
        error += f"\nstopped after {limit:.0f} s"
    error = error.strip()
    (out / f"{stage.replace(' ', '_')}.log").write_text(f"{printed}\n{error}")
    rows: Rows = [(what, figure) for what, figure in json.loads(result.read_text())] if result.exists() else []
    if not rows:
        rows = [(stage, line[:180]) for line in (*printed.splitlines(), *error.splitlines()[-6:])]
    return [*rows, (f"stage {stage}", f"{time.monotonic() - begin:.0f} s")]


if __name__ == "__main__":
    main()
