"""One inference server on a Ray cluster: finds a node for it, starts it there, and starts it again, if need
be elsewhere.

Each server has a placement group of its own with one bundle, so that it never spans nodes. After an end the server
starts again on its node. When its actor or node is lost, the group is given back and a new one is asked for.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeVar

from skyrl.inference.placement import OnExit
from skyrl.runtime.processes.backoff import Backoff
from skyrl.runtime.processes.supervision import FIRST_DELAY_S, LONGEST_DELAY_S, STABLE_AFTER_S, set_within
from skyrl.runtime.ray_cluster.capacity import Bundle, Cancelled, amounts
from skyrl.runtime.ray_cluster.hosts import Look, Started

logger = logging.getLogger(__name__)
T = TypeVar("T")

LOOK_S = 0.5
"""How often the actor is asked how the server does, and for new log lines."""
QUIET_S = 3.0
"""An actor that has not answered for this long is mentioned."""
LOST_S = 30.0
"""An actor that has not answered for this long is given up; the cluster may know earlier that its node is dead."""
START_S = 120.0
"""How long a node may take to start an actor: it imports skyrl, perhaps from a network's file system."""
REFUSALS = 3
"""After so many tries on a node that cannot run the server, another node is looked for."""
TAIL_BYTES = 200 * 1024


class Lost(Exception):
    """The actor cannot be reached any more. The text says what is known."""


class Host(Protocol):
    """`skyrl.runtime.ray_cluster.hosts.ServerHost` as seen from here. Calls raise Lost when the actor is lost,
    TimeoutError."""

    async def node(self, within_s: float) -> tuple[str, str]: ...

    async def start(self, within_s: float) -> Started: ...

    async def look(self, offset: int, sidecar_offset: int, within_s: float) -> Look: ...

    async def ended(self, within_s: float) -> None: ...

    def kill(self) -> None:
        """Kill the server, at some time."""
        ...

    async def stop(self, grace_s: float) -> None: ...

    async def release(self) -> None:
        """End the actor and give its resources back."""
        ...


class Spots(Protocol):
    """Makes hosts on the cluster."""

    async def reserve(
        self, name: str, bundle: Bundle, on_waiting: Callable[[str], None], is_cancelled: Callable[[], bool]
    ) -> Host:
        """A host on a node that has room. Waits as long as that takes. Raises Cancelled, Lost."""
        ...

    def avoid(self, node_id: str) -> None:
        """Prefer other nodes from now on."""
        ...


class RayServer:
    """A ServerHandle. `on_change` is called after each change of its attributes."""

    def __init__(
        self,
        name: str,
        bundle: Bundle,
        spots: Spots,
        log: Path,
        on_exit: OnExit | None,
        on_change: Callable[[], None],
    ) -> None:
        self.name = name
        self.url: str | None = None
        self.sidecar_url: str | None = None
        """Of the sidecar that runs beside the server, if its kind has one."""
        self.node: str | None = None
        self.incarnation: str | None = None
        self.reason = "is about to be placed"
        """Why the server does not run, or cannot be used, as the rest of a sentence that begins with its name; empty
        while all is well."""
        self._bundle = bundle
        self._spots = spots
        self._log = log
        self._on_exit = on_exit
        self._on_change = on_change
        self._tail: deque[bytes] = deque()
        """Of the server's own log: the cause of its end is searched there, and not among its sidecar's lines."""
        self._sidecar_trouble = ""
        self._host: Host | None = None
        self._started_at = 0.0
        self._starts = 0
        self._grace_s = 0.0
        self._stopping = asyncio.Event()
        self._moved = asyncio.Event()
        self._backoff = Backoff(FIRST_DELAY_S, LONGEST_DELAY_S, stable_s=STABLE_AFTER_S)
        self._supervision = asyncio.create_task(self._run(), name=f"supervise {name}")

    @property
    def running_s(self) -> float | None:
        return None if self.incarnation is None else time.monotonic() - self._started_at

    async def until_moved(self, url: str | None) -> None:
        while self.url == url:
            await self._moved.wait()

    def log_tail(self, lines: int = 20) -> str:
        return "\n".join(b"".join(self._tail).decode(errors="replace").splitlines()[-lines:])

    def restart(self, incarnation: str) -> bool:
        if self._host is None or self.incarnation != incarnation:
            return False
        self._host.kill()
        return True

    def give_up(self) -> None:
        self._stopping.set()

    async def supervised(self) -> None:
        await asyncio.shield(self._supervision)

    async def stop(self, grace_s: float = 10.0) -> None:
        self._grace_s = grace_s
        self._stopping.set()
        await self._supervision

    async def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    await self._on_one_node()
                except Cancelled:
                    return
                except Lost as lost:
                    where = "" if self.node is None else f" on node {self.node}"
                    logger.warning("%s%s is lost: %s", self.name, where, lost)
                    self._set(url=None, reason=f"was lost{where} ({lost}), and is placed again")
                    self.node = None
                await self._release()
                if not self._stopping.is_set():
                    await self._pause()
        finally:
            await self._release()

    async def _on_one_node(self) -> None:
        """Run the server on a node until it is told to stop. Raises Lost, Cancelled."""
        self._host = await self._spots.reserve(self.name, self._bundle, self._note_waiting, self._stopping.is_set)
        self._set(url=None, reason=f"waits for its actor ({amounts(self._bundle)})")
        node_id, self.node = await self._answer(self._host.node(START_S), START_S)
        logger.info("%s is placed on node %s (%s)", self.name, self.node, node_id[:8])
        refusals = 0
        while not self._stopping.is_set():
            started = await self._answer(self._host.start(START_S), START_S)
            if started.url is None:
                refusals += 1
                await self._not_started(started)
                if refusals >= REFUSALS:
                    self._spots.avoid(node_id)
                    raise Lost(f"cannot start {started.trouble}")
                continue
            self._starts += 1
            self._started_at = time.monotonic()
            self._tail.clear()
            divider = (
                f"===== {self.name}: start {self._starts} on {self.node}, {time.strftime('%Y-%m-%d %H:%M:%S')} ====="
            )
            await asyncio.to_thread(self._append, divider.encode() + b"\n")
            self.sidecar_url = started.sidecar_url
            self._set(url=started.url, incarnation=f"start {self._starts}, {started.incarnation}")
            code = await self._until_ended(self._host)
            if code is None:
                return
            why = self._sidecar_trouble and f"; its sidecar does not stay alive: {self._sidecar_trouble}"
            self._set(url=None, reason=f"ended with {code} on node {self.node}, and starts again{why}")
            await self._answer(self._host.ended(LOST_S), LOST_S)
            if self._on_exit is not None and not self._stopping.is_set():
                self._on_exit(code)
            self._backoff.ran(time.monotonic() - self._started_at)
            await self._pause(f"ended with {code}; again")

    async def _not_started(self, started: Started) -> None:
        """The node cannot run the server. Whoever watches the server's start is told as of an end with code 78."""
        self._tail.clear()
        self._note_log(f"{started.trouble}\n".encode())
        self._set(url=None, reason=f"cannot start {started.trouble}")
        logger.error("%s cannot start %s", self.name, started.trouble)
        if self._on_exit is not None and not self._stopping.is_set():
            self._on_exit(NOT_STARTED)
        await self._pause()

    async def _until_ended(self, host: Host) -> int | None:
        """The server's exit code; None when it is told to stop. Raises Lost."""
        quiet_since, self._sidecar_trouble = time.monotonic(), ""
        while not self._stopping.is_set():
            try:
                look = await host.look(self._offset, self._sidecar_offset, QUIET_S)
            except TimeoutError:
                quiet_s = time.monotonic() - quiet_since
                if quiet_s > LOST_S:
                    raise Lost(f"no answer for {quiet_s:.0f} s") from None
                if not self.reason or self._sidecar_trouble:
                    self._sidecar_trouble = ""
                    logger.warning("%s: its actor on node %s does not answer", self.name, self.node)
                    self._set(url=self.url, reason=f"is on node {self.node}, which does not answer")
                continue
            quiet_since = time.monotonic()
            self._note_running(look.sidecar_trouble)
            self._note_log(look.log)
            if new := look.log + look.sidecar_log:
                await asyncio.to_thread(self._append, new)
            self._offset, self._sidecar_offset = look.next_offset, look.next_sidecar_offset
            if look.code is not None:
                return look.code
            if not new:
                await set_within(self._stopping, LOOK_S)
        return None

    _offset = _sidecar_offset = 0
    """Bytes of the logs on the node that were read."""

    def _note_running(self, trouble: str) -> None:
        """The server runs. `trouble` is that of its sidecar."""
        reason = f"runs on node {self.node}, but its sidecar does not stay alive: {trouble}" if trouble else ""
        if trouble and not self._sidecar_trouble:
            logger.warning("%s %s", self.name, reason)
        self._sidecar_trouble = trouble
        if self.reason != reason:
            self._set(url=self.url, reason=reason)

    async def _release(self) -> None:
        host, self._host, self._offset, self._sidecar_offset = self._host, None, 0, 0
        self._set(url=None, reason=self.reason or "is stopping")
        if host is not None:
            if self._stopping.is_set():
                with suppress(Lost, TimeoutError):
                    await host.stop(self._grace_s)
            await host.release()

    async def _answer(self, call: Awaitable[T], within_s: float) -> T:
        """The answer of the actor. Raises Lost also when there is none within its time."""
        try:
            return await call
        except TimeoutError as error:
            raise Lost(f"no answer within {within_s:.0f} s") from error

    async def _pause(self, what: str = "again") -> None:
        delay = self._backoff.pause()
        logger.warning("%s %s in %.1f s (%s)", self.name, what, delay, self._log)
        await set_within(self._stopping, delay)

    def _note_waiting(self, lack: str) -> None:
        wanted = amounts(self._bundle)
        logger.info("%s waits for %s: %s", self.name, wanted, lack)
        self._set(url=None, reason=f"waits for {wanted}: {lack}")

    def _set(self, *, url: str | None, incarnation: str | None = None, reason: str = "") -> None:
        before = (self.url, self.reason)
        if url is None:
            self.incarnation = self.sidecar_url = None
        elif incarnation is not None:
            self.incarnation = incarnation
        self.url, self.reason = url, reason
        if before[0] != url:
            self._moved.set()
            self._moved = asyncio.Event()
        self._on_change()

    def _note_log(self, text: bytes) -> None:
        if text:
            self._tail.append(text)
        while sum(map(len, self._tail)) > TAIL_BYTES and len(self._tail) > 1:
            self._tail.popleft()

    def _append(self, text: bytes) -> None:
        """Append to the log on this machine. A full disk is no reason to end the server."""
        with suppress(OSError):
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("ab") as log:
                log.write(text)


NOT_STARTED = 78
"""The exit code that stands for a node that cannot run the server (`skyrl.runtime.processes.startup.CANNOT_START`)."""


def in_loop(loop: asyncio.AbstractEventLoop, callback: Callable[[str], None]) -> Callable[[str], None]:
    """`callback`, to be called on other threads."""
    return lambda text: loop.call_soon_threadsafe(callback, text) and None
