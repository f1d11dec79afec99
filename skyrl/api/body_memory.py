"""Room for large bodies: how many of their bytes may be on the way from the socket to the database at once, and how
many more they may become when they are decompressed.

What finds no room is not read: its connection waits, and its bytes stay with the client. Small bodies need none.
"""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.requests import Request

from skyrl.api.body import SMALL_BYTES, expand, expanded_size, receive
from skyrl.storage.space import SPARE_DISK_BYTES
from skyrl.wire.errors import NoSpace, RequestError

ROOM_BYTES = 32 * 2**20
RETRY_S = 5.0
ARRIVE_S = 20.0
LEAST_BYTES_PER_S = 64 * 2**10
"""A large body that has room must arrive in ARRIVE_S, and in what it would take at this rate more: a client that has
fallen asleep in the middle of one would keep its room, and the others waiting."""


class BodyMemory:
    """Who has least in it is next, and of those whoever waits longest; each tenant's bodies in order of arrival. A body
    that is larger than the whole room has it alone."""

    def __init__(self, directory: Path, size: int = ROOM_BYTES) -> None:
        self._directory = directory
        self._size = size
        self._taken: Counter[str] = Counter()
        """Bytes, by tenant."""
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}
        """By tenant, whoever waits longest first."""

    @asynccontextmanager
    async def of(self, request: Request, tenant: str) -> AsyncIterator[None]:
        """Room for this request's body, by its size on the wire; held until its command is recorded.

        Raises RequestError 503, with nothing read, when the disk has no space for it.
        """
        declared = request.headers.get("content-length", "")
        async with self.of_bytes(int(declared) if declared.isdigit() else self._size, tenant):
            yield

    @asynccontextmanager
    async def of_bytes(self, size: int, tenant: str) -> AsyncIterator[None]:
        """Room for so many bytes. Raises as `of` does."""
        size = min(size, self._size)
        if size <= SMALL_BYTES:
            yield
            return
        if shutil.disk_usage(self._directory).free < SPARE_DISK_BYTES + size:
            raise NoSpace(
                f"the server's disk is full: this request of {size} bytes is taken when there is space for it, and is "
                "sent again until then; tell the server's operator",
                retry_after_s=RETRY_S,
            )
        await self._take(size, tenant)
        try:
            yield
        finally:
            self._give_back(size, tenant)

    async def _take(self, size: int, tenant: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append((size, turn))
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give_back(size, tenant)
            raise

    def _give_back(self, size: int, tenant: str) -> None:
        self._taken[tenant] -= size
        if not self._taken[tenant]:
            del self._taken[tenant]
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            tenant = min(self._waiting, key=self._taken.__getitem__)
            size, turn = self._waiting[tenant][0]
            if not turn.cancelled() and self._taken.total() + size > self._size:
                return
            theirs = self._waiting.pop(tenant)
            theirs.popleft()
            if theirs:
                self._waiting[tenant] = theirs  # behind who has waited longer
            if not turn.cancelled():
                self._taken[tenant] += size
                turn.set_result(None)


class BodyReader:
    """Bodies of up to `max_bytes`, with room for them: as they come, and once more as they are decompressed.

    Who waits for the second holds some of the first, and never the other way round. Few bytes that would become many
    wait like many.
    """

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self._received = BodyMemory(directory)
        self._expanded = BodyMemory(directory)
        self._max_bytes = max_bytes

    @asynccontextmanager
    async def of(self, request: Request, tenant: str) -> AsyncIterator[bytes]:
        """The decompressed body. Raises as `read_body` and `Room.of` do, and RequestError 408 when it does not come."""
        async with self._received.of(request, tenant):
            content = await self._receive(request)
            expanded = expanded_size(request, content, self._max_bytes)
            async with self._expanded.of_bytes(expanded, tenant):
                yield await expand(request, content, self._max_bytes)

    async def _receive(self, request: Request) -> bytes:
        declared = request.headers.get("content-length", "")
        wait_s = ARRIVE_S + (int(declared) / LEAST_BYTES_PER_S if declared.isdigit() else 0.0)
        try:
            async with asyncio.timeout(wait_s):
                return await receive(request, self._max_bytes)
        except TimeoutError as error:
            raise RequestError(f"the body did not arrive in {wait_s:.0f} s", status=408) from error
