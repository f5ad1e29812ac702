"""The benchmark of single operations: what it prints, and that it knows which kernels ran."""

from __future__ import annotations

import pytest
from fakes.cuda_driver import FakeDriver

from ninfer._cuda import bench
from ninfer._cuda.device import CudaDevice


@pytest.fixture
def quick(machine: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    monkeypatch.setattr(CudaDevice, "read_bandwidth", lambda device: 4e12)
    monkeypatch.setattr(bench, "COLD", 1)
    return machine


def test_cases_are_timed_and_their_memory_returned(quick: FakeDriver, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        bench.run(0, ["gdn B=1 W=1", "gdn fold of 48 layers B=1", "attention_prepare", "attention bf16 B=1 W=4"]) == 0
    )
    header, *rows = capsys.readouterr().out.splitlines()
    assert header == "cuda:0 (Fake GPU): read 4000 GB/s"
    assert [row.split()[0] for row in rows] == ["attention", "attention_prepare", "gdn", "gdn"]
    assert "attention_bf16." in rows[0]
    assert "gdn_one.gdn_one" in rows[2]
    assert "gdn_fold.gdn_fold" in rows[3]
    assert quick.used == 0


def test_another_kernel_than_the_wanted_one_is_a_failure(
    quick: FakeDriver, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "ATTENTION", "other")
    assert bench.run(0, ["attention_prepare"]) == 1
    assert "WRONG KERNEL" in capsys.readouterr().out


def test_wide_cases_are_compared_with_narrow_ones(quick: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    device = CudaDevice()
    b = bench.Bench(device, [])
    for T in (8, 64):
        b.case(f"copy T={T}", "rows", 10, lambda: [lambda: device.function("rows", "gather") and None])
    assert b.results[1]["of 8 columns"] == 1
    assert "1.00x of 8 columns" in bench.line(b.results[1])
    device.close()
