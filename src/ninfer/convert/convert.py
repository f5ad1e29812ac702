"""The conversion itself: everything is checked and planned first, then read, encoded and written in one pass."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import attrs
import numpy as np

from ninfer.artifact import TensorObject, write_artifact
from ninfer.artifact.framing import MAX_FILE_BYTES
from ninfer.convert.checkpoint import Checkpoint
from ninfer.convert.companion import companion_record
from ninfer.convert.hf_config import CONFIG, SourceConfig, parse_config, read_json
from ninfer.convert.planning import Item, Plan, plan
from ninfer.convert.proposal import proposed_ids
from ninfer.convert.quantised import resolver
from ninfer.convert.resources import text_resources, vision_resources
from ninfer.convert.sources import locate
from ninfer.convert.streaming import Chunk, encoded
from ninfer.errors import ConversionError, InvalidRequest
from ninfer.models.qwen3_5 import recipes
from ninfer.models.qwen3_5.parameters import PROPOSAL_HEAD
from ninfer.options import ProgressCallback
from ninfer.progress import Meter

RECIPES: Mapping[str, recipes.Recipe] = {**recipes.RECIPES, "import": recipes.RECIPES["bf16"]}
"""Number formats by role. "import" wants a quantised checkpoint, and stores what is not quantised as bfloat16."""

COMPONENTS = ("text", "mtp", "vision")
_PREFIXES = {"mtp": "mtp.", "vision": "model.visual."}
_HEAD = "lm_head.weight"


@attrs.frozen
class ConversionReport:
    """What a conversion did. Sizes in bytes; ``seconds`` of wall time; ``formats``: tensor objects of each format."""

    components: tuple[str, ...]
    source_bytes: int
    artifact_bytes: int
    seconds: float
    formats: Mapping[str, int]

    @property
    def source_mb_per_second(self) -> float:
        """Megabytes (10**6) of checkpoint read per second."""
        return self.source_bytes / 1e6 / self.seconds

    def __str__(self) -> str:
        formats = ", ".join(f"{count} {name}" for name, count in self.formats.items())
        return (
            f"{self.source_bytes / 1e6:,.1f} MB -> {self.artifact_bytes / 1e6:,.1f} MB in {self.seconds:.1f} s "
            f"({self.source_mb_per_second:,.0f} MB/s); {'+'.join(self.components)}; {formats}"
        )


def convert(
    src: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    recipe: str,
    name: str | None = None,
    components: Sequence[str] | None = None,
    dflash: str | os.PathLike[str] | None = None,
    dflash2: str | os.PathLike[str] | None = None,
    proposal_head: str | os.PathLike[str] | Sequence[int] | None = None,
    proposal_rows: int | None = None,
    shard_bytes: int = MAX_FILE_BYTES,
    progress: bool | ProgressCallback | None = None,
) -> ConversionReport:
    """Make the artifact ``out`` from the Hugging Face checkpoint folder ``src``.

    recipe: a name in ``RECIPES``; it chooses the number format of every matrix that the checkpoint stores as floats.
    Modules quantised by compressed-tensors (FP8 by row, NVFP4) keep their bits whatever the recipe.
    name: the model's public name. components: of "text", "mtp", "vision"; default: those the checkpoint has.
    dflash, dflash2: checkpoint folders of companions of this model, which become components too.
    proposal_head: tokens of a reduced output head that they and the MTP module draft with: ids, a JSON file of ids, or
    a ``.npy`` file of how often each id occurs, of which the ``proposal_rows`` most frequent are taken (default 131072,
    or all).
    shard_bytes: no file of the artifact grows beyond it. progress: ``None`` (a bar in a terminal or notebook), a bool,
    or ``callback("convert", done, total)``, in bytes of the checkpoint.

    Memory stays bounded by a row block. Files are written under temporary names; on any exception, KeyboardInterrupt
    included, nothing is left behind. Raises InvalidRequest for a wrong argument, ConversionError naming the tensor or
    file for a checkpoint that cannot be converted (all but non-finite values before anything is written), ArtifactError
    or OSError when the artifact cannot be written.
    """
    started = time.perf_counter()
    _check_arguments(out, recipe, name, components, shard_bytes, progress)
    folder = Path(src)
    config = parse_config(read_json(folder, CONFIG), vision=components is None or "vision" in components)
    places = {name: Path(path) for name, path in (("dflash", dflash), ("dflash2", dflash2)) if path is not None}
    found = {name: companion_record(read_json(place, CONFIG), config.text, name) for name, place in places.items()}
    config = attrs.evolve(
        config,
        companions={name: parsed for name, (_, parsed) in found.items()},
        companion_records={name: record for name, (record, _) in found.items()},
    )
    with Checkpoint(folder, {f"{name}/": place for name, place in places.items()}) as checkpoint:
        planned = prepare(folder, config, checkpoint, recipe, name, components, proposal_head, proposal_rows)
        used = {name for parent in planned.parents.values() for item in parent.items for name in item.stored.names}
        total = sum(checkpoint.tensors[name].nbytes for name in used)
        total += sum(_read_again(item) for parent in planned.parents.values() for item in parent.items)
        with Meter("convert", total, progress) as meter:

            def contents(object_id: str) -> Iterator[Chunk]:
                if object_id in planned.blobs:
                    return iter([(0, np.frombuffer(planned.blobs[object_id], np.uint8))])
                return encoded(planned.parents[object_id], checkpoint, meter)

            written = write_artifact(out, planned.directory, contents, max_file_bytes=shard_bytes)
    target = Path(out)
    files = [target.with_name(entry.path or target.name) for entry in written.files]
    return ConversionReport(
        components=tuple(written.components),
        source_bytes=total,
        artifact_bytes=sum(file.stat().st_size for file in files),
        seconds=time.perf_counter() - started,
        formats=dict(Counter(o.format for o in written.objects.values() if isinstance(o, TensorObject))),
    )


def prepare(
    folder: Path,
    config: SourceConfig,
    checkpoint: Checkpoint,
    recipe: str,
    name: str | None = None,
    components: Sequence[str] | None = None,
    proposal_head: str | os.PathLike[str] | Sequence[int] | None = None,
    proposal_rows: int | None = None,
) -> Plan:
    """The plan of a conversion. Reads headers and a few scalars, no weights (a stored tied head excepted)."""
    _refuse_fused(checkpoint)
    chosen = _components(config, checkpoint, components)
    resources = {"text": text_resources(folder, config)}
    proposal = None
    if proposal_head is not None:
        if not set(chosen) & {"mtp", "dflash", "dflash2"}:
            raise InvalidRequest("nothing here drafts", field="proposal_head")
        proposal = proposed_ids(proposal_head, proposal_rows, resources["text"]["tokenizer.json"])
    elif proposal_rows is not None:
        raise InvalidRequest("says how large a proposal_head is", field="proposal_rows")
    if "vision" in chosen and config.vision is not None:
        resources["vision"] = vision_resources(folder, config.vision)
    planned = plan(
        config,
        chosen,
        locate(config, chosen, checkpoint.tensors, proposal),
        resolver(checkpoint, config.quantization),
        RECIPES[recipe],
        resources,
        metadata={} if name is None else {"name": name},
        provenance={"converter": "ninfer", "recipe": recipe},
        proposal=proposal,
    )
    _refuse_extra(config, checkpoint, planned, chosen)
    if recipe == "import" and not any(item.stored.format for p in planned.parents.values() for item in p.items):
        raise ConversionError("nothing is quantised here that could be imported", tensor=CONFIG)
    return planned


def _read_again(item: Item) -> int:
    """Bytes of a parameter whose tensor another one has read whole."""
    words = item.stored.words
    return words.nbytes * item.source.rows // words.shape[0] if item.spec.name == PROPOSAL_HEAD else 0


def _check_arguments(
    out: str | os.PathLike[str],
    recipe: str,
    name: str | None,
    components: Sequence[str] | None,
    shard_bytes: int,
    progress: bool | ProgressCallback | None,
) -> None:
    if not isinstance(recipe, str) or recipe not in RECIPES:
        raise InvalidRequest(f"{recipe!r} is not one of {', '.join(RECIPES)}", field="recipe")
    if name is not None and (not isinstance(name, str) or not name or "\0" in name):
        raise InvalidRequest(f"expected a non-empty string, got {name!r}", field="name")
    if components is not None:
        unknown = [c for c in components if c not in COMPONENTS]
        if isinstance(components, str) or unknown or "text" not in components:
            raise InvalidRequest(f'expected "text" and perhaps "mtp", "vision", got {components!r}', field="components")
    if isinstance(shard_bytes, bool) or not isinstance(shard_bytes, int) or shard_bytes < 1 << 20:
        raise InvalidRequest(f"expected at least {1 << 20} bytes, got {shard_bytes!r}", field="shard_bytes")
    if progress is not None and not isinstance(progress, bool) and not callable(progress):
        raise InvalidRequest(f"expected None, a bool or a callable, got {progress!r}", field="progress")
    if os.path.lexists(out):
        raise InvalidRequest("exists already and is not replaced", field="out")
    if not Path(out).parent.is_dir():
        raise InvalidRequest("its folder does not exist", field="out")


def _components(config: SourceConfig, checkpoint: Checkpoint, wanted: Sequence[str] | None) -> list[str]:
    """The chosen components, in storage order."""
    stored = {name for name in _PREFIXES if any(tensor.startswith(_PREFIXES[name]) for tensor in checkpoint.tensors)}
    if config.vision is None:
        stored.discard("vision")
    for name in wanted or ():
        if name != "text" and name not in stored:
            raise ConversionError(f"the checkpoint has no {name} module", tensor=f"{_PREFIXES[name]}*")
    chosen = [name for name in COMPONENTS if name == "text" or name in (stored if wanted is None else wanted)]
    chosen += config.companions
    if "mtp" in chosen and (config.mtp_layers not in (None, 1) or config.mtp_own_embeddings):
        raise ConversionError("mtp: one layer without embeddings of its own is supported", tensor=CONFIG)
    return chosen


def _refuse_fused(checkpoint: Checkpoint) -> None:
    for tensor in checkpoint.tensors:
        if ".in_proj_qkvz." in tensor or ".in_proj_ba." in tensor:
            raise ConversionError("a fused projection of the older Qwen3-Next layout, not supported", tensor=tensor)


def _refuse_extra(config: SourceConfig, checkpoint: Checkpoint, planned: Plan, chosen: Sequence[str]) -> None:
    """Every tensor must have been used, or belong to a component that was left out."""
    used = {name for parent in planned.parents.values() for item in parent.items for name in item.stored.names}
    skipped = tuple(prefix for component, prefix in _PREFIXES.items() if component not in chosen)
    for tensor in checkpoint.tensors:
        if tensor in used or tensor.startswith(skipped):
            continue
        if tensor == _HEAD and config.text.tie_word_embeddings:
            _refuse_unequal(checkpoint, f"{config.prefix}embed_tokens.weight")
        else:
            raise ConversionError("not a tensor of this model", tensor=tensor)


def _refuse_unequal(checkpoint: Checkpoint, embedding: str) -> None:
    """A tied head that is stored nevertheless must be the embedding."""
    a, b = checkpoint.tensors[_HEAD], checkpoint.tensors[embedding]
    equal = a.shape == b.shape and a.dtype == b.dtype
    if equal:
        rows, columns = a.shape
        step = max(1, (1 << 24) // columns)
        spans = [(first, min(first + step, rows)) for first in range(0, rows, step)]
        equal = all(
            checkpoint.rows(a, *span, columns).tobytes() == checkpoint.rows(b, *span, columns).tobytes()
            for span in spans
        )
    if not equal:
        raise ConversionError(f"differs from {embedding} though tie_word_embeddings is true", tensor=_HEAD)
