"""The log behind the long poll for all samples of a client: pages, bounds, and what happens when it is forgotten."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

import pytest

from skyrl.futures import completions
from skyrl.futures.completions import CLONE_BLOCK, Completion, CompletionLogs, Target, block_of, clone_of

TARGET = Target("session", "session:sample:0", 0)


class Stored:
    """What the database has."""

    def __init__(self) -> None:
        self.ends: list[Completion] = []
        self.reads = 0

    async def load(self, _: Target, since: float) -> Iterable[Completion]:
        self.reads += 1
        await asyncio.sleep(0)
        return [end for end in self.ends if end.at > since]

    def add(self, logs: CompletionLogs, name: str, at: float | None = None) -> None:
        """A sample ends: it is written, and the log is told."""
        end = Completion(name, 1, time.time() if at is None else at)
        self.ends.append(end)
        logs.note(TARGET, end)


async def everything(logs: CompletionLogs, cursor: int = 0) -> tuple[int, list[str]]:
    names: list[str] = []
    while True:
        cursor, told = await logs.poll(TARGET, cursor, 0)
        if not told:
            return cursor, names
        names += [end.request_id for end in told]


@pytest.fixture
def stored() -> Stored:
    return Stored()


@pytest.fixture
def logs(stored: Stored) -> CompletionLogs:
    return CompletionLogs(stored.load)


async def test_many_come_in_pages(logs: CompletionLogs, stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "MAX_COMPLETIONS", 7)
    now = time.time()
    for number in range(100):
        stored.add(logs, str(number), now)  # all in one moment
    cursor, told = await logs.poll(TARGET, 0, 0)
    assert [end.request_id for end in told] == [str(number) for number in range(7)]
    _, names = await everything(logs, cursor)
    assert names == [str(number) for number in range(7, 100)]
    assert stored.reads == 1


async def test_log_that_nobody_reads_is_forgotten_and_nothing_is_lost(
    logs: CompletionLogs, stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completions, "MAX_LOG", 10)
    stored.add(logs, "seen")
    cursor, _ = await everything(logs)
    for number in range(25):
        stored.add(logs, str(number))
    assert len(logs) == 0
    _, names = await everything(logs, cursor)
    assert set(names) >= {str(number) for number in range(25)}


async def test_forgotten_between_two_pages_it_is_read_on_from_there(
    logs: CompletionLogs, stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cursor is a time, so that ends of long ago that were not told yet are found again."""
    monkeypatch.setattr(completions, "MAX_COMPLETIONS", 10)
    long_ago = time.time() - 3000
    for number in range(30):
        stored.add(logs, str(number), long_ago + 100 * number)
    cursor, first = await logs.poll(TARGET, 0, 0)
    logs._logs.clear()
    _, rest = await everything(logs, cursor)
    assert [end.request_id for end in first] == [str(number) for number in range(10)]
    assert rest == [str(number) for number in range(9, 30)], "the last one once more, all others once"


async def test_idle_logs_go_when_another_client_comes(
    logs: CompletionLogs, stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    await logs.poll(TARGET, 0, 0)
    monkeypatch.setattr(completions, "IDLE_S", -1.0)
    await logs.poll(Target("session", "session:sample:1", 0), 0, 0)
    assert len(logs) == 1


async def test_log_that_could_not_be_read_is_no_log(logs: CompletionLogs, stored: Stored) -> None:
    load, stored.ends = logs._load, [Completion("old", 1, time.time())]

    async def fail(*_: object) -> Iterable[Completion]:
        raise OSError("no database")

    logs._load = fail
    with pytest.raises(OSError, match="no database"):
        await logs.poll(TARGET, 0, 0)
    logs._load = load
    assert (await everything(logs))[1] == ["old"]


async def test_cursor_ahead_of_the_clock_still_hears_what_comes(logs: CompletionLogs, stored: Stored) -> None:
    ahead = int((time.time() + 3600) * 1e6)
    assert await logs.poll(TARGET, ahead, 0) == (ahead, [])
    stored.add(logs, "new")
    cursor, told = await logs.poll(TARGET, ahead, 0)
    assert [end.request_id for end in told] == ["new"]
    assert cursor > ahead


@pytest.mark.parametrize("clone", [0, 1, 2, 10**9])
def test_blocks_and_numbers_agree(clone: int) -> None:
    first, end = block_of(clone)
    assert clone_of(first) == clone_of(end - 1) == clone
    assert clone_of(end) == clone + 1
    assert end - (first or 0) == CLONE_BLOCK


async def test_one_who_waits_hears_of_an_end_although_another_asked_from_the_beginning(
    logs: CompletionLogs, stored: Stored
) -> None:
    stored.add(logs, "first")
    cursor, _ = await everything(logs)
    waiting = asyncio.create_task(logs.poll(TARGET, cursor, 60.0))
    await asyncio.sleep(0)
    again = await logs.poll(TARGET, 0, 0.0)
    assert [end.request_id for end in again[1]] == ["first"]
    await asyncio.sleep(0)
    stored.add(logs, "second")
    told = await asyncio.wait_for(waiting, 60.0)
    assert "second" in [end.request_id for end in told[1]]


async def test_one_session_keeps_a_bounded_number_of_logs(
    logs: CompletionLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completions, "MAX_LOGS", 3)
    for clone in range(10):
        await logs.poll(Target(TARGET.session_id, TARGET.sampling_session_id, clone), 0, 0.0)
    assert len(logs) <= 3
