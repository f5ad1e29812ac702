"""Which tokens a reduced head for drafting scores: given one by one, or the most frequent of counted ones.

Tokens that no text spells, but every conversation has, are always among them: the special ones of the tokenizer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ninfer.errors import ConversionError, InvalidRequest
from ninfer.models.qwen3_5.bind import FEWEST_PROPOSED

ROWS = 131_072
"""Tokens of a head that is made from counts, unless the vocabulary has fewer or the caller says otherwise."""

_FIELD = "proposal_head"


def proposed_ids(
    given: str | os.PathLike[str] | Sequence[int], rows: int | None, tokenizer: bytes
) -> npt.NDArray[np.int32]:
    """Ids i32 [rows], in the order of the head's rows.

    given: ids, as a sequence or a JSON file of a list, which are kept in their order; or a ``.npy`` file of how often
    each id occurs, integers [ids] or [n, ids] whose first row counts. Of those the ``rows`` most frequent are taken,
    special tokens first of all, and put into the order of their counts, equal ones of their ids. ``rows`` needs counts.
    Raises InvalidRequest naming proposal_head or proposal_rows.
    """
    size, special = _vocabulary(tokenizer)
    counts: npt.NDArray[Any] | None = None
    if isinstance(given, str | os.PathLike):
        read = _read(Path(given))
        counts, given = (read, ()) if isinstance(read, np.ndarray) else (None, read)
    if counts is None:
        if rows is not None:
            raise InvalidRequest("the ids say how many there are", field="proposal_rows")
        return _checked(given, size)
    if counts.ndim == 2:
        counts = counts[0]
    if counts.ndim != 1 or counts.dtype.kind not in "iu" or len(counts) < size or counts.min(initial=0) < 0:
        raise InvalidRequest(f"expected counts, not negative, of at least {size} ids", field=_FIELD)
    wanted = min(ROWS, size) if rows is None else rows
    least = max(FEWEST_PROPOSED, len(special))
    if isinstance(wanted, bool) or not isinstance(wanted, int) or not least <= wanted <= size:
        raise InvalidRequest(f"expected {least}..{size}, got {wanted!r}", field="proposal_rows")
    return _most_frequent(counts[:size].astype(np.int64), special, wanted)


def _most_frequent(counts: npt.NDArray[np.int64], special: Sequence[int], rows: int) -> npt.NDArray[np.int32]:
    order = np.argsort(-counts, kind="stable")
    others = order[~np.isin(order, special)][: rows - len(special)]
    chosen = np.sort(np.concatenate([others, np.array(special, np.int64)]))
    return chosen[np.argsort(-counts[chosen], kind="stable")].astype(np.int32)


def _read(path: Path) -> npt.NDArray[Any] | list[Any]:
    try:
        if path.suffix == ".npy":
            return np.asarray(np.load(path, allow_pickle=False))
        read = json.loads(path.read_bytes())
    except OSError as error:
        raise InvalidRequest(f"{path}: {error.strerror or error}", field=_FIELD) from None
    except ValueError as error:
        reason = f"{path}: neither a JSON list of ids nor a .npy file of counts: {error}"
        raise InvalidRequest(reason, field=_FIELD) from None
    if not isinstance(read, list):
        raise InvalidRequest(f"{path}: expected a JSON list of ids", field=_FIELD)
    return read


def _checked(ids: Sequence[Any], size: int) -> npt.NDArray[np.int32]:
    for place, id in enumerate(ids):
        if isinstance(id, bool) or not isinstance(id, int) or not 0 <= id < size:
            raise InvalidRequest(f"expected ids in 0..{size - 1}, got {id!r}", field=f"{_FIELD}[{place}]")
    if len(ids) < FEWEST_PROPOSED or len(set(ids)) != len(ids):
        raise InvalidRequest(f"expected at least {FEWEST_PROPOSED} distinct ids", field=_FIELD)
    return np.array(ids, np.int32)


def _vocabulary(tokenizer: bytes) -> tuple[int, list[int]]:
    """Ids there are, and those of special tokens, from tokenizer.json."""
    try:
        record = json.loads(tokenizer)
        added = record.get("added_tokens", [])
        ids = [*record["model"]["vocab"].values(), *(token["id"] for token in added)]
        return max(ids) + 1, sorted({token["id"] for token in added if token.get("special")})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConversionError(f"no vocabulary: {error}", tensor="tokenizer.json") from None
