"""The sockets that a server listens on. The launcher opens them, and its API processes accept from them.

So the death of an API process refuses no client: another API process accepts the connection, or the next one does.
"""

from __future__ import annotations

import errno
import socket

from skyrl.config.server import ConfigError

BACKLOG = 4096
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""Errors of a machine without IPv6 for `::1`, which is one of the addresses of `localhost`."""


def listen(host: str, port: int) -> list[socket.socket]:
    """Listen on each address that the host's name stands for. Raises ConfigError."""
    sockets: list[socket.socket] = []
    missing: OSError | None = None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in dict.fromkeys(found):
            try:
                sockets.append(_listening(family, address))
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
                missing = error
        if not sockets and missing is not None:
            raise missing
    except OSError as error:
        for opened in sockets:
            opened.close()
        raise ConfigError(f"port: cannot listen on {host}:{port} ({error.strerror})") from error
    return sockets


def _listening(family: int, address: tuple[object, ...]) -> socket.socket:
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        opened.bind(address)
        opened.listen(BACKLOG)
    except OSError:
        opened.close()
        raise
    return opened
