"""The public token domain: which ids exist, the bytes each one stands for, which are control tokens."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, overload

import attrs
import numpy as np
import numpy.typing as npt

from ninfer.constraints.vocab import TokenClasses
from ninfer.frontend.protocol import CALL_CLOSE, CALL_OPEN, THINK_CLOSE
from ninfer.frontend.resources import broken

_FILE = "tokenizer.json"
_CONFIG = "tokenizer_config.json"


def _byte_alphabet() -> dict[int, int]:
    """GPT-2's printable stand-ins: code point of the character -> byte it stands for."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: byte for byte in printable}
    for byte in sorted(set(range(256)) - set(printable)):
        table[0x100 + len(table) - len(printable)] = byte
    return table


_ALPHABET = _byte_alphabet()


@attrs.frozen
class AddedToken:
    """A token cut out of the text before anything else."""

    id: int
    content: str
    special: bool

    @classmethod
    def parse(cls, token_id: Any, entry: Any, where: str) -> AddedToken:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise broken(where, f"added token has id {token_id!r}")
        if not isinstance(entry, Mapping) or not isinstance(entry.get("content"), str) or not entry["content"]:
            raise broken(where, f"added token {token_id} has no content")
        try:
            entry["content"].encode()
        except UnicodeEncodeError:
            raise broken(where, f"added token {token_id} holds a lone surrogate") from None
        for flag in ("lstrip", "rstrip", "single_word"):
            if entry.get(flag):
                raise broken(where, f"added token {entry['content']!r} sets {flag!r}, which loses text")
        return cls(token_id, entry["content"], bool(entry.get("special", False)))


class TokenBytes(Sequence[bytes]):
    """What each id stands for, in one block: a quarter of a million bytes objects would take several times as much."""

    __slots__ = ("_block", "_ends")

    def __init__(self, block: bytes, lengths: Iterable[int]) -> None:
        """Tokens of these lengths, one after the other in ``block``."""
        self._block, self._ends = block, array("I", accumulate(lengths, initial=0))

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[bytes]: ...

    def __getitem__(self, index: int | slice) -> bytes | Sequence[bytes]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        size = len(self._ends) - 1
        if not -size <= index < size:
            raise IndexError(index)
        index %= size
        return self._block[self._ends[index] : self._ends[index + 1]]

    def without(self, ids: Iterable[int]) -> TokenBytes:
        """The same, but nothing for these ids."""
        lengths, ends, pieces, at = self.lengths(), self._ends, [], 0
        for i in sorted(ids):
            pieces.append(self._block[at : ends[i]])
            at, lengths[i] = ends[i + 1], 0
        return TokenBytes(b"".join([*pieces, self._block[at:]]), lengths.tolist())

    def ending_with(self, byte: int) -> list[int]:
        """Ids whose last byte this is."""
        lengths, ends = self.lengths(), np.array(self._ends[1:], np.int64)
        last = np.frombuffer(self._block + b"\0", np.uint8)[ends - 1]
        found: list[int] = np.flatnonzero((lengths > 0) & (last == byte)).tolist()
        return found

    def __iter__(self) -> Iterator[bytes]:
        block = self._block
        return (block[begin:end] for begin, end in pairwise(self._ends))

    def lengths(self) -> npt.NDArray[np.int64]:
        """Bytes of each id, int64 [size]."""
        ends = np.array(self._ends, np.int64)
        return ends[1:] - ends[:-1]


@attrs.frozen(eq=False)
class Vocabulary:
    """Ids are exactly ``0..size-1``.

    bytes: what each id stands for in UTF-8 text. lengths: their number, int64 [size]. added: id ->
    AddedToken.
    """

    size: int
    bytes: TokenBytes
    lengths: npt.NDArray[np.int64]
    added: Mapping[int, AddedToken]
    ids: Mapping[str, int]
    """Content of an added token -> id."""


def token_classes(vocabulary: Vocabulary, stop_ids: tuple[int, ...]) -> TokenClasses:
    """What constraints may do with each id: markers of the answer's own envelope, ends, ordinary text."""
    text = np.ones(vocabulary.size, np.bool_)
    text[[*vocabulary.added, *stop_ids]] = False
    markers = [vocabulary.ids[name] for name in (THINK_CLOSE, CALL_OPEN, CALL_CLOSE) if name in vocabulary.ids]
    phase = {token: vocabulary.bytes[token] for token in markers if token not in stop_ids}
    return TokenClasses(vocabulary.bytes, text, phase, stop_ids)


def read_vocabulary(tokenizer: Mapping[str, Any], config: Mapping[str, Any], rows: int) -> Vocabulary:
    """The union of ``model.vocab``, ``added_tokens`` and the config's ``added_tokens_decoder``.

    The sources must agree on the content and the special flag of every id, and the ids must be exactly
    ``0..V-1`` with ``V <= rows``. Raises ArtifactError.
    """
    model = tokenizer.get("model")
    if not isinstance(model, Mapping) or model.get("type", "BPE") != "BPE":
        raise broken(f"{_FILE}: model", "expected a byte-level BPE model")
    vocab = model.get("vocab")
    if not isinstance(vocab, Mapping) or not vocab:
        raise broken(f"{_FILE}: model.vocab", "expected a non-empty object")
    pieces = _unique_ids(vocab)
    added = _added_tokens(tokenizer, config, vocab)
    for token in added.values():
        if pieces.setdefault(token.id, token.content) != token.content:
            raise broken(_FILE, f"id {token.id} is both {pieces[token.id]!r} and {token.content!r}")
    size = len(pieces)
    if max(pieces) != size - 1:
        missing = next(i for i in range(size) if i not in pieces)
        raise broken(_FILE, f"token ids are not 0..V-1: id {missing} is missing, id {max(pieces)} exists")
    if size > rows:
        raise broken(_FILE, f"{size} tokens exceed the model's {rows} vocabulary rows")
    data = _token_bytes(pieces, added)
    return Vocabulary(size, data, data.lengths(), added, {token.content: token.id for token in added.values()})


def _unique_ids(vocab: Mapping[str, Any]) -> dict[int, str]:
    pieces: dict[int, str] = {}
    for piece, token_id in vocab.items():
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise broken(f"{_FILE}: model.vocab", f"token {piece!r} has id {token_id!r}")
        if pieces.setdefault(token_id, piece) != piece:
            raise broken(f"{_FILE}: model.vocab", f"id {token_id} is both {pieces[token_id]!r} and {piece!r}")
    return pieces


def _added_tokens(
    tokenizer: Mapping[str, Any], config: Mapping[str, Any], vocab: Mapping[str, Any]
) -> dict[int, AddedToken]:
    added: dict[int, AddedToken] = {}
    contents: dict[str, int] = {}
    for token, where in _declared(tokenizer, config):
        known = added.setdefault(token.id, token)
        if known != token:
            raise broken(where, f"id {token.id} is {token.content!r}/special={token.special}, but elsewhere "
                                f"{known.content!r}/special={known.special}")  # fmt: skip
        elsewhere = contents.setdefault(token.content, token.id)
        if elsewhere != token.id or vocab.get(token.content, token.id) != token.id:
            raise broken(where, f"token {token.content!r} has two ids")
    return added


def _declared(tokenizer: Mapping[str, Any], config: Mapping[str, Any]) -> Iterable[tuple[AddedToken, str]]:
    listed = tokenizer.get("added_tokens") or []
    if not isinstance(listed, list):
        raise broken(f"{_FILE}: added_tokens", "expected an array")
    for entry in listed:
        token_id = entry.get("id") if isinstance(entry, Mapping) else None
        yield AddedToken.parse(token_id, entry, f"{_FILE}: added_tokens"), f"{_FILE}: added_tokens"
    decoder = config.get("added_tokens_decoder") or {}
    where = f"{_CONFIG}: added_tokens_decoder"
    if not isinstance(decoder, Mapping):
        raise broken(where, "expected an object")
    for key, entry in decoder.items():
        if not (isinstance(key, str) and key.isascii() and key.isdigit()):
            raise broken(where, f"{key!r} is not a token id")
        yield AddedToken.parse(int(key), entry, where), where


def _token_bytes(pieces: Mapping[int, str], added: Mapping[int, AddedToken]) -> TokenBytes:
    plain = [piece for token_id, piece in pieces.items() if token_id not in added]
    if unknown := set("".join(plain)).difference(map(chr, _ALPHABET)):
        raise broken(f"{_FILE}: model.vocab", f"not a byte-level vocabulary: it uses {min(unknown)!r}")
    if lacking := set(map(chr, _ALPHABET)).difference(plain):
        raise broken(f"{_FILE}: model.vocab", f"no token stands for byte {_ALPHABET[ord(min(lacking))]:#04x} alone")
    blocks: list[bytes] = []
    lengths: list[int] = []
    begin = 0
    for end in (*sorted(added), len(pieces)):  # a character of a plain token is a byte: they are translated by the run
        run = [pieces[i] for i in range(begin, end)]
        blocks.append("".join(run).translate(_ALPHABET).encode("latin-1"))
        lengths += map(len, run)
        if end in added:
            blocks.append(pieces[end].encode())
            lengths.append(len(blocks[-1]))
        begin = end + 1
    return TokenBytes(b"".join(blocks), lengths)
