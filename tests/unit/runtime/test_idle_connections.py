"""Which unused connection a client takes next, and which are closed. The connections are only stand-ins: no bytes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from skyrl.http import idle_connections
from skyrl.http.idle_connections import IdleConnections

SERVER = "server"


@dataclass(eq=False)
class Unused:
    idle_since: float = 0.0
    reusable: bool = True
    closed: bool = False

    def abort(self) -> None:
        self.closed = True


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_connections, "REFRESH_S", 0.1)
    monkeypatch.setattr(idle_connections, "MAX_IDLE_S", 0.2)


@pytest.mark.usefixtures("short")
async def test_connections_that_a_peak_needed_stay_open_while_there_is_traffic() -> None:
    kept = IdleConnections[str, Unused]()
    peak = [Unused() for _ in range(5)]
    for connection in peak:
        kept.keep(SERVER, connection)
    for _ in range(30):  # three times MAX_IDLE_S, one request at a time
        await asyncio.sleep(0.02)
        taken = kept.take(SERVER)
        assert taken in peak
        kept.keep(SERVER, taken)
    assert not any(connection.closed for connection in peak)
    kept.close()


async def test_the_most_recently_used_connection_is_taken_while_no_other_is_about_to_be_too_old() -> None:
    kept = IdleConnections[str, Unused]()
    older, newer = Unused(), Unused()
    kept.keep(SERVER, older)
    kept.keep(SERVER, newer)
    assert kept.take(SERVER) is newer
    kept.close()
    assert older.closed


@pytest.mark.usefixtures("short")
async def test_connections_that_are_too_old_are_closed_and_not_given() -> None:
    kept = IdleConnections[str, Unused]()
    old = [Unused(), Unused()]
    for connection in old:
        kept.keep(SERVER, connection)
    for connection in old:
        connection.idle_since -= 1.0
    fresh = Unused()
    kept.keep(SERVER, fresh)
    assert kept.take(SERVER) is fresh
    assert all(connection.closed for connection in old)
    assert kept.take(SERVER) is None
    kept.close()
