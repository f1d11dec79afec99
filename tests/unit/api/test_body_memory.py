"""Memory for large bodies: it is bounded, given in order, and always given back. Small bodies need none."""

from __future__ import annotations

import asyncio
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from loop_clock import LoopClock
from starlette.requests import Request
from starlette.types import Message, Receive

from skyrl.api import bodies as body_memory
from skyrl.api.bodies import CONTROL_BYTES, MEMORY_BYTES, SMALL_BYTES, SPARE_DISK_BYTES, BodyMemory, BodyReader
from skyrl.base.wire.errors import RequestError
from skyrl.http.shared_memory import Reservation

HALF = MEMORY_BYTES // 2
DiskUsage = namedtuple("DiskUsage", "total used free")


def request_of(size: int | None) -> Request:
    headers = [] if size is None else [(b"content-length", str(size).encode())]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": headers})


class Body:
    """A request body that asks for memory at once. `inside` is True while the body has its memory; `leave` gives the
    memory back."""

    def __init__(self, memory: BodyMemory, size: int | None, tenant: str = "tenant") -> None:
        self.inside = False
        self.taken: Reservation | None = None
        self._leaving = asyncio.Event()
        self.task = asyncio.create_task(self._hold_memory(memory, size, tenant))

    async def _hold_memory(self, memory: BodyMemory, size: int | None, tenant: str) -> None:
        taken = self.taken = await memory.for_body(size, tenant)
        self.inside = True
        await self._leaving.wait()
        self.inside = False
        if taken is not None:
            taken.release()

    async def leave(self) -> None:
        self._leaving.set()
        await self.task
        await settle()


async def settle() -> None:
    """Let all other tasks run until each of them waits."""
    for _ in range(10):
        await asyncio.sleep(0)


async def bodies(memory: BodyMemory, *sizes: int | None, tenant: str = "tenant") -> list[Body]:
    arrived = [Body(memory, size, tenant) for size in sizes]
    await settle()
    return arrived


async def test_bodies_wait_for_memory_in_order_of_arrival(tmp_path: Path) -> None:
    memory = BodyMemory(tmp_path)
    first, second, third, fourth = await bodies(memory, HALF, HALF, HALF, SMALL_BYTES + 1)
    assert [body.inside for body in (first, second, third, fourth)] == [True, True, False, False], (
        "the small fourth body does not overtake"
    )
    await first.leave()
    assert third.inside
    assert not fourth.inside
    await second.leave()
    assert fourth.inside
    await third.leave()
    await fourth.leave()
    assert [body.inside for body in await bodies(memory, HALF, HALF)] == [True, True], "all memory was given back"


async def test_many_bodies_of_one_tenant_do_not_keep_out_another_tenants(tmp_path: Path) -> None:
    memory = BodyMemory(tmp_path)
    many = await bodies(memory, *[HALF] * 20, tenant="many")
    few = await bodies(memory, HALF, HALF, tenant="few")
    other = await bodies(memory, MEMORY_BYTES, tenant="other")
    order: list[list[str]] = []
    while waiting := [body for body in (*many, *few, *other) if body.inside]:
        groups = (("m", many), ("f", few), ("o", other))
        order.append([name for name, group in groups for body in group if body.inside])
        await waiting[0].leave()
    assert order[:5] == [["m", "m"], ["m", "f"], ["m", "f"], ["f"], ["o"]], "tenants take turns"
    assert not any(not body.task.done() for body in (*many, *few, *other))


async def test_small_bodies_need_no_memory(tmp_path: Path) -> None:
    memory = BodyMemory(tmp_path)
    large, waiting, small = await bodies(memory, MEMORY_BYTES, MEMORY_BYTES, SMALL_BYTES)
    assert large.inside
    assert not waiting.inside
    assert small.inside


@pytest.mark.parametrize("size", [10 * MEMORY_BYTES, None])
async def test_a_body_larger_than_the_memory_or_of_unknown_size_has_it_alone(tmp_path: Path, size: int | None) -> None:
    memory = BodyMemory(tmp_path)
    before, large, after = await bodies(memory, HALF, size, HALF)
    assert not large.inside
    await before.leave()
    assert large.inside
    assert not after.inside
    await large.leave()
    assert after.inside


async def test_a_body_that_is_cancelled_gives_its_memory_back(tmp_path: Path) -> None:
    memory = BodyMemory(tmp_path)
    first, cancelled, last = await bodies(memory, MEMORY_BYTES, MEMORY_BYTES, HALF)
    assert first.inside
    cancelled.task.cancel()
    await settle()
    await first.leave()
    assert last.inside


async def test_a_body_that_is_cancelled_at_the_moment_of_its_turn_gives_its_memory_back(tmp_path: Path) -> None:
    memory = BodyMemory(tmp_path)
    first, cancelled = await bodies(memory, MEMORY_BYTES, MEMORY_BYTES)
    assert first.taken is not None
    first.taken.release()
    cancelled.task.cancel()  # the memory is assigned, but the task has not run since
    await settle()
    assert [body.inside for body in await bodies(memory, MEMORY_BYTES)] == [True]


async def test_large_bodies_are_refused_while_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = BodyMemory(tmp_path)
    free = DiskUsage(0, 0, SPARE_DISK_BYTES + SMALL_BYTES)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(RequestError, match="disk") as refused:
        await memory.for_body(SMALL_BYTES + 1, "tenant")
    assert refused.value.status == 503
    assert refused.value.retry_after_s
    assert [body.inside for body in await bodies(memory, SMALL_BYTES)] == [True]


async def test_a_body_that_does_not_arrive_gives_its_memory_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that stops in the middle of a body must not delay others."""
    monkeypatch.setattr(body_memory, "ARRIVE_S", 0.05)
    monkeypatch.setattr(body_memory, "LEAST_BYTES_PER_S", 2**40)
    memory = BodyReader(tmp_path, {"training": MEMORY_BYTES})

    async def receive_nothing() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def receive_all() -> Message:
        return {"type": "http.request", "body": b"x" * HALF, "more_body": False}

    stalled = Request(request_of(None).scope, receive_nothing)
    complete = Request(request_of(HALF).scope, receive_all)

    async def read(request: Request) -> bytes:
        async with memory.of(request, "tenant", "training") as body:
            return body

    first = asyncio.create_task(read(stalled))
    await settle()
    async with asyncio.timeout(60):
        assert len(await read(complete)) == HALF
    with pytest.raises(RequestError, match="did not arrive") as refused:
        await first
    assert refused.value.status == 408


async def test_a_slow_body_loses_its_memory_once_another_tenant_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three slow bodies kept all memory for more than an hour. Those who are alone, or fast, have their time."""
    monkeypatch.setattr(body_memory, "CROWDED_BYTES_PER_S", 2**20)
    memory, clock = BodyReader(tmp_path, {"training": MEMORY_BYTES}), LoopClock()

    def read(tenant: str, size: int, *parts: int) -> asyncio.Task[bytes]:
        left = [*parts]

        async def receive() -> Message:
            if not left:
                await asyncio.Event().wait()
            return {"type": "http.request", "body": b"x" * left.pop(0), "more_body": sum(parts) < size or bool(left)}

        async def held() -> bytes:
            async with memory.of(Request(request_of(size).scope, receive), tenant, "training") as body:
                return body

        return asyncio.create_task(held())

    def later(seconds: float) -> asyncio.Task[None]:
        clock.advance(seconds)
        return asyncio.create_task(asyncio.sleep(0.05))

    slow, fast = read("slow", HALF, 2**20), read("fast", HALF, HALF - 1)
    await settle()
    own = read("slow", HALF, HALF)
    await later(7)
    assert not slow.done(), "nobody else waits"
    other = read("other", HALF, HALF)
    await later(1)
    assert not slow.done(), "the other one waits for a moment only"
    await later(6)
    async with asyncio.timeout(60):
        assert len(await other) == len(await own) == HALF
    with pytest.raises(RequestError, match="only 1048576 bytes, while others wait") as refused:
        await slow
    assert refused.value.status == 408
    assert not fast.done()
    fast.cancel()
    again, later_one = (read("slow", MEMORY_BYTES, 2**20) for _ in range(2))
    await settle()
    other = read("other", HALF, HALF)
    await settle()
    await later(6)
    assert not again.done(), "the second time it may take longer"
    await later(2)
    with pytest.raises(RequestError, match="while others wait"):
        await again
    await settle()
    assert other.done(), "it goes before the tenant's next one, which came earlier"
    assert len(await other) == HALF
    later_one.cancel()


async def test_control_bodies_need_memory_unless_they_are_small(tmp_path: Path) -> None:
    """Otherwise thousands of connections that each send most of a body and then stop would fill the memory."""
    reader = BodyReader(tmp_path, {"control": CONTROL_BYTES})
    arrived = asyncio.Event()

    async def receive_late() -> Message:
        await arrived.wait()
        return {"type": "http.request", "body": b"late"}

    async def receive_now() -> Message:
        return {"type": "http.request", "body": b"here"}

    def read_control(receive: Receive, **headers: str) -> asyncio.Task[bytes]:
        raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        request = Request({"type": "http", "headers": raw}, receive)
        return asyncio.create_task(reader.small(request) or reader.control(request, "tenant"))

    slow = read_control(receive_late, transfer_encoding="chunked")  # its length is unknown, so it has the whole memory
    await settle()
    large = read_control(receive_now, content_length=str(SMALL_BYTES + 1))
    small = [read_control(receive_now, content_length=str(SMALL_BYTES)), read_control(receive_now)]
    assert await asyncio.gather(*small) == [b"here", b"here"]
    await settle()
    assert not large.done()
    arrived.set()
    assert await asyncio.gather(slow, large) == [b"late", b"here"]
