"""What generation_config.json and tokenizer_config.json say about generating: stop ids, sampling, named tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ninfer.errors import InvalidRequest
from ninfer.frontend.protocol import TURN_CLOSE
from ninfer.frontend.resources import broken
from ninfer.frontend.vocabulary import Vocabulary
from ninfer.options import SamplingParams

_FALLBACK = SamplingParams(temperature=1.0, top_p=1.0, top_k=20, min_p=0.0, presence_penalty=0.0, frequency_penalty=0.0)
_LARGEST_TOP_K = 64


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The token names a chat template may read, such as ``eos_token``."""
    names = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
    values = {name: config.get(name) for name in names}
    contents = {k: v.get("content") if isinstance(v, Mapping) else v for k, v in values.items()}
    return {name: content for name, content in contents.items() if isinstance(content, str)}


def read_stop_ids(generation: Mapping[str, Any], config: Mapping[str, Any], vocabulary: Vocabulary) -> tuple[int, ...]:
    """``eos_token_id`` (else the tokenizer's ``eos_token``), then ``<|im_end|>``. Raises ArtifactError."""
    where = "generation_config.json: eos_token_id"
    listed = generation.get("eos_token_id")
    ids = listed if isinstance(listed, list) else [] if listed is None else [listed]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocabulary.size:
            raise broken(where, f"{token!r} is not a token id in 0..{vocabulary.size - 1}")
    names = [TURN_CLOSE] if ids else [TURN_CLOSE, special_tokens(config).get("eos_token", "")]
    ids = [*ids, *(vocabulary.ids[name] for name in names if name in vocabulary.ids)]
    if not ids:
        raise broken(where, "no stop id")
    return tuple(dict.fromkeys(ids))


def read_sampling(generation: Mapping[str, Any]) -> SamplingParams:
    """The recommended sampling, every field but the seed. Raises ArtifactError."""
    names = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty")
    chosen = {name: generation[name] for name in names if generation.get(name) is not None}
    if isinstance(chosen.get("top_k"), int):
        chosen["top_k"] = min(chosen["top_k"], _LARGEST_TOP_K)
    if generation.get("do_sample") is False:
        chosen["temperature"] = 0.0
    try:
        return SamplingParams(**chosen).over(_FALLBACK)
    except InvalidRequest as error:
        raise broken(f"generation_config.json: {error.field}", error.reason) from None
