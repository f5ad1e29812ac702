"""What makes two token prefixes the same content, and digests that find candidates for that comparison."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

DIGEST_BLOCK = 64
"""Tokens of one link of a digest chain."""


@dataclass(frozen=True, slots=True)
class VisionSpan:
    """Positions ``[begin, begin + length)`` that one image or video fills.

    grid: temporal, height, width after merging. digest: 32-byte hash of the prepared pixels.
    """

    begin: int
    length: int
    modality: str
    grid: tuple[int, int, int]
    digest: bytes


@dataclass(frozen=True, slots=True, eq=False)
class PrefixIdentity:
    """Everything that decides whether two prefixes are the same content.

    tokens: int32 [n]. token_types: uint8 [n], 0 text. positions: int32 [3, n], rotary axes. rope_delta: what a
    generated token's index is shifted by. mode: template and runtime tag. execution_frontiers: sorted positions at
    which a rendered history must be split when it is executed.
    """

    tokens: npt.NDArray[np.int32]
    token_types: npt.NDArray[np.uint8]
    positions: npt.NDArray[np.int32]
    rope_delta: int = 0
    vision: tuple[VisionSpan, ...] = ()
    mode: str = "text"
    execution_frontiers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptDigest:
    """Chained 16-byte BLAKE2b links, one per 64 tokens. A shortlist key; it never proves equality."""

    chain: tuple[bytes, ...]


def same_prefix(a: PrefixIdentity, b: PrefixIdentity, frontier: int) -> bool:
    """Whether the first ``frontier`` tokens of both are the same content, executed with the same splits.

    A span of media that the frontier cuts never matches.
    """
    if not 0 <= frontier <= min(len(a.tokens), len(b.tokens)) or a.mode != b.mode:
        return False
    spans = [tuple(s for s in i.vision if s.begin < frontier) for i in (a, b)]
    if spans[0] != spans[1] or any(s.begin + s.length > frontier for s in spans[0]):
        return False
    splits = [tuple(f for f in i.execution_frontiers if 0 < f <= frontier) for i in (a, b)]
    return (
        splits[0] == splits[1]
        and np.array_equal(a.tokens[:frontier], b.tokens[:frontier])
        and np.array_equal(a.token_types[:frontier], b.token_types[:frontier])
        and np.array_equal(a.positions[:, :frontier], b.positions[:, :frontier])
    )


def digest_chain(identity: PrefixIdentity, known: PromptDigest | None = None) -> PromptDigest:
    """``chain[b]`` stands for the first ``64 b`` tokens. ``known``: the chain of a prefix of this identity."""
    chain = list(known.chain) if known is not None and known.chain else [_seed(identity)]
    for begin in range((len(chain) - 1) * DIGEST_BLOCK, len(identity.tokens) - DIGEST_BLOCK + 1, DIGEST_BLOCK):
        chain.append(_extend(chain[-1], identity, begin, begin + DIGEST_BLOCK))
    return PromptDigest(tuple(chain))


def digest_at(identity: PrefixIdentity, digest: PromptDigest, frontier: int) -> bytes:
    """The digest of the first ``frontier`` tokens: the last whole link, and one more hash over what follows it."""
    block = frontier // DIGEST_BLOCK
    link = digest.chain[block]
    return link if frontier % DIGEST_BLOCK == 0 else _extend(link, identity, block * DIGEST_BLOCK, frontier)


def _seed(identity: PrefixIdentity) -> bytes:
    return hashlib.blake2b(identity.mode.encode(), digest_size=16).digest()


def _extend(link: bytes, identity: PrefixIdentity, begin: int, end: int) -> bytes:
    media = b"".join(s.digest for s in identity.vision if begin < s.begin + s.length and s.begin < end)
    parts = (link, identity.tokens[begin:end].tobytes(), identity.token_types[begin:end].tobytes(), media)
    return hashlib.blake2b(b"".join(parts), digest_size=16).digest()
