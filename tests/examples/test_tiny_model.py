"""The shipped model through the public engine: what it was trained for, and the same numbers as `transformers`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import ninfer
from ninfer.artifact import Artifact, inspect, open_artifact, verify
from ninfer.models.qwen3_5.config import parse_text
from ninfer.models.qwen3_5.parameters import text_parameters

EXAMPLES = Path(__file__).parents[2] / "examples"
ARTIFACT = EXAMPLES / "tiny" / "tiny.ninfer"
GREEDY = ninfer.SamplingParams(temperature=0)


@pytest.fixture(scope="module")
def engine():
    with ninfer.Engine(ARTIFACT, max_concurrency=8, max_context=2048, progress=False) as opened:
        yield opened


def test_the_artifact_is_legal_and_small():
    with open_artifact(ARTIFACT) as source:
        assert verify(source) == []
        report = inspect(source).to_dict()
    assert {c["name"] for c in report["components"]} == {"text", "mtp"}
    assert report["provenance"] == {"converter": "ninfer", "recipe": "q8"}
    assert ARTIFACT.stat().st_size < 10e6


def test_the_companions_come_with_the_same_model():
    with open_artifact(ARTIFACT) as source, open_artifact(ARTIFACT.with_name("tiny-dflash.ninfer")) as other:
        assert verify(other) == []
        one, two = Artifact(source), Artifact(other)
        assert set(two.directory.components) == {"text", "dflash", "dflash2"}
        for name in one.directory.bindings:
            if name.startswith("text/"):
                np.testing.assert_array_equal(one.decode(name), two.decode(name))


@pytest.mark.parametrize(
    ("kind", "least"),
    [
        ("extraction", 0.85),
        ("arithmetic", 0.85),
        ("arithmetic, thinking", 0.95),
        ("lookup", 0.85),
        ("tool call", 0.85),
        ("parallel tool calls", 0.75),
        ("answer after tool result", 0.85),
    ],
)
@pytest.mark.parametrize("count", [20, pytest.param(60, marks=pytest.mark.full)])
def test_held_out_questions_are_answered(engine, tiny, kind, least, count):
    """Of sixty of the first held-out thousand; the measured accuracies are in the model's own page."""
    items = tiny("corpus").corpus.held_out_sets(60)[kind][:count]
    chats = [
        ninfer.Chat(item["messages"][:-1], tools=item.get("tools") or (), thinking=item["thinking"]) for item in items
    ]
    results = engine.generate(chats, max_tokens=400, sampling=GREEDY)
    right = 0
    for item, result in zip(items, results, strict=True):
        wanted = item["messages"][-1]
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in wanted.get("tool_calls", ())]
        made = [(call.name, dict(call.arguments)) for call in result.tool_calls]
        right += result.text.strip() == (wanted.get("content") or "").strip() and made == calls
    assert right / len(items) >= least, f"{kind}: {right} of {len(items)}"


def weights_for_transformers(artifact: Artifact, config: dict) -> dict[str, np.ndarray]:
    """The decoded text weights under their checkpoint names."""
    heads, width = config["num_attention_heads"], config["head_dim"]
    shapes = {spec.name: spec.shape for spec in text_parameters(parse_text(config))}

    def get(name: str) -> np.ndarray:
        return artifact.decode(name, shapes[name])

    out = {"model.embed_tokens.weight": get("text/token_embedding"), "model.norm.weight": get("text/final_norm"),
           "lm_head.weight": get("text/output_head")}  # fmt: skip
    for i, kind in enumerate(config["layer_types"]):
        ours, theirs = f"text/layers/{i}/", f"model.layers.{i}."
        out[theirs + "input_layernorm.weight"] = get(ours + "input_norm")
        out[theirs + "post_attention_layernorm.weight"] = get(ours + "post_attention_norm")
        for name in ("gate", "up", "down"):
            out[f"{theirs}mlp.{name}_proj.weight"] = get(f"{ours}mlp/{name}")
        if kind == "full_attention":
            ours, theirs = ours + "attention/", theirs + "self_attn."
            query, gate = (get(ours + name).reshape(heads, width, -1) for name in ("query", "gate"))
            out[theirs + "q_proj.weight"] = np.concatenate([query, gate], 1).reshape(2 * heads * width, -1)
            for a, b in (("key", "k_proj"), ("value", "v_proj"), ("output", "o_proj")):
                out[f"{theirs}{b}.weight"] = get(ours + a)
            for a, b in (("query_norm", "q_norm"), ("key_norm", "k_norm")):
                out[f"{theirs}{b}.weight"] = get(ours + a)
        else:
            ours, theirs = ours + "gdn/", theirs + "linear_attn."
            out[theirs + "in_proj_qkv.weight"] = np.concatenate([get(ours + n) for n in ("query", "key", "value")])
            for a, b in (("z", "in_proj_z"), ("a_projection", "in_proj_a"), ("b_projection", "in_proj_b"),
                         ("norm", "norm"), ("output", "out_proj")):  # fmt: skip
                out[f"{theirs}{b}.weight"] = get(ours + a)
            out[theirs + "A_log"], out[theirs + "dt_bias"] = get(ours + "a_log"), get(ours + "dt_bias")
            out[theirs + "conv1d.weight"] = np.ascontiguousarray(get(ours + "convolution").T)[:, None]
    return out


def test_answers_and_logprobs_equal_transformers(engine):
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    with open_artifact(ARTIFACT) as source:
        artifact = Artifact(source)
        config = json.loads(json.dumps(source.directory.components["text"].config))
        weights = weights_for_transformers(artifact, config)
    names = {k: v for k, v in config.items() if k not in ("architectures", "model_type")}
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**names)).float().eval()
    missing, unexpected = model.load_state_dict({k: torch.from_numpy(v) for k, v in weights.items()}, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}

    questions = [
        "What is 17 + 25?",
        "Ada is in the garden. Ben is in the kitchen. Where is Ada?",
        "Tell me about rain.",
    ]
    for question in questions:
        chat = ninfer.Chat([{"role": "user", "content": question}], thinking=question.startswith("What"))
        prompt = engine.prepare(chat)
        result = engine.generate(prompt, max_tokens=64, sampling=GREEDY, logprobs=2)
        ids = torch.tensor([[*prompt.tokens.tolist(), *result.token_ids]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1, :4096]
        spread = max(1.0, float(logits.std()))
        expected = torch.log_softmax(logits.double(), -1)
        for i, (token, score) in enumerate(zip(result.token_ids, result.logprobs, strict=True)):
            best = torch.topk(expected[i], 2)
            if best.values[0] - best.values[1] > 1e-3 * spread:
                assert token == int(best.indices[0])
            assert score.logprob == pytest.approx(float(expected[i, token]), abs=1e-3 * spread)
