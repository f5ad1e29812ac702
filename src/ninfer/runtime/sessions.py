"""Which retained history a session's next request should find. A session key is a hint for a search, not a lock."""

from __future__ import annotations

from dataclasses import dataclass

from ninfer.contract import Handle


@dataclass(slots=True)
class _Session:
    """last_order: publication order of the newest result bound so far. live: requests of the session in the engine."""

    owner: Handle | None = None
    last_order: int = 0
    live: int = 0


class SessionIndex:
    """Session key -> owner. Of two results the one whose request entered later stays bound, whichever ends first.

    A key is forgotten once nothing is bound to it and no request of it is in the engine.
    """

    def __init__(self) -> None:
        self._sessions: dict[str, _Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def enter(self, key: str) -> None:
        """A request of the session has entered the engine."""
        self._sessions.setdefault(key, _Session()).live += 1

    def leave(self, key: str) -> None:
        """A request of the session has ended."""
        if key in self._sessions:  # not so after ``clear``
            self._sessions[key].live -= 1
            self._tidy(key)

    def lookup(self, key: str) -> Handle | None:
        """The bound owner."""
        session = self._sessions.get(key)
        return None if session is None else session.owner

    def publish(self, key: str, owner: Handle, order: int) -> bool:
        """Bind a result of the request with that publication order; False when a later request's is already bound."""
        session = self._sessions.setdefault(key, _Session())
        if order <= session.last_order:
            return False
        session.owner, session.last_order = owner, order
        return True

    def forget_owner(self, key: str, owner: Handle) -> None:
        """The owner is gone: consumed or evicted."""
        session = self._sessions.get(key)
        if session is not None and session.owner == owner:
            session.owner = None
            self._tidy(key)

    def clear(self) -> None:
        self._sessions.clear()

    def _tidy(self, key: str) -> None:
        session = self._sessions[key]
        if session.owner is None and session.live == 0:
            del self._sessions[key]
