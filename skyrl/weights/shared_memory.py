"""Memory that trainer and servers of one machine share, as a medium: what is sent is written once and read in place."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from typing import Any

import torch

from skyrl.weights.group import check_applied
from skyrl.weights.segments import Segment, places_of
from skyrl.weights.tensors import Part, check_sent, described
from skyrl.weights.workers import PauseMode, Workers, WorkersFailed

ROUTE = "/update_weights_from_tensor"


class NotShared(RuntimeError):
    """A server cannot open this process's memory: it is on another machine, or has another user or container. Use
    another medium."""


class SharedMemory:
    """Parts on the CPU stay in main memory that all servers of this machine stage in place, until `finish` has
    returned; together they take the model's size once. With `keep_memory` the next update writes into the same memory,
    which is several times as fast. Parts on a GPU go through one buffer there, and servers copy them.

    With the pause `in_place`, samples in flight keep their cache; without a pause the servers refuse while samples are
    in flight. `checksums`: servers check what they find. `dtype`:
    of all floating-point tensors in the memory; they are cast where they are copied.
    """

    def __init__(
        self,
        workers: Workers,
        pause: PauseMode | None = "in_place",
        *,
        checksums: bool = False,
        keep_memory: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._workers = workers
        self._pause: PauseMode | None = pause
        self._checksums = checksums
        self._keep_memory = keep_memory
        self._dtype = dtype
        self._version = ""
        self._update = ""
        """Tells this update from one of another trainer with the same version."""
        self._free: list[Segment] = []
        self._sent: list[Segment] = []

    async def begin(self, version: str) -> None:
        """Raises NotShared, WorkersFailed."""
        self._version, self._update = version, secrets.token_hex(8)
        probe = Segment(1, torch.device("cpu"))
        try:
            await self._tell({}, [], probe, stage_only=True)
        except WorkersFailed as error:
            if error.refused:
                raise NotShared(str(error)) from error
            raise
        finally:
            probe.close()

    async def send(self, part: Part) -> None:
        """Raises OSError without memory for the part, WorkersFailed, ValueError for a dtype that servers do not
        take."""
        if not part:
            return
        check_sent(part)
        device = next(iter(part.values())).device
        places, size = places_of(part, self._dtype)
        segment = self._segment(size, device)
        self._sent.append(segment)
        await asyncio.to_thread(segment.fill, part, places, self._dtype)
        await self._tell(part, places, segment, stage_only=True)
        if device.type == "cuda":  # the servers have copied it
            self._free.append(self._sent.pop())

    async def finish(self) -> None:
        """Raises WorkersFailed, NotApplied."""
        async with self._workers.paused(self._pause):
            try:
                check_applied(await self._tell({}, [], None, stage_only=False))
            except BaseException:
                await self.abandon()  # servers do not go on in the middle of an update
                raise
        self._free += self._sent
        self._sent = []
        if not self._keep_memory:
            self.close()

    async def abandon(self) -> None:
        """The memory of this update is not written again: a server may still have it."""
        sent, self._sent = self._sent, []
        with contextlib.suppress(WorkersFailed):  # of a server that is gone
            await self._workers.post(ROUTE, {"discard": True})
        for segment in sent:
            segment.close()

    def close(self) -> None:
        """Give back the memory that was kept for the next update."""
        kept, self._free = self._free, []
        for segment in kept:
            segment.close()

    def _segment(self, size: int, device: torch.device) -> Segment:
        """The smallest one that is free and large enough, or a new one in the place of the largest one that is free: so
        there are never more than an update has parts."""
        free = [one for one in self._free if one.device == device]
        fitting = [one for one in free if one.bytes >= size]
        if not fitting:
            if free:
                largest = max(free, key=lambda one: one.bytes)
                self._free.remove(largest)
                largest.close()
            return Segment(size, device)
        found = min(fitting, key=lambda one: one.bytes)
        self._free.remove(found)
        return found

    async def _tell(
        self, part: Part, places: list[int], segment: Segment | None, *, stage_only: bool
    ) -> dict[str, Any]:
        body = described(part, self._dtype, checksums=self._checksums) | {
            "places": places,
            "memory": None if segment is None else segment.described(),
            "stage_only": stage_only,
            "flush_cache": self._pause != "in_place",
            "weight_version": self._version,
            "update": self._update,
        }
        return await self._workers.post(ROUTE, body)
