"""The network interface that has an address of this machine, for the groups of gloo and NCCL."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

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
