"""What `api.log` says of refused requests: which route, which tenant or key, what was wrong.

Requests that succeed never come here. A line holds no secret: of a key only the part that names it.
"""

from __future__ import annotations

import logging
import re

from skyrl.api.access import Access
from skyrl.api.call import Call
from skyrl.api.tokens import is_token
from skyrl.processes.log_limits import LimitedLog, plain
from skyrl.wire.errors import OverQuota, RequestError

logger = logging.getLogger(__name__)

_MANAGED = re.compile(r"tml-[0-9a-f]{12}(?=-)")
_SHOWN = 8
"""Characters of a key in another form that are shown, but never more than a quarter of it."""
_TO_THE_OPERATOR = frozenset({401, 403})
"""Statuses that say something of keys, scopes and quotas: warnings. What is wrong with a request is its client's
business, and is logged as information."""


def key_prefix(key: str) -> str:
    """What may be shown of an API key: the id of one that `skyrl keys create` made, else a few letters."""
    if (managed := _MANAGED.match(key)) is not None:
        return f"{managed.group()}-..."
    return f"{plain(key[: min(_SHOWN, len(key) // 4)])}..."


def path_of(call: Call) -> str:
    """The path of the request's route, with parameters in braces; the request's own path where it has no route."""
    route = call.route or call.request.scope.get("route")  # FastAPI's, of another method of the same path
    return call.request.scope["path"] if route is None else route.path


class Refusals:
    """Logs refused requests, with a limit on lines; `access` tells whose a key is. Callers whose key is not taken have
    a limit of their own, so that they cannot keep others' lines out."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._tenants = LimitedLog(logger)
        self._strangers = LimitedLog(logger)

    def note(self, call: Call, status: int, sentence: str, error: RequestError | None = None) -> None:
        """A request was answered with `status` and `sentence`."""
        request, path = call.request, path_of(call)
        known, caller = self._caller(request.headers.get("x-api-key", ""))
        quota = error.quota if isinstance(error, OverQuota) else None
        field = None if error is None else error.field
        about = f", quota {quota}" if quota is not None else f", field {plain(field)}" if field else ""
        cause = (request.method, path if error is not None else None, status, quota, field, caller)
        (self._tenants if known else self._strangers).say(
            logging.WARNING if quota is not None or status in _TO_THE_OPERATOR else logging.INFO,
            cause,
            f"refused {request.method} {plain(path)} with {status}{about} ({caller}): {plain(sentence)}",
            call.id,
        )

    def _caller(self, key: str) -> tuple[bool, str]:
        """Whether the key is taken, and the tenant and the key in words; of one that is not taken only its prefix."""
        if not key:
            return False, "no key"
        try:
            caller = self._access.caller(key)
        except RequestError:
            return False, "a token" if is_token(key) else f"key {key_prefix(key)}"
        return True, f"tenant {caller.tenant}" + ("" if caller.key is None else f", key {caller.key.id}")
