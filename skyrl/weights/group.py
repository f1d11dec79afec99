"""A torch.distributed group of the trainer and all servers as a medium: what is sent goes to all of them at once."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Coroutine, Mapping
from typing import Any

import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from skyrl.weights.process_group import Group, join, listen
from skyrl.weights.segments import KeptMemory
from skyrl.weights.tensors import Part, check_sent, described, sent_as
from skyrl.weights.workers import PAUSE_S, SHORT_S, PauseMode, Workers, WorkersFailed

TIMEOUT_S = 120.0


class NotApplied(RuntimeError):
    """All parts were sent, and a server still waits for tensors of its model."""


def check_applied(answers: Mapping[str, Any]) -> None:
    """Raises NotApplied for servers, by URL, that have not applied the update after its last tensor."""
    waiting = {url: one.get("message") for url, one in answers.items() if one.get("applied") is False}
    if waiting:
        raise NotApplied("; ".join(f"{url}: {message}" for url, message in waiting.items()))


class TrainerGroup:
    """The trainer is rank 0 and listens on `address`, which the servers must reach. Each update has a group of its own:
    that takes milliseconds, and a group that has failed cannot be used again.

    Servers stage what arrives while they sample. The last tensor makes them apply the update; `pause` holds all of them
    around it, so that they change together. With the pause `in_place`, samples in flight keep their cache; without a
    pause the servers refuse while samples are in flight. `timeout_s` bounds the forming of the group, and each
    broadcast. `checksums`: servers check what arrives. `dtype`: of all floating-point tensors on their way; each is
    cast while those before it travel. The memory for that, as much as one part, is kept for the next part and the next
    update.
    """

    def __init__(
        self,
        workers: Workers,
        address: str = "127.0.0.1",
        backend: str = "gloo",
        pause: PauseMode | None = "in_place",
        timeout_s: float = TIMEOUT_S,
        *,
        checksums: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._workers = workers
        self._address = address
        self._backend = backend
        self._pause: PauseMode | None = pause
        self._timeout_s = timeout_s
        self._checksums = checksums
        self._dtype = dtype
        self._cast_memory = KeptMemory()
        self._group: Group | None = None
        self._name = ""
        self._version = ""
        self._last: Part | None = None

    async def begin(self, version: str) -> None:
        """Raises GroupError, NotStaged, WorkersFailed."""
        await self._workers.check_all_stage("a group whose parts arrive while servers sample")
        self._version, self._last = version, None
        self._name = f"skyrl-{secrets.token_hex(8)}"
        ranks = await self._workers.ranks()
        world = 1 + sum(ranks.values())
        store = await asyncio.to_thread(listen, self._address, world, self._timeout_s)
        bodies, offset = {}, 1
        for url, size in ranks.items():
            bodies[url] = {
                "master_address": self._address,
                "master_port": store.port,
                "rank_offset": offset,
                "world_size": world,
                "group_name": self._name,
                "backend": self._backend,
                "timeout_s": self._timeout_s,
            }
            offset += size
        joining = asyncio.to_thread(self._join, self._name, store, world)
        await _both(joining, self._workers.post("/init_weights_update_group", bodies=bodies))

    def _join(self, name: str, store: TCPStore, world: int) -> None:
        group = join(self._address, store.port, 0, world, name, self._backend, self._timeout_s, store)
        if self._name == name:
            self._group = group
        else:  # the update was abandoned meanwhile
            group.close()

    async def send(self, part: Part) -> None:
        """The part is broadcast when the next one is given, or by `finish`. Raises GroupError, WorkersFailed,
        ValueError for a dtype that servers do not take."""
        if not part:
            return
        check_sent(part)
        if self._last is not None:
            await self._broadcast(self._last)
        self._last = part

    async def finish(self) -> None:
        """Raises GroupError, WorkersFailed, NotApplied."""
        if self._last is None:
            raise NotApplied("nothing was sent")
        last = self._last
        smallest = min(last, key=lambda name: last[name].nbytes)
        rest = {name: tensor for name, tensor in last.items() if name != smallest}
        if rest:
            await self._broadcast(rest)
        async with self._workers.paused(self._pause):  # for as short as possible: one small tensor is left
            try:
                check_applied(await self._broadcast({smallest: last[smallest]}))
            except BaseException:
                await self._leave()  # servers do not go on in the middle of an update
                raise
        await self._leave()
        self._cast_memory.reuse()

    async def abandon(self) -> None:
        await self._leave()
        self._cast_memory = KeptMemory()  # a thread that has not noticed may still write into the old one

    async def _broadcast(self, part: Part) -> dict[str, Any]:
        assert self._group is not None
        body = described(part, self._dtype, checksums=self._checksums) | {
            "group_name": self._name,
            "flush_cache": self._pause != "in_place",
            "weight_version": self._version,
        }
        sending = asyncio.to_thread(self._broadcast_each, self._group, part, self._cast_memory)
        _, answers = await _both(sending, self._workers.post("/update_weights_from_distributed", body))
        return answers

    def _broadcast_each(self, group: Group, part: Part, memory: KeptMemory) -> None:
        memory.reuse()  # not at the end: torch's threads let the last tensors go a moment later
        for _ in group.broadcast_each(self._cast(tensor, memory) for tensor in part.values()):
            pass

    def _cast(self, tensor: torch.Tensor, memory: KeptMemory) -> torch.Tensor:
        dtype = sent_as(tensor, self._dtype)
        if dtype == tensor.dtype or tensor.device.type != "cpu":
            return tensor.to(dtype)
        return memory.empty(tensor.shape, dtype).copy_(tensor)

    async def _leave(self) -> None:
        name, self._name, self._last = self._name, "", None
        group, self._group = self._group, None
        if not name:
            return
        with contextlib.suppress(WorkersFailed):  # of a server that is gone, or was never in the group
            await self._workers.post("/destroy_weights_update_group", {"group_name": name}, timeout_s=PAUSE_S)
        if group is not None:
            await asyncio.to_thread(group.close)


async def _both(sending: Coroutine[Any, Any, Any], telling: Coroutine[Any, Any, Any]) -> tuple[Any, Any]:
    """Both results. What a server says is raised first, because it says more. After a failed sending it has SHORT_S for
    that: a server that hangs would say nothing for long."""
    answers = asyncio.ensure_future(telling)
    try:
        (sent,) = await asyncio.gather(sending, return_exceptions=True)
        failed = sent if isinstance(sent, BaseException) else None
        try:
            async with asyncio.timeout(None if failed is None else SHORT_S):
                told = await answers
        except TimeoutError:
            assert failed is not None
            raise failed from None
        if failed is not None:
            raise failed
        return sent, told
    finally:
        answers.cancel()
