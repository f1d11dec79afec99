"""The doorbell: a local datagram socket on which one process tells another that there is something to look at.

A ring may be lost (the listener is away, its buffer full); whoever listens also looks by itself now and then. So an
idle server uses no CPU, and work starts within a millisecond.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Iterable
from pathlib import Path

logger = logging.getLogger(__name__)

MAX_DATAGRAM = 60_000

SESSIONS = "sessions"
"""The word that tells the engine that a session has ended; for new commands it needs none."""


class Doorbell:
    """The ringing end, of one listener or several. Never blocks and never fails the caller."""

    def __init__(self, *paths: Path) -> None:
        self._paths = [str(path) for path in paths]
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self.lost = 0

    def ring(self, words: Iterable[str] = ()) -> None:
        """Send words (request ids, or nothing), split over as many datagrams as they need."""
        buffer = b""
        for word in words:
            encoded = word.encode() + b"\n"
            if len(buffer) + len(encoded) > MAX_DATAGRAM:
                self._send(buffer)
                buffer = b""
            buffer += encoded
        self._send(buffer)

    def _send(self, datagram: bytes) -> None:
        for path in self._paths:
            try:
                self._socket.sendto(datagram, path)
            except OSError:
                self.lost += 1

    def close(self) -> None:
        self._socket.close()


class DoorbellListener:
    """The listening end: calls `on_ring(words)` on the event loop for every datagram."""

    def __init__(self, path: Path, on_ring: Callable[[list[str]], None]) -> None:
        self._path = path
        self._on_ring = on_ring
        self._socket: socket.socket | None = None

    def start(self) -> None:
        """Bind and listen on the running event loop; replaces what a dead predecessor left at the path."""
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
