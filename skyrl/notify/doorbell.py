"""The doorbell: a local datagram socket on which one process of a server tells another where to look.

A ring may be lost, because the listener is away or its buffer is full, so every listener also looks by itself now and
then. With the doorbell an idle server uses no CPU, and work starts within a millisecond.
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
"""Tells the engine that a session has ended. A ring without a word tells it of new commands."""
STATE = "state"
"""Tells an API process that the engine's state has changed. Other words are ids of requests that the engine settled."""


class Doorbell:
    """Rings one listener or several. Never blocks, and never raises: rings that are lost are counted. Threads may share
    it. The first ring opens the socket."""

    def __init__(self, *paths: Path) -> None:
        self._paths = [str(path) for path in paths]
        self._socket: socket.socket | None = None
        self._opening = threading.Lock()
        self._closed = False
        self.lost = 0

    def ring(self, words: Iterable[str] = ()) -> None:
        """Send words, or a ring without a word, in as many datagrams as the words need."""
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
    """Listens, and calls `on_ring(words)` on the event loop for every datagram."""

    def __init__(self, path: Path, on_ring: Callable[[list[str]], None]) -> None:
        self._path = path
        self._on_ring = on_ring
        self._socket: socket.socket | None = None

    def start(self) -> None:
        """Bind and listen on the running event loop. Replaces the socket that a dead predecessor left at the path."""
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
