"""Artifacts of random weights: any geometry in any recipe, without a checkpoint. For benchmarks and tests."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from ninfer.artifact import Component, RandomTensor, SyntheticSource, Use
from ninfer.errors import InvalidRequest
from ninfer.models.qwen3_5.config import Dense, TextConfig, parse_text
from ninfer.models.qwen3_5.geometries import GEOMETRIES
from ninfer.models.qwen3_5.packing import parents
from ninfer.models.qwen3_5.parameters import ParameterSpec, mtp_parameters, text_parameters
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
    and optionally "mtp". alike: layers of one shape hold the same weights. Its tokenizer has the family's control
    tokens, single bytes and made-up words. Raises
    InvalidRequest for an unknown name or a vocabulary too small for the tokenizer, ArtifactError for a bad config.
    """
    for field, value, known in (("geometry", geometry, GEOMETRIES), ("recipe", recipe, RECIPES)):
        if isinstance(value, str) and value not in known:
            raise InvalidRequest(f"{value!r} is not one of {', '.join(known)}", field=field)
    if unknown := set(components) - {"text", "mtp"}:
        raise InvalidRequest(f"cannot compose {sorted(unknown)}", field="components")
    raw = dict(GEOMETRIES[geometry] if isinstance(geometry, str) else geometry)
    companions = tuple(c for c in components if c == "mtp")
    text = parse_text(raw, mtp=bool(companions))
    specs = list(text_parameters(text, companions))
    records = {"text": Component(raw)}
    if companions:
        specs += mtp_parameters(text)
        kind = "Qwen3_5MTP" if isinstance(text.ffn, Dense) else "Qwen3_5MoeMTP"
        records["mtp"] = Component({"architectures": [kind]}, target="text")
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
    if text.tie_word_embeddings:
        bindings = dict(source.directory.bindings)
        bindings["text/output_head"] = bindings["text/token_embedding"]
        source.directory = attrs.evolve(source.directory, bindings=bindings)
    return source


def _tensors(text: TextConfig, specs: Sequence[ParameterSpec], recipe: str) -> Iterator[RandomTensor]:
    """One tensor per stored object, with statistics under which activations neither vanish nor explode."""
    by_name = {spec.name: spec for spec in specs}
    formats = {spec.name: storage_format(RECIPES[recipe], spec) for spec in specs}
    if text.tie_word_embeddings:
        del formats["text/output_head"]
    for members in parents(specs, formats):
        spec = by_name[members[0]]
        mean, std = _statistics(spec)
        shapes = tuple((name, by_name[name].shape) for name in members)
        yield RandomTensor(formats[spec.name], shapes, mean=mean, std=std)


def _statistics(spec: ParameterSpec) -> tuple[float, float]:
    leaf = spec.name.rpartition("/")[2]
    if spec.role.endswith("gdn/norm"):
        return 1.0, 0.2
    if leaf == "convolution":
        return 0.0, 1 / math.sqrt(spec.shape[0])
    if leaf in ("token_embedding", "a_log"):
        return 0.0, 1.0
    return 0.0, 0.2 if spec.kind == "direct" else 1 / math.sqrt(spec.shape[-1])
