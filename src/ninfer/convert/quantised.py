"""How a checkpoint stores a source: as floats, or quantised in the compressed-tensors spelling.

Two schemes are imported bit for bit; a module ``P`` keeps its codes and scales in tensors beside each other:

* FP8: ``P.weight`` F8_E4M3 ``[N, K]``, ``P.weight_scale`` BF16, N elements, a multiplier per row.
* NVFP4: ``P.weight_packed`` U8 ``[N, K/2]`` (low nibble = even column), ``P.weight_scale`` F8_E4M3 ``[N, K/16]``,
  ``P.weight_global_scale`` F32, one element, a divisor; with quantised activations ``P.input_global_scale``, likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import numpy as np

from ninfer.convert.checkpoint import Checkpoint, TensorInfo
from ninfer.convert.hf_config import refuse
from ninfer.convert.sources import Source
from ninfer.errors import ConversionError

FP8, NVFP4 = "fp8_e4m3fn_row_bf16", "nvfp4"
FLOATS = ("BF16", "F16", "F32")
_MEMBER = "quantization_config"


@attrs.frozen
class Stored:
    """The tensors that hold one source. ``format`` is None for floats, else the artifact format that keeps their bits.

    words: values or codes, ``[rows, columns]`` of the source (half as many columns for packed nibbles).
    """

    format: str | None
    words: TensorInfo
    scales: TensorInfo | None = None
    divisor: np.float32 | None = None
    input_divisor: np.float32 | None = None
    names: tuple[str, ...] = ()


def resolver(checkpoint: Checkpoint, quantization: Any) -> Callable[[Source], Stored]:
    """A function from sources to how they are stored. ConversionError names a missing or mis-shaped tensor."""
    allowed = declared_schemes(quantization)
    known: dict[str, Stored] = {}

    def resolve(source: Source) -> Stored:
        if source.tensor not in known:
            known[source.tensor] = stored = _resolve(checkpoint, source)
            if stored.format is not None and stored.format not in allowed:
                reason = f"stored as {stored.format}, which {_MEMBER} does not declare"
                raise ConversionError(reason, tensor=source.tensor)
        return known[source.tensor]

    return resolve


def _resolve(checkpoint: Checkpoint, source: Source) -> Stored:
    tensors, module = checkpoint.tensors, source.module
    if f"{module}.weight_packed" in tensors:
        return _nvfp4(checkpoint, source)
    info = tensors.get(source.tensor)
    if info is None:
        raise ConversionError("missing from the checkpoint", tensor=source.tensor)
    _expect(info, source.shape, *FLOATS, "F8_E4M3")
    if info.dtype != "F8_E4M3":
        return Stored(None, info, names=(info.name,))
    if len(source.shape) != 2:
        raise ConversionError("F8_E4M3 is only imported for matrices", tensor=source.tensor)
    scales = _companion(tensors, f"{module}.weight_scale")
    rows = source.shape[0]
    _expect(scales, (rows,) if len(scales.shape) == 1 else (rows, 1), "BF16")
    return Stored(FP8, info, scales, names=(info.name, scales.name))


def _nvfp4(checkpoint: Checkpoint, source: Source) -> Stored:
    tensors, module = checkpoint.tensors, source.module
    rows, columns = source.shape
    codes, scales = tensors[f"{module}.weight_packed"], _companion(tensors, f"{module}.weight_scale")
    if columns % 64:
        raise ConversionError(f"{columns} columns are not a multiple of 64", tensor=codes.name)
    _expect(codes, (rows, columns // 2), "U8")
    _expect(scales, (rows, columns // 16), "F8_E4M3")
    divisor = _companion(tensors, f"{module}.weight_global_scale")
    used = [codes, scales, divisor]
    activation = tensors.get(f"{module}.input_global_scale")
    if activation is not None:
        used.append(activation)
    return Stored(
        NVFP4,
        codes,
        scales,
        divisor=_divisor(checkpoint, divisor),
        input_divisor=None if activation is None else _divisor(checkpoint, activation),
        names=tuple(info.name for info in used),
    )


def _companion(tensors: Mapping[str, TensorInfo], name: str) -> TensorInfo:
    if name not in tensors:
        raise ConversionError("missing from the checkpoint", tensor=name)
    return tensors[name]


def _expect(info: TensorInfo, shape: tuple[int, ...], *dtypes: str) -> None:
    if info.dtype not in dtypes:
        raise ConversionError(f"dtype {info.dtype}, expected {' or '.join(dtypes)}", tensor=info.name)
    if info.shape != shape:
        raise ConversionError(f"shape {list(info.shape)}, expected {list(shape)}", tensor=info.name)


def _divisor(checkpoint: Checkpoint, info: TensorInfo) -> np.float32:
    _expect(info, () if not info.shape else (1,), "F32")
    value: np.float32 = checkpoint.rows(info, 0, 1, 1)[0, 0]
    if not np.isfinite(value) or value <= 0:
        raise ConversionError(f"{value} is not a positive finite divisor", tensor=info.name)
    return value


def declared_schemes(quantization: Any) -> frozenset[str]:
    """The formats a config's ``quantization_config`` declares; ConversionError when it declares any other scheme."""
    if quantization is None:
        return frozenset()
    if not isinstance(quantization, dict) or quantization.get("quant_method") != "compressed-tensors":
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise refuse(f"{_MEMBER}.quant_method: {method!r} is not supported, only 'compressed-tensors'")
    for name in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        value = quantization.get(name)
        if value and not (isinstance(value, dict) and value.get("format") == "dense"):
            raise refuse(f"{_MEMBER}.{name}: not supported")
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise refuse(f"{_MEMBER}.config_groups: expected a non-empty object")
    return frozenset(_scheme(f"{_MEMBER}.config_groups.{name}", group) for name, group in groups.items())


def _scheme(place: str, group: Any) -> str:
    weights, inputs = (_arguments(place, group, side) for side in ("weights", "input_activations"))
    found = tuple(weights.get(name) for name in ("type", "num_bits", "strategy"))
    if weights.get("symmetric", True) is True and not weights.get("dynamic"):
        if found == ("float", 8, "channel") and (not inputs or inputs.get("dynamic") is True):
            return FP8
        if found == ("float", 4, "tensor_group") and weights.get("group_size") == 16:
            return NVFP4
    raise refuse(
        f"{place}: weights {weights} with input_activations {inputs or None} are not supported; only FP8 per channel "
        "with dynamic or no activation quantisation, and NVFP4"
    )


def _arguments(place: str, group: Any, side: str) -> dict[str, Any]:
    value = group.get(side) if isinstance(group, dict) else group
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise refuse(f"{place}.{side}: expected an object")
    return value
