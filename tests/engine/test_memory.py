"""What an engine occupies: only selected components, no more than planned, and nothing once it is closed."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest

import ninfer
from ninfer.artifact import write_artifact
from ninfer.models.qwen3_5.geometries import GEOMETRIES
from ninfer.models.qwen3_5.synthetic import synthetic_source

PROCESS = psutil.Process()


def write(path: Path, config: dict[str, Any]) -> dict[str, int]:
    """Write an artifact of text and MTP weights. Returns the bytes of each component's tensors."""
    source = synthetic_source(config, "q8", components=("text", "mtp"))
    objects = source.directory.objects
    write_artifact(path, source.directory, lambda i: [(0, source.read(objects[i].offset, objects[i].nbytes))])
    sizes = {"text": 0, "mtp": 0}
    for component in sizes:
        used = {
            part.object
            for name, binding in source.directory.bindings.items()
            if name.startswith(f"{component}/")
            for part in binding.parts
        }
        sizes[component] = sum(objects[name].nbytes for name in used)
    return sizes


def resident_pages(name: str) -> int:
    """Bytes of a mapped file that are in this process's memory."""
    return sum(m.rss for m in PROCESS.memory_maps() if Path(m.path).name == name)


def test_only_the_language_model_becomes_resident(tmp_path):
    """The MTP layer is a third of the weights, and none of its pages are ever touched."""
    geometry = {**GEOMETRIES["tiny"], "hidden_size": 512, "intermediate_size": 8192, "num_hidden_layers": 2}
    sizes = write(tmp_path / "two.ninfer", {**geometry, "layer_types": geometry["layer_types"][-2:]})
    assert sizes["mtp"] > 8 << 20
    with ninfer.Engine(tmp_path / "two.ninfer", max_context=128, max_concurrency=1, progress=False) as engine:
        engine.generate(ninfer.TokenPrompt([1] * 100), max_tokens=4, ignore_eos=True)
        resident = resident_pages("two.ninfer")
    around = 1 << 20  # the system maps what lies around a page that is touched
    assert sizes["text"] - around < resident < sizes["text"] + around


def test_a_process_stays_within_weights_plan_and_200_megabytes(tmp_path):
    write(tmp_path / "model.ninfer", GEOMETRIES["tiny"])
    program = """
        import sys, ninfer, psutil
        with ninfer.Engine(sys.argv[1], max_context=2048, progress=False) as engine:
            engine.generate([ninfer.TokenPrompt([1] * 1500)] * 8, max_tokens=8, ignore_eos=True)
            memory = engine.stats().memory
            planned = sum(n for name, n in memory.items() if name.startswith("bytes."))
            print(psutil.Process().memory_info().rss, planned)
        """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "model.ninfer")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    resident, planned = map(int, done.stdout.split())
    assert resident <= (tmp_path / "model.ninfer").stat().st_size + planned + 200_000_000


LEAKS = """
import gc, os, sys, threading
import psutil
import ninfer
from ninfer.models.qwen3_5.synthetic import synthetic_source

with ninfer.Engine(synthetic_source("tiny", "q8"), max_context=64, max_concurrency=8, progress=False) as engine:

    def batch(count):
        for k in range(count):
            handle = engine.submit("hi", max_tokens=2, block=True)
            match k % 4:
                case 0:
                    handle.result()
                case 1:
                    list(handle)
                case 2:
                    handle.cancel()
            del handle
        engine.generate(["hi"] * 8, max_tokens=2)
        while engine.stats().outstanding:
            threading.Event().wait(0.005)
        engine.cache.clear()
        gc.collect()
        descriptors = len(os.listdir("/proc/self/fd"))
        return psutil.Process().memory_info().rss, descriptors, threading.active_count(), len(gc.get_objects())

    before, after = batch(200), batch(int(sys.argv[1]))
    used = engine.stats().memory
    print(*(b - a for a, b in zip(before, after)), used["pages.main.used"], used["state_slots.used"])
"""


@pytest.mark.parametrize("requests", [200, pytest.param(5000, marks=pytest.mark.full)])
def test_short_requests_leave_nothing_behind(requests):
    """In a process of its own: what other tests leave to the allocator is not this engine's."""
    done = subprocess.run([sys.executable, "-c", LEAKS, str(requests)], capture_output=True, text=True, check=True)
    resident, descriptors, threads, objects, pages, slots = map(int, done.stdout.split())
    assert resident < 8 << 20
    assert descriptors == threads == 0
    assert objects < 200
    assert pages == slots == 0


def test_the_collector_has_seen_what_was_opened() -> None:
    """A full collection is over when the first request comes, so that none falls into its rounds."""
    ballast = [[] for _ in gc.get_objects()]  # as much again, so that one is due
    before = gc.get_stats()[2]["collections"]
    with ninfer.Engine(synthetic_source("tiny", "q8"), max_context=256, progress=False) as engine:
        opened = gc.get_stats()[2]["collections"]
        assert opened > before
        engine.generate(ninfer.TokenPrompt([1, 2, 3]), max_tokens=100, ignore_eos=True)
        assert gc.get_stats()[2]["collections"] == opened
    del ballast
