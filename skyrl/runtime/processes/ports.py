"""Ports, sockets and network interfaces of this machine.

Ports for servers that skyrl starts: free ones, and ones that are held from the choice on. The sockets that a server
listens on: the launcher opens them, and the API processes accept connections from them. The network interface that has
an address of this machine, for the groups of gloo and NCCL.
"""

from __future__ import annotations

import array
import errno
import fcntl
import ipaddress
import secrets
import socket
import struct
import sys
from collections.abc import Collection
from contextlib import ExitStack, closing
from pathlib import Path

from skyrl.base.config.server import ConfigError

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


class HeldPorts(ExitStack):
    """Ports that are held until the end of a `with`."""

    def take(self, count: int, host: str = LOOPBACK, but_not: Collection[int] = ()) -> list[int]:
        """Free ports, none of them in `but_not`. Raises OSError."""
        return [self.enter_context(closing(HeldPort.any(host, but_not))).number for _ in range(count)]

    def keep(self, number: int, host: str = LOOPBACK) -> None:
        """Hold a port that an operator has chosen. Raises OSError if a server listens there."""
        self.enter_context(closing(HeldPort(number, host, chosen=False)))


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


BACKLOG = 16_384
"""How many connections may wait to be accepted. The kernel lowers it to `net.core.somaxconn`."""
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


_LIST_ADDRESSES = 0x8912
"""SIOCGIFCONF of Linux: all IPv4 addresses, also several of one interface."""
_ENTRY = 40
"""Bytes of one `struct ifreq`: 16 of the name, 4 of the kind and the port, 4 of the address."""
_MOST = 1024
_IPV6 = Path("/proc/net/if_inet6")


def interface_of(address: str) -> str | None:
    """The name of the interface that has this address. None if none has it, and for what is no address."""
    try:
        wanted = ipaddress.ip_address(address)
    except ValueError:
        return None
    return _addresses().get(wanted)


def group_variables(interface: str) -> dict[str, str]:
    """The environment variables by which gloo and NCCL use this interface alone."""
    # NCCL takes a name without "=" for the beginning of a name
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}


def _addresses() -> dict[ipaddress.IPv4Address | ipaddress.IPv6Address, str]:
    found: dict[ipaddress.IPv4Address | ipaddress.IPv6Address, str] = {}
    buffer = array.array("B", bytes(_ENTRY * _MOST))
    where, size = buffer.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        answer = fcntl.ioctl(asked.fileno(), _LIST_ADDRESSES, struct.pack("iP", size, where))
    length, _ = struct.unpack("iP", answer)
    for entry in (buffer[at : at + _ENTRY].tobytes() for at in range(0, length, _ENTRY)):
        name = entry[:16].partition(b"\0")[0].decode().partition(":")[0]  # after the colon is an address's label
        found[ipaddress.IPv4Address(entry[20:24])] = name
    if _IPV6.exists():
        for line in _IPV6.read_text().splitlines():
            digits, *_, name = line.split()
            found[ipaddress.IPv6Address(int(digits, 16))] = name
    return found
