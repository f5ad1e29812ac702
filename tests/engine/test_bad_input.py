"""Every bad input is refused with a typed error that names it, and leaves the engine as it was."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
from fakes.prompts import endless, ends_at

import ninfer
from ninfer import Chat, TokenPrompt


@pytest.mark.parametrize("name", ["temperature", "pause", "unknown"])
def test_an_unknown_keyword_is_a_type_error(world, name):
    w = world()
    calls = [w.engine.submit, w.engine.generate, w.engine.stream, w.engine.generate_iter]
    for call in calls:
        with pytest.raises(TypeError, match=name):
            call(endless(), **{name: 1})
    with pytest.raises(TypeError, match=name):
        w.engine.chat([{"role": "user", "content": "hello"}], **{name: 1})
    with pytest.raises(TypeError, match=name):
        w.engine.submit(endless(), ninfer.RequestOptions(), **{name: 1})
    w.check_at_rest()


@pytest.mark.parametrize("name", ["vision", "purpose", "unknown"])
def test_an_unknown_engine_option_is_a_type_error(world, name):
    with pytest.raises(TypeError, match=name):
        ninfer.Engine("artifact", **{name: 1})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", "5"),
        ("thinking_budget", -1),
        ("timeout", 0),
        ("timeout", float("nan")),
        ("timeout", -1.0),
        ("timeout", 10**400),
        ("logprobs", 21),
        ("logprobs", -1),
        ("ignore_eos", 1),
        ("thinking_stop", "yes"),
        ("stop", [""]),
        ("stop", [3]),
        ("stop", ["\ud800"]),
        ("stop", 7),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1.0]),
        ("stop_token_ids", "12"),
        ("stop_token_ids", [999]),
        ("stop_token_ids", np.array(3)),
        ("stop_token_ids", np.array([[3]])),
        ("stop_token_ids", np.array([3.0])),
        ("sampling", {"temperature": 1}),
        ("metadata", [1]),
    ],
)
def test_a_wrong_value_names_its_field(world, field, value):
    w = world()
    for call in (w.engine.submit, w.engine.generate):
        with pytest.raises(ninfer.InvalidRequest) as caught:
            call(endless(), **{field: value})
        assert caught.value.field.split("[")[0] == field
    w.check_at_rest()
    assert w.engine.generate(ends_at(1), max_tokens=3).finish_reason == "stop"


@pytest.mark.parametrize(
    ("make", "fields", "field"),
    [
        (ninfer.SpecOptions, {"draft_tokens": 5}, "draft_tokens"),
        (ninfer.CacheOptions, {"enabled": False, "device_state_slots": 3}, "device_state_slots"),
        (ninfer.CacheOptions, {"enabled": False, "host_kv_bytes": 0}, "host_kv_bytes"),
        (ninfer.CacheOptions, {"enabled": False, "aging_window": 8}, "aging_window"),
        (ninfer.CacheOptions, {"max_long_anchors": 0, "anchor_gap": 64}, "anchor_gap"),
        (ninfer.CacheOptions, {"host_state_slots": 0, "host_kv_bytes": 1 << 20}, "host_kv_bytes"),
        (ninfer.RequestOptions, {"thinking_stop": True}, "thinking_stop"),
        (ninfer.RequestOptions, {"update_session": False}, "update_session"),
        (ninfer.RequestOptions, {"session": "a", "cache": "disabled"}, "session"),
    ],
)
def test_an_option_that_could_have_no_effect_is_refused(make, fields, field):
    with pytest.raises(ninfer.InvalidRequest, match="has no effect") as caught:
        make(**fields)
    assert caught.value.field == field


@pytest.mark.parametrize("switched_off", [ninfer.SpecOptions("none"), ninfer.CacheOptions(enabled=False)])
def test_every_detail_of_what_is_switched_off_is_refused(switched_off):
    """Also of fields that do not exist yet."""
    details = {"draft_tokens": 3, "max_long_anchors": 5, "anchor_gap": 64}
    for a in attrs.fields(type(switched_off)):
        if a.name not in ("backend", "enabled"):
            with pytest.raises(ninfer.InvalidRequest) as caught:
                attrs.evolve(switched_off, **{a.name: details.get(a.name, 9)})
            assert caught.value.field == a.name


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("inf")),
        ("temperature", 10**400),
        ("temperature", np.array([0.5, 1.0])),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", 65),
        ("top_k", 2.0),
        ("min_p", -1),
        ("presence_penalty", 3),
        ("frequency_penalty", "1"),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_a_wrong_sampling_value_names_its_field(field, value):
    with pytest.raises(ninfer.InvalidRequest) as caught:
        ninfer.SamplingParams(**{field: value})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("device", "gpu"),
        ("device", np.array(["cpu", "cpu"])),
        ("max_concurrency", 0),
        ("max_concurrency", 9),
        ("max_context", 0),
        ("max_outstanding", 0),
        ("queue_timeout", 0),
        ("max_tokens", -1),
        ("prefill_chunk", 0),
        ("concurrent_prefill", 1),
        ("kv_capacity", "all"),
        ("kv_capacity", np.array([1, 2])),
        ("kv_dtype", "int4"),
        ("progress", "yes"),
    ],
)
def test_a_wrong_engine_option_names_its_field(field, value):
    with pytest.raises(ninfer.InvalidRequest) as caught:
        ninfer.Engine("artifact", **{field: value})
    assert caught.value.field == field


def test_token_ids_may_be_an_array(world):
    w = world()
    options = ninfer.RequestOptions(stop_token_ids=np.array([9], np.uint16))
    assert options.stop_token_ids == (9,)
    assert TokenPrompt(np.array([255, 9], np.int64)) == TokenPrompt([np.int32(255), 9])
    assert w.engine.generate(ends_at(1), options, max_tokens=3).finish_reason == "stop"


@pytest.mark.parametrize("artifact", [None, 7, object(), ["model.ninfer"]])
def test_an_artifact_of_the_wrong_type(artifact):
    with pytest.raises(ninfer.InvalidRequest) as caught:
        ninfer.Engine(artifact)
    assert caught.value.field == "artifact"


@pytest.mark.parametrize("artifact", ["no such file", b"no such file", "null\0character", "", "."])
def test_a_path_without_an_artifact(artifact):
    with pytest.raises(ninfer.ArtifactError):
        ninfer.Engine(artifact)


def test_options_of_the_wrong_kind(world):
    w = world()
    with pytest.raises(ninfer.InvalidRequest, match="options"):
        w.engine.submit(endless(), {"max_tokens": 3})
    with pytest.raises(ninfer.InvalidRequest, match="options"):
        ninfer.Engine("artifact", {"max_context": 3})


@pytest.mark.parametrize("prompt", [None, 7, b"bytes", {"role": "user"}, np.zeros(3, np.int32), object()])
def test_an_input_of_the_wrong_type(world, prompt):
    w = world()
    for call in (w.engine.prepare, w.engine.submit, w.engine.generate, w.engine.count_tokens):
        with pytest.raises(ninfer.InvalidRequest, match="prompt"):
            call(prompt)
    w.check_at_rest()


def test_an_empty_prompt(world):
    w = world()
    with pytest.raises(ninfer.InvalidRequest, match="prompt"):
        w.engine.submit(TokenPrompt([]))
    w.check_at_rest()


def test_a_malformed_message_is_named(world):
    w = world()
    with pytest.raises(ninfer.InvalidRequest) as caught:
        w.engine.chat([{"role": "user", "content": 5}])
    assert caught.value.field.startswith("messages[0]")
    with pytest.raises(ninfer.InvalidRequest, match="messages"):
        Chat("hello")
    with pytest.raises(ninfer.InvalidRequest, match="Chat"):
        w.engine.generate([{"role": "user", "content": "hello"}])
    w.check_at_rest()


def test_a_prompt_longer_than_the_context_tells_both_numbers(world):
    w = world(program={"context": 20})
    for call in (w.engine.submit, w.engine.generate):
        with pytest.raises(ninfer.ContextOverflow) as caught:
            call(endless(21))
        assert (caught.value.prompt_tokens, caught.value.limit) == (21, 20)
    w.check_at_rest()


def test_a_request_too_large_for_the_pool_fails_at_once(world):
    w = world(program={"context": 64, "pages": 4, "page": 8})
    with pytest.raises(ninfer.InvalidRequest) as caught:
        w.engine.generate(endless(30), max_tokens=30)
    assert "4 pages" in str(caught.value)
    assert caught.value.partial.usage.completion_tokens == 0
    assert w.engine.generate(ends_at(1), max_tokens=3).finish_reason == "stop"
    w.check_at_rest()


def test_a_full_engine_is_overloaded_until_somebody_reads(world):
    w = world(threaded=False, max_outstanding=3)
    handles = [w.engine.submit(endless(), max_tokens=5) for _ in range(3)]
    with pytest.raises(ninfer.Overloaded, match="3"):
        w.engine.submit(endless())
    w.drain()
    with pytest.raises(ninfer.Overloaded):
        w.engine.submit(endless())
    handles[1].result()
    w.engine.submit(endless(), max_tokens=5).close()
    for handle in handles:
        handle.result()
    w.drain()
    w.check_at_rest()


def test_a_session_that_cannot_be_built_gives_its_slot_back(world):
    w = world(max_outstanding=1)
    w.program.faults.arm("output_session", ninfer.InvalidRequest("no", field="stop"))
    with pytest.raises(ninfer.InvalidRequest):
        w.engine.submit(endless())
    w.program.faults.fired.clear()
    assert w.engine.generate(ends_at(1), max_tokens=3).finish_reason == "stop"
    w.check_at_rest()
