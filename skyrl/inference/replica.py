"""One replica: an inference server as the engine sees it, with the calls that the engine makes to it.

Each call has a bound in seconds of its own, so a server that hangs delays nobody for longer than that. Knows which
adapters the server has. Does not decide when the replica is used (that is `engine_group`), and starts no server.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

import httpx

from skyrl.inference.adapter_host import AdapterHost
from skyrl.inference.vllm_client import VllmClient, VllmError
from skyrl.types.weights import AdapterVersion

logger = logging.getLogger(__name__)
T = TypeVar("T")


class ReplicaState(StrEnum):
    """Where a replica is in its life. Only a ready one gets samples.

    `starting`: it has not answered yet. `warming`: it answers, is warmed up and loads the adapters that are in use.
    `draining`: it gets no new samples, and goes. `lost`: it was there, and does not answer or cannot sample.
    """

    STARTING = "starting"
    WARMING = "warming up"
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Addresses:
    """Base URLs of a replica without a trailing slash. `data` takes `/v1/completions`, `admin` everything else."""

    data: str
    admin: str

    @classmethod
    def same(cls, url: str) -> Addresses:
        """Of a server that has one address for both."""
        return cls(url, url)


@dataclass(frozen=True, slots=True)
class CallBounds:
    """How long a replica may take to answer each kind of call, in seconds. `load_s` includes bringing the files to its
    host. `/health` and the unloading of an adapter have short bounds, because they never wait for a step of the engine
    core."""

    health_s: float = 5.0
    load_s: float = 60.0
    unload_s: float = 5.0
    sleep_s: float = 60.0
    warm_up_s: float = 300.0


class NoAnswer(httpx.TransportError):
    """The replica gave no answer within the bound, or was lost before it did."""


class Replica:
    """One server. `incarnation` tells one start of the server from the next: a new one has no adapters. It is None
    until the server has answered, and where the server does not say it.

    Calls raise VllmError when the server refuses, and httpx.TransportError when it does not answer.
    """

    def __init__(
        self, replica_id: str, addresses: Addresses, api_key: str, host: AdapterHost, bounds: CallBounds | None = None
    ) -> None:
        self.id = replica_id
        self.addresses = addresses
        self.state = ReplicaState.STARTING
        self.trouble = ""
        """Why it is lost, for people."""
        self.incarnation: str | None = None
        self.adapters: set[AdapterVersion] = set()
        """Those that the engine has had this incarnation load, and has not asked it to unload since. The server may
        have others: API processes load what their samples lack, and do not tell the engine."""
        self.wanted: set[AdapterVersion] = set()
        """Those that it is to load before it is ready."""
        self._loading: set[AdapterVersion] = set()
        self._retired: dict[AdapterVersion, None] = {}
        """Those that it is to unload, in this order."""
        self._unloading: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[Any]] = set()
        self._host = host
        self._bounds = bounds or CallBounds()
        self._client = VllmClient(addresses.admin, api_key)
        self._lost = asyncio.Event()

    def become(self, state: ReplicaState, trouble: str = "") -> None:
        """Change the state. Calls that wait for an answer end when the replica is lost."""
        self.state, self.trouble = state, trouble
        if state is ReplicaState.LOST:
            self._lost.set()
        else:
            self._lost.clear()

    async def lost_within(self, seconds: float) -> bool:
        """Wait so long, or until it is lost; says which."""
        try:
            await asyncio.wait_for(self._lost.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def is_healthy(self) -> bool:
        """Ask `/health`, and note which incarnation answers."""
        try:
            alive = await self._bounded(self._client.health(), self._bounds.health_s)
        except NoAnswer:
            return False
        if alive is not None and alive.incarnation != self.incarnation:
            self._note_start(alive.incarnation)
        return alive is not None

    def forget_adapters(self) -> None:
        """Of a server that may have been started again without saying so."""
        self._note_start(self.incarnation)

    async def warm_up(self) -> None:
        await self._unless_lost(self._client.warm_up(), self._bounds.warm_up_s)

    async def is_sleeping(self) -> bool:
        return await self._unless_lost(self._client.is_sleeping(), self._bounds.sleep_s)

    async def sleep(self) -> None:
        await self._unless_lost(self._client.sleep(), self._bounds.sleep_s)

    async def wake(self) -> None:
        await self._unless_lost(self._client.wake(), self._bounds.sleep_s)

    async def load(self, adapter: AdapterVersion) -> None:
        """Bring the adapter's files to the replica's host and load them. Also raises what `AdapterHost.bring` does."""
        incarnation = self.incarnation

        async def bring_and_load() -> None:
            await self._client.load_adapter(adapter.name, await self._host.bring(adapter))

        self.wanted.discard(adapter)
        self._loading.add(adapter)
        try:
            await self._unless_lost(bring_and_load(), self._bounds.load_s)
        finally:
            self._loading.discard(adapter)
        if self.incarnation == incarnation:
            self.adapters.add(adapter)
            self._retired.pop(adapter, None)

    def retire(self, adapters: Sequence[AdapterVersion]) -> asyncio.Task[None]:
        """Mark adapters as not needed any more, in place of those of the call before. Returns the task that unloads
        them in the background; `may_read` says for each of them how far it is.

        They are unloaded in every state: a server that is lost may come back with what it had loaded.
        """
        self.wanted.difference_update(adapters)
        self._retired = dict.fromkeys(adapters)
        if self._unloading is None or self._unloading.done():
            self._unloading = self.in_background(self._unload_retired())
        return self._unloading

    def may_read(self, adapter: AdapterVersion) -> bool:
        """Whether the server may read the files of this adapter, which it was told to load or to unload."""
        return adapter in self.adapters or adapter in self._loading or adapter in self._retired

    async def _unload_retired(self) -> None:
        """The first call without an answer is the last one, so that a server that hangs costs one bound. A server that
        refuses connections reads nothing: it has ended, or is ending, and its successor starts without adapters."""
        asked: set[AdapterVersion] = set()
        while (adapter := self._to_unload(asked)) is not None:
            asked.add(adapter)
            self.adapters.discard(adapter)  # a server that goes on later takes the requests that waited for it
            try:
                await self._bounded(self._client.unload_adapter(adapter.name), self._bounds.unload_s)
            except VllmError as error:
                logger.warning("adapter %s could not be unloaded yet: %s", adapter.name, error)
                continue
            except httpx.TransportError as error:
                if _refused(error):
                    logger.info("vLLM at %s takes no connection, so it reads no adapter", self.addresses.admin)
                    self._note_start(None)
                    self._retired.clear()
                    return
                said = error or type(error).__name__
                logger.warning("adapters could not be unloaded yet from vLLM at %s: %s", self.addresses.admin, said)
                return
            self._retired.pop(adapter, None)

    def _to_unload(self, asked: set[AdapterVersion]) -> AdapterVersion | None:
        """The next adapter to unload that is not in `asked`. One that is being loaded is left for a later call."""
        return next((each for each in self._retired if each not in asked and each not in self._loading), None)

    def in_background(self, call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task that goes on when nobody waits for it any more; `close` ends it."""
        task = asyncio.create_task(call)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def close(self) -> None:
        background = list(self._background)
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await self._client.close()

    def _note_start(self, incarnation: str | None) -> None:
        self.incarnation = incarnation
        self.adapters.clear()

    async def _unless_lost(self, call: Coroutine[Any, Any, T], within_s: float) -> T:
        """As `_bounded`. Also ends when the watch over the replica finds that it is lost."""
        lost = asyncio.create_task(self._lost.wait())
        try:
            return await self._bounded(call, within_s, lost)
        finally:
            lost.cancel()
            await asyncio.gather(lost, return_exceptions=True)

    async def _bounded(self, call: Coroutine[Any, Any, T], within_s: float, end: asyncio.Task[Any] | None = None) -> T:
        """The answer of a call. Raises NoAnswer when `within_s` seconds are over or `end` has ended before it."""
        answer = asyncio.create_task(call)
        try:
            await asyncio.wait([answer, *([end] if end else [])], timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            why = "is lost" if end is not None and end.done() else f"gave no answer within {within_s:g} s"
            raise NoAnswer(f"vLLM at {self.addresses.admin} {why}")
        finally:
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)


def _refused(error: BaseException | None) -> bool:
    """Whether nobody listens at the address. An address that cannot be reached says nothing about the server."""
    while error is not None and not isinstance(error, ConnectionRefusedError):
        error = error.__cause__ or error.__context__
    return error is not None
