"""The doorbell: a local datagram socket on which one process of a server sends notices to another.

A ring is lost when the listener does not run or its buffer is full. Because of the doorbell an idle server uses almost
no CPU, and work starts within a millisecond.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

logger = logging.getLogger(__name__)

MAX_DATAGRAM = 60_000

SESSIONS = "sessions"
"""The notice to the engine that a session has ended. A ring without a notice tells it of new commands."""
SERVERS = "servers"
"""The notice to the engine that an inference server has come, gone or moved."""
STATE = "state"
"""The notice to an API process that the engine's state has changed. Its other notices are ids of settled requests."""


class Doorbell:
    """Rings one or several listeners. Never blocks and never raises; lost rings are counted. Threads may share it. The
    first ring opens the socket."""

    def __init__(self, *paths: Path) -> None:
        self._paths = [str(path) for path in paths]
        self._socket: socket.socket | None = None
        self._opening = threading.Lock()
        self._closed = False
        self.lost = 0

    def ring(self, notices: Iterable[str] = ()) -> None:
        """Send notices in as many datagrams as they need, or a ring without a notice."""
        datagram = b""
        for notice in notices:
            line = notice.encode() + b"\n"
            if len(datagram) + len(line) > MAX_DATAGRAM:
                self._send(datagram)
                datagram = b""
            datagram += line
        self._send(datagram)

    def _send(self, datagram: bytes) -> None:
        for path in self._paths:
            try:
                self._opened().sendto(datagram, path)
            except OSError:
                self.lost += 1

    def _opened(self) -> socket.socket:
        """Raises OSError after `close`."""
        if self._socket is None:
            with self._opening:
                if self._closed:
                    raise OSError("the doorbell is closed")
                if self._socket is None:
                    opened = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                    opened.setblocking(False)
                    self._socket = opened
        return self._socket

    def close(self) -> None:
        with self._opening:
            self._closed = True
            if self._socket is not None:
                self._socket.close()


class DoorbellListener:
    """Calls `on_ring(notices)` on the event loop for every datagram."""

    def __init__(self, path: Path, on_ring: Callable[[list[str]], None]) -> None:
        self._path = path
        self._on_ring = on_ring
        self._socket: socket.socket | None = None

    def start(self) -> None:
        """Listen on the running event loop. Replaces the socket that a killed process has left at the path."""
        self._path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        listener.setblocking(False)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        listener.bind(str(self._path))
        os.chmod(self._path, 0o600)
        self._socket = listener
        asyncio.get_running_loop().add_reader(listener.fileno(), self._readable)

    def _readable(self) -> None:
        assert self._socket is not None
        while True:
            try:
                datagram = self._socket.recv(MAX_DATAGRAM + 1)
            except BlockingIOError:
                return
            self._on_ring(datagram.decode().split("\n")[:-1])

    def close(self) -> None:
        if self._socket is None:
            return
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        self._socket = None
        self._path.unlink(missing_ok=True)
