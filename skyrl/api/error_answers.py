"""The one place where an error becomes an answer, `{"detail": sentence, "field": name or null, "request_id": id}`,
and a log line.

The routes of OpenAI's and Anthropic's dialects answer the same errors in their shapes. `Refusals` writes the log lines
about refused requests: the route, the tenant or key, and what was wrong. A line holds no secret: it shows only the part
of a key that names the key. Requests that succeed never get here."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from skyrl.api.access import Access, is_token, offered_key
from skyrl.api.call import BytesResponse, Call, reply
from skyrl.api.routing import API
from skyrl.base.wire.errors import OverQuota, RequestError
from skyrl.chat.dialects import messages
from skyrl.chat.openai.errors import OpenAIError, error_body
from skyrl.runtime.processes.logs import LimitedLog, about_request, plain
from skyrl.sampling.metrics import RefusalMetrics
from skyrl.sampling.quotas import Quotas
from skyrl.storage.checkpoint_store.base import NotStored, StoreError
from skyrl.storage.db.faults import DatabaseError, column_with_nul, is_transient, reason
from skyrl.storage.shares import SHARE_OF_DISK

logger = logging.getLogger(__name__)

MESSAGES = "/v1/messages"
"""Anthropic's route."""


def is_openai(path: str) -> bool:
    """Whether a path is under the prefixes of these routes: then errors have OpenAI's shape."""
    return path.startswith(("/oai/", "/v1/", "/inference/"))


def is_anthropic(path: str) -> bool:
    """Whether errors of a path have Anthropic's shape."""
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


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


DATABASE_RETRY_S = 2.0
"""`Retry-After` of a request that failed because the database was away."""
MAX_PATH = 200
"""The most characters of an unknown path that the answer repeats."""
MAX_DETAIL = 4_000
"""The most characters of a sentence, which may repeat a value of the request."""


@dataclass(frozen=True)
class ErrorAnswer:
    """`field` names the request field at fault. `code` is OpenAI's word for the error, where it has one."""

    detail: str
    status: int
    field: str | None = None
    headers: Mapping[str, str] | None = None
    code: str | None = None

    def response(self, call: Call) -> BytesResponse:
        """In the shape of the routes below the request's path."""
        path = call.request.scope["path"]
        if is_anthropic(path):
            body: Any = messages.error_body(self.status, self.detail, self.field, self.code, call.id)
        elif is_openai(path):
            body = error_body(self.status, self.detail, self.field, self.code)
        else:
            body = {"detail": self.detail, "field": self.field, "request_id": call.id}
        return reply(body, self.status, dict(self.headers or {}))


class ErrorAnswers:
    """Answers an error by its nearest class in `kinds`, which ends with `Exception`."""

    def __init__(self, refusals: Refusals, quotas: Quotas, metrics: RefusalMetrics) -> None:
        self._refusals = refusals
        self._quotas = quotas
        self._metrics = metrics
        self.kinds: dict[type[Exception], Callable[[Call, Any], ErrorAnswer]] = {
            RequestError: self._refused,
            RequestValidationError: self._invalid,
            HTTPException: self._http_error,
            NotStored: self._files_lost,
            StoreError: self._store_unavailable,
            DatabaseError: self._database_unavailable,
            Exception: self._internal,
        }

    def answer(self, call: Call, error: Exception) -> BytesResponse:
        """Log the error, and make its answer."""
        make = next(self.kinds[kind] for kind in type(error).__mro__ if kind in self.kinds)
        return make(call, error).response(call)

    def _refused(self, call: Call, error: RequestError) -> ErrorAnswer:
        self._refusals.note(call, error.status, error.message, error)
        if isinstance(error, OverQuota):
            self._quotas.refused[error.quota] += 1
            if error.quota == SHARE_OF_DISK:
                self._metrics.refused("share")
        code = error.code if isinstance(error, OpenAIError) else None
        return ErrorAnswer(_cut(error.message, MAX_DETAIL), error.status, error.field, error.headers, code)

    def _invalid(self, call: Call, error: RequestValidationError) -> ErrorAnswer:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"][1:])
        return self._refused(call, RequestError(first["msg"], field=field))

    def _http_error(self, call: Call, error: HTTPException) -> ErrorAnswer:
        detail = _no_such_path(call.request.url.path) if error.status_code == 404 else str(error.detail)
        self._refusals.note(call, error.status_code, detail)
        return ErrorAnswer(detail, error.status_code, headers=error.headers)

    def _files_lost(self, call: Call, error: NotStored) -> ErrorAnswer:
        _log(call, ": %s", error)
        return ErrorAnswer("the checkpoint's files are not in the checkpoint store any more", 404)

    def _store_unavailable(self, call: Call, error: StoreError) -> ErrorAnswer:
        _log(call, ": %s", error)
        return ErrorAnswer("the checkpoint store cannot be used now; try again", 503)

    def _database_unavailable(self, call: Call, error: DatabaseError) -> ErrorAnswer:
        if is_transient(error):
            _log(call, ": the database cannot be used: %s", reason(error))
            detail = "the database cannot be used now; send the request again"
            return ErrorAnswer(detail, 503, headers={"Retry-After": f"{DATABASE_RETRY_S:g}"})
        if (column := column_with_nul(error)) is not None:
            return ErrorAnswer(f"{column}: must not hold the character U+0000", 400, column)
        return self._internal(call, error)

    def _internal(self, call: Call, error: Exception) -> ErrorAnswer:
        _log(call, " failed", trace=error)
        return ErrorAnswer(f"internal error: {type(error).__name__}", 500)


def _log(call: Call, sentence: str, *details: object, trace: Exception | None = None) -> None:
    """Log an error: method and path of the request, then the sentence."""
    extra = about_request(call.id)
    logger.error(f"%s %s{sentence}", call.request.method, call.request.url.path, *details, exc_info=trace, extra=extra)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


def _no_such_path(path: str) -> str:
    """The sentence for a path without a route. The SDK adds `/api/v1` to its base URL, so that a base URL which ends in
    `/api/v1` doubles it."""
    shown = _cut(path, MAX_PATH)
    if path.startswith(f"{API}{API}"):
        return f"no such path {shown!r}; the base URL ends before {API}"
    return f"no such path {shown!r}"
