"""Which checkpoints a prompt might start from, found by digest. A digest never proves a match; Program does."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Sequence

from ninfer.context import CheckpointRef, ShortlistKey
from ninfer.identity import PrefixIdentity, PromptDigest, digest_at


class PrefixIndex:
    """Checkpoints by (frontier, mode, digest of the tokens before it)."""

    def __init__(self) -> None:
        self._found: dict[ShortlistKey, list[CheckpointRef]] = {}
        self._keys: dict[CheckpointRef, ShortlistKey] = {}
        self._frontiers: list[int] = []  # distinct, ascending
        self._uses: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: ShortlistKey, ref: CheckpointRef) -> None:
        self._found.setdefault(key, []).append(ref)
        self._keys[ref] = key
        self._uses[key.frontier] += 1
        if self._uses[key.frontier] == 1:
            insort(self._frontiers, key.frontier)

    def remove(self, ref: CheckpointRef) -> None:
        key = self._keys.pop(ref)
        refs = self._found[key]
        refs.remove(ref)
        if not refs:
            del self._found[key]
        self._uses[key.frontier] -= 1
        if not self._uses[key.frontier]:
            del self._uses[key.frontier]
            self._frontiers.remove(key.frontier)

    def find(self, key: ShortlistKey) -> Sequence[CheckpointRef]:
        """Checkpoints under one key, in the order they were added."""
        return self._found.get(key, ())

    def shortlist(self, identity: PrefixIdentity, digest: PromptDigest) -> list[CheckpointRef]:
        """Checkpoints whose digest is the prompt's at their frontier, deepest first, older ones first among equals.

        The work is one hash of at most 63 tokens for each distinct frontier up to the prompt's length.
        """
        reach = bisect_right(self._frontiers, len(identity.tokens))
        found: list[CheckpointRef] = []
        for frontier in reversed(self._frontiers[:reach]):
            found += self.find(shortlist_key(identity, digest, frontier))
        return found


def shortlist_key(identity: PrefixIdentity, digest: PromptDigest, frontier: int) -> ShortlistKey:
    """The key of the prompt's first ``frontier`` tokens."""
    return ShortlistKey(frontier, identity.mode, digest_at(identity, digest, frontier))
