"""What an artifact will hold, decided before any weight is read: formats, parents, bindings, uses, offsets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from ninfer.artifact import (
    Binding,
    Component,
    Directory,
    Part,
    Proposal,
    ResourceSpec,
    TensorSpec,
    Use,
    geometry,
    pack_members,
    plan_directory,
)
from ninfer.artifact.directory import DIVISOR_ROLE, Policy
from ninfer.convert.hf_config import SourceConfig
from ninfer.convert.quantised import FP8, NVFP4, Stored
from ninfer.convert.sources import Source
from ninfer.errors import ArtifactError, ConversionError
from ninfer.models.qwen3_5.packing import parents
from ninfer.models.qwen3_5.parameters import (
    PROPOSAL_IDS,
    ParameterSpec,
    dflash_parameters,
    mtp_parameters,
    proposal_parameters,
    shared_binding,
    text_parameters,
    vision_parameters,
)
from ninfer.models.qwen3_5.recipes import Recipe, storage_format


@attrs.frozen
class Item:
    """One parameter: what it is, which rows of the checkpoint it takes, how those are stored, and its new format."""

    spec: ParameterSpec
    source: Source
    stored: Stored
    format: str


@attrs.frozen
class Parent:
    """A tensor object and the parameters whose rows fill it, one after the other."""

    id: str
    format: str
    shape: tuple[int, ...]
    items: tuple[Item, ...]


@attrs.frozen
class Plan:
    """A directory, and what fills its objects: ``parents``, or the very bytes in ``blobs``."""

    directory: Directory
    parents: Mapping[str, Parent]
    blobs: Mapping[str, bytes]


def parameters(config: SourceConfig, components: Sequence[str], proposed: int | None = None) -> list[ParameterSpec]:
    """Every parameter of the chosen components, in the order text, mtp, vision, dflash, dflash2, and then of a head of
    ``proposed`` rows for drafting."""
    companions = [name for name in ("mtp", *config.companions) if name in components]
    specs = list(text_parameters(config.text, companions))
    if "mtp" in components:
        specs += mtp_parameters(config.text)
    if "vision" in components and config.vision is not None:
        specs += vision_parameters(config.vision, config.text.hidden_size)
    for companion in config.companions.values():
        specs += dflash_parameters(companion, config.text)
    if proposed is not None:
        specs += proposal_parameters(config.text, proposed, companions)
    return specs


def plan(
    config: SourceConfig,
    components: Sequence[str],
    sources: Mapping[str, Source],
    resolve: Callable[[Source], Stored],
    recipe: Recipe,
    resources: Mapping[str, Mapping[str, bytes]],
    *,
    metadata: Mapping[str, Any],
    provenance: Mapping[str, Any],
    proposal: npt.NDArray[np.int32] | None = None,
) -> Plan:
    """Decides everything. ``resources``: component -> role -> bytes. proposal: tokens of a head for drafting.
    ConversionError names a tensor that does not fit.

    Modules that the checkpoint stores quantised keep their bits under every recipe; the recipe rules the others.
    """
    items = {}
    for spec in parameters(config, components, None if proposal is None else len(proposal)):
        if spec.name == PROPOSAL_IDS:
            continue
        stored = resolve(sources[spec.name])
        items[spec.name] = Item(spec, sources[spec.name], stored, stored.format or storage_format(recipe, spec))
    tensors, bindings = _pack(items, tied=config.text.tie_word_embeddings)
    uses, divisors = _uses(items.values())
    bindings = {name: bindings[name] for name in items}
    direct = [TensorSpec(name, "fp32", ()) for name in divisors]
    if proposal is not None:
        ids = f"auxiliary/{len(divisors):06d}"
        divisors[ids] = proposal.astype("<i4").tobytes()
        direct.append(TensorSpec(ids, "int32", proposal.shape))
        bindings[PROPOSAL_IDS] = Binding((Part(ids, 0, len(proposal)),), whole=True)
    blobs = {_resource_id(c, role): data for c, roles in resources.items() for role, data in roles.items()}
    directory = plan_directory(
        components=_components(config, components, resources, proposal),
        objects=[
            *(ResourceSpec(name, len(data)) for name, data in blobs.items()),
            *(TensorSpec(parent.id, parent.format, parent.shape) for parent in tensors.values()),
            *direct,
        ],
        bindings=bindings,
        uses=uses,
        metadata=metadata,
        provenance=provenance,
    )
    return Plan(directory, tensors, blobs | divisors)


def _pack(items: Mapping[str, Item], *, tied: bool) -> tuple[dict[str, Parent], dict[str, Binding]]:
    """The tensor objects, and where each parameter lies in them. Some lie where another does, as a tied head does."""
    shared = {name: other for name in items if (other := shared_binding(name, tied=tied))}
    keys = {name: _key(item) for name, item in items.items() if name not in shared}
    tensors: dict[str, Parent] = {}
    bindings: dict[str, Binding] = {}
    for names in parents([item.spec for item in items.values()], keys):
        members = tuple(items[name] for name in names)
        format = members[0].format
        tensor, bound = pack_members(
            f"weight/{len(tensors):06d}", format, [(item.spec.name, item.spec.shape) for item in members]
        )
        try:
            geometry(format, None, tensor.shape)
        except ArtifactError as error:
            raise ConversionError(error.reason, tensor=members[0].stored.words.name) from None
        tensors[tensor.id] = Parent(tensor.id, format, tensor.shape, members)
        bindings |= bound
    return tensors, bindings | {name: bindings[other] for name, other in shared.items()}


def _key(item: Item) -> tuple[str, bool, bytes]:
    """What parameters must agree in to share an object: format, imported or encoded, and an NVFP4 divisor's bits."""
    divisor = item.stored.divisor
    return item.format, item.stored.format is not None, b"" if divisor is None else divisor.tobytes()


def _uses(items: Iterable[Item]) -> tuple[list[Use], dict[str, bytes]]:
    """The uses of all projections, and the input divisors they refer to, one object for each use."""
    uses: list[Use] = []
    divisors: dict[str, bytes] = {}
    for item in items:
        for site in item.spec.uses:
            auxiliaries = {}
            if item.stored.input_divisor is not None:
                object_id = f"auxiliary/{len(divisors):06d}"
                divisors[object_id] = item.stored.input_divisor.astype("<f4").tobytes()
                auxiliaries[DIVISOR_ROLE] = Binding((Part(object_id, 0, 1),), whole=True)
            uses.append(Use(item.spec.name, site, _policy(item.stored), auxiliaries))
    return uses, divisors


def _policy(stored: Stored) -> Policy:
    """Lower activation precision only where the checkpoint was quantised for it."""
    if stored.format == NVFP4 and stored.input_divisor is not None:
        return "AllowA4"
    return "AllowA8" if stored.format == FP8 else "A16Only"


def _components(
    config: SourceConfig, components: Sequence[str], resources: Mapping[str, Mapping[str, bytes]],
    proposal: npt.NDArray[np.int32] | None,
) -> dict[str, Component]:  # fmt: skip
    records = {"text": config.text_record, "mtp": config.mtp_record, "vision": config.vision_record}
    records |= config.companion_records
    return {
        name: Component(
            config=records[name] or {},
            target=None if name == "text" else "text",
            resources={role: _resource_id(name, role) for role in resources.get(name, ())},
            proposal=Proposal("indexed", len(proposal)) if name == "text" and proposal is not None else None,
        )
        for name in components
    }


def _resource_id(component: str, role: str) -> str:
    return f"resource/{component}/{role}"
