"""Drafting with a head of some tokens alone: only those are drafted, and answers are the ordinary ones."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

import ninfer
from ninfer import SamplingParams, SpecOptions
from ninfer.artifact import Proposal
from ninfer.models.qwen3_5.synthetic import synthetic_source

GREEDY = SamplingParams(temperature=0)
COMPONENTS = ("text", "mtp", "dflash", "dflash2", "proposal")


def opened(spec: SpecOptions | str, components: tuple[str, ...] = COMPONENTS, source=None) -> ninfer.Engine:
    source = source or synthetic_source("tiny", "q8", seed=3, components=components)
    return ninfer.Engine(source, device="cpu", max_context=512, progress=False, spec=spec)


@pytest.mark.parametrize("backend", ["mtp", "dflash", "dflash2"])
def test_only_its_tokens_are_drafted(backend):
    with opened("none") as engine:
        want = engine.generate(["one two three", "four"], max_tokens=40, sampling=GREEDY)
        rows = engine._frontend.vocab_size
    drafted = {}
    for choice in (None, False):
        with opened(SpecOptions(backend, proposal_head=choice)) as engine:
            units = engine._core._worker._program._units
            bring, seen = units.drafts, drafted.setdefault(choice, set())

            def spy(B, ahead, bring=bring, seen=seen):
                found = bring(B, ahead)
                seen.update(token for row in found for token in row)
                return found

            units.drafts = spy
            for one, other in zip(want, engine.generate(["one two three", "four"], max_tokens=40, sampling=GREEDY)):
                assert other.token_ids == one.token_ids
            hot = engine.generate("five", max_tokens=20, sampling=SamplingParams(temperature=5.0, seed=1))
            assert hot.error is None
    half = 512 // 2
    assert rows > half
    assert max(drafted[None]) < half <= max(drafted[False])


def test_an_absent_head_is_refused():
    with pytest.raises(ninfer.InvalidRequest) as caught:
        opened(SpecOptions("mtp", proposal_head=True), ("text", "mtp"))
    assert caught.value.field == "spec.proposal_head"
    for options in ({"proposal_head": 1}, {"proposal_head": "yes"}):
        with pytest.raises(ninfer.InvalidRequest) as caught:
            SpecOptions("mtp", **options)
        assert caught.value.field == "proposal_head"


@pytest.mark.parametrize(
    ("ids", "where"),
    [
        (np.arange(256) - 1, "bindings['proposal/token_ids']"), (np.arange(256) // 2, "bindings['proposal/token_ids']"),
        (np.arange(256) + 257, "bindings['proposal/token_ids']"),
    ],
)  # fmt: skip
def test_ids_that_are_none_are_refused(ids, where):
    source = synthetic_source("tiny", "q8", components=COMPONENTS)
    (name,) = [o for o, tensor in source._tensors.items() if tensor.format == "int32"]
    source._tensors[name] = attrs.evolve(source._tensors[name], values=ids.astype(np.int32))
    with pytest.raises(ninfer.ArtifactError) as caught:
        opened("mtp", source=source)
    assert caught.value.where == where


def test_rows_out_of_range_are_refused():
    for rows in (31, 513):
        source = synthetic_source("tiny", "q8", components=COMPONENTS)
        text = attrs.evolve(source.directory.components["text"], proposal=Proposal("indexed", rows))
        source.directory = attrs.evolve(source.directory, components={**source.directory.components, "text": text})
        with pytest.raises(ninfer.ArtifactError) as caught:
            opened("mtp", source=source)
        assert caught.value.where == "components.text.proposal.rows"


def test_a_head_of_every_token_needs_no_ids():
    source = synthetic_source("tiny", "q8", components=("text", "mtp"))
    d = source.directory
    text = attrs.evolve(d.components["text"], proposal=Proposal("full"))
    use = d.uses["text/output_head", "mtp/final_hidden"]
    uses = {**d.uses, ("proposal/head", "mtp/final_hidden"): attrs.evolve(use, parameter="proposal/head")}
    bindings = {**d.bindings, "proposal/head": d.bindings["text/output_head"]}
    source.directory = attrs.evolve(d, components={**d.components, "text": text}, uses=uses, bindings=bindings)
    results = []
    for choice in (True, False):
        with opened(SpecOptions("mtp", proposal_head=choice), source=source) as engine:
            results.append(engine.generate("one", max_tokens=20, sampling=GREEDY))
    assert results[0].token_ids == results[1].token_ids
    assert results[0].speculation == results[1].speculation
