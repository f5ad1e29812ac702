"""The Frontend as a whole: resources, defaults, stop ids, threads."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import attrs
import pytest

from ninfer.errors import ArtifactError, InvalidRequest
from ninfer.frontend import Frontend
from ninfer.inputs import Chat
from ninfer.options import SamplingParams


def with_generation(resources, **config):
    return Frontend(attrs.evolve(resources, generation_config=json.dumps(config).encode()))


def test_defaults_come_from_the_generation_config(tiny_resources):
    frontend = with_generation(tiny_resources, eos_token_id=514, temperature=0.6, top_p=0.95, top_k=20, min_p=0.1)
    assert frontend.defaults == SamplingParams(
        temperature=0.6, top_p=0.95, top_k=20, min_p=0.1, presence_penalty=0.0, frequency_penalty=0.0
    )


def test_defaults_where_the_config_is_silent(tiny_resources):
    frontend = with_generation(tiny_resources, eos_token_id=514, temperature=None)
    assert frontend.defaults == SamplingParams(
        temperature=1.0, top_p=1.0, top_k=20, min_p=0.0, presence_penalty=0.0, frequency_penalty=0.0
    )
    assert with_generation(tiny_resources, eos_token_id=514, top_k=200).defaults.top_k == 64
    assert with_generation(tiny_resources, eos_token_id=514, do_sample=False, temperature=0.6).defaults.temperature == 0


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"eos_token_id": [514, 512]}, (514, 512)),
        ({"eos_token_id": 512}, (512, 514)),  # <|im_end|> always ends a turn
        ({"eos_token_id": [512, 512]}, (512, 514)),
        ({}, (514,)),
    ],
)
def test_stop_ids(tiny_resources, config, expected):
    assert with_generation(tiny_resources, **config).stop_ids == expected


@pytest.mark.parametrize(
    "config",
    [
        {"eos_token_id": 527},
        {"eos_token_id": -1},
        {"eos_token_id": "514"},
        {"eos_token_id": [True]},
        {"eos_token_id": {"a": 1}},
        {"eos_token_id": 514, "temperature": -1},
        {"eos_token_id": 514, "temperature": "hot"},
        {"eos_token_id": 514, "top_p": 0},
        {"eos_token_id": 514, "top_k": 2.5},
    ],
)
def test_refused_generation_configs(tiny_resources, config):
    with pytest.raises(ArtifactError) as refusal:
        with_generation(tiny_resources, **config)
    assert refusal.value.where.startswith("generation_config.json")


def test_refused_templates(tiny_resources):
    with pytest.raises(ArtifactError) as refusal:
        Frontend(attrs.evolve(tiny_resources, chat_template="{% if %}"))
    assert refusal.value.where == "chat_template.jinja: line 1"


def test_a_vocabulary_that_cannot_spell_the_close(tiny_resources):
    with pytest.raises(ArtifactError):
        with_generation(tiny_resources, eos_token_id=524)  # </think> as a stop id


def test_close_tokens(frontend):
    assert frontend.decode(frontend.close_tokens) == "\n</think>\n\n"
    assert frontend.close_tokens == tuple(frontend._tokenizer.encode("\n</think>\n\n"))


def test_special_tokens_are_template_variables(tiny):
    frontend = Frontend(tiny.resources("{{ eos_token }}{{ pad_token }}{{ bos_token is defined }}"))
    prompt = frontend.prepare("x")
    assert frontend.decode(prompt.tokens.tolist()) == "<|im_end|><|endoftext|>False"


def test_preparing_from_many_threads(qwen):
    """Equal inputs give equal prompts, whoever else prepares, renders or first uses the plain encoder."""
    chats = [
        Chat([{"role": "user", "content": f"<|im_end|> question {i % 4}"}], escape_special=bool(i % 2))
        for i in range(32)
    ]
    expected = [qwen.prepare(chat).tokens.tolist() for chat in chats]
    with ThreadPoolExecutor(8) as pool:
        assert [p.tokens.tolist() for p in pool.map(qwen.prepare, chats)] == expected


def test_importing_stays_light():
    """Neither tokenizers nor anything heavier is loaded before a Frontend is made."""
    heavy = "('tokenizers', 'torch', 'transformers', 'numba')"
    code = f"import sys, ninfer.frontend; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_template_that_prints_nothing(tiny):
    with pytest.raises(InvalidRequest) as refusal:
        Frontend(tiny.resources("{# silent #}")).prepare("x")
    assert refusal.value.field == "messages"
