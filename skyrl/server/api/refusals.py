"""Log lines about refused requests: the route, the tenant or key, and what was wrong.

Requests that succeed never get here. A line holds no secret: it shows only the part of a key that names the key.
"""

from __future__ import annotations

import logging
import re

from skyrl.base.wire.errors import OverQuota, RequestError
from skyrl.runtime.processes.logs import LimitedLog, plain
from skyrl.server.api.access import Access
from skyrl.server.api.call import Call
from skyrl.server.api.offered_key import offered_key
from skyrl.server.api.tokens import is_token

logger = logging.getLogger(__name__)

_MANAGED = re.compile(r"tml-[0-9a-f]{12}(?=-)")
_SHOWN_CHARACTERS = 8
"""How many characters of any other key are shown, but never more than a quarter of the key."""
_WARNING_STATUSES = frozenset({401, 403})
"""Refusals over keys, scopes and quotas are logged as warnings, for the operator. Other refusals are the client's
mistakes and are logged as information."""


def key_prefix(key: str) -> str:
    """The part of an API key that may be shown: its id if `skyrl keys create` made it, else its first characters."""
    if (managed := _MANAGED.match(key)) is not None:
        return f"{managed.group()}-..."
    return f"{plain(key[: min(_SHOWN_CHARACTERS, len(key) // 4)])}..."


def path_of(call: Call) -> str:
    """The path of the request's route, with parameters in braces; the request's own path if it has no route."""
    route = call.route or call.request.scope.get("route")  # FastAPI's: a route with this path and another method
    return call.request.scope["path"] if route is None else route.path


class Refusals:
    """Logs refused requests, with a limit on lines. Callers without an accepted key have a separate limit, so that they
    cannot use up that of the tenants."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._tenants = LimitedLog(logger)
        self._strangers = LimitedLog(logger)

    def note(self, call: Call, status: int, sentence: str, error: RequestError | None = None) -> None:
        """Log a request that is answered with `status` and `sentence`."""
        request, path = call.request, path_of(call)
        known, caller = self._caller(offered_key(call.received))
        quota = error.quota if isinstance(error, OverQuota) else None
        field = None if error is None else error.field
        about = f", quota {quota}" if quota is not None else f", field {plain(field)}" if field else ""
        cause = (request.method, path if error is not None else None, status, quota, field, caller)
        (self._tenants if known else self._strangers).say(
            logging.WARNING if quota is not None or status in _WARNING_STATUSES else logging.INFO,
            cause,
            f"refused {request.method} {plain(path)} with {status}{about} ({caller}): {plain(sentence)}",
            call.id,
        )

    def _caller(self, key: str) -> tuple[bool, str]:
        """Whether the key is accepted, and a description: its tenant and its id, or the prefix of a key that is not."""
        if not key:
            return False, "no key"
        try:
            caller = self._access.caller(key)
        except RequestError:
            return False, "a token" if is_token(key) else f"key {key_prefix(key)}"
        return True, f"tenant {caller.tenant}" + ("" if caller.key is None else f", key {caller.key.id}")
