"""Text to token ids and back. One encoder with added tokens, one (made on first use) without."""

from __future__ import annotations

import codecs
import json
import re
import threading
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from ninfer.cancellation import checkpoint
from ninfer.frontend.pieces import cutter
from ninfer.frontend.resources import FrontendResources, broken, json_object
from ninfer.frontend.vocabulary import Vocabulary, read_vocabulary

_PROBE = "The cafés cost\n\n 5€, 名前 \U0001f600\t\r\n  end"


class Tokenizer:
    """A byte-level BPE tokenizer over the public token domain. Safe to use from several threads.

    Encoding adds nothing (no BOS, no template) and truncates nothing. Raises ArtifactError for resources that
    cannot be honoured exactly.
    """

    def __init__(self, resources: FrontendResources) -> None:
        spec = json_object(resources.tokenizer_json, "tokenizer.json")
        self.config = json_object(resources.tokenizer_config, "tokenizer_config.json")
        self.vocabulary: Vocabulary = read_vocabulary(spec, self.config, resources.vocab_rows)
        self._encoder = _build(resources.tokenizer_json)
        self._pieces = cutter(spec, [token.content for token in self.vocabulary.added.values()])
        _add_listed_only_in(self.config, self._encoder)
        for token in self.vocabulary.added.values():
            if self._encoder.token_to_id(token.content) != token.id:
                raise broken("tokenizer.json: added_tokens", f"token {token.content!r} does not load as id {token.id}")
        if self.decode(self.encode(_PROBE)) != self.normalize(_PROBE):
            raise broken("tokenizer.json", "decoding does not reproduce the encoded text")
        contents = sorted((t.content for t in self.vocabulary.added.values()), key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, contents)) or r"(?!)")
        self.openers = frozenset(content[0] for content in contents)
        self._plain: Any = None
        self._plain_lock = threading.Lock()

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``; the spelling of an added token becomes that token."""
        return self._encode(self._encoder, text)

    def encode_except(self, text: str, literal: Collection[int]) -> list[int]:
        """As ``encode``, but no added token starts at the character offsets in ``literal``."""
        ids: list[int] = []
        start = scan = 0
        while match := self._added.search(text, scan):
            if match.start() in literal:
                scan = match.start() + 1
                continue
            ids += self._encode_plain(text[start : match.start()])
            ids.append(self.vocabulary.ids[match.group()])
            start = scan = match.end()
        return ids + self._encode_plain(text[start:])

    def normalize(self, text: str) -> str:
        """What the text becomes before it is split (NFC in this family)."""
        normalizer = self._encoder.normalizer
        return text if normalizer is None else str(normalizer.normalize_str(text))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids``; bytes that are not UTF-8 show as U+FFFD."""
        return b"".join(map(self.vocabulary.bytes.__getitem__, ids)).decode("utf-8", "replace")

    def tokens_within(self, tokens: npt.NDArray[np.int32], prefixes: Iterable[str]) -> list[int]:
        """How many of ``tokens`` lie wholly inside each prefix of the text they encode."""
        ends = np.cumsum(self.vocabulary.lengths[tokens])
        return [int(np.searchsorted(ends, len(self.normalize(prefix).encode()), side="right")) for prefix in prefixes]

    def _encode_plain(self, text: str) -> list[int]:
        if not text:
            return []
        with self._plain_lock:
            if self._plain is None:
                spec = {**json.loads(self._encoder.to_str()), "added_tokens": []}
                self._plain = _build(json.dumps(spec).encode())
        return self._encode(self._plain, text)

    def _encode(self, encoder: Any, text: str) -> list[int]:
        """Piece by piece; ends between two when nobody waits any more."""
        ids: list[int] = []
        for piece in self._pieces(text):
            checkpoint()
            ids += encoder.encode(piece, add_special_tokens=False).ids
        return ids


def decode_utf8(pending: bytes, data: bytes, *, final: bool = False) -> tuple[str, bytes]:
    """Text that ``pending + data`` settles, and the bytes of a character that may still be completed.

    A maximal invalid subpart becomes one U+FFFD as soon as no continuation can repair it (Unicode 16, table
    3-8); with ``final`` an unfinished character does too.
    """
    joined = pending + data if pending else data
    text, used = codecs.utf_8_decode(joined, "replace", final)
    return text, joined[used:]


def _add_listed_only_in(config: dict[str, Any], encoder: Any) -> None:
    """Add the tokens that tokenizer_config.json lists and tokenizer.json does not. They take the next ids."""
    from tokenizers import AddedToken

    known = encoder.get_added_tokens_decoder()
    decoder = {int(key): entry for key, entry in (config.get("added_tokens_decoder") or {}).items()}
    for token, entry in sorted(decoder.items()):
        if token not in known:
            flags = {flag: bool(entry.get(flag, False)) for flag in ("normalized", "special")}
            encoder.add_tokens([AddedToken(entry["content"], **flags)])


def _build(source: bytes) -> Any:
    from tokenizers import Tokenizer as Encoder

    try:
        encoder = Encoder.from_str(source.decode())
    except Exception as error:  # the binding raises bare Exception
        raise broken("tokenizer.json", str(error)) from None
    encoder.no_truncation()
    encoder.no_padding()
    return encoder
