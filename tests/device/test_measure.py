"""The measurements themselves, as far as they work without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from device.measure.context import copies
from device.measure.drafting import drafted
from device.measure.reuse import reuse
from device.measure.sanitizer import findings
from device.measure.widths import adaptive, constrained, widths

from ninfer._cpu.device import CpuDevice

REPORT = """\
========= COMPUTE-SANITIZER
========= Program hit CUDA_ERROR_NOT_FOUND (error 500) due to "named symbol not found" on CUDA API call to \
cuGetProcAddress_v2.
=========     Saved host backtrace up to driver entry point at error
========= Invalid __global__ write of size 4 bytes
=========     at sweep+0x80
=========     by thread (31,0,0) in block (0,0,0)
========= Error: Race reported between Write access at sweep+0x10
=========     and Read access at sweep+0x20 [8 hazards]
=========
========= ERROR SUMMARY: 2 errors
"""


def test_a_failed_driver_call_is_no_fault() -> None:
    faults, codes = findings(REPORT)
    assert faults == [
        "Invalid __global__ write of size 4 bytes",
        "Error: Race reported between Write access at sweep+0x10",
    ]
    assert codes == {"cuGetProcAddress_v2: CUDA_ERROR_NOT_FOUND": 1}


def test_a_stage_that_fails_costs_no_other(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).parent / "measure"), "--out", str(tmp_path)]
    done = subprocess.run([*command, "--only", "missing"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "no stage missing" in done.stderr
    hidden = [*command, "--only", "start,sampler"]
    environment = {"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(hidden, capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert "DeviceError" in done.stdout
    rows = dict(json.loads((tmp_path / "results.json").read_text()))
    assert "DeviceError" in rows["start FAILED"]
    assert "DeviceError" in rows["sampler FAILED"]
    assert "DeviceError" in (tmp_path / "log.txt").read_text()


def test_copies_are_measured_on_the_host_as_on_a_gpu() -> None:
    device = CpuDevice()
    rows = dict(copies(device, pages=4, layers=(1, 1), nbytes=16 << 20))
    device.close()
    assert "GB/s" in rows["d2h"]
    assert "GB/s" in rows["h2d"]


def test_reuse_is_measured_on_the_host_as_on_a_gpu() -> None:
    tiny = Path(__file__).parents[2] / "examples" / "tiny" / "tiny.ninfer"
    rows = dict(reuse("cpu", tiny, tokens=256, many=True))
    assert [what for what in rows if what.endswith("FAILED")] == []
    answers = [figure for what, figure in rows.items() if what.startswith("answer")]
    assert len(answers) == 3
    assert all(figure.startswith("24 tokens equal") for figure in answers)


def test_rounds_with_drafts_are_compared_with_plain_steps(tmp_path: Path) -> None:
    rows = dict(drafted("tiny", "q8", "dflash2", 3, device="cpu", batches="2", tokens=6)(tmp_path))
    assert list(rows) == [f"tiny q8, 2 rows: {what}" for what in ("plain step", "dflash2 round, 3 drafts", "drafting")]
    figure, _, head = rows["tiny q8, 2 rows: drafting"].partition(";")
    assert head == " from 512 tokens"
    added = float(figure.split()[-5])
    assert 0 < added < 5, "the companion is of the size of the model"


def test_a_reduced_head_is_said_and_reads_less(tmp_path: Path) -> None:
    reads = []
    for choice, tokens in (("off", 512), ("on", 256)):
        rows = dict(
            drafted("tiny", "q8", "mtp", 3, "--proposal-head", choice, device="cpu", batches="1", tokens=6)(tmp_path)
        )
        figure, _, head = rows["tiny q8, 1 rows: drafting"].partition(";")
        assert head == f" from {tokens} tokens"
        reads.append(float(figure.split()[-5]))
    assert 0 < reads[1] < reads[0]


def test_rounds_under_a_schema_are_compared_with_free_ones(tmp_path: Path) -> None:
    rows = dict(constrained("tiny", "q8", device="cpu", batches="1,2", tokens=6)(tmp_path))
    for B in (1, 2):
        ratio = float(rows[f"tiny q8, {B} rows, mtp round of 3 drafts, schema / free"].partition(";")[0])
        assert ratio > 0


def test_the_parts_of_a_round_are_timed_by_its_width(tmp_path: Path) -> None:
    rows = dict(widths("tiny", "q8", device="cpu", rows=2)(tmp_path))
    for B in (1, 2):
        for kind in ("forward", "finish", "fold"):
            assert f"tiny q8, {B} rows, {kind}, 8 columns" in rows
        assert float(rows[f"tiny q8, {B} rows, verification, 8 columns / 1"]) > 0


def test_adaptive_rounds_are_compared_with_none(tmp_path: Path) -> None:
    rows = dict(adaptive(device="cpu", batches=(2,), backends=("mtp",), tokens=8, repeats=1, large=False)(tmp_path))
    assert list(rows) == ["tiny, 2 rows, mtp fixed", "tiny, 2 rows, mtp adaptive"]
    for figure in rows.values():
        assert float(figure.split(" x without drafts")[0]) > 0
