"""The parts of a running server: processes, watches and whatever else must be there as long as the server.

Knows which part needs which, and in which order they stop. Does not know what a part does. Parts may be added and
removed while the server runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

logger = logging.getLogger(__name__)


class ServerEnded(RuntimeError):
    """Something that must run as long as the server has ended by itself. The server was stopped in order."""


@dataclass(frozen=True)
class Part:
    """One part. `start` returns once the part runs. `supervise` keeps it running. It returns or raises only when nobody
    keeps the part running any more; `duty` says for people what `supervise` does. `stop` ends the part within about
    `grace_s` seconds.

    `needs` names the parts that must be there before this one starts, and until this one has stopped. A part without
    `stop` ends when its supervision is cancelled.
    """

    name: str
    needs: tuple[str, ...] = ()
    start: Callable[[], Awaitable[None]] | None = None
    supervise: Callable[[], Awaitable[None]] | None = None
    duty: str = ""
    stop: Callable[[], Awaitable[None]] | None = None
    grace_s: float = 0.0


class Parts:
    """The parts that run now."""

    def __init__(self) -> None:
        self._parts: dict[str, Part] = {}
        self._supervisions: dict[str, asyncio.Task[None]] = {}
        self._ended = asyncio.Event()
        self._failure: ServerEnded | None = None

    @property
    def names(self) -> list[str]:
        """In the order in which they were added."""
        return list(self._parts)

    @property
    def grace_s(self) -> float:
        """How long `stop` takes at most, about."""
        return sum(max(self._parts[name].grace_s for name in names) for names in self._stop_order())

    async def add(self, part: Part) -> None:
        """Start a part. Raises ValueError when a part has its name or a part that it needs is not there, and what its
        start raises: it is not there then."""
        if part.name in self._parts:
            raise ValueError(f"there is a part {part.name} already")
        if missing := [name for name in part.needs if name not in self._parts]:
            raise ValueError(f"{part.name} needs {', '.join(missing)}")
        self._parts[part.name] = part
        try:
            if part.start is not None:
                await part.start()
        except BaseException:
            del self._parts[part.name]
            raise
        if part.supervise is not None:
            self._supervisions[part.name] = asyncio.create_task(self._supervise(part))

    async def remove(self, name: str) -> None:
        """Stop a part. Raises ValueError when a part that runs needs it. An error of its stop is logged."""
        if users := [part.name for part in self._parts.values() if name in part.needs]:
            raise ValueError(f"{', '.join(users)} needs {name}")
        part = self._parts.pop(name)
        supervision = self._supervisions.pop(name, None)
        try:
            if part.stop is not None:
                await part.stop()
        except Exception:
            logger.exception("stopping %s failed", name)
        finally:
            if supervision is not None:
                supervision.cancel()
                await asyncio.gather(supervision, return_exceptions=True)

    async def stop(self) -> None:
        """Stop all parts, each after those that need it. Whatever goes wrong with one, the others are stopped too."""
        for names in self._stop_order():
            await asyncio.gather(*(self.remove(name) for name in names))

    async def until_one_ends(self) -> None:
        """Wait until the supervision of a part ends although the part was not removed. Raises ServerEnded then."""
        await self._ended.wait()
        assert self._failure is not None
        raise self._failure

    async def _supervise(self, part: Part) -> None:
        assert part.supervise is not None
        failure: Exception | None = None
        try:
            await part.supervise()
        except Exception as error:
            failure = error
        if part.name in self._parts and self._failure is None:
            said = f"{part.duty} has ended, without which no server is to run: {failure or 'see above'}"
            self._failure = ServerEnded(said)
            self._failure.__cause__ = failure
            self._ended.set()

    def _stop_order(self) -> list[list[str]]:
        """All parts in groups. A group may stop when those before it have: nobody that is left needs its parts."""
        left, order = dict(self._parts), list[list[str]]()
        while left:
            needed = {name for part in left.values() for name in part.needs}
            order.append([name for name in left if name not in needed])
            for name in order[-1]:
                del left[name]
        return order
