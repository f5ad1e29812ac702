"""Artifacts of random weights: any geometry in any recipe, without a checkpoint. For benchmarks and tests."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from ninfer.artifact import Component, Proposal, RandomTensor, SyntheticSource, Use
from ninfer.errors import InvalidRequest
from ninfer.models.qwen3_5.config import FULL, SLIDING, Dense, TextConfig, parse_dflash, parse_text
from ninfer.models.qwen3_5.geometries import GEOMETRIES
from ninfer.models.qwen3_5.packing import parents
from ninfer.models.qwen3_5.parameters import (
    ParameterSpec,
    dflash_parameters,
    mtp_parameters,
    proposal_parameters,
    shared_binding,
    text_parameters,
)
from ninfer.models.qwen3_5.recipes import RECIPES, storage_format
from ninfer.models.qwen3_5.synthetic_text import text_resources


def synthetic_source(
    geometry: str | Mapping[str, Any],
    recipe: str,
    seed: int = 0,
    components: Sequence[str] = ("text",),
    alike: bool = False,
) -> SyntheticSource:
    """A source that makes its weights when they are viewed; the same arguments give the same bytes.

    geometry: a name of ``GEOMETRIES`` or a text component config. recipe: a name of ``RECIPES``. components: "text"
    and optionally "mtp", "dflash", "dflash2", and with one of them "proposal": a head of the first half of the ids.
    alike: layers of one shape hold the same weights. Its tokenizer has the
    family's control tokens, single bytes and made-up words. Raises InvalidRequest for an unknown name or a vocabulary
    too small for the tokenizer, ArtifactError for a bad config.
    """
    for field, value, known in (("geometry", geometry, GEOMETRIES), ("recipe", recipe, RECIPES)):
        if isinstance(value, str) and value not in known:
            raise InvalidRequest(f"{value!r} is not one of {', '.join(known)}", field=field)
    if unknown := set(components) - {"text", "mtp", "dflash", "dflash2", "proposal"}:
        raise InvalidRequest(f"cannot compose {sorted(unknown)}", field="components")
    raw = dict(GEOMETRIES[geometry] if isinstance(geometry, str) else geometry)
    companions = tuple(c for c in ("mtp", "dflash", "dflash2") if c in components)
    text = parse_text(raw, mtp="mtp" in companions)
    specs = list(text_parameters(text, companions))
    records = {"text": Component(raw)}
    if "mtp" in companions:
        specs += mtp_parameters(text)
        kind = "Qwen3_5MTP" if isinstance(text.ffn, Dense) else "Qwen3_5MoeMTP"
        records["mtp"] = Component({"architectures": [kind]}, target="text")
    for component in [c for c in ("dflash", "dflash2") if c in companions]:
        draft = _dflash(text) if component == "dflash" else _dflash2(text)
        specs += dflash_parameters(parse_dflash(draft, text, component), text)
        records[component] = Component(draft, target="text")
    if "proposal" in components:
        records["text"] = Component(raw, proposal=Proposal("indexed", text.vocab_size // 2))
        specs += proposal_parameters(text, text.vocab_size // 2, companions)
    name = f"synthetic-{geometry if isinstance(geometry, str) else 'custom'}-{recipe}"
    source = SyntheticSource(
        _tensors(text, specs, recipe),
        components=records,
        resources={("text", role): data for role, data in text_resources(text.vocab_size).items()},
        uses=[Use(spec.name, site, "A16Only") for spec in specs for site in spec.uses],
        metadata={"name": name},
        seed=seed,
        alike=alike,
        name=f"{name}.ninfer",
    )
    bindings = dict(source.directory.bindings)
    for spec in specs:
        if other := shared_binding(spec.name, tied=text.tie_word_embeddings):
            bindings[spec.name] = bindings[other]
    source.directory = attrs.evolve(source.directory, bindings=bindings)
    return source


def _dflash(text: TextConfig) -> dict[str, Any]:
    """The config of a companion like those that were published: five layers, the last of which sees everything."""
    layers, small = len(text.layer_types), text.hidden_size < 1024
    return {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "intermediate_size": 3 * text.hidden_size,
        "num_attention_heads": 4 if small else 32, "num_key_value_heads": 2 if small else 8,
        "head_dim": 32 if small else 128, "num_hidden_layers": 5, "max_position_embeddings": 262144,
        "rms_norm_eps": text.eps, "rope_parameters": {"rope_theta": 1e7}, "layer_types": [SLIDING] * 4 + [FULL],
        "sliding_window": 64 if small else 2048, "block_size": 8 if small else 16,
        "dflash_config": {
            "target_layer_ids": sorted({i * (layers - 1) // 4 for i in range(5)}), "mask_token_id": text.vocab_size - 1,
        },
    }  # fmt: skip


def _dflash2(text: TextConfig) -> dict[str, Any]:
    """The same with a window in every layer, convolutions and a selector."""
    config = _dflash(text)
    chain = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
    if text.hidden_size % 16:
        chain["conv_group_size"] = 1
    own = config["dflash_config"] | chain
    changed = {"architectures": ["DFlash2DraftModel"], "layer_types": [SLIDING] * 5, "block_size": 8}
    return config | changed | {"dflash_config": own}


def _tensors(text: TextConfig, specs: Sequence[ParameterSpec], recipe: str) -> Iterator[RandomTensor]:
    """One tensor per stored object, with statistics under which activations neither vanish nor explode."""
    by_name = {spec.name: spec for spec in specs}
    formats = {spec.name: storage_format(RECIPES[recipe], spec) for spec in specs}
    formats = {name: form for name, form in formats.items() if not shared_binding(name, tied=text.tie_word_embeddings)}
    for members in parents(specs, formats):
        spec = by_name[members[0]]
        mean, std = _statistics(spec)
        shapes = tuple((name, by_name[name].shape) for name in members)
        yield RandomTensor(formats[spec.name], shapes, mean=mean, std=std)


def _statistics(spec: ParameterSpec) -> tuple[float, float]:
    leaf = spec.name.rpartition("/")[2]
    if spec.role.endswith("gdn/norm") or (spec.name.startswith("dflash") and leaf.endswith("norm")):
        return 1.0, 0.2
    if leaf == "convolution":
        return 0.0, 1 / math.sqrt(spec.shape[0])
    if leaf in ("token_embedding", "a_log"):
        return 0.0, 1.0
    return 0.0, 0.2 if spec.kind == "direct" else 1 / math.sqrt(spec.shape[-1])
