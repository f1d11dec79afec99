"""The media of new weights over servers that are processes of their own; tests/plane has the same test on vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from torch.distributed import ProcessGroupGloo, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from skyrl.runtime.processes.ports import HeldPorts, free_port
from skyrl.runtime.processes.supervision import dies_with_parent
from skyrl.weights import process_group
from skyrl.weights.changes_on_disk import ChangesOnDisk
from skyrl.weights.disk import CheckpointOnDisk
from skyrl.weights.group import NotApplied, TrainerGroup
from skyrl.weights.process_group import Group, GroupError
from skyrl.weights.protocol import WeightUpdate, publish, push
from skyrl.weights.shared_memory import SharedMemory
from skyrl.weights.tensors import FLOATS, INTEGERS, Part, digest, dtype_name, in_buckets
from skyrl.weights.workers import Workers, WorkersFailed
from tests.component.weight_worker import SHAPES
from tests.weight_media import World, check

TIMEOUT_S = 20.0
ALL_DTYPES = sorted({one for one in vars(torch).values() if isinstance(one, torch.dtype)}, key=str)
TAKEN = FLOATS + INTEGERS


def of_dtype(dtype: torch.dtype, *shape: int, first: int = 1) -> torch.Tensor:
    """A tensor with different bytes, none of which is part of a NaN."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch means to drop quantized tensors
        tensor = torch.empty(shape, dtype=dtype)
    if tensor.is_quantized:  # its bytes cannot be written so
        return tensor
    raw = tensor.reshape(-1).view(torch.uint8)
    raw.copy_(torch.arange(first, first + len(raw)) % (2 if dtype is torch.bool else 50))
    return tensor


@pytest.fixture(scope="module")
def servers() -> Iterator[list[str]]:
    with HeldPorts() as held:
        ports = held.take(2)
        processes = [
            subprocess.Popen(dies_with_parent((sys.executable, "-m", "tests.component.weight_worker", str(port))))
            for port in ports
        ]
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        try:
            asyncio.run(_until_up(urls))
            yield urls
        finally:
            for process in processes:
                process.kill()
                process.wait()


async def _until_up(urls: list[str]) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        with contextlib.suppress(WorkersFailed):
            await Workers(urls).versions()
            return
        await asyncio.sleep(0.1)
    raise AssertionError("the servers are not up")


@pytest.fixture
def workers(servers: list[str]) -> Workers:
    return Workers(servers)


def tensors(version: str) -> list[Part]:
    return [{name: torch.full(shape, float(version))} for name, shape in SHAPES.items()]


def media(workers: Workers, directory: Path) -> dict[str, Any]:
    return {
        "disk": CheckpointOnDisk(workers, directory),
        "group": TrainerGroup(workers, timeout_s=TIMEOUT_S, checksums=True),
        "memory": SharedMemory(workers, checksums=True),
        "changes": ChangesOnDisk(workers, directory),
    }


@pytest.mark.parametrize("medium", ["disk", "group", "memory", "changes"])
async def test_full_weights_keep_the_promises_of_a_medium(medium: str, workers: Workers, tmp_path: Path) -> None:
    async def served() -> list[list[str]]:
        return [[version] for version in (await workers.versions()).values()]

    def wrong(version: str) -> list[Part]:
        return [tensors(version)[0], {"b": torch.zeros(7)}]

    await check(World(media(workers, tmp_path)[medium], ("1", "2", "3"), tensors, wrong, served))
    assert os.listdir(tmp_path) == []
    for info in await infos(workers):
        assert info["sums"] == {"a": 36.0, "b": 15.0}
        assert info["paused"] is None


async def infos(workers: Workers) -> list[Any]:
    async with aiohttp.ClientSession() as session:
        found = []
        for url in workers.urls:
            async with session.get(url + "/model_info") as answer:
                found.append(await answer.json())
        return found


@pytest.mark.parametrize("medium", ["disk", "group", "memory", "changes"])
async def test_a_failure_at_one_of_two_names_it(medium: str, workers: Workers, tmp_path: Path) -> None:
    await Workers(workers.urls[:1]).post("/break")
    parts = [{name: tensor for part in tensors("7") for name, tensor in part.items()}]
    with pytest.raises(WorkersFailed, match="on purpose") as raised:
        await publish(media(workers, tmp_path)[medium], "7", parts)
    assert list(raised.value.failed) == [workers.urls[0]]
    assert list(raised.value.answered) == [workers.urls[1]]
    versions = await workers.versions()
    assert versions[workers.urls[1]] == "7" != versions[workers.urls[0]]
    assert [info["paused"] for info in await infos(workers)] == [None, None]
    assert os.listdir(tmp_path) == []


async def test_changes_alone_are_sent_until_a_server_lacks_their_base(workers: Workers, tmp_path: Path) -> None:
    medium, a = ChangesOnDisk(workers, tmp_path), torch.zeros(4, 3, dtype=torch.bfloat16)
    sent, sums = [], []
    for number in range(4):
        if number == 3:
            await Workers(workers.urls[1:]).post("/forget")
        a[0, 0] = number + 1
        await publish(medium, f"c{number}", [{"a": a}, {"b": torch.zeros(5)}])
        sent.append(medium.sent_bytes)
        sums.append([info["sums"]["a"] for info in await infos(workers)])
    assert sent == [44, 6, 6, 6 + 44]
    assert sums == [[1.0] * 2, [2.0] * 2, [3.0] * 2, [4.0] * 2]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("medium", [TrainerGroup, SharedMemory])
async def test_tensors_are_rounded_to_the_mediums_dtype_on_their_way(
    medium: type[TrainerGroup | SharedMemory], workers: Workers
) -> None:
    third = torch.full((4, 3), 1 / 3)
    parts = in_buckets([("a", third), ("b", torch.zeros(5))])
    await publish(medium(workers, checksums=True, dtype=torch.bfloat16), "rounded", parts)
    for info in await infos(workers):
        assert info["first"] == third[0].to(torch.bfloat16).tolist()
    assert third.dtype == torch.float32


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.04])
@pytest.mark.parametrize("medium", ["disk", "group", "memory", "changes"])
async def test_after_a_cancelled_update_the_next_one_is_whole(
    medium: str, after_s: float, workers: Workers, tmp_path: Path
) -> None:
    chosen = media(workers, tmp_path)[medium]
    if medium == "group":  # its thread may wait so long for servers that have never joined
        chosen = TrainerGroup(workers, timeout_s=10.0, checksums=True)
    cancelled = asyncio.create_task(publish(chosen, "8", tensors("8")))
    await asyncio.sleep(after_s)
    cancelled.cancel()
    with contextlib.suppress(asyncio.CancelledError):  # it may have ended by now
        await cancelled
    await publish(chosen, "9", tensors("9"))
    for info in await infos(workers):
        assert info["sums"] == {"a": 108.0, "b": 45.0}
        assert info["paused"] is None
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("medium", ["disk", "group", "memory", "changes"])
async def test_a_part_without_tensors_changes_nothing(medium: str, workers: Workers, tmp_path: Path) -> None:
    first, second = tensors("6")
    await publish(media(workers, tmp_path)[medium], "6", [{}, first, {}, second, {}])
    for info in await infos(workers):
        assert info["sums"] == {"a": 72.0, "b": 30.0}


async def test_shared_memory_does_not_grow_with_the_number_of_updates(workers: Workers) -> None:
    """Also where the parts of each update are larger than those of the one before."""
    medium = SharedMemory(workers)
    for number in range(1, 9):
        segments = [medium._segment(size * number, torch.device("cpu")) for size in (1024, 512)]
        medium._free += segments
    assert sorted(segment.bytes for segment in medium._free) == [4096, 8192]
    medium.close()


async def test_memory_into_which_a_cancelled_update_may_still_write_is_not_used_again(workers: Workers) -> None:
    """Its thread goes on for a moment, and the next update casts its tensors in another thread."""
    medium = TrainerGroup(workers, timeout_s=TIMEOUT_S, dtype=torch.float32)
    await publish(medium, "1", [{name: tensor.double() for name, tensor in part.items()} for part in tensors("1")])
    before = medium._cast_memory
    assert before._arenas
    update = WeightUpdate(medium)
    first, second = tensors("2")
    await update.begin("2")
    await update.send(first)
    cancelled = asyncio.create_task(update.send(second))
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert medium._cast_memory is not before


async def test_an_update_that_lacks_tensors_says_so(workers: Workers) -> None:
    before = await workers.versions()
    with pytest.raises(NotApplied, match="a tensor is missing"):
        await publish(TrainerGroup(workers, timeout_s=TIMEOUT_S), "9", tensors("9")[:1])
    assert await workers.versions() == before
    assert [info["paused"] for info in await infos(workers)] == [None, None]


async def test_a_server_that_stays_paused_is_named(workers: Workers) -> None:
    medium = TrainerGroup(workers, timeout_s=TIMEOUT_S)
    await medium.begin("9")
    await medium.send(tensors("9")[0])
    await medium.send(tensors("9")[1])  # the first part is with the servers now
    with pytest.raises(LookupError) as raised:
        async with workers.paused("in_place"):
            raise LookupError
    assert all(f"{url}: an update is not finished" in raised.value.__notes__[0] for url in workers.urls)
    await medium.abandon()
    await workers.post("/continue_generation")


async def test_a_server_that_does_not_answer_is_named(workers: Workers, tmp_path: Path) -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    both = Workers([*workers.urls, gone])
    for medium in media(both, tmp_path).values():
        with pytest.raises(WorkersFailed, match=gone):
            await publish(medium, "9", tensors("9"))
    assert os.listdir(tmp_path) == []


def test_a_training_loop_without_an_event_loop_can_push(workers: Workers, tmp_path: Path) -> None:
    for version, medium in zip(("4", "5", "6", "7"), media(workers, tmp_path).values(), strict=True):
        push(medium, version, tensors(version))
        assert set(asyncio.run(workers.versions()).values()) == {version}


def test_buckets_hold_each_tensor_once() -> None:
    embedding, other = torch.ones(8, 4), torch.ones(2, dtype=torch.int64)
    given = [("embed", embedding), ("a", torch.ones(4, 4)), ("n", other), ("head", embedding)]
    buckets = list(in_buckets(given, torch.bfloat16, most_bytes=64))
    assert [list(bucket) for bucket in buckets] == [["embed"], ["a", "n"]]
    assert [tensor.dtype for bucket in buckets for tensor in bucket.values()] == [
        torch.bfloat16,
        torch.bfloat16,
        torch.int64,
    ]
    assert [name for bucket in in_buckets(given) for name in bucket] == ["embed", "a", "n"]


def test_memory_that_is_used_again_is_another_tensor() -> None:
    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(8):
            yield str(number), torch.full((64, 64), float(number))

    sent = {name: tensor for part in in_buckets(gathered(), torch.bfloat16) for name, tensor in part.items()}
    assert {name: float(tensor[0, 0]) for name, tensor in sent.items()} == {str(one): float(one) for one in range(8)}


def test_another_view_of_the_same_memory_is_another_tensor() -> None:
    square = torch.arange(4.0).reshape(2, 2)
    (part,) = in_buckets([("a", square), ("b", square.t()), ("c", square.detach())])
    assert {name: tensor.tolist() for name, tensor in part.items()} == {"a": [[0, 1], [2, 3]], "b": [[0, 2], [1, 3]]}


async def test_parts_need_not_be_contiguous(workers: Workers, tmp_path: Path) -> None:
    tensor = torch.arange(12.0).reshape(3, 4).t()
    for version, medium in zip(("11", "12/a", "13", "14"), media(workers, tmp_path / "new").values(), strict=True):
        await publish(medium, version, [{"a": tensor, "b": torch.zeros(5)}])
        assert [info["first"] for info in await infos(workers)] == [[0, 4, 8], [0, 4, 8]]


async def test_the_directory_of_a_version_is_in_its_parent_and_open_to_others(tmp_path: Path) -> None:
    medium = CheckpointOnDisk(Workers(["http://unused"]), tmp_path)
    await medium.begin("../a b")
    (name,) = os.listdir(tmp_path)
    assert os.stat(tmp_path / name).st_mode & 0o777 == 0o777 & ~umask()
    await medium.abandon()
    assert os.listdir(tmp_path) == []


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(2.5),
        torch.empty(0, 3),
        torch.arange(6.0).reshape(2, 3).t(),
        torch.tensor([True, False]),
        *(one for dtype in ALL_DTYPES if not (one := of_dtype(dtype, 3)).is_quantized),
    ],
    ids=lambda tensor: f"{dtype_name(tensor.dtype)}{list(tensor.shape)}",
)
def test_every_kind_of_tensor_arrives_as_it_was_sent(tensor: torch.Tensor, pair: tuple[Group, Group]) -> None:
    trainer, server = pair
    arrived = of_dtype(tensor.dtype, *tensor.shape, first=7)
    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(trainer.broadcast, tensor)
        server.broadcast(arrived)
        sending.result(TIMEOUT_S)
    assert digest("t", arrived) == digest("t", tensor)


@pytest.mark.parametrize("medium", ["disk", "group", "memory", "changes"])
async def test_a_tensor_of_any_dtype_arrives_or_is_refused_before_it_is_announced(
    medium: str, workers: Workers, tmp_path: Path
) -> None:
    refused = set()
    for dtype in ALL_DTYPES:
        before, version = await workers.versions(), f"{medium} {dtype}"
        update = WeightUpdate(media(workers, tmp_path)[medium])
        await update.begin(version)
        await update.send({"a": of_dtype(dtype if dtype in TAKEN else torch.float32, 4, 3)})
        if dtype in TAKEN:
            await update.send({"b": of_dtype(dtype, 5, first=9)})
            await update.finish()
            assert set((await workers.versions()).values()) == {version}
            continue
        refused.add(dtype)
        with pytest.raises(ValueError, match=f"b is {dtype_name(dtype)}, which servers do not take"):
            await update.send({"b": of_dtype(dtype, 5)})
        assert await workers.versions() == before
    assert {torch.complex64, torch.float4_e2m1fn_x2, torch.quint8} <= refused
    assert os.listdir(tmp_path) == []


def test_a_server_that_stops_in_the_middle_still_gets_the_tensors_that_are_on_their_way(
    pair: tuple[Group, Group],
) -> None:
    trainer, server = pair
    sent = [torch.full((size,), float(size)) for size in (3, 4, 5)]
    rooms = [torch.zeros(size) for size in (3, 4, 5)]
    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(list, trainer.broadcast_each(sent))
        arriving = server.broadcast_each(rooms)
        assert next(arriving) is rooms[0]
        arriving.close()
        sending.result(TIMEOUT_S)
        assert all(torch.equal(one, other) for one, other in zip(sent, rooms, strict=True))
        sending = thread.submit(trainer.broadcast, torch.ones(3))
        server.broadcast(rooms[0])
        sending.result(TIMEOUT_S)
    assert torch.equal(rooms[0], torch.ones(3))


def test_a_tensor_to_fill_must_be_contiguous(pair: tuple[Group, Group]) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        pair[1].broadcast(torch.empty(2, 3).t())


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Group, Group]]:
    """Both members in this process; torch's registry of groups, which `join` uses, allows one."""
    first = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    timeout = timedelta(seconds=TIMEOUT_S)

    def member(rank: int) -> Group:
        # A member that waits keeps its store busy, so each has one
        store = first if rank == 0 else TCPStore("127.0.0.1", first.port, 2, is_master=False)
        return Group(ProcessGroupGloo(store, rank, 2, timeout), store, rank, timeout)  # type: ignore[arg-type]

    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(member, 1)
        yield member(0), other.result(TIMEOUT_S)


def test_a_group_of_one_name_can_be_formed_again_after_a_failure() -> None:
    port = free_port()
    with pytest.raises(GroupError, match=f"rank 1 of 2 at 127.0.0.1:{port}"):
        process_group.join("127.0.0.1", port, 1, 2, "again", "gloo", 0.5)
    with pytest.raises(GroupError):
        process_group.join("127.0.0.1", free_port(), 0, 2, "again", "gloo", 0.5)
    alone = process_group.join("127.0.0.1", free_port(), 0, 1, "again", "gloo", TIMEOUT_S)
    tensor = torch.arange(3.0)
    alone.broadcast(tensor)
    alone.close()
    alone.close()
    with pytest.raises(GroupError, match="closed"):
        alone.broadcast(tensor)
    for arguments in ((0, 2, "mpi"), (2, 2, "gloo")):
        rank, world, backend = arguments
        with pytest.raises(ValueError, match="backend|rank"):
            process_group.join("127.0.0.1", port, rank, world, "again", backend, 1)
