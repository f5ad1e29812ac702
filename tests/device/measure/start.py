"""Opening a device, and the way from the start of a process to the first token."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .stage import Rows, Stage, environment, opened


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


FIRST_TOKEN = """
import importlib, sys, time
begin, file = float(sys.argv[1]), sys.argv[2]
def mark(name, since):
    print(f"{name}\t{time.time() - since:.2f} s", flush=True)
mark("python", begin)
from device import prebuilt
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
            done = subprocess.run(command, env=environment(), capture_output=True, text=True)
            rows += [
                (f"4b {attempt} start: {what}", took)
                for what, took in (line.split("\t") for line in done.stdout.splitlines() if "\t" in line)
            ]
            if done.returncode:
                rows.append((f"4b {attempt} start", done.stderr[-300:]))
    return rows


STAGES = {"start": Stage(30, start), "first token": Stage(60, first_token)}
