"""Memory for large bodies: how many of their bytes may be on the way from the socket to the database at once, and how
many more they may become when they are decompressed.

A body without memory is not read: its connection waits, and its bytes stay with the client. Small bodies need none.
"""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter, deque
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from starlette.requests import Request

from skyrl.api.body import CONTROL_BYTES, SAMPLE_BYTES, SMALL_BYTES, expand, expanded_size, receive
from skyrl.api.route import Bound
from skyrl.storage.space import SPARE_DISK_BYTES
from skyrl.wire.errors import NoSpace, RequestError

ROOM_BYTES = 32 * 2**20
RETRY_S = 5.0
ARRIVE_S = 20.0
LEAST_BYTES_PER_S = 64 * 2**10
"""A large body that has memory must arrive in ARRIVE_S plus its size at this rate. A client that fell asleep in the
middle of a body would keep the memory, and the other bodies waiting."""


class Reservation:
    """Memory for one body, taken by `take` or at the beginning of `async with`, and given back once."""

    def __init__(self, memory: BodyMemory, size: int, tenant: str) -> None:
        self._memory = memory
        self._size = size
        self._tenant = tenant
        self._taken = False

    async def take(self) -> None:
        """Wait until there is memory. Raises NoSpace (503), with nothing read, when the disk has no space for the
        body."""
        if self._size > SMALL_BYTES:
            await self._memory.take(self._size, self._tenant)
            self._taken = True

    def release(self) -> None:
        if self._taken:
            self._taken = False
            self._memory.give_back(self._size, self._tenant)

    async def __aenter__(self) -> Self:
        await self.take()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.release()


class BodyMemory:
    """The next body is one of the tenant that has least memory here, and of several such tenants, of the one that waits
    longest; each tenant's bodies go in order of arrival. A body that is larger than the whole memory has it alone."""

    def __init__(self, directory: Path, size: int = ROOM_BYTES) -> None:
        self._directory = directory
        self._size = size
        self._taken: Counter[str] = Counter()
        """Bytes, by tenant."""
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}
        """By tenant; the tenant that waits longest comes first."""

    def of(self, request: Request, tenant: str) -> Reservation:
        """For this request's body, by its size on the wire; a body that does not tell its size takes all."""
        declared = request.headers.get("content-length", "")
        return self.of_bytes(int(declared) if declared.isdigit() else self._size, tenant)

    def of_bytes(self, size: int, tenant: str) -> Reservation:
        return Reservation(self, min(size, self._size), tenant)

    async def take(self, size: int, tenant: str) -> None:
        """Raises as `Reservation.take` does."""
        if shutil.disk_usage(self._directory).free < SPARE_DISK_BYTES + size:
            raise NoSpace(
                f"the server's disk is full: this request of {size} bytes is taken when there is space for it, and is "
                "sent again until then; tell the server's operator",
                retry_after_s=RETRY_S,
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append((size, turn))
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(size, tenant)
            raise

    def give_back(self, size: int, tenant: str) -> None:
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
                self._waiting[tenant] = theirs  # behind the tenants that have waited longer
            if not turn.cancelled():
                self._taken[tenant] += size
                turn.set_result(None)


class LargeBody:
    """One body of a request, with memory for it: as it comes, and once more as it is decompressed.

    A body that waits for the second memory holds some of the first, and never the other way round. Few bytes that would
    become many wait like many.
    """

    def __init__(
        self, request: Request, tenant: str, received: BodyMemory, expanded: BodyMemory, max_bytes: int
    ) -> None:
        self._request = request
        self._tenant = tenant
        self._received = received.of(request, tenant)
        self._memory_for_expanded = expanded
        self._expanded: Reservation | None = None
        self._max_bytes = max_bytes

    async def read(self) -> bytes:
        """The decompressed body, whose memory is held until `release`. Raises as `receive`, `expand` and
        `Reservation.take` do, and RequestError 408 when the body does not come."""
        await self._received.take()
        content = await self._receive()
        size = expanded_size(self._request, content, self._max_bytes)
        self._expanded = self._memory_for_expanded.of_bytes(size, self._tenant)
        await self._expanded.take()
        return await expand(self._request, content, self._max_bytes)

    def release(self) -> None:
        if self._expanded is not None:
            self._expanded.release()
        self._received.release()

    async def __aenter__(self) -> bytes:
        try:
            return await self.read()
        except BaseException:
            self.release()
            raise

    async def __aexit__(self, *_: object) -> None:
        self.release()

    async def _receive(self) -> bytes:
        declared = self._request.headers.get("content-length", "")
        wait_s = ARRIVE_S + (int(declared) / LEAST_BYTES_PER_S if declared.isdigit() else 0.0)
        try:
            async with asyncio.timeout(wait_s):
                return await receive(self._request, self._max_bytes)
        except TimeoutError as error:
            raise RequestError(f"the body did not arrive in {wait_s:.0f} s", status=408) from error


def bounds(max_body_bytes: int) -> dict[Bound, int]:
    """The most bytes of a body, decompressed, where the configuration says `max_body_bytes`."""
    return {"control": CONTROL_BYTES, "sample": min(max_body_bytes, SAMPLE_BYTES), "training": max_body_bytes}


class BodyReader:
    """Reads the bodies of all routes, each within its route's bound. Bodies of each bound have memory of their own:
    samples never wait for training passes."""

    def __init__(self, directory: Path, max_bytes: Mapping[Bound, int]) -> None:
        self._memory = {
            bound: (BodyMemory(directory), BodyMemory(directory), size) for bound, size in max_bytes.items()
        }
        """By bound: memory for what is received and for what is decompressed, and the most bytes of a body."""

    def of(self, request: Request, tenant: str, bound: Bound) -> LargeBody:
        return LargeBody(request, tenant, *self._memory[bound])

    async def control(self, request: Request, tenant: str) -> bytes:
        """The decompressed body of a route with the bound `control`. Its memory is given back when it was read: a poll
        that waits for its result must hold none. Raises as `LargeBody.read` does."""
        if _is_small(request):
            content = await receive(request, CONTROL_BYTES)
            return await expand(request, content, CONTROL_BYTES)
        async with self.of(request, tenant, "control") as body:
            return body


def _is_small(request: Request) -> bool:
    declared = request.headers.get("content-length")
    if declared is None:
        return "transfer-encoding" not in request.headers  # there is no body
    return declared.isdigit() and int(declared) <= SMALL_BYTES
