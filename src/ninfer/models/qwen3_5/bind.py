"""An artifact becomes a model: everything is checked first, then only the selected components are made resident.

A stored object is handed to the device once, whole, and every parameter in it becomes row segments of it. A parameter
whose parts do not fall on row boundaries is decoded into a matrix of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ninfer.artifact import Artifact, EncodedTensor
from ninfer.artifact.directory import DIVISOR_ROLE
from ninfer.artifact.formats import f32_to_bf16
from ninfer.artifact.layouts import Bytes, align_up
from ninfer.device import ITEM_BYTES, Arena, Buffer, Device
from ninfer.errors import ArtifactError, InvalidRequest, OutOfDeviceMemory
from ninfer.models.qwen3_5.config import (
    FULL,
    Dense,
    DFlashConfig,
    MtpConfig,
    TextConfig,
    parse_dflash,
    parse_mtp,
    parse_text,
    parse_vision,
)
from ninfer.models.qwen3_5.parameters import (
    PROPOSAL_HEAD,
    PROPOSAL_IDS,
    ParameterSpec,
    dflash_parameters,
    mtp_parameters,
    proposal_parameters,
    text_parameters,
    vision_parameters,
)
from ninfer.models.qwen3_5.weights import (
    AttentionWeights,
    Block,
    ConvolutionWeights,
    DenseWeights,
    DFlashWeights,
    DraftLayer,
    GdnWeights,
    Model,
    MoeWeights,
    MtpWeights,
    ProposalWeights,
    SelectorWeights,
)
from ninfer.ops import Bank, Matrix, Segment, Stored

RESOURCES = {
    "text": ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"),
    "vision": ("preprocessor_config.json", "video_preprocessor_config.json"),
}
"""Roles a component must carry when it is used."""

COMPANIONS = ("dflash", "dflash2")
"""Components that draft blocks."""

FEWEST_PROPOSED = 32
"""Rows of a head for drafting, at least: more than candidates of a draft."""

_DTYPE = {"bf16": "bf16", "fp32": "f32", "int32": "i32"}
_WORDS = {"bf16": np.uint16, "fp32": np.float32, "int32": np.int32}
_ALIGN = 256

LoadProgress = Callable[[int, int], None]
"""Called as (bytes resident, bytes in all)."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The configs of the selected components, and every parameter they need."""

    text: TextConfig
    mtp: MtpConfig | None
    dflash: DFlashConfig | None
    parameters: tuple[ParameterSpec, ...]


def check(artifact: Artifact, components: Sequence[str] = ("text",)) -> Selection:
    """Whether the components "text", "mtp", "dflash", "dflash2", "vision" can be bound, and "proposal", the text's head
    for drafting: configs, resources, parameters, uses.

    Raises ArtifactError naming the component, parameter or use. Reads no weight bytes. Parameters and uses that no
    selected component needs are ignored.
    """
    selection = _select(artifact, components)
    checked: set[str] = set()
    for spec in selection.parameters:
        artifact.check(spec.name, spec.shape)
        parts = artifact.binding(spec.name).parts
        for object_id in {part.object for part in parts} - checked:
            artifact.geometry(object_id)
            checked.add(object_id)
        formats = {artifact.geometry(part.object).format.name for part in parts}
        if spec.kind == "direct" and formats != {spec.format}:
            found = ", ".join(sorted(formats))
            raise _error(artifact, f"stored as {found}, must be {spec.format}", f"bindings[{spec.name!r}]")
        if spec.kind != "direct" and "int32" in formats:
            raise _error(artifact, "int32 cannot store a matrix", f"bindings[{spec.name!r}]")
        for site in spec.uses:
            _check_use(artifact, spec.name, site)
    return selection


def _select(artifact: Artifact, components: Sequence[str]) -> Selection:
    records = artifact.directory.components
    for name in ("text", *components):
        if name == "proposal":
            continue
        where = f"components.{name}"
        if name not in records:
            raise _error(artifact, "no such component", where)
        if name != "text" and records[name].target != "text":
            raise _error(artifact, f"target is {records[name].target!r}, must be 'text'", f"{where}.target")
        for role in RESOURCES.get(name, ()):
            if role not in records[name].resources:
                raise _error(artifact, "required resource is missing", f"{where}.resources.{role}")
    companions = tuple(name for name in ("mtp", *COMPANIONS) if name in components)
    try:
        text = parse_text(records["text"].config, mtp="mtp" in components)
        mtp = parse_mtp(records["mtp"].config, text) if "mtp" in components else None
        dflash = next((parse_dflash(records[c].config, text, c) for c in COMPANIONS if c in components), None)
        parameters = list(text_parameters(text, companions))
        if mtp:
            parameters += mtp_parameters(text)
        if dflash:
            parameters += dflash_parameters(dflash, text)
        if "proposal" in components:
            parameters += _proposal_parameters(artifact, text, companions)
        if "vision" in components:
            parameters += vision_parameters(parse_vision(records["vision"].config), text.hidden_size)
    except ArtifactError as error:
        raise _error(artifact, error.reason, error.where) from None
    return Selection(text, mtp, dflash, tuple(parameters))


def _proposal_parameters(artifact: Artifact, text: TextConfig, companions: Sequence[str]) -> Iterator[ParameterSpec]:
    proposal, where = artifact.directory.components["text"].proposal, "components.text.proposal"
    if proposal is None:
        raise _error(artifact, "no such member", where)
    if proposal.rows is not None and not FEWEST_PROPOSED <= proposal.rows <= text.vocab_size:
        expected = f"{FEWEST_PROPOSED}..{text.vocab_size}"
        raise _error(artifact, f"{proposal.rows}, must be {expected}", f"{where}.rows")
    return proposal_parameters(text, proposal.rows, companions)


def _check_use(artifact: Artifact, parameter: str, site: str) -> None:
    where = f"uses[{parameter!r}, {site!r}]"
    use = artifact.directory.uses.get((parameter, site))
    if use is None:
        raise _error(artifact, "needed use is missing", where)
    if use.activation_policy is None:
        raise _error(artifact, "needs an activation policy", f"{where}.activation_policy")
    for role, binding in use.auxiliaries.items():
        if role != DIVISOR_ROLE:
            raise _error(artifact, "unknown auxiliary role", f"{where}.auxiliaries.{role}")
        values = artifact.decode(binding).reshape(-1)
        if values.dtype != np.float32 or values.size != 1 or not (np.isfinite(values[0]) and values[0] > 0):
            raise _error(artifact, "must be one positive finite fp32 number", f"{where}.auxiliaries.{role}")


def _error(artifact: Artifact, message: str, where: str) -> ArtifactError:
    return ArtifactError(message, path=artifact.source.name, where=where)


def bind(
    artifact: Artifact,
    device: Device,
    components: Sequence[str] = ("text",),
    progress: LoadProgress | None = None,
) -> Model:
    """Check the components "text" and, if asked for, "mtp", "dflash" or "dflash2", and "proposal", and make their
    weights resident on the device.

    Raises ArtifactError as ``check`` does, and OutOfDeviceMemory for more than a GPU has free beside what its Ops work
    in, before loading anything.
    """
    if unknown := set(components) - {"text", "mtp", "proposal", *COMPANIONS}:
        raise InvalidRequest(f"cannot bind {sorted(unknown)}", field="components")
    selection = check(artifact, components)
    loader = _Loader(artifact, device, selection.parameters, progress)
    free, shared = device.memory().free, device.ops.shared_bytes
    if device.kind == "cuda" and loader.total + shared > free:
        needed, beside, there = (f"{nbytes / 2**20:.1f} MiB" for nbytes in (loader.total, shared, free))
        less = "numbers of fewer bits" + (' or spec "none"' if len(components) > 1 else "")
        message = (
            f"the weights take {needed} and operations {beside}, {there} are free on {device.name};"
            f" what needs less: {less}"
        )
        raise OutOfDeviceMemory(message, plan={"weights": loader.total, "operations": shared}, free=free)
    config = selection.text
    model = Model(
        config=config,
        embedding=loader.matrix("text/token_embedding"),
        blocks=tuple(_block(loader, config, f"text/layers/{i}/", kind) for i, kind in enumerate(config.layer_types)),
        final_norm=loader.vector("text/final_norm"),
        head=loader.matrix("text/output_head"),
        mtp=_mtp(loader, config) if selection.mtp else None,
        nbytes=loader.total,
        dflash=_dflash(loader, selection.dflash) if selection.dflash else None,
        proposal=_proposal(loader, artifact, config) if "proposal" in components else None,
    )
    loader.finish()
    return model


def _proposal(load: _Loader, artifact: Artifact, config: TextConfig) -> ProposalWeights:
    record = artifact.directory.components["text"].proposal
    if record is None or record.rows is None:
        return ProposalWeights(load.matrix(PROPOSAL_HEAD), None, 0)
    ids = artifact.decode(PROPOSAL_IDS, (record.rows,))
    if ids.min() < 0 or ids.max() >= config.vocab_size or len(np.unique(ids)) != len(ids):
        raise _error(artifact, f"must be distinct ids in 0..{config.vocab_size - 1}", f"bindings[{PROPOSAL_IDS!r}]")
    return ProposalWeights(load.matrix(PROPOSAL_HEAD), load.vector(PROPOSAL_IDS), int(ids.max()))


def _mtp(load: _Loader, config: TextConfig) -> MtpWeights:
    return MtpWeights(
        projection=load.matrix("mtp/input_projection"),
        embedding_norm=load.vector("mtp/embedding_norm"),
        hidden_norm=load.vector("mtp/hidden_norm"),
        block=_block(load, config, "mtp/layers/0/", FULL),
        final_norm=load.vector("mtp/final_norm"),
    )


def _dflash(load: _Loader, config: DFlashConfig) -> DFlashWeights:
    return DFlashWeights(
        config=config,
        features=load.matrix(f"{config.name}/feature_projection"),
        context_norm=load.vector(f"{config.name}/context_norm"),
        layers=tuple(_draft_layer(load, f"{config.name}/layers/{i}/", config) for i in range(len(config.windows))),
        final_norm=load.vector(f"{config.name}/final_norm"),
        selector=_selector(load, f"{config.name}/candidate_selector/") if config.chain else None,
    )


def _selector(load: _Loader, p: str) -> SelectorWeights:
    books = (load.vector(f"{p}{name}_codebook") for name in ("predecessor", "successor"))
    return SelectorWeights(load.matrix(f"{p}hidden_projection"), *books)


def _convolution(load: _Loader, p: str) -> ConvolutionWeights:
    return ConvolutionWeights(load.vector(f"{p}base_kernel"), load.matrix(f"{p}kernel_projection"))


def _draft_layer(load: _Loader, p: str, config: DFlashConfig) -> DraftLayer:
    a = f"{p}attention/"
    query, key, value, context_key, context_value, output = load.matrices(
        a, ("query", "key", "value", "context_key", "context_value", "output")
    )
    return DraftLayer(
        input_norm=load.vector(f"{p}input_norm"),
        query=query,
        key=key,
        value=value,
        context_key=context_key,
        context_value=context_value,
        query_norm=load.vector(f"{a}query_norm"),
        key_norm=load.vector(f"{a}key_norm"),
        output=output,
        post_norm=load.vector(f"{p}post_attention_norm"),
        ffn=_swiglu(load, f"{p}mlp/"),
        attention_conv=_convolution(load, f"{p}attention_conv/") if config.chain else None,
        mlp_conv=_convolution(load, f"{p}mlp_conv/") if config.chain else None,
    )


def _block(load: _Loader, config: TextConfig, p: str, kind: str) -> Block:
    return Block(
        input_norm=load.vector(f"{p}input_norm"),
        mixer=_attention(load, f"{p}attention/") if kind == FULL else _gdn(load, f"{p}gdn/"),
        post_norm=load.vector(f"{p}post_attention_norm"),
        ffn=_swiglu(load, f"{p}mlp/") if isinstance(config.ffn, Dense) else _moe(load, f"{p}moe/", config.ffn.experts),
    )


def _attention(load: _Loader, p: str) -> AttentionWeights:
    query, key, value, gate, output = load.matrices(p, ("query", "key", "value", "gate", "output"))
    return AttentionWeights(query, key, value, gate, output, load.vector(f"{p}query_norm"), load.vector(f"{p}key_norm"))


def _gdn(load: _Loader, p: str) -> GdnWeights:
    query, key, value, z, a, b, output = load.matrices(
        p, ("query", "key", "value", "z", "a_projection", "b_projection", "output")
    )
    convolution, a_log, dt_bias, norm = (load.vector(p + name) for name in ("convolution", "a_log", "dt_bias", "norm"))
    return GdnWeights(query, key, value, z, a, b, output, convolution, a_log, dt_bias, norm)


def _swiglu(load: _Loader, p: str) -> DenseWeights:
    return DenseWeights(*load.matrices(p, ("gate", "up", "down")))


def _moe(load: _Loader, p: str, experts: int) -> MoeWeights:
    gate, up, down = (
        load.matrices(p, [f"experts/{e}/{name}" for e in range(experts)]) for name in ("gate", "up", "down")
    )
    router, shared_score = load.matrices(p, ("router", "shared_score"))
    return MoeWeights(router, shared_score, Bank(gate, up, down), _swiglu(load, f"{p}shared/"))


class _Loader:
    """Makes objects resident once, and direct parameters in one arena. ``total``: bytes of both."""

    def __init__(
        self,
        artifact: Artifact,
        device: Device,
        parameters: Iterable[ParameterSpec],
        progress: LoadProgress | None,
    ) -> None:
        self._artifact = artifact
        self._device = device
        self._progress = progress
        self._specs = {spec.name: spec for spec in parameters}
        self._stored: dict[str, Stored] = {}
        self._uploads: list[Bytes] = []
        self._done = 0
        self._offsets: dict[str, int] = {}
        cursor = 0
        objects: set[str] = set()
        for spec in self._specs.values():
            if spec.format is not None:
                self._offsets[spec.name] = cursor
                cursor = align_up(cursor + math.prod(spec.shape) * ITEM_BYTES[_DTYPE[spec.format]], _ALIGN)
            else:
                objects.update(part.object for part in artifact.binding(spec.name).parts)
        self._arena: Arena = device.arena(max(cursor, _ALIGN))
        self.total = cursor + sum(artifact.geometry(object_id).nbytes for object_id in objects)

    def vector(self, name: str) -> Buffer:
        """A direct parameter in its own shape and format."""
        spec = self._specs[name]
        assert spec.format is not None
        word = ITEM_BYTES[_DTYPE[spec.format]]
        data = np.concatenate(
            [parent.data[begin * word : end * word] for parent, begin, end in self._artifact.parts(name)]
        )
        buffer = self._arena.buffer(self._offsets[name], spec.shape, _DTYPE[spec.format])
        words = data.view(_WORDS[spec.format]).reshape(spec.shape)
        self._device.upload(buffer, words)
        self._uploads.append(data)
        self._advance(align_up(data.nbytes, _ALIGN))
        return buffer

    def matrix(self, name: str) -> Matrix:
        """A matrix parameter as row segments of resident objects."""
        rows, columns = self._specs[name].shape
        segments = []
        for parent, begin, end in self._artifact.parts(name):
            if len(parent.shape) != 2 or parent.shape[1] != columns or begin % columns or end % columns:
                return self._device.ops.matrix([Segment(self._decoded(name, rows, columns), 0, rows)])
            segments.append(Segment(self._resident(parent), begin // columns, end // columns))
        return self._device.ops.matrix(segments)

    def matrices(self, prefix: str, names: Sequence[str]) -> tuple[Matrix, ...]:
        return tuple(self.matrix(prefix + name) for name in names)

    def finish(self) -> None:
        """Wait until the device has taken every byte."""
        event = self._device.event()
        event.record()
        event.wait()
        self._uploads.clear()
        self._advance(self.total - self._done)

    def _resident(self, parent: EncodedTensor) -> Stored:
        if parent.id not in self._stored:
            rows, columns = parent.shape
            twin = self._stored.get(self._artifact.source.original(parent.id))
            data = self._device.weights(parent.data) if twin is None else self._device.duplicate(twin.data)
            self._stored[parent.id] = Stored(parent.format, (rows, columns), data)
            self._advance(data.nbytes)
        return self._stored[parent.id]

    def _decoded(self, name: str, rows: int, columns: int) -> Stored:
        """A copy of scattered elements: bf16 where that loses nothing, else fp32."""
        values = np.ascontiguousarray(self._artifact.decode(name, (rows, columns)), np.float32)
        exact = not (values.view(np.uint32) & 0xFFFF).any()
        words = f32_to_bf16(values) if exact else values
        data = self._device.weights(words.reshape(-1).view(np.uint8))
        return Stored("bf16" if exact else "fp32", (rows, columns), data)

    def _advance(self, nbytes: int) -> None:
        self._done += nbytes
        if self._progress is not None and nbytes:
            self._progress(self._done, self.total)
