"""The keys of agent sessions: each names its session and its tenant, and is signed, so that it is checked without the
database.

A key is `ska-<session>-<tenant>-<signature>`. Whether the session takes requests still is not asked here.
"""

from __future__ import annotations

import hashlib
import hmac
from functools import lru_cache

from skyrl.base.wire.errors import RequestError

_PREFIX = "ska-"
_PURPOSE = b"skyrl agent session key\0"
"""Signed with the text of a key, because the secret signs tokens, too."""
_SIGNATURE_BYTES = 20


def is_agent_key(key: str) -> bool:
    return key.startswith(_PREFIX)


class AgentKeys:
    """`secret` is the one that only this server has."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self.read = lru_cache(maxsize=4096)(self._read)

    def issue(self, session_id: str, tenant: str) -> str:
        """The key of a session. Session ids and tenants have letters and digits alone."""
        return f"{_PREFIX}{session_id}-{tenant}-{self._signature(session_id, tenant)}"

    def _read(self, key: str) -> tuple[str, str]:
        """The session and the tenant of a key. Raises RequestError 401."""
        parts = key.split("-")
        if len(parts) == 4 and hmac.compare_digest(parts[3].encode(), self._signature(parts[1], parts[2]).encode()):
            return parts[1], parts[2]
        raise RequestError("this key of an agent session was not made by this server", status=401)

    def _signature(self, session_id: str, tenant: str) -> str:
        signed = _PURPOSE + f"{session_id}-{tenant}".encode()
        return hmac.new(self._secret, signed, hashlib.sha256).digest()[:_SIGNATURE_BYTES].hex()
