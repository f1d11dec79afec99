"""Reads a request's body within limits, before and after decompression.

`BodyMemory` limits how many bytes of large bodies, as received and as decompressed, this process holds at once. The
server does not read a large body before there is memory for it: the connection waits, and the bytes stay with the
client. Small bodies are read at once."""

from __future__ import annotations

import asyncio
import io
import shutil
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Literal

import zstandard
from cachetools import TTLCache
from starlette.requests import Request

from skyrl.base.wire.errors import NoSpace, RequestError
from skyrl.http.shared_memory import Reservation, SharedMemory
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


def declared_size(request: Request) -> int | None:
    """The Content-Length; None if the request states none."""
    declared = request.headers.get("content-length", "")
    return int(declared) if declared.isdigit() else None


def is_small(request: Request) -> bool:
    """Whether the body, received and decompressed, has at most SMALL_BYTES."""
    if request.headers.get("content-encoding", "identity") != "identity":
        return False
    size = declared_size(request)
    if size is None:
        named = ("content-length", "transfer-encoding")
        return not any(name in request.headers for name in named)  # there is no body
    return size <= SMALL_BYTES


async def receive(request: Request, max_bytes: int, arrived: Callable[[int], object] | None = None) -> bytes:
    """The body as received. `arrived` is told how many bytes have come so far. Raises RequestError 413 when the body is
    larger than `max_bytes`."""
    declared = declared_size(request)
    if declared is not None and declared > max_bytes:
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
        if arrived is not None:
            arrived(size)
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
CROWDED_S, LOOK_S = 3.0, 1.0
CROWDED_BYTES_PER_S = 4 * 2**20
"""Once another tenant has waited for memory for CROWDED_S, a body that has some must have arrived at this rate, but for
its first seconds: CROWDED_S. Else a tenant's slow bodies of max_body_bytes would keep all other tenants' passes waiting
for hours."""
MOST_CROWDED_S, PATIENCE_S, MAX_PATIENCES = 64.0, 600.0, 1_000
"""Each body of a tenant that was ended for that gives the tenant's later ones twice as many first seconds, up to
MOST_CROWDED_S, for PATIENCE_S: then 80 MB get through at 1 MB a second."""


class BodyMemory(SharedMemory):
    """Memory for bodies on their way into the database, which is in `directory`."""

    def __init__(self, directory: Path, size: int = MEMORY_BYTES) -> None:
        super().__init__(size)
        self._directory = directory
        self._patience: TTLCache[str, tuple[float, float]] = TTLCache(MAX_PATIENCES, PATIENCE_S)
        """By tenant, its first seconds, and when they became so many (monotonic)."""

    def first_seconds(self, tenant: str) -> float:
        """In which a body of the tenant may be slow though others wait for its memory."""
        return self._patience.get(tenant, (CROWDED_S, 0.0))[0]

    def was_slow(self, tenant: str) -> None:
        """A body of the tenant is ended for that: its memory goes to another tenant."""
        self.put_last(tenant)
        first_s, since = self._patience.get(tenant, (CROWDED_S, -CROWDED_S))
        now = time.monotonic()
        if now >= since + CROWDED_S:  # else several were ended at once
            self._patience[tenant] = min(2 * first_s, MOST_CROWDED_S), now

    async def for_body(self, size: int | None, tenant: str) -> Reservation | None:
        """Wait until there is memory for a body; all of it if the size is not known. None: a small body needs none.
        Raises NoSpace (503) when the disk has no space for the body, which is then unread."""
        if size is not None and size <= SMALL_BYTES:
            return None
        size = MEMORY_BYTES if size is None else size
        if shutil.disk_usage(self._directory).free < SPARE_DISK_BYTES + min(size, self._size):
            raise NoSpace(
                f"the server's disk is full: the client sends this request of {size} bytes again until there is space "
                "for it; tell the server's operator",
                retry_after_s=RETRY_S,
            )
        return await self.take(size, tenant)


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
        self._received, self._expanded = received, expanded
        self._max_bytes = max_bytes
        self._held: list[Reservation] = []
        self._arrived = 0
        self._next_look: asyncio.TimerHandle | None = None

    async def read(self) -> bytes:
        """The decompressed body. Its memory is held until `release`. Raises as `receive`, `expand` and
        `BodyMemory.for_body` do, and RequestError 408 when the body does not arrive in time."""
        size = declared_size(self._request)
        await self._hold(self._received, size)
        content = await self._receive(ARRIVE_S + (size or 0) / LEAST_BYTES_PER_S)
        await self._hold(self._expanded, expanded_size(self._request, content, self._max_bytes))
        return await expand(self._request, content, self._max_bytes)

    async def _receive(self, most_s: float) -> bytes:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(most_s) as limit:
                self._watch(limit, began)
                return await receive(self._request, self._max_bytes, self._note)
        except TimeoutError as error:
            seconds = loop.time() - began
            crowd = "" if seconds >= most_s else f", only {self._arrived} bytes, while others wait for its memory"
            raise RequestError(f"the body did not arrive in {seconds:.0f} s{crowd}", status=408) from error
        finally:
            if self._next_look is not None:
                self._next_look.cancel()

    def _note(self, arrived: int) -> None:
        self._arrived = arrived

    def _watch(self, limit: asyncio.Timeout, began: float) -> None:
        """End a body that is slow while others wait for its memory, now or at a later look."""
        loop, memory = asyncio.get_running_loop(), self._received
        expected = (loop.time() - began - memory.first_seconds(self._tenant)) * CROWDED_BYTES_PER_S
        if self._held and self._arrived < expected and memory.others_wait_s(self._tenant) >= CROWDED_S:
            if not limit.expired():
                limit.reschedule(loop.time())
                memory.was_slow(self._tenant)
        else:
            self._next_look = loop.call_later(LOOK_S, self._watch, limit, began)

    async def _hold(self, memory: BodyMemory, size: int | None) -> None:
        if (taken := await memory.for_body(size, self._tenant)) is not None:
            self._held.append(taken)

    def release(self) -> None:
        while self._held:
            self._held.pop().release()

    async def __aenter__(self) -> bytes:
        try:
            return await self.read()
        except BaseException:
            self.release()
            raise

    async def __aexit__(self, *_: object) -> None:
        self.release()


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
