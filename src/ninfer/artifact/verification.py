"""Everything the readers trust the producer for, checked offline: codes, scales, padding, links.

What a parameter must look like for its model is the model's to check; here an artifact is only a container.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import attrs
import numpy as np
import numpy.typing as npt

from ninfer.artifact.artifact import Artifact, EncodedTensor
from ninfer.artifact.decoding import block_divisor, grouped_codes
from ninfer.artifact.directory import DIVISOR_ROLE, TensorObject, Use
from ninfer.artifact.formats import RAW_ENCODING
from ninfer.artifact.layouts import plane_view
from ninfer.artifact.source import ArtifactSource
from ninfer.errors import ArtifactError

_BLOCK = 1 << 20  # bytes checked at once


@attrs.frozen
class Finding:
    """Something wrong ("error") or legal but unusual ("warning") at a place such as ``objects['weight/000003']``."""

    severity: Literal["error", "warning"]
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.where}: {self.message}"


def verify(source: ArtifactSource, progress: Callable[[str, int, int], None] | None = None) -> list[Finding]:
    """Check every object, use and gap of an artifact; nothing is repaired. No finding means it is sound.

    progress: called as (object id, bytes checked, total bytes). Reads the whole payload once.
    """
    artifact = Artifact(source)
    findings: list[Finding] = []
    cursor, total = 0, source.directory.payload_bytes
    for record in source.directory.objects.values():
        where = f"objects[{record.id!r}]"
        try:
            findings += _gap(source, cursor, record.offset, f"before {where}")
            if isinstance(record, TensorObject):
                findings += (Finding("error", where, text) for text in _tensor(artifact.parent(record.id)))
            elif record.encoding != RAW_ENCODING:
                findings.append(Finding("error", f"{where}.encoding", f"unknown encoding {record.encoding!r}"))
        except ArtifactError as error:
            findings.append(Finding("error", error.where or where, error.reason))
        cursor = record.offset + record.nbytes
        if progress is not None:
            progress(record.id, cursor, total)
    try:
        findings += _gap(source, cursor, total, "the end of the payload")
    except ArtifactError as error:
        findings.append(Finding("error", "payload", error.reason))
    for i, use in enumerate(source.directory.uses.values()):
        findings += _use(artifact, use, f"uses[{i}]")
    return findings


def _gap(source: ArtifactSource, begin: int, end: int, where: str) -> Iterator[Finding]:
    for at in range(begin, end, _BLOCK):
        if source.view(at, min(_BLOCK, end - at)).any():
            yield Finding("warning", where, f"bytes {begin}..{end}, outside every object, are not zero")
            return


def _use(artifact: Artifact, use: Use, where: str) -> Iterator[Finding]:
    if use.activation_policy is None:
        yield Finding("warning", f"{where}.activation_policy", "missing; a projection cannot be bound without it")
    for role, binding in use.auxiliaries.items():
        place = f"{where}.auxiliaries[{role!r}]"
        if role != DIVISOR_ROLE:
            yield Finding("warning", place, "unknown role; the parameter cannot be bound")
            continue
        try:
            formats = {artifact.geometry(part.object).format.name for part in binding.parts}
            if formats != {"fp32"} or binding.elements != 1:
                yield Finding("error", place, "a divisor is one fp32 element")
            elif not (value := artifact.decode(binding).item()) > 0 or not np.isfinite(value):
                yield Finding("error", place, f"divisor {value} is not finite and positive")
        except ArtifactError as error:
            yield Finding("error", place, str(error))
    if use.activation_policy == "AllowA4" and DIVISOR_ROLE not in use.auxiliaries:
        records = [artifact.directory.objects[p.object] for p in artifact.directory.bindings[use.parameter].parts]
        if any(isinstance(r, TensorObject) and r.format == "nvfp4" for r in records):
            yield Finding("warning", where, "AllowA4 of an nvfp4 weight without a divisor; it runs in 16 bit")


def _tensor(tensor: EncodedTensor) -> Iterator[str]:
    """What is illegal in a tensor's bytes; each kind of fault once, with its count and first place."""
    g, data = tensor.geometry, tensor.data
    end = 0
    for plane in g.planes():
        if data[end : plane.offset].any():
            yield f"gap bytes {end}..{plane.offset} are not zero"
        end = plane.offset + plane.nbytes
    if g.divisor is not None and not 0 < (divisor := block_divisor(g, data)) < np.inf:
        yield f"divisor {divisor} is not finite and positive"
    check = _CHECK.get(g.format.kind)
    if check is None:
        return
    first: dict[str, tuple[int, list[int]]] = {}
    step = max(128, _BLOCK // g.codes.row_bytes // 128 * 128)
    for row in range(0, g.rows, step):
        for fault, illegal in check(tensor, slice(row, min(row + step, g.rows))):
            count = int(np.count_nonzero(illegal))
            if count:
                place = [int(axis[0]) for axis in np.nonzero(illegal)]
                place[0] += row
                seen, at = first.get(fault, (0, place))
                first[fault] = (seen + count, at)
    for fault, (count, at) in first.items():
        yield f"{count} {fault}, the first at {at}"


_Faults = Iterator[tuple[str, npt.NDArray[Any]]]


def _grouped(tensor: EncodedTensor, rows: slice) -> _Faults:
    g, data = tensor.geometry, tensor.data
    assert g.scales is not None
    codes = grouped_codes(g, data, rows)
    scales = plane_view(data, g.scales, rows, "<u2")
    used = -(-g.columns // g.format.group)
    yield "scales [row, group] are negative or not finite", scales >= 0x7C00
    yield "groups [row, group] have codes under a zero scale", ((scales == 0) & codes.any(-1))[:, :used]
    if g.format.bits == 8:
        yield "codes [row, group, lane] are -128", codes == -128
    lanes = codes.reshape(codes.shape[0], -1)
    yield "padding lanes [row, lane] are not zero", (lanes != 0) & (np.arange(lanes.shape[1]) >= g.columns)
    yield "scales [row, group] of padding are not zero", (scales != 0) & (np.arange(g.groups) >= used)


def _row(tensor: EncodedTensor, rows: slice) -> _Faults:
    g, data = tensor.geometry, tensor.data
    assert g.scales is not None
    codes = plane_view(data, g.codes, rows) & 0x7F
    scales = plane_view(data, g.scales, rows, "<u2")
    yield "codes [row, column] are NaN", codes == 0x7F
    yield "scales [row, 0] are negative or not finite", scales >= 0x7F80
    yield "rows [row, 0] have codes under a zero scale", (scales == 0) & codes.any(-1, keepdims=True)


def _block(tensor: EncodedTensor, rows: slice) -> _Faults:
    g, data = tensor.geometry, tensor.data
    assert g.scales is not None
    yield "scale bytes [row, byte as stored] are negative or NaN", plane_view(data, g.scales, rows) > 0x7E


_CHECK = {"grouped": _grouped, "row": _row, "block": _block}
