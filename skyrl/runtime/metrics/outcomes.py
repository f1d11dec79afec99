"""How a request has ended, as the label `outcome`."""

from __future__ import annotations

from skyrl.base.wire.errors import ErrorCategory

OK, USER_ERROR, SERVER_ERROR, CANCELLED = "ok", "user_error", "server_error", "cancelled"
OUTCOMES = (OK, USER_ERROR, SERVER_ERROR, CANCELLED)


def outcome_label(error: str | None, category: str | None) -> str:
    """The label for a stored outcome. `cancelled` is not stored apart: who cancels counts that. `unknown` is a command
    that the client or its network has lost."""
    if error is None:
        return OK
    return USER_ERROR if category in (ErrorCategory.USER, ErrorCategory.UNKNOWN) else SERVER_ERROR
