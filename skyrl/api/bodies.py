"""Reads a request's body within limits, before and after decompression.

`BodyMemory` limits how many bytes of large bodies, as received and as decompressed, this process holds at once. The
server does not read a large body before there is memory for it: the connection waits, and the bytes stay with the
client. Small bodies are read at once."""

from __future__ import annotations

import asyncio
import io
import shutil
from collections import Counter, deque
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, Literal, Self

import zstandard
from starlette.requests import Request

from skyrl.base.wire.errors import NoSpace, RequestError
from skyrl.runtime.processes.host_resources import SPARE_DISK_BYTES

Bound = Literal["control", "sample", "training"]
"""Which bound holds for the bytes of a body. Samples and training passes may be large, all other bodies are small."""

INLINE_BYTES = 256 * 2**10
"""The most bytes, decompressed, of a body that is decompressed on the event loop. A larger body goes to a thread: on
the loop each megabyte would stop the process for some 5 ms."""
SMALL_BYTES = 64 * 2**10
"""The most bytes of a body that is read without waiting for memory."""
CONTROL_BYTES = 2**20
"""The most bytes of any other body than that of a sample or a training pass. `max_body_bytes` may not be less."""
SAMPLE_BYTES = 32 * 2**20
"""The most bytes of a body of asample: a prompt of millions of tokens, which becomes a Python list."""


def is_small(request: Request) -> bool:
    """Whether the body, received and decompressed, has at most SMALL_BYTES."""
    if request.headers.get("content-encoding", "identity") != "identity":
        return False
    declared = request.headers.get("content-length")
    if declared is None:
        return "transfer-encoding" not in request.headers  # there is no body
    return declared.isdigit() and int(declared) <= SMALL_BYTES


async def receive(request: Request, max_bytes: int) -> bytes:
    """The body as received. Raises RequestError 413 when it is larger than `max_bytes`."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise RequestError(f"the body has {declared} bytes; at most {max_bytes} are accepted", status=413)
    parts: list[bytes] = []
    size = 0
    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise RequestError("the client went away before the body was complete")
        part, more = message.get("body", b""), message.get("more_body", False)
        size += len(part)
        if size > max_bytes:
            raise RequestError(f"the body has more than {max_bytes} bytes, the most that are accepted", status=413)
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def expanded_size(request: Request, body: bytes, max_bytes: int) -> int:
    """The most bytes that `expand` returns for this body: the size that its zstd frame states, or `max_bytes` if it
    states none. 0 if the body is not zstd."""
    if request.headers.get("content-encoding") != "zstd":
        return 0
    try:
        stated_size = zstandard.frame_content_size(body)
    except zstandard.ZstdError:
        return 0
    return min(stated_size, max_bytes) if stated_size >= 0 else max_bytes


async def expand(request: Request, body: bytes, max_bytes: int) -> bytes:
    """The decompressed body. Raises RequestError 413 when it is larger than `max_bytes`, 415 for other encodings than
    zstd."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding == "identity":
        return body
    if encoding != "zstd":
        raise RequestError(f"content-encoding {encoding!r} is not supported; send zstd or none", status=415)
    if expanded_size(request, body, max_bytes) <= INLINE_BYTES:
        return _decompress(body, max_bytes)
    return await asyncio.to_thread(_decompress, body, max_bytes)


def _too_large(limit: int) -> RequestError:
    return RequestError(f"the body decompresses to more than {limit} bytes", status=413)


_PIECE_BYTES = 2**20


def _decompress(body: bytes, max_bytes: int) -> bytes:
    output = io.BytesIO()
    try:
        stated_size = zstandard.frame_content_size(body)  # -1: the frame states no size
        limit = min(max_bytes, stated_size) if stated_size >= 0 else max_bytes
        if stated_size > max_bytes:
            raise _too_large(max_bytes)
        with zstandard.ZstdDecompressor(max_window_size=2**27).stream_reader(body) as reader:
            ended = False
            while chunk := reader.read(_PIECE_BYTES):
                if ended or 0 <= stated_size == output.tell():
                    raise RequestError("the body holds more than one zstd frame; send one")
                ended = len(chunk) < _PIECE_BYTES  # the reader stops at the end of a frame
                output.write(chunk)
                if output.tell() > limit:
                    raise _too_large(limit)
    except zstandard.ZstdError as error:
        raise RequestError(f"the body is not zstd: {error}") from error
    if output.tell() < stated_size:
        raise RequestError(f"the body is incomplete: {output.tell()} of {stated_size} bytes, decompressed")
    return output.getvalue()


def body_format(request: Request) -> str:
    """ "proto" or "json", from the content type."""
    return "proto" if request.headers.get("content-type", "").startswith("application/x-protobuf") else "json"


MEMORY_BYTES = 32 * 2**20
RETRY_S = 5.0
ARRIVE_S = 20.0
LEAST_BYTES_PER_S = 64 * 2**10
"""A large body that has memory must arrive within ARRIVE_S plus its size divided by this rate. A client that stopped in
the middle of a body would otherwise keep the memory, and other bodies would wait."""


class Reservation:
    """Memory for one body. `take` or `async with` takes it, and it is given back once."""

    def __init__(self, memory: BodyMemory, size: int, tenant: str) -> None:
        self._memory = memory
        self._size = size
        self._tenant = tenant
        self._taken = False

    async def take(self) -> None:
        """Wait until there is memory. Raises NoSpace (503) when the disk has no space for the body, which is then
        unread."""
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
    """Shares memory between tenants. The next body is one of the tenant that holds the least memory; of several such
    tenants, the one that has waited longest. Each tenant's bodies go in order of arrival. A body that is larger than
    the whole memory waits until no other body holds any."""

    def __init__(self, directory: Path, size: int = MEMORY_BYTES) -> None:
        self._directory = directory
        self._size = size
        self._taken: Counter[str] = Counter()
        """Bytes that each tenant holds."""
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}
        """Size and turn of each waiting body, by tenant. The tenant that has waited longest comes first."""

    def of(self, request: Request, tenant: str) -> Reservation:
        """For this request's body, by its Content-Length; for all memory if the request states none."""
        declared = request.headers.get("content-length", "")
        return self.of_size(int(declared) if declared.isdigit() else self._size, tenant)

    def of_size(self, size: int, tenant: str) -> Reservation:
        return Reservation(self, min(size, self._size), tenant)

    async def take(self, size: int, tenant: str) -> None:
        """Raises as `Reservation.take` does."""
        if shutil.disk_usage(self._directory).free < SPARE_DISK_BYTES + size:
            raise NoSpace(
                f"the server's disk is full: the client sends this request of {size} bytes again until there is space "
                "for it; tell the server's operator",
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
            queue = self._waiting.pop(tenant)
            queue.popleft()
            if queue:
                self._waiting[tenant] = queue  # behind the tenants that have waited longer
            if not turn.cancelled():
                self._taken[tenant] += size
                turn.set_result(None)


class LargeBody:
    """One body, with memory for its received bytes and more memory for its decompressed bytes.

    A body takes memory for received bytes first and for decompressed bytes second, so two bodies never wait for each
    other. A small body that decompresses to many bytes waits for memory for all of them.
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
        """The decompressed body. Its memory is held until `release`. Raises as `receive`, `expand` and
        `Reservation.take` do, and RequestError 408 when the body does not arrive in time."""
        await self._received.take()
        content = await self._receive()
        size = expanded_size(self._request, content, self._max_bytes)
        self._expanded = self._memory_for_expanded.of_size(size, self._tenant)
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
    """The most bytes of a body, decompressed, under each bound; `max_body_bytes` is the configuration's."""
    return {"control": CONTROL_BYTES, "sample": min(max_body_bytes, SAMPLE_BYTES), "training": max_body_bytes}


class BodyReader:
    """Reads the bodies of all routes, each within its route's bound. Each bound has separate memory, so that samples
    never wait for training passes."""

    def __init__(self, directory: Path, max_bytes: Mapping[Bound, int]) -> None:
        self._memory = {
            bound: (BodyMemory(directory), BodyMemory(directory), size) for bound, size in max_bytes.items()
        }
        """By bound: memory for received bytes, memory for decompressed bytes, and the most bytes of a body."""

    def of(self, request: Request, tenant: str, bound: Bound) -> LargeBody:
        return LargeBody(request, tenant, *self._memory[bound])

    @staticmethod
    def small(request: Request) -> Coroutine[Any, Any, bytes] | None:
        """Receives a body that is not compressed and has at most SMALL_BYTES; None for others. Raises as `receive`."""
        return receive(request, SMALL_BYTES) if is_small(request) else None

    async def control(self, request: Request, tenant: str) -> bytes:
        """The decompressed body of a route with the bound `control`, if it is not `small`. Its memory is given back
        once it is read, because a poll must not hold memory while it waits. Raises as `LargeBody.read` does."""
        async with self.of(request, tenant, "control") as body:
            return body
