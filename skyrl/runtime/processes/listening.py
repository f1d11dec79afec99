"""The sockets that a server listens on. The launcher opens them, and the API processes accept connections from them.

So clients can connect while an API process restarts: another API process accepts the connection, or the restarted one
does.
"""

from __future__ import annotations

import errno
import socket

from skyrl.base.config.server import ConfigError

BACKLOG = 4096
_NO_SUCH_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""Errors for `::1`, one of the addresses of `localhost`, on a machine without IPv6."""


def listen(host: str, port: int) -> list[socket.socket]:
    """Listen on each address of the host. Raises ConfigError when it cannot listen on one of them; addresses that this
    machine does not have are left out, unless it has none of them."""
    sockets: list[socket.socket] = []
    no_such_address: OSError | None = None
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in dict.fromkeys(addresses):
            try:
                sockets.append(_listening_socket(family, address))
            except OSError as error:
                if error.errno not in _NO_SUCH_ADDRESS:
                    raise
                no_such_address = error
        if not sockets and no_such_address is not None:
            raise no_such_address
    except OSError as error:
        for listener in sockets:
            listener.close()
        raise ConfigError(f"port: cannot listen on {host}:{port} ({error.strerror})") from error
    return sockets


def _listening_socket(family: int, address: tuple[object, ...]) -> socket.socket:
    # asyncio sets TCP_NODELAY only on sockets that name their protocol. Without it, an answer whose head and body are
    # written apart takes 40 ms
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
