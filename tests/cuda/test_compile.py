"""The cache of machine code, with and without a compiler, and every kernel for every architecture."""

from __future__ import annotations

import os
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from oracles.cubins import needs

from ninfer import env
from ninfer._cuda import compile as compiler
from ninfer._cuda import driver, numba_kernels, sampling
from ninfer._cuda.buffers import CudaBuffer
from ninfer._cuda.device import CudaDevice
from ninfer.errors import DeviceError
from ninfer.ops import Drafts, SampleOut, SampleRows

pytestmark = pytest.mark.usefixtures("cache")
ARCHITECTURES = ("sm_80", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120")


def source(name: str, built: list[str], text: str = "text", version: str = "1") -> compiler.Source:
    def build(arch: str) -> bytes:
        built.append(f"{name} {arch}")
        return f"{name} {text} {arch}".encode()

    return compiler.Source(name, text, build, lambda: version)


def test_a_second_start_compiles_nothing() -> None:
    built: list[str] = []
    for _ in range(2):
        seen: list[tuple[int, int, str]] = []
        sources = [source(name, built) for name in ("a", "b", "c")]
        cubins = compiler.compile_all(sources, "sm_80", lambda *step, seen=seen: seen.append(step))
        assert [cubin.read_bytes() for cubin in cubins] == [b"a text sm_80", b"b text sm_80", b"c text sm_80"]
        assert seen == [(1, 3, "a"), (2, 3, "b"), (3, 3, "c")]
    assert sorted(built) == ["a sm_80", "b sm_80", "c sm_80"]


def test_text_architecture_and_compiler_are_told_apart() -> None:
    built: list[str] = []
    compiler.cubin(source("a", built), "sm_80")
    assert compiler.cubin(source("a", built, text="other"), "sm_80").read_bytes() == b"a other sm_80"
    assert compiler.cubin(source("a", built), "sm_90").read_bytes() == b"a text sm_90"
    compiler.cubin(source("a", built, version="2"), "sm_80")
    assert len(built) == 4


def test_a_damaged_file_is_compiled_again(cache: Path) -> None:
    built: list[str] = []
    compiler.cubin(source("a", built), "sm_80")
    (file,) = (cache / "cuda").glob("*.cubin")
    for damage in (file.read_bytes()[:-1], b"", b"x" * 100):
        file.write_bytes(damage)
        assert compiler.cubin(source("a", built), "sm_80").read_bytes() == b"a text sm_80"
    assert len(built) == 4


def test_a_folder_that_cannot_be_used_only_costs_time(cache: Path) -> None:
    (cache / "cuda").write_text("in the way")
    built: list[str] = []
    for _ in range(2):
        assert compiler.cubin(source("a", built), "sm_80").read_bytes() == b"a text sm_80"
    assert len(built) == 2


def test_a_failed_compilation_leaves_no_file(cache: Path) -> None:
    def fail(arch: str) -> bytes:
        raise DeviceError("broken.cu: error")

    broken = compiler.Source("broken", "", fail, lambda: "1")
    with pytest.raises(DeviceError, match="broken"):
        compiler.compile_all([source("a", []), broken], "sm_80")
    assert [file.name.split("-")[0] for file in (cache / "cuda").glob("*.cubin")] == ["a"]


def test_writers_do_not_disturb_each_other() -> None:
    threads = [threading.Thread(target=lambda: compiler.cubin(source("a", []), "sm_80")) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    built: list[str] = []
    assert compiler.cubin(source("a", built), "sm_80").read_bytes() == b"a text sm_80"
    assert built == []


def test_code_that_is_used_no_more_goes(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process left half written too, but nothing else in the folder."""
    built: list[str] = []
    code = {name: compiler.cubin(source(name, built), "sm_90a") for name in ("old", "used")}
    half = code["old"].with_name(f"{code['old'].name}.q_3x.tmp")
    others = [cache / "cuda" / name for name in ("notes.cubin", "old-sm_90a.cubin", f"{code['old'].stem}.txt")]
    for path in (half, *others):
        path.write_bytes(b"x")
    for path in (cache / "cuda").iterdir():
        os.utime(path, (time.time() - 90 * 24 * 3600,) * 2)
    monkeypatch.setattr("ninfer.kept.BOUND", 0)
    compiler.cubin(source("used", built), "sm_90a")
    assert code["old"].exists()  # nothing was compiled
    new = compiler.cubin(source("new", built), "sm_90a")
    here = {path for file in (code["used"], new) for path in (file, file.with_suffix(".sum"))}
    assert set((cache / "cuda").iterdir()) == {*others, *here}
    assert built == ["old sm_90a", "used sm_90a", "new sm_90a"]


def test_a_disk_that_is_full_is_not_filled_further(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*paths: object) -> None:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert compiler.cubin(source("a", []), "sm_80").read_bytes() == b"a text sm_80"
    assert list((cache / "cuda").iterdir()) == []


def test_architectures() -> None:
    assert [compiler.architecture(c) for c in ((8, 0), (8, 9), (9, 0), (12, 0))] == [
        "sm_80",
        "sm_89",
        "sm_90a",
        "sm_120",
    ]


def test_without_a_gpu_the_missing_piece_is_named() -> None:
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("this machine has a GPU")
    with pytest.raises(DeviceError, match=r"no NVIDIA driver|install ninfer\[cuda12\]"):
        driver.check_machine(lambda: 13)


@pytest.fixture
def compilers() -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="no CUDA compiler: pip install ninfer[cuda13]")
    pytest.importorskip("numba_cuda", reason="no Numba CUDA target: pip install ninfer[cuda13]")


@pytest.mark.usefixtures("compilers")
def test_diagnostics_of_a_kernel_that_does_not_compile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broken.cu").write_text('#include "part.cuh"\nextern "C" __global__ void k() { int x = ; }')
    (tmp_path / "part.cuh").write_text("#include <cuda_bf16.h>\n")
    monkeypatch.setattr(compiler, "KERNELS", tmp_path)
    with pytest.raises(DeviceError, match=r"broken\.cu\(2\): error"):
        compiler.cubin(compiler.cuda_source("broken"), "sm_80")
    (tmp_path / "whole.cu").write_text(
        '#include "part.cuh"\nextern "C" __global__ void k(__nv_bfloat16* x) { *x = N; }'
    )
    code = compiler.cubin(compiler.cuda_source("whole", ("N=3",)), "sm_80").read_bytes()
    assert code[:4] == b"\x7fELF"
    assert compiler.cuda_source("whole", ("N=3",)).path("sm_80") != compiler.cuda_source("whole", ("N=4",)).path(
        "sm_80"
    )


@pytest.mark.usefixtures("compilers")
def test_a_gpu_that_the_compiler_does_not_know() -> None:
    with pytest.raises(DeviceError, match=r"nvrtc 1\d\.\d compiles for sm_\d+ to sm_\d+, not sm_990: install ninfer"):
        compiler.cubin(compiler.cuda_source("sweep"), "sm_990")


def test_what_a_discarded_branch_would_swallow() -> None:
    """NVRTC 12.3 ends an ``if constexpr`` that is not taken behind a pragma too late: without braces, what follows the
    loop is lost with it."""
    bare = re.compile(r"if constexpr [^\n;{]*\n *#pragma")
    assert bare.search("if constexpr (a)\n    #pragma unroll")
    assert [path.name for path in compiler.KERNELS.glob("*.cu*") if bare.search(path.read_text())] == []


ONCE, EVERY = "sm_90a", tuple(arch for arch in ARCHITECTURES if arch != "sm_90a")
KEPT = env.cache_dir()


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """The machine's own folder: what was compiled of the same text, by the same compiler, need not be again."""
    monkeypatch.setenv("NINFER_CACHE_DIR", str(KEPT))


REGISTERS, SHARED = 65536, 48 << 10
"""Of a multiprocessor, and of what a block may take of its shared memory without asking; of every architecture."""


@pytest.mark.usefixtures("compilers", "kept")
@pytest.mark.parametrize("arch", [ONCE, *(pytest.param(arch, marks=pytest.mark.full) for arch in EVERY)])
@pytest.mark.parametrize("name", [source.name for source in numba_kernels.sources()])
def test_numba_kernels_compile_and_fit(name: str, arch: str, blocks: dict[str, int]) -> None:
    """They say no bounds of their launch, so only this says that one is possible."""
    (kernel,) = (source for source in numba_kernels.sources() if source.name == name)
    found = needs(compiler.cubin(kernel, arch).read_bytes())
    assert list(found) == [name]
    assert 0 < found[name].registers_of(blocks[name]) <= REGISTERS
    assert found[name].shared <= SHARED


@pytest.mark.usefixtures("compilers", "kept")
@pytest.mark.parametrize("arch", [ONCE, *(pytest.param(arch, marks=pytest.mark.full) for arch in EVERY)])
@pytest.mark.parametrize("name", compiler.kernel_names())
def test_kernels_compile_and_fit(name: str, arch: str) -> None:
    found = needs(compiler.cubin(compiler.cuda_source(name), arch).read_bytes())
    assert found
    for kernel, need in found.items():
        assert need.threads, kernel
        assert 0 < need.registers_of(need.threads) <= REGISTERS, kernel
        assert need.shared <= SHARED, kernel


@pytest.fixture(scope="module")
def blocks() -> dict[str, int]:
    """Threads of a block of every Numba kernel, from their launches."""
    seen: dict[str, int] = {}

    def launch(kernel: str, grid: object, block: int, *args: object) -> None:
        seen[kernel] = max(block, seen.get(kernel, 0))

    def buffer(*shape: int) -> CudaBuffer:
        return CudaBuffer(0, shape, "i32")

    device: Any = SimpleNamespace(function=lambda module, symbol: symbol, launch=launch, _rows_of=lambda planes: None)
    any_, tokens = buffer(1), buffer(1, 2)
    sampler = sampling.Sampler(device)
    rows = SampleRows(1, 2, any_, any_, any_, any_, any_, everything=True)
    out = SampleOut(any_, any_, any_, any_)
    sampler.accept(out, any_, buffer(2, 512), any_, any_, rows, Drafts(any_, tokens), buffer(1 << 20))
    sampler.count(buffer(1, 512), any_, tokens, any_)
    CudaDevice.copy_rows(device, [tokens], 0, 0)
    assert sorted(seen) == sorted(source.name for source in numba_kernels.sources())
    return seen
