"""Who may use the admin routes of the router and of the sidecar: pauses, new weights, adapters, memory.

Reads the headers and the peer's address of an ASGI request. Knows no route.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Iterable, MutableMapping
from typing import Any

ADMIN_KEY_VARIABLE = "SKYRL_ADMIN_KEY"
ROUTER_KEY_VARIABLE = "SKYRL_ROUTER_API_KEY"
"""The key that clients of a router must send."""
FORWARDING = frozenset({b"forwarded", b"x-forwarded-for", b"x-real-ip"})
"""Headers of a proxy: the peer is then the proxy, and says nothing about the client."""


class AdminKey:
    """With a key, clients must send it as a Bearer token. Without a key, only clients on this machine may ask."""

    def __init__(self, key: str | None) -> None:
        self._bearer = None if key is None else f"Bearer {key}".encode()

    def is_in(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether a request with these headers has the key. False without a key."""
        if self._bearer is None:
            return False
        given = next((value for name, value in headers if name.lower() == b"authorization"), b"")
        return hmac.compare_digest(given, self._bearer)

    def refusal(self, scope: MutableMapping[str, Any]) -> tuple[int, str] | None:
        """The status and the message for a client that may not use the admin routes; None for one that may."""
        if self._bearer is not None:
            if self.is_in(scope["headers"]):
                return None
            return 401, "Authorization: Bearer <the admin key> is missing or wrong"
        if not any(name.lower() in FORWARDING for name, _ in scope["headers"]) and is_on_this_machine(
            scope.get("client")
        ):
            return None
        return 403, "without an admin key, admin routes answer on this machine alone: set --admin-api-key"


def is_on_this_machine(client: tuple[str, int] | None) -> bool:
    """Whether the peer of a connection is on this machine. A peer without an address counts as a stranger."""
    try:
        address = ipaddress.ip_address(client[0]) if client else None
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address is not None and address.is_loopback


def forwarded_for(client: tuple[str, int] | None) -> list[tuple[bytes, bytes]]:
    """The header with which a proxy on this machine says that the client is not; none for a client on this machine."""
    if is_on_this_machine(client):
        return []
    return [(b"x-forwarded-for", client[0].encode() if client else b"unknown")]
