"""The trace of the request that is being worked on, for code that does not see the request.

A task that a request starts inherits it: a sample's task forwards and settles in the trace of its `asample`.
"""

from __future__ import annotations

from contextvars import ContextVar

from skyrl.runtime.tracing.spans import RequestTrace

current_trace: ContextVar[RequestTrace | None] = ContextVar("current_trace", default=None)
"""None for a request that is not traced, and outside of requests."""
