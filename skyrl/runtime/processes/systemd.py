"""Tells systemd how this process does: ready, a status line, alive, stopping (the protocol of sd_notify(3)).

Does not know what the process does, or when it is ready. Without `NOTIFY_SOCKET` nothing is sent.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager

logger = logging.getLogger(__name__)

SOCKET, WATCHDOG_US, WATCHDOG_PID = "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"
"""The variables of systemd: the socket's address, how often it wants to hear that the process lives, in microseconds,
and which process."""
SEND_TIMEOUT_S = 1.0
"""systemd reads its socket at once. A full socket must not stop the event loop for longer than this."""
MAX_STATUS = 500
"""Characters of a status line."""


class Systemd:
    """The socket of systemd. An empty `address` means that systemd does not listen.

    `watchdog_s`: when systemd hears nothing for so long, it kills this process; None if it does not watch.
    """

    def __init__(self, address: str = "", watchdog_s: float | None = None) -> None:
        self._address = f"\0{address[1:]}" if address.startswith("@") else address  # "@": without a file
        self._watchdog_s = watchdog_s if address else None
        self._has_failed = False

    @classmethod
    def take_from(cls, environment: MutableMapping[str, str]) -> Systemd:
        """Read systemd's variables and remove them: a child process must not speak for this one."""
        address = environment.pop(SOCKET, "")
        interval = environment.pop(WATCHDOG_US, "")
        is_mine = environment.pop(WATCHDOG_PID, str(os.getpid())) == str(os.getpid())
        if address[:1] not in ("", "/", "@"):
            logger.warning("systemd is not told how the server does: %s is no address of a socket: %r", SOCKET, address)
            address = ""
        watches = is_mine and interval.isdecimal() and int(interval) > 0
        return cls(address, int(interval) / 1e6 if watches else None)

    def ready(self, status: str) -> None:
        self._send("READY=1", _status(status))

    def status(self, status: str) -> None:
        """The line that `systemctl status` shows."""
        self._send(_status(status))

    def stopping(self, status: str) -> None:
        self._send("STOPPING=1", _status(status))

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """While the block runs and the event loop turns, tell systemd that this process lives."""
        telling = asyncio.create_task(self._tell_alive())
        try:
            yield
        finally:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)

    async def _tell_alive(self) -> None:
        while self._watchdog_s is not None:
            self._send("WATCHDOG=1")
            await asyncio.sleep(self._watchdog_s / 3)

    def _send(self, *lines: str) -> None:
        """Send one datagram. The server goes on if that fails; the first failure is logged."""
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.settimeout(SEND_TIMEOUT_S)
                sender.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:
            if not self._has_failed:
                logger.warning("systemd cannot be told how the server does (%s): %s", lines[0], error)
            self._has_failed = True


def _status(text: str) -> str:
    """One line: systemd would read the next line as a command of its own, such as `MAINPID=`."""
    return f"STATUS={' '.join(text.split())[:MAX_STATUS]}"
