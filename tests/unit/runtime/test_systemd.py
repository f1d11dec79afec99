"""What systemd hears on its socket, and what child processes inherit."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from skyrl.runtime.processes.systemd import Systemd
from tests.log_lines import logged_lines

WAIT_S = 60.0


@pytest.fixture
def listen() -> Iterator[Callable[[str], socket.socket]]:
    """A function that makes systemd's socket at an address."""
    sockets: list[socket.socket] = []

    def make(address: str) -> socket.socket:
        sockets.append(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        sockets[-1].bind(address.replace("@", "\0"))
        sockets[-1].settimeout(WAIT_S)
        return sockets[-1]

    yield make
    for made in sockets:
        made.close()


@pytest.fixture(params=["file", "abstract"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "notify") if request.param == "file" else f"@skyrl-{secrets.token_hex(8)}"


def test_each_message_is_one_datagram(listen: Callable[[str], socket.socket], address: str) -> None:
    receiver, systemd = listen(address), Systemd.take_from({"NOTIFY_SOCKET": address})
    systemd.status("loading the base model")
    systemd.ready("ready at http://127.0.0.1:8000")
    systemd.stopping("stopping")
    assert [receiver.recv(4096).decode() for _ in range(3)] == [
        "STATUS=loading the base model",
        "READY=1\nSTATUS=ready at http://127.0.0.1:8000",
        "STOPPING=1\nSTATUS=stopping",
    ]


def test_a_status_is_one_short_line(listen: Callable[[str], socket.socket], address: str) -> None:
    receiver = listen(address)
    Systemd(address).status("the model\nMAINPID=1" + "x" * 10_000)
    received = receiver.recv(65536).decode()
    assert received.startswith("STATUS=the model MAINPID=1xxx")
    assert len(received) < 600


def test_children_do_not_inherit_systemds_variables() -> None:
    environment = {"NOTIFY_SOCKET": "/run/x", "WATCHDOG_USEC": "10", "WATCHDOG_PID": "1", "HOME": "/root"}
    Systemd.take_from(environment)
    assert environment == {"HOME": "/root"}


async def test_systemd_hears_again_and_again_that_the_process_lives(
    listen: Callable[[str], socket.socket], address: str
) -> None:
    receiver = listen(address)
    environment = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "30000", "WATCHDOG_PID": str(os.getpid())}
    async with Systemd.take_from(environment).watched():
        for _ in range(3):
            assert await asyncio.to_thread(receiver.recv, 4096) == b"WATCHDOG=1"


@pytest.mark.parametrize(
    "variables",
    [{}, {"WATCHDOG_USEC": "0"}, {"WATCHDOG_USEC": "soon"}, {"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}],
    ids=["no watchdog", "zero", "not a number", "another process"],
)
async def test_without_a_watchdog_of_its_own_the_process_says_nothing(
    listen: Callable[[str], socket.socket], address: str, variables: dict[str, str]
) -> None:
    receiver, systemd = listen(address), Systemd.take_from({"NOTIFY_SOCKET": address} | variables)
    async with systemd.watched():
        await asyncio.sleep(0.05)
    systemd.status("the end")
    assert receiver.recv(4096) == b"STATUS=the end", "nothing came before"


async def test_without_systemd_nothing_is_sent_or_logged(caplog: pytest.LogCaptureFixture) -> None:
    systemd = Systemd.take_from({"WATCHDOG_USEC": "1000"})
    async with systemd.watched():
        systemd.ready("ready")
        await asyncio.sleep(0.01)
    assert logged_lines(caplog) == []


@pytest.mark.parametrize("unusable", ["vsock:2:1234", "run/notify"])
def test_an_address_that_is_no_socket_is_logged_and_not_used(unusable: str, caplog: pytest.LogCaptureFixture) -> None:
    Systemd.take_from({"NOTIFY_SOCKET": unusable}).ready("ready")
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert unusable in caplog.text


def test_a_socket_that_is_gone_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    systemd = Systemd(str(tmp_path / "gone"))
    systemd.status("starting")
    systemd.ready("ready")
    assert len(caplog.records) == 1


def test_a_full_socket_does_not_stop_the_server(
    listen: Callable[[str], socket.socket], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyrl.runtime.processes.systemd.SEND_TIMEOUT_S", 0.0001)
    receiver, systemd = listen(address), Systemd(address)
    for number in range(1000):
        systemd.status(str(number))
    receiver.setblocking(False)
    received = 0
    with suppress(BlockingIOError):
        while receiver.recv(4096):
            received += 1
    assert 0 < received < 1000, "the rest did not fit, and nobody waited"
