"""Room for large bodies: bounded, in order, given back whatever happens; small ones pass."""

from __future__ import annotations

import asyncio
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.types import Message, Receive

from skyrl.api import body_memory as room_module
from skyrl.api.body import CONTROL_BYTES
from skyrl.api.body_memory import MEMORY_BYTES, SMALL_BYTES, SPARE_DISK_BYTES, BodyMemory, BodyReader
from skyrl.wire.errors import RequestError

HALF = MEMORY_BYTES // 2
DiskUsage = namedtuple("DiskUsage", "total used free")


def request_of(size: int | None) -> Request:
    headers = [] if size is None else [(b"content-length", str(size).encode())]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": headers})


class Body:
    """One body on its way: `enter` asks for room, `leave` gives it back."""

    def __init__(self, room: BodyMemory, size: int | None, tenant: str = "tenant") -> None:
        self.inside = False
        self._leaving = asyncio.Event()
        self.task = asyncio.create_task(self._pass(room, size, tenant))

    async def _pass(self, room: BodyMemory, size: int | None, tenant: str) -> None:
        async with room.of(request_of(size), tenant):
            self.inside = True
            await self._leaving.wait()
        self.inside = False

    async def leave(self) -> None:
        self._leaving.set()
        await self.task
        await settle()


async def settle() -> None:
    """Let every task run until it waits for another."""
    for _ in range(10):
        await asyncio.sleep(0)


async def bodies(room: BodyMemory, *sizes: int | None, tenant: str = "tenant") -> list[Body]:
    made = [Body(room, size, tenant) for size in sizes]
    await settle()
    return made


async def test_what_finds_no_room_waits_its_turn(tmp_path: Path) -> None:
    room = BodyMemory(tmp_path)
    first, second, third, fourth = await bodies(room, HALF, HALF, HALF, SMALL_BYTES + 1)
    assert [body.inside for body in (first, second, third, fourth)] == [True, True, False, False], "the last one, too"
    await first.leave()
    assert third.inside
    assert not fourth.inside
    await second.leave()
    assert fourth.inside
    await third.leave()
    await fourth.leave()
    assert [body.inside for body in await bodies(room, HALF, HALF)] == [True, True], "all was given back"


async def test_many_bodies_of_a_tenant_do_not_keep_anothers_out(tmp_path: Path) -> None:
    room = BodyMemory(tmp_path)
    many = await bodies(room, *[HALF] * 20, tenant="many")
    few = await bodies(room, HALF, HALF, tenant="few")
    other = await bodies(room, MEMORY_BYTES, tenant="other")
    order: list[list[str]] = []
    while waiting := [body for body in (*many, *few, *other) if body.inside]:
        order.append([name for name, theirs in (("m", many), ("f", few), ("o", other)) for b in theirs if b.inside])
        await waiting[0].leave()
    assert order[:5] == [["m", "m"], ["m", "f"], ["m", "f"], ["f"], ["o"]], "nobody waits for all that another has"
    assert not any(not body.task.done() for body in (*many, *few, *other))


async def test_small_bodies_need_no_room(tmp_path: Path) -> None:
    room = BodyMemory(tmp_path)
    large, waiting, small = await bodies(room, MEMORY_BYTES, MEMORY_BYTES, SMALL_BYTES)
    assert large.inside
    assert not waiting.inside
    assert small.inside


@pytest.mark.parametrize("size", [10 * MEMORY_BYTES, None])
async def test_body_beyond_the_room_and_one_of_unknown_size_have_it_alone(tmp_path: Path, size: int | None) -> None:
    room = BodyMemory(tmp_path)
    before, large, after = await bodies(room, HALF, size, HALF)
    assert not large.inside
    await before.leave()
    assert large.inside
    assert not after.inside
    await large.leave()
    assert after.inside


async def test_one_that_fails_or_gives_up_gives_its_room_back(tmp_path: Path) -> None:
    room = BodyMemory(tmp_path)
    with pytest.raises(RuntimeError):
        async with room.of(request_of(MEMORY_BYTES), "tenant"):
            raise RuntimeError
    first, impatient, last = await bodies(room, MEMORY_BYTES, MEMORY_BYTES, HALF)
    assert first.inside
    impatient.task.cancel()
    await settle()
    await first.leave()
    assert last.inside


async def test_one_that_gives_up_at_the_moment_of_its_turn_gives_its_room_back(tmp_path: Path) -> None:
    room = BodyMemory(tmp_path)
    async with room.of(request_of(MEMORY_BYTES), "tenant"):
        [impatient] = await bodies(room, MEMORY_BYTES)
    impatient.task.cancel()  # it has its turn, and has not gone on yet
    await settle()
    assert [body.inside for body in await bodies(room, MEMORY_BYTES)] == [True]


async def test_nothing_large_is_read_while_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = BodyMemory(tmp_path)
    free = DiskUsage(0, 0, SPARE_DISK_BYTES + SMALL_BYTES)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(RequestError, match="disk") as refused:
        async with room.of(request_of(SMALL_BYTES + 1), "tenant"):
            raise AssertionError("it is not let in")
    assert refused.value.status == 503
    assert refused.value.retry_after_s
    assert [body.inside for body in await bodies(room, SMALL_BYTES)] == [True]


async def test_body_that_does_not_arrive_gives_its_room_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that fell asleep in the middle of one must not keep the others waiting."""
    monkeypatch.setattr(room_module, "ARRIVE_S", 0.05)
    monkeypatch.setattr(room_module, "LEAST_BYTES_PER_S", 2**40)
    room = BodyReader(tmp_path, {"training": MEMORY_BYTES})

    async def sleeps() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def arrives() -> Message:
        return {"type": "http.request", "body": b"x" * HALF, "more_body": False}

    asleep = Request(request_of(None).scope, sleeps)
    awake = Request(request_of(HALF).scope, arrives)

    async def read(request: Request) -> bytes:
        async with room.of(request, "tenant", "training") as body:
            return body

    first = asyncio.create_task(read(asleep))
    await settle()
    async with asyncio.timeout(60):
        assert len(await read(awake)) == HALF
    with pytest.raises(RequestError, match="did not arrive") as refused:
        await first
    assert refused.value.status == 408


async def test_other_bodies_need_room_unless_they_are_small(tmp_path: Path) -> None:
    """Thousands of connections that each bring nearly a whole one, and no more, would fill the memory."""
    reader = BodyReader(tmp_path, {"control": CONTROL_BYTES})
    arrived = asyncio.Event()

    async def receive() -> Message:
        await arrived.wait()
        return {"type": "http.request", "body": b"late"}

    async def come() -> Message:
        return {"type": "http.request", "body": b"here"}

    def asked(receive: Receive, **headers: str) -> asyncio.Task[bytes]:
        given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        return asyncio.create_task(reader.control(Request({"type": "http", "headers": given}, receive), "tenant"))

    slow = asked(receive, transfer_encoding="chunked")  # of any length: it has the whole room
    await settle()
    large = asked(come, content_length=str(SMALL_BYTES + 1))
    small = [asked(come, content_length=str(SMALL_BYTES)), asked(come)]
    assert await asyncio.gather(*small) == [b"here", b"here"]
    await settle()
    assert not large.done()
    arrived.set()
    assert await asyncio.gather(slow, large) == [b"late", b"here"]
