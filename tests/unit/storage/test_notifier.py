"""The notifier of an API process: words that it sends to other processes and receives from them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from skyrl.base.types.requests import new_request_id, new_session_id
from skyrl.base.wire.paths import sampling_session_id_of
from skyrl.storage import notices as peers_module
from skyrl.storage.doorbell import SESSIONS, STATE, Doorbell, DoorbellListener
from skyrl.storage.notices import Notifier, PeerNotices, PeerNotifier

LONG_S = 60.0


async def ignore(_: object) -> None:
    """A reaction that does nothing."""


def notifier(directory: Path) -> Notifier:
    return Notifier(
        "server/0",
        own_doorbell=directory / "api.sock",
        engine_doorbells=[directory / "engine.sock"],
        postgres_conninfo=None,
    )


def test_ids_are_sorted_into_requests_sampling_sessions_and_sessions() -> None:
    request, session = new_request_id(), new_session_id()
    sampler = sampling_session_id_of(session, 3)
    assert PeerNotices.of([sampler, request, session]) == PeerNotices([request], [sampler], [session])


async def test_the_words_of_one_turn_are_sent_together_and_each_once() -> None:
    peers, sent = PeerNotifier(), []
    peers.send = sent.append
    peers.living = frozenset({"other/0"})
    peers.request_ended("r1", "s1:sample:0")
    peers.request_ended("r2", "s1:sample:0")
    peers.session_changed("s1")
    assert sent == []
    await asyncio.sleep(0)
    assert sent == [["r1", "s1:sample:0", "r2", "s1"]]


async def test_words_that_follow_soon_are_sent_together_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "APART_S", 0.5)
    sends: asyncio.Queue[list[str]] = asyncio.Queue()
    peers = PeerNotifier()
    peers.send = sends.put_nowait
    peers.living = frozenset({"other/0"})
    peers.request_ended("r1")
    await asyncio.sleep(0)
    assert sends.get_nowait() == ["r1"]
    peers.request_ended("r2")
    peers.request_ended("r3")
    await asyncio.sleep(0)
    assert sends.empty()
    assert await asyncio.wait_for(sends.get(), LONG_S) == ["r2", "r3"]


async def test_no_words_are_sent_while_no_other_process_lives() -> None:
    peers, sent = PeerNotifier(), []
    peers.send = sent.append
    peers.request_ended("r1")
    await asyncio.sleep(0)
    assert peers.alone
    assert sent == []


async def test_engine_and_api_process_hear_each_other(tmp_path: Path) -> None:
    words_to_engine: asyncio.Queue[list[str]] = asyncio.Queue()
    words_to_api: asyncio.Queue[list[str]] = asyncio.Queue()
    engine = DoorbellListener(tmp_path / "engine.sock", words_to_engine.put_nowait)
    engine.start()
    api_notifier = notifier(tmp_path)
    api_notifier.listen(words_to_api.put, ignore)
    api_notifier.engine.ring([SESSIONS])
    assert await asyncio.wait_for(words_to_engine.get(), LONG_S) == [SESSIONS]
    bell = Doorbell(tmp_path / "api.sock")
    bell.ring([STATE, "r1"])
    assert await asyncio.wait_for(words_to_api.get(), LONG_S) == [STATE, "r1"]
    await api_notifier.run()  # without PostgreSQL there are no other API processes, so this returns at once
    await api_notifier.close()
    bell.ring(["r2"])
    assert bell.lost == 1
    bell.close()
    engine.close()


async def test_close_cancels_reactions_that_still_run(tmp_path: Path) -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def react(_: list[str]) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    api_notifier, bell = notifier(tmp_path), Doorbell(tmp_path / "api.sock")
    api_notifier.listen(react, ignore)
    bell.ring()
    await asyncio.wait_for(started.wait(), LONG_S)
    await asyncio.wait_for(api_notifier.close(), LONG_S)
    assert ended.is_set()
    bell.close()
