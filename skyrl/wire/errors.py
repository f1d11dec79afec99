"""What goes wrong, as the wire tells it: a 4xx answer at once, or a failed future with a category."""

from __future__ import annotations

from enum import StrEnum


class ErrorCategory(StrEnum):
    """Whose fault a failed future is; the SDK's own words."""

    USER = "user"
    SERVER = "server"
    UNKNOWN = "unknown"


class RequestError(Exception):
    """A request that is refused with a status and a sentence; nothing was recorded.

    `field` is the request field at fault (dotted), put in front of the message.
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


class InvalidToken(RequestError):
    """A token that is no longer taken, or never was: the client is to get a new one and try again."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=401)


class NotFound(RequestError):
    """The named thing does not exist, or belongs to somebody else (the two look the same)."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message, field=field, status=404)


class NoSpace(RequestError):
    """The server's disk has no room for a request; the same request is taken when there is."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message, status=503, retry_after_s=retry_after_s)

    @property
    def headers(self) -> dict[str, str]:
        """The SDK repeats a 503 up to ten times without a word. These make it end that loop, print the sentence, and
        repeat the request from its outer loop, for five minutes."""
        return {"x-should-retry": "false", "x-deprecation-level": "error", "x-deprecation-note": self.message}


class OverQuota(RequestError):
    """More than the tenant's quota of that name allows. 429 with `retry_after_s` if waiting helps. 403 if it does not,
    because only the tenant can make room: clients raise a 403 at once, and repeat a 429 for minutes."""

    def __init__(self, quota: str, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message, status=403 if retry_after_s is None else 429, retry_after_s=retry_after_s)
        self.quota = quota


class FailedRequest(Exception):
    """Accepted work that failed: becomes the future's `{"error", "category"}`."""

    def __init__(self, message: str, category: ErrorCategory = ErrorCategory.USER) -> None:
        super().__init__(message)
        self.message = message
        self.category = category
