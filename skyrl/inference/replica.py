"""One replica: an inference server as the engine sees it, with the calls that the engine makes to it.

Each call has its own timeout, so a server that hangs delays no caller for longer. Knows which adapters the
server has loaded. `engine_group` decides when a replica is used, and the launcher starts its server.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

import httpx

from skyrl.base.types.weights import AdapterVersion
from skyrl.inference.adapter_host import AdapterHost, StoredAdapters
from skyrl.inference.metrics import AdapterMetrics
from skyrl.inference.vllm_client import VllmClient, VllmError
from skyrl.runtime.processes.supervision import set_within

logger = logging.getLogger(__name__)
T = TypeVar("T")


class ReplicaState(StrEnum):
    """The state of a replica. Only a ready replica gets samples.

    `STARTING`: the replica has not answered yet. `WARMING`: it answers, is warmed up and loads the adapters in use.
    `DRAINING`: it gets no new samples, and will be removed. `LOST`: it used to answer, and now does not answer or
    cannot sample.
    """

    STARTING = "starting"
    WARMING = "warming up"
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Addresses:
    """Base URLs of a replica without a trailing slash. `data` takes `/v1/completions`, `sidecar` new weights if the
    replica has a sidecar, and `admin` everything else."""

    data: str
    admin: str
    sidecar: str | None = None

    @classmethod
    def same(cls, url: str, sidecar: str | None = None) -> Addresses:
        """The addresses of a server that has one URL for data and admin."""
        return cls(url, url, sidecar)


@dataclass(frozen=True, slots=True)
class CallTimeouts:
    """How long a replica may take to answer each kind of call, in seconds. `load_s` includes bringing the files to the
    replica's host. `health_s` and `unload_s` are short, because these calls never wait for a step of the engine
    core."""

    health_s: float = 5.0
    load_s: float = 60.0
    unload_s: float = 5.0
    sleep_s: float = 60.0
    warm_up_s: float = 300.0


class NoAnswer(httpx.TransportError):
    """The replica gave no answer within the timeout, or was lost before its answer."""


class Replica:
    """One server. `incarnation` names one start of the server; a new start has no adapters. `incarnation` is None until
    the server has answered, and for a server that does not send it.

    Calls raise VllmError when the server refuses, and httpx.TransportError when it does not answer.
    """

    def __init__(
        self,
        replica_id: str,
        addresses: Addresses,
        api_key: str,
        host: AdapterHost,
        timeouts: CallTimeouts | None = None,
        metrics: AdapterMetrics | None = None,
    ) -> None:
        self.id = replica_id
        self.addresses = addresses
        self.state = ReplicaState.STARTING
        self.trouble = ""
        """Why the replica is lost, for people."""
        self.incarnation: str | None = None
        self.adapters: set[AdapterVersion] = set()
        """Adapters that the engine has loaded on this incarnation and has not asked it to unload. The server may have
        others: API processes load adapters that their samples need, and do not tell the engine."""
        self.weights: str | None = None
        """The version of the full weights that the engine has put on this incarnation; None while that is unknown."""
        self.wanted: set[AdapterVersion] = set()
        """Adapters that the replica loads before it is ready."""
        self.answered_at = 0.0
        """When the server was last known to work, in the time of `time.monotonic`."""
        self._loading: set[AdapterVersion] = set()
        self._retired: dict[AdapterVersion, None] = {}
        """Adapters that the replica is to unload, in this order."""
        self._unloaded: set[AdapterVersion] = set()
        """Adapters of the last call of `retire` that the replica has unloaded. They are not unloaded again: with many
        adapters, one call would never get further than the call before."""
        self._unloading: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[Any]] = set()
        self._host = host
        self._timeouts = timeouts or CallTimeouts()
        self._metrics = metrics or AdapterMetrics()
        self._client = VllmClient(addresses.admin, api_key)
        self._lost = asyncio.Event()

    def set_state(self, state: ReplicaState, trouble: str = "") -> None:
        """Change the state. Calls that wait for an answer end when the replica is lost."""
        self.state, self.trouble = state, trouble
        if state is ReplicaState.READY:
            self.answered_at = time.monotonic()
        if state is ReplicaState.LOST:
            self._lost.set()
        else:
            self._lost.clear()

    async def lost_within(self, seconds: float) -> bool:
        """Wait until the replica is lost, but at most `seconds`. Returns whether it is lost."""
        return await set_within(self._lost, seconds)

    async def is_healthy(self) -> bool:
        """Ask `/health`, and record which incarnation answers."""
        try:
            alive = await self._bounded(self._client.health(), self._timeouts.health_s)
        except NoAnswer:
            return False
        if alive is None:
            return False
        self.answered_at = time.monotonic()
        if alive.incarnation != self.incarnation:
            self._record_start(alive.incarnation)
        return True

    def forget_adapters(self) -> None:
        """For a server that sends no incarnation, and so may have been restarted unnoticed."""
        self._record_start(self.incarnation)

    async def warm_up(self) -> None:
        await self.unless_lost(self._client.warm_up(), self._timeouts.warm_up_s)

    async def is_sleeping(self) -> bool:
        return await self.unless_lost(self._client.is_sleeping(), self._timeouts.sleep_s)

    async def sleep(self) -> None:
        await self.unless_lost(self._client.sleep(), self._timeouts.sleep_s)

    async def wake(self) -> None:
        await self.unless_lost(self._client.wake(), self._timeouts.sleep_s)

    async def load(self, adapter: AdapterVersion) -> None:
        """Bring the adapter's files to the replica's host and load them. Also raises the errors of
        `AdapterHost.bring`."""
        incarnation = self.incarnation

        async def bring_and_load() -> None:
            directory = await self._host.bring(adapter)
            held = await self._host.held(adapter) if isinstance(self._host, StoredAdapters) else None
            if held is not None:
                with suppress(OSError):  # most often the store has just got it; the host asks there
                    return await self._client.load_adapter(adapter.name, directory, held)
            await self._client.load_adapter(adapter.name, directory)

        self.wanted.discard(adapter)
        self._unloaded.discard(adapter)
        self._loading.add(adapter)
        try:
            with self._metrics.load() as load:
                await self.unless_lost(bring_and_load(), self._timeouts.load_s)
                load.ok = True
        finally:
            self._loading.discard(adapter)
        if self.incarnation == incarnation:
            self.adapters.add(adapter)
            self._retired.pop(adapter, None)

    def retire(self, adapters: Sequence[AdapterVersion]) -> asyncio.Task[None]:
        """Unload these adapters in the background. Returns the task that unloads them. `may_read` tells whether the
        server may still read an adapter's stored files. An adapter that is in each call since it was unloaded is not
        unloaded again.

        They take the place of the adapters of the last call, whose files the caller has kept if they are not unloaded,
        and names again. A server with files of its own unloads those of the last call, too: their stored files may be
        deleted by now, and nobody names them again.

        The replica is asked in every state: a lost server may come back with its adapters loaded.
        """
        self.wanted.difference_update(adapters)
        self._unloaded.intersection_update(adapters)
        kept = self._retired if self._host.copies else {}
        self._retired = kept | dict.fromkeys(each for each in adapters if each not in self._unloaded)
        if self._unloading is None or self._unloading.done():
            self._unloading = self.in_background(self._unload_retired())
        return self._unloading

    def may_read(self, adapter: AdapterVersion) -> bool:
        """Whether the server may read the stored files of this adapter, which it was asked to load or to unload. A
        server with files of its own reads no others."""
        if self._host.copies:
            return False
        return adapter in self.adapters or adapter in self._loading or adapter in self._retired

    async def _unload_retired(self) -> None:
        """Unload the retired adapters one after another. The first call without an answer is the last, so that a server
        that hangs costs one timeout. A server that refuses connections reads no files: it has ended or is ending, and
        its next start has no adapters. An adapter that is being loaded waits for a later call of `retire`."""
        asked: set[AdapterVersion] = set()
        while True:
            adapter = next((each for each in self._retired if each not in asked and each not in self._loading), None)
            if adapter is None:
                return
            asked.add(adapter)
            self.adapters.discard(adapter)  # also without an answer: a server that hung may still read the request
            try:
                await self._bounded(self._client.unload_adapter(adapter.name), self._timeouts.unload_s)
            except VllmError as error:
                logger.warning("adapter %s could not be unloaded yet: %s", adapter.name, error)
                continue
            except httpx.TransportError as error:
                if _refused(error):
                    logger.info("vLLM at %s refuses connections, so it reads no adapter", self.addresses.admin)
                    self._record_start(None)
                    self._retired.clear()
                    return
                cause = str(error) or type(error).__name__
                logger.warning("adapters could not be unloaded yet from vLLM at %s: %s", self.addresses.admin, cause)
                return
            self._retired.pop(adapter, None)
            self._unloaded.add(adapter)

    def in_background(self, call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task that goes on when its caller stops waiting for it. `close` cancels it."""
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

    def _record_start(self, incarnation: str | None) -> None:
        self.incarnation = incarnation
        self.adapters.clear()
        self.weights = None
        self._unloaded.clear()

    async def unless_lost(self, call: Coroutine[Any, Any, T], within_s: float) -> T:
        """The answer of a call. Raises NoAnswer when `within_s` seconds pass, or the replica is lost, before the
        answer."""
        lost = asyncio.create_task(self._lost.wait())
        try:
            return await self._bounded(call, within_s, lost)
        finally:
            lost.cancel()
            await asyncio.gather(lost, return_exceptions=True)

    async def _bounded(self, call: Coroutine[Any, Any, T], within_s: float, lost: asyncio.Task[Any] | None = None) -> T:
        """The answer of a call. Raises NoAnswer when `within_s` seconds pass, or `lost` ends, before the answer."""
        answer = asyncio.create_task(call)
        tasks = [answer] if lost is None else [answer, lost]
        try:
            await asyncio.wait(tasks, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            why = "is lost" if lost is not None and lost.done() else f"gave no answer within {within_s:g} s"
            raise NoAnswer(f"vLLM at {self.addresses.admin} {why}")
        finally:
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)


def _refused(error: BaseException | None) -> bool:
    """Whether the connection was refused: no process listens at the address. Other errors say nothing about the
    server."""
    while error is not None and not isinstance(error, ConnectionRefusedError):
        error = error.__cause__ or error.__context__
    return error is not None
