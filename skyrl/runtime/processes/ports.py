"""Ports of this machine for servers that skyrl starts: free ones, and ones that are held from the choice on.

A server binds its port long after the port was chosen: vLLM imports before, for 26 s on a busy machine. A held port has
a socket of this process that is bound and never listens. On Linux a server that sets SO_REUSEADDR, as vLLM, uvicorn,
Ray and skyrl do, may bind and listen beside that socket; nobody else finds the port free, and the kernel gives it to
nobody who asks for any port. Connections are refused while the server does not listen, as without the socket.

A program that was told this very port and sets SO_REUSEADDR can still take it while the server does not listen.
"""

from __future__ import annotations

import errno
import secrets
import socket
import sys
from collections.abc import Collection
from types import TracebackType

LOOPBACK = "127.0.0.1"
FIRST_PORT, PORTS = 12_000, 20_000
"""Below the range for outgoing connections (32768 and up on Linux): any process's connection could take a port of that
range between a server's end and its restart."""
_CAN_HOLD = sys.platform == "linux"
"""Elsewhere no server can bind beside a bound socket."""


class HeldPort:
    """`number` at `host`, held until `close`."""

    def __init__(self, number: int, host: str = LOOPBACK, *, chosen: bool = True) -> None:
        """Raises OSError if a server listens at the port; for a port that was `chosen` here, and not by an operator,
        also if a process holds it, or had connections there in the last minute."""
        self.number = number
        self._socket = _socket(host)
        try:
            if not chosen:
                _share(self._socket)
            self._socket.bind((host, number))
            _share(self._socket)  # only now: two processes that choose would else hold the same port
        except OSError:
            self._socket.close()
            raise
        if not _CAN_HOLD:
            self._socket.close()

    @classmethod
    def any(cls, host: str = LOOPBACK, but_not: Collection[int] = ()) -> HeldPort:
        """A random port from FIRST_PORT on. Raises OSError."""
        while True:
            number = FIRST_PORT + secrets.randbelow(PORTS)
            if number in but_not:
                continue
            try:
                return cls(number, host)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise

    def close(self) -> None:
        """Hold the port no longer. A server that listens there goes on. May be called twice."""
        self._socket.close()


class HeldPorts:
    """Ports that are held until the end of a `with`."""

    def __init__(self) -> None:
        self._held: list[HeldPort] = []

    def __enter__(self) -> HeldPorts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for port in self._held:
            port.close()

    def take(self, count: int, host: str = LOOPBACK, but_not: Collection[int] = ()) -> list[int]:
        """Free ports, none of them in `but_not`. Raises OSError."""
        taken = [HeldPort.any(host, but_not) for _ in range(count)]
        self._held += taken
        return [port.number for port in taken]

    def keep(self, number: int, host: str = LOOPBACK) -> None:
        """Hold a port that an operator has chosen. Raises OSError if a server listens there."""
        self._held.append(HeldPort(number, host, chosen=False))


def free_port(host: str = LOOPBACK) -> int:
    """A port that no process has now; another one may take the port before it is used. Raises OSError."""
    port = HeldPort.any(host)
    port.close()
    return port.number


def check_free(number: int, host: str = LOOPBACK) -> None:
    """Raises OSError unless a server could listen at the port now, held or not."""
    HeldPort(number, host, chosen=False).close()


def _share(bound: socket.socket) -> None:
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def _socket(host: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
