"""Which device an engine takes, and what a whole engine asks of the driver."""

from __future__ import annotations

import logging

import pytest
from fakes.cuda_driver import ILLEGAL_ADDRESS, FakeDriver

import ninfer
from ninfer._cuda import driver as driver_module
from ninfer.errors import DeviceError, InvalidRequest
from ninfer.models.qwen3_5.config import FULL
from ninfer.models.qwen3_5.geometries import GEOMETRIES
from ninfer.models.qwen3_5.synthetic import synthetic_source
from ninfer.options import EngineOptions
from ninfer.program import KVCodec
from ninfer.program.recordings import Recordings
from ninfer.runtime.devices import codec, open_device


def missing() -> None:
    raise DeviceError("no NVIDIA driver on this machine")


def test_a_named_gpu_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "cupy", missing)
    with pytest.raises(DeviceError, match="no NVIDIA driver"):
        open_device(EngineOptions(device="cuda:0"))


def test_auto_falls_back_to_the_host_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(driver_module, "cupy", missing)
    with caplog.at_level(logging.INFO, "ninfer"):
        device = open_device(EngineOptions())
    device.close()
    assert device.kind == "cpu"
    assert [record.getMessage() for record in caplog.records] == [
        "running on the CPU: no NVIDIA driver on this machine"
    ]


def test_auto_takes_the_first_gpu(driver: FakeDriver) -> None:
    seen: list[tuple[str, int, int]] = []
    device = open_device(EngineOptions(progress=lambda *step: seen.append(step)))
    assert (device.kind, device.name) == ("cuda", "cuda:0 (Fake GPU)")
    assert seen == [("compile", 1, 1)]
    assert codec(EngineOptions(), device) is KVCodec.BF16
    with pytest.raises(InvalidRequest, match="kv_dtype"):
        codec(EngineOptions(kv_dtype="fp32"), device)
    device.close()
    with pytest.raises(DeviceError, match="cuda:7: 1 GPU visible"):
        open_device(EngineOptions(device="cuda:7"))


@pytest.mark.parametrize("device", ["cuda", "cuda:", "cuda:-1", "cuda:x", "cuda:0 ", "CUDA:0", "gpu", "cuda:\u0661"])
def test_names_that_are_refused(device: str) -> None:
    with pytest.raises(InvalidRequest, match="device"):
        EngineOptions(device=device)


GREEDY = ninfer.SamplingParams(temperature=0)


def open_engine(recipe: str = "q4-mixed", **options: object) -> ninfer.Engine:
    source = synthetic_source("tiny", recipe)
    options.setdefault("cache", ninfer.CacheOptions(enabled=False))
    return ninfer.Engine(source, device="cuda:0", max_context=512, progress=False, max_concurrency=2, **options)


def generate(engine: ninfer.Engine, tokens: int) -> ninfer.GenerationResult:
    return engine.generate(ninfer.TokenPrompt([1, 2, 3]), max_tokens=tokens, sampling=GREEDY, ignore_eos=True)


def test_a_decode_round_is_two_graphs_one_copy_down_and_no_allocation(machine: FakeDriver) -> None:
    with open_engine() as engine:
        generate(engine, 8)
        machine.calls.clear()
        short = generate(engine, 10)
        few = machine.calls.copy()
        machine.calls.clear()
        generate(engine, 30)
        more = machine.calls - few
        assert len(short.token_ids) == 10
        assert not any(word in str(name).lower() for name in few + more for word in ("alloc", "free", "create"))
        assert not more["cuLaunchKernelEx"]
        assert more["graphLaunch"] == 2 * 20
        assert more["memcpyAsync", 1] == 0, "the copy up is in the first graph"
        assert more["memcpyAsync", 2] == 20
        assert more["streamSynchronize"] == 0
    assert {kind: count for kind, count in machine.live.items() if count} == {}


def test_a_decode_step_has_few_nodes(machine: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one storage format: 5 a linear layer, 7 a full-attention layer, and the copy up, embedding, final norm, its
    copy into the state, head and counts; several rows make their columns ready before each of 4 products a layer and
    the head. Sampling is two more."""
    nodes: dict[object, int] = {}
    record = Recordings._record

    def recorded(recordings: Recordings, name: object) -> object:
        graph = record(recordings, name)
        nodes[name] = machine.nodes[-1]
        return graph

    monkeypatch.setattr(Recordings, "_record", recorded)
    with open_engine("bf16"):
        pass
    layers = GEOMETRIES["tiny"]["layer_types"]
    assert nodes["forward", 1, 1] <= sum(7 if kind == FULL else 5 for kind in layers) + 6
    assert nodes["forward", 2, 1] <= nodes["forward", 1, 1] + 4 * len(layers) + 1
    assert nodes["finish", 1, 1, False, False] == nodes["finish", 2, 1, False, False] == 2


def test_a_prefill_chunk_is_one_graph(machine: FakeDriver) -> None:
    with open_engine(prefill_chunk=40) as engine:
        generate(engine, 2)
        for prompt, chunks in ((1, 1), (16, 1), (17, 1), (40, 1), (41, 2), (100, 3)):
            machine.calls.clear()
            engine.generate(ninfer.TokenPrompt([1] * prompt), max_tokens=1, sampling=GREEDY)
            assert machine.calls["graphLaunch"] == chunks + 2, "and two for the first token"
            assert machine.calls["memcpyAsync", 1] == chunks
            assert machine.calls["cuLaunchKernelEx"] == 0


@pytest.mark.parametrize("name", ["graphLaunch", "eventSynchronize", "memcpyAsync"])
def test_a_fault_fails_the_engine_and_the_next_one_opens(machine: FakeDriver, name: str) -> None:
    engine = open_engine()
    generate(engine, 4)
    machine.fail[name] = ILLEGAL_ADDRESS
    with pytest.raises(ninfer.EngineFailed) as caught:
        generate(engine, 4)
    assert isinstance(caught.value.__cause__ or caught.value.cause, DeviceError)
    assert not engine.available
    engine.close()
    machine.fail.clear()
    with open_engine() as again:
        assert len(generate(again, 4).token_ids) == 4


@pytest.mark.parametrize(
    ("megabytes", "what"), [(50, "weights .* operations 168"), (202, r"weights .*kv .*operations 168\.")]
)
def test_a_model_that_does_not_fit_says_by_how_much(machine: FakeDriver, megabytes: int, what: str) -> None:
    """Too little for the weights, and for the plan, which lists its components."""
    machine.total = megabytes << 20
    with pytest.raises(ninfer.OutOfDeviceMemory, match=what) as caught:
        open_engine(kv_capacity=1024)
    assert 0 <= caught.value.free <= machine.total
    assert {kind: count for kind, count in machine.live.items() if count} == {}


def test_weights_beyond_the_memory_are_refused_before_they_are_loaded(machine: FakeDriver) -> None:
    source = synthetic_source("0.8b", "q4-mixed", components=("text", "mtp"), alike=True)
    machine.total = 512 << 20
    says = r'weights take \d+\.\d MiB and operations 168\.2 MiB, .* free on .*: numbers of fewer bits or spec "none"'
    with pytest.raises(ninfer.OutOfDeviceMemory, match=says) as caught:
        ninfer.Engine(source, device="cuda:0", spec="mtp", max_context=512, progress=False)
    assert sum(caught.value.plan.values()) > caught.value.free > caught.value.plan["weights"]
    assert machine.calls["memcpyAsync"] == 0
    assert {kind: count for kind, count in machine.live.items() if count} == {}
