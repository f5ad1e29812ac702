"""Where a long text may be cut without changing its tokens, so that encoding it can stop on the way."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from typing import Any

PIECE = 1 << 14
"""Characters, about; encoding so many takes some ten milliseconds."""

_SPLITS = tuple(
    rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?{letters}+|\p{{N}}| ?[^\s{others}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    for letters, others in ((r"\p{L}", r"\p{L}"), (r"[\p{L}\p{M}]", r"\p{L}\p{M}"))
)
"""How the tokenizers of this family split a text: letters with what precedes them, single digits, the rest."""
_LETTER = "A-Za-z\u05d0-\u05ea\u0627-\u063a\u0430-\u044f\u0905-\u0939\u3042-\u3093\u4e00-\u9fa5\uac00-\ud7a3"
"""Some that every version of Unicode calls letters."""
_CUT = re.compile(rf"(?<=[0-9])|(?<=[{_LETTER}])(?=[ \n\u3001\u3002\uff0c])")
"""Behind a digit, and behind a letter before a space, a line's end or a comma or full stop of Chinese: there a part
always ends, whatever comes before and after, and normalization (NFC) joins nothing."""


def cutter(spec: dict[str, Any], added: Collection[str]) -> Callable[[str], Iterator[str]]:
    """What cuts texts for the tokenizer of a tokenizer.json, whose added tokens are spelled ``added``. Texts of a
    tokenizer that splits in another way stay whole."""
    splits = [part for part in _parts(spec.get("pre_tokenizer")) if part.get("type") != "ByteLevel"]
    normalizer = (spec.get("normalizer") or {"type": "NFC"}).get("type")
    known = len(splits) == 1 and (splits[0].get("pattern") or {}).get("Regex") in _SPLITS
    if known and normalizer == "NFC" and not any(_CUT.search(token) for token in added):
        return pieces
    return lambda text: iter((text,))


def pieces(text: str, size: int = PIECE) -> Iterator[str]:
    """The text in order, in pieces of at least ``size`` characters that end where it may be cut."""
    begin = 0
    while len(text) - begin > size and (cut := _CUT.search(text, begin + size)) is not None:
        yield text[begin : cut.start()]
        begin = cut.start()
    yield text[begin:]


def _parts(pre_tokenizer: dict[str, Any] | None) -> list[dict[str, Any]]:
    if pre_tokenizer is None or pre_tokenizer.get("type") != "Sequence":
        return [] if pre_tokenizer is None else [pre_tokenizer]
    return list(pre_tokenizer.get("pretokenizers") or [])
