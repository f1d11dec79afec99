"""The one way in which new weights get to inference servers: begin, send part by part, finish.

Nothing that samples sees changes before `finish`. Each medium has a module of its own. Imports no torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from enum import Enum, auto
from typing import Generic, Protocol, TypeVar

V_contra = TypeVar("V_contra", contravariant=True)
P_contra = TypeVar("P_contra", contravariant=True)
V = TypeVar("V")
P = TypeVar("P")


class OutOfOrder(RuntimeError):
    """A call of an update came before its turn, or after the update's end."""


class Medium(Protocol[V_contra, P_contra]):
    """How weights travel. One update at a time. `WeightUpdate` keeps the order of the calls."""

    async def begin(self, version: V_contra) -> None:
        """Make everything ready. Whoever samples notices nothing."""
        ...

    async def send(self, part: P_contra) -> None:
        """Bring a part to the servers, or to where they will find it. Whoever samples notices nothing."""
        ...

    async def finish(self) -> None:
        """All parts are sent: servers sample from the new version when this returns. If it raises, the exception says
        which servers do."""
        ...

    async def abandon(self) -> None:
        """Give the update up, after an error in any call. Servers that have not finished keep their version."""
        ...


class _State(Enum):
    NEW = auto()
    BEGUN = auto()
    ENDED = auto()


class WeightUpdate(Generic[V, P]):
    """One update over a medium, with its calls in order. After an error the update is abandoned, and has ended."""

    def __init__(self, medium: Medium[V, P]) -> None:
        self._medium = medium
        self._state = _State.NEW

    async def begin(self, version: V) -> None:
        self._check(_State.NEW, "begin")
        self._state = _State.BEGUN
        await self._or_abandon(self._medium.begin(version))

    async def send(self, part: P) -> None:
        self._check(_State.BEGUN, "send")
        await self._or_abandon(self._medium.send(part))

    async def finish(self) -> None:
        self._check(_State.BEGUN, "finish")
        await self._or_abandon(self._medium.finish())
        self._state = _State.ENDED

    async def abandon(self) -> None:
        """Also before `begin`, and after the end; then nothing happens."""
        begun, self._state = self._state is _State.BEGUN, _State.ENDED
        if begun:
            await self._medium.abandon()

    def _check(self, wanted: _State, call: str) -> None:
        if self._state is not wanted:
            raise OutOfOrder(f"{call}: the update is {self._state.name.lower()}, not {wanted.name.lower()}")

    async def _or_abandon(self, call: object) -> None:
        try:
            await call  # type: ignore[misc]
        except BaseException:
            await self.abandon()
            raise


async def publish(medium: Medium[V, P], version: V, parts: Iterable[P]) -> None:
    """A whole update. Raises what the medium raises; then the update has been abandoned."""
    update = WeightUpdate(medium)
    await update.begin(version)
    try:
        for part in parts:
            await update.send(part)
    except BaseException:
        await update.abandon()  # `parts` may have raised
        raise
    await update.finish()


def push(medium: Medium[V, P], version: V, parts: Iterable[P]) -> None:
    """As `publish`, for a training loop without an event loop."""
    asyncio.run(publish(medium, version, parts))
