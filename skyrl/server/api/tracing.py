"""The hook that traces requests: it decides for each request, and records the request's own span when it is answered.

The other spans are recorded where the work is done (`skyrl.runtime.tracing`). Long polls are not traced: one
sample may have many.
"""

from __future__ import annotations

import time

from skyrl.runtime.tracing import RequestTrace, Span, SpanContext, Spans, TraceDecision, current_trace
from skyrl.server.api.call import Call
from skyrl.server.api.route import Route

UNTRACED = frozenset(
    {
        "/api/v1/client/config",
        "/api/v1/client/dynamic_config",
        "/api/v1/retrieve_future",
        "/api/v1/retrieve_futures",
        "/api/v1/session_heartbeat",
        "/api/v1/telemetry",
    }
)


class TraceHook:
    """Traces POST requests that start work."""

    name = "tracing"

    def __init__(self, spans: Spans, ratio: float) -> None:
        self._spans = spans
        self._decision = TraceDecision(ratio)
        self._running: dict[int, tuple[SpanContext, SpanContext | None, int]] = {}
        """By the call's identity: the request's span, its parent, and when the request came, in nanoseconds."""

    def begin(self, call: Call) -> None:
        if not _starts_work(call.route) or (decided := self._decision.of(call.scope["headers"])) is None:
            return
        context, parent = decided
        self._running[id(call)] = (context, parent, time.time_ns())
        current_trace.set(RequestTrace(self._spans, context))

    def end(self, call: Call) -> None:
        if (running := self._running.pop(id(call), None)) is None or call.route is None:
            return
        current_trace.set(None)  # what the request has started keeps its trace
        context, parent, start_ns = running
        status = call.status or 500
        self._spans.record(
            Span(
                call.route.path.rpartition("/")[2],
                context,
                parent,
                start_ns,
                time.time_ns(),
                "server",
                {"http.route": call.route.path, "http.response.status_code": status, "http.request.id": call.id},
                f"answered {status}" if status >= 500 else None,
            )
        )


def _starts_work(route: Route | None) -> bool:
    return route is not None and route.method == "POST" and route.path not in UNTRACED
