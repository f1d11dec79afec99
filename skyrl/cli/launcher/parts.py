"""The parts of a running server: processes, watches, and other things that must exist as long as the server runs.

Starts and stops parts in the order in which they need each other. Does not know what a part does. Parts may be added
and removed while the server runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, replace

logger = logging.getLogger(__name__)


class ServerEnded(RuntimeError):
    """A part has ended by itself, although it must run as long as the server. The other parts were then stopped."""


@dataclass(frozen=True)
class Part:
    """One part of a server.

    `start` returns when the part runs. `supervise` keeps the part running; when it returns or raises, the server must
    end. `duty` is the name of that work in the error message. `stop` ends the part within about `grace_s` seconds. A
    part without `stop` ends when `supervise` is cancelled.

    `needs` names the parts that must run before this part starts and until it has stopped.
    """

    name: str
    needs: tuple[str, ...] = ()
    start: Callable[[], Awaitable[None]] | None = None
    supervise: Callable[[], Awaitable[None]] | None = None
    duty: str = ""
    stop: Callable[[], Awaitable[None]] | None = None
    grace_s: float = 0.0


class Parts:
    """The running parts of a server."""

    def __init__(self) -> None:
        self._parts: dict[str, Part] = {}
        self._supervisions: dict[str, asyncio.Task[None]] = {}
        self._ended = asyncio.Event()
        self._failure: ServerEnded | None = None

    @property
    def names(self) -> list[str]:
        """The names of the parts, in the order in which they were added."""
        return list(self._parts)

    @property
    def grace_s(self) -> float:
        """The longest time, about, that `stop` takes."""
        return sum(max(self._parts[name].grace_s for name in names) for names in self._stop_order())

    async def add(self, part: Part) -> None:
        """Start a part. Raises ValueError when another part has its name or a part that it needs is missing, and what
        `start` raises. Then the part is not added."""
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
        """Stop a part. Raises ValueError when a running part needs it. An error while it stops is logged."""
        if users := [part.name for part in self._parts.values() if name in part.needs]:
            raise ValueError(f"{', '.join(users)} needs {name}")
        part = self._parts.pop(name)
        supervision = self._supervisions.pop(name, None)
        try:
            if part.stop is not None:
                await part.stop()
        except Exception:  # logged; the other parts must stop, too
            logger.exception("stopping %s failed", name)
        finally:
            if supervision is not None:
                supervision.cancel()
                await asyncio.gather(supervision, return_exceptions=True)

    async def stop(self) -> None:
        """Stop all parts, each after the parts that need it. If stopping one fails, the others are stopped all the
        same."""
        for names in self._stop_order():
            await asyncio.gather(*(self.remove(name) for name in names if name in self._parts))

    async def drop(self, names: Collection[str]) -> None:
        """Stop these parts, each after those of them that need it. Other parts that need them run on without them."""
        for name, part in self._parts.items():
            if name not in names:
                self._parts[name] = replace(part, needs=tuple(need for need in part.needs if need not in names))
        for group in self._stop_order():
            await asyncio.gather(*(self.remove(name) for name in group if name in names and name in self._parts))

    async def until_one_ends(self) -> None:
        """Wait until `supervise` of a part ends although the part was not removed. Raises ServerEnded then."""
        await self._ended.wait()
        assert self._failure is not None
        raise self._failure

    async def _supervise(self, part: Part) -> None:
        assert part.supervise is not None
        failure: Exception | None = None
        try:
            await part.supervise()
        except Exception as error:  # the server ends, whatever it was: its message says little without a trace
            logger.exception("%s failed", part.duty)
            failure = error
        if part.name in self._parts and self._failure is None:
            self._failure = ServerEnded(f"the server has stopped because {part.duty} ended: {failure or 'see above'}")
            self._failure.__cause__ = failure
            self._ended.set()

    def _stop_order(self) -> list[list[str]]:
        """All parts in groups. When the groups before it have stopped, no running part needs a part of the group."""
        remaining, order = dict(self._parts), list[list[str]]()
        while remaining:
            needed = {name for part in remaining.values() for name in part.needs}
            order.append([name for name in remaining if name not in needed])
            for name in order[-1]:
                del remaining[name]
        return order
