"""What an API process tells other processes and hears from them, as it builds it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from skyrl.notify.doorbell import SESSIONS, STATE, Doorbell, DoorbellListener
from skyrl.notify.notifier import Notifier
from skyrl.notify.peers import PeerNotices, PeerNotifier
from skyrl.types.ids import new_request_id, new_session_id
from skyrl.wire.paths import sampling_session_id_of

LONG_S = 60.0


async def nothing(_: object) -> None:
    """Hears words, and does nothing."""


def notifier(directory: Path) -> Notifier:
    return Notifier(
        "server/0",
        own_doorbell=directory / "api.sock",
        engine_doorbell=directory / "engine.sock",
        postgres_conninfo=None,
    )


def test_ids_say_what_they_are_of() -> None:
    request, session = new_request_id(), new_session_id()
    sampler = sampling_session_id_of(session, 3)
    assert PeerNotices.of([sampler, request, session]) == PeerNotices([request], [sampler], [session])


async def test_words_of_one_turn_go_together_and_each_once() -> None:
    peers, sent = PeerNotifier(), []
    peers.send = sent.append
    peers.living = frozenset({"other/0"})
    peers.request_ended("r1", "s1:sample:0")
    peers.request_ended("r2", "s1:sample:0")
    peers.session_changed("s1")
    assert sent == []
    await asyncio.sleep(0)
    assert sent == [["r1", "s1:sample:0", "r2", "s1"]]
    peers.request_ended("r3")
    await asyncio.sleep(0)
    assert sent[1:] == [["r3"]]


async def test_nothing_is_told_while_no_other_process_lives() -> None:
    peers, sent = PeerNotifier(), []
    peers.send = sent.append
    peers.request_ended("r1")
    await asyncio.sleep(0)
    assert peers.alone
    assert sent == []


async def test_engine_and_api_process_hear_each_other(tmp_path: Path) -> None:
    told: asyncio.Queue[list[str]] = asyncio.Queue()
    heard: asyncio.Queue[list[str]] = asyncio.Queue()
    engine = DoorbellListener(tmp_path / "engine.sock", told.put_nowait)
    engine.start()
    own = notifier(tmp_path)
    own.listen(heard.put, nothing)
    own.engine.ring([SESSIONS])
    assert await asyncio.wait_for(told.get(), LONG_S) == [SESSIONS]
    bell = Doorbell(tmp_path / "api.sock")
    bell.ring([STATE, "r1"])
    assert await asyncio.wait_for(heard.get(), LONG_S) == [STATE, "r1"]
    await own.run()  # without PostgreSQL there is nobody else, so this returns
    await own.close()
    bell.ring(["r2"])
    assert bell.lost == 1
    bell.close()
    engine.close()


async def test_close_ends_reactions_that_still_run(tmp_path: Path) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def react(_: list[str]) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    own, bell = notifier(tmp_path), Doorbell(tmp_path / "api.sock")
    own.listen(react, nothing)
    bell.ring()
    await asyncio.wait_for(begun.wait(), LONG_S)
    await asyncio.wait_for(own.close(), LONG_S)
    assert ended.is_set()
    bell.close()
