"""Errors that a client sees: a refused request (4xx or 503), or a failed future with a category."""

from __future__ import annotations

from enum import StrEnum


class ErrorCategory(StrEnum):
    """Whose fault a failed future is, in the words of the SDK."""

    USER = "user"
    SERVER = "server"
    UNKNOWN = "unknown"


class RequestError(Exception):
    """Refuses a request with a status and a sentence; nothing was recorded.

    `field` is the request field at fault (a dotted path). The message begins with it.
    """

    def __init__(
        self, message: str, *, field: str | None = None, status: int = 400, retry_after_s: float | None = None
    ) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field
        self.status = status
        self.retry_after_s = retry_after_s

    @property
    def message(self) -> str:
        return str(self)

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        return {"Retry-After": f"{self.retry_after_s:g}"} if self.retry_after_s is not None else {}


class InvalidToken(RequestError):
    """The token is not valid, or not any more. The client should get a new one and try again."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=401)

    @property
    def headers(self) -> dict[str, str]:
        return {"WWW-Authenticate": 'Bearer error="invalid_token"'}


class NotFound(RequestError):
    """The named object does not exist, or belongs to another tenant; the answer is the same."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message, field=field, status=404)


class NoSpace(RequestError):
    """The server's disk is too full for a request. The server takes the same request once there is space again."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message, status=503, retry_after_s=retry_after_s)

    @property
    def headers(self) -> dict[str, str]:
        """Without these headers the SDK repeats a 503 up to ten times and prints nothing. With them the SDK prints the
        message at once, and repeats the request from its outer loop for five minutes."""
        told = {"x-should-retry": "false", "x-deprecation-level": "error", "x-deprecation-note": self.message}
        return super().headers | told


class OverQuota(RequestError):
    """The request exceeds the quota named `quota` of its tenant. The status is 429 if waiting helps (`retry_after_s` is
    given). It is 403 if only the tenant can make room: clients raise a 403 at once, and repeat a 429 for minutes."""

    def __init__(self, quota: str, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message, status=403 if retry_after_s is None else 429, retry_after_s=retry_after_s)
        self.quota = quota


class FailedRequest(Exception):
    """An accepted request failed. The future becomes `{"error", "category"}`."""

    def __init__(self, message: str, category: ErrorCategory = ErrorCategory.USER) -> None:
        super().__init__(message)
        self.message = message
        self.category = category


def whose_vocabulary(base_model: str) -> str:
    """The end of a message that says which token ids are allowed. `base_model` is empty where the server has one."""
    if not base_model:
        return ""
    return f", the vocabulary of {base_model!r}: the id may come from another base model's tokenizer"
