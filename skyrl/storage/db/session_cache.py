"""Objects of sessions in the memory of an API process: found by id, and dropped together with their session.

Knows ids alone. The caller decides what may be kept: what is not living any more is not dropped by a session's end.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar


class _OfSession(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def session_id(self) -> str: ...


T = TypeVar("T", bound=_OfSession)


class SessionCache(Generic[T]):
    """To drop a session's objects takes time for these objects alone: 100,000 sessions may end within a minute, and a
    search among 100,000 objects for each would keep the event loop busy for minutes."""

    def __init__(self) -> None:
        self._by_id: dict[str, T] = {}
        self._ids_of: dict[str, set[str]] = {}
        """The ids of objects by session."""

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, object_id: str) -> T | None:
        return self._by_id.get(object_id)

    def keep(self, each: T) -> None:
        self._by_id[each.id] = each
        self._ids_of.setdefault(each.session_id, set()).add(each.id)

    def drop(self, object_id: str) -> None:
        """Drop an object, if it is there."""
        if (each := self._by_id.pop(object_id, None)) is None:
            return
        ids = self._ids_of[each.session_id]
        ids.remove(object_id)
        if not ids:
            del self._ids_of[each.session_id]

    def drop_session(self, session_id: str) -> None:
        for object_id in self._ids_of.pop(session_id, ()):
            del self._by_id[object_id]
