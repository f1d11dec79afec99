"""Sends spans to a collector: OTLP over HTTP, in batches, from a thread of its own.

Spans are made after the fact, from times that the callers have. Above the queue's bound (2,048 spans) they are dropped,
and never block. Knows no requests.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from skyrl.base.config.server import ConfigError
from skyrl.runtime.tracing.context import SpanContext

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace import SpanContext as OtelContext

logger = logging.getLogger(__name__)

Kind = Literal["internal", "server", "client"]
Attribute = str | int | float | bool
EXPORT_TIMEOUT_S = 5
CLOSE_S = 2.0
LOG_EVERY_S = 60.0
"""OpenTelemetry logs every failed try to reach the collector. One line in this time is let through."""


@dataclass(frozen=True, slots=True)
class Span:
    """One span that has ended. Times are in nanoseconds since the epoch. `error` is set if the work has failed; its
    text has neither prompts nor keys."""

    name: str
    context: SpanContext
    parent: SpanContext | None
    start_ns: int
    end_ns: int
    kind: Kind = "internal"
    attributes: Mapping[str, Attribute] | None = None
    error: str | None = None


class Spans(Protocol):
    """Where spans go. `record` never raises and never waits."""

    def record(self, span: Span) -> None: ...

    def close(self) -> None: ...


def traces_url(endpoint: str) -> str:
    """Where a collector takes spans over OTLP/HTTP."""
    return f"{endpoint.rstrip('/')}/v1/traces"


class _SeldomRelay(logging.Handler):
    """Takes OpenTelemetry's own log lines, and logs one of them every LOG_EVERY_S."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + LOG_EVERY_S
            logger.warning("sending spans: %s", record.getMessage())


class OtlpSpans:
    """Sends to the collector at `endpoint`, for example `http://127.0.0.1:4318`. `process` names this process in
    traces. Raises ConfigError if the
    packages of the extra `traces` are not installed."""

    def __init__(self, endpoint: str, process: str, version: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(f"otlp_endpoint: traces need the extra packages of skyrl[traces] ({error})") from error
        self._resource = Resource({"service.name": "skyrl", "service.instance.id": process, "service.version": version})
        telling = logging.getLogger("opentelemetry")
        telling.propagate, telling.handlers = False, [_SeldomRelay()]
        exporter = OTLPSpanExporter(traces_url(endpoint), timeout=EXPORT_TIMEOUT_S)
        self._processor: BatchSpanProcessor = BatchSpanProcessor(exporter)

    def record(self, span: Span) -> None:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanKind, Status, StatusCode

        status = Status(StatusCode.UNSET) if span.error is None else Status(StatusCode.ERROR, span.error)
        self._processor.on_end(
            ReadableSpan(
                span.name,
                _otel(span.context),
                None if span.parent is None else _otel(span.parent),
                self._resource,
                attributes=span.attributes,
                kind=SpanKind[span.kind.upper()],
                status=status,
                start_time=span.start_ns,
                end_time=span.end_ns,
            )
        )

    def close(self) -> None:
        """Send what is queued, for at most CLOSE_S: with a collector that is away, OpenTelemetry would try for longer
        than a stop may take."""
        ending = threading.Thread(target=self._processor.shutdown, name="last spans", daemon=True)
        ending.start()
        ending.join(CLOSE_S)


def _otel(context: SpanContext) -> OtelContext:
    from opentelemetry.trace import SpanContext as Context
    from opentelemetry.trace import TraceFlags

    return Context(context.trace_id, context.span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


class RequestTrace:
    """The trace of one request: makes children of its span. Held by whoever works on the request."""

    __slots__ = ("_spans", "context")

    def __init__(self, spans: Spans, context: SpanContext) -> None:
        self._spans = spans
        self.context = context

    def child(self, name: str, kind: Kind = "internal", start_ns: int | None = None) -> OpenSpan:
        """Begin a child of the request's span, now or at `start_ns`. The caller ends it."""
        return OpenSpan(self._spans, name, self.context, kind, start_ns)

    def within(self, span: OpenSpan) -> RequestTrace:
        """The same trace for a part of the work: its children are children of `span`."""
        return RequestTrace(self._spans, span.context)

    def record(
        self,
        name: str,
        start_ns: int,
        end_ns: int,
        attributes: Mapping[str, Attribute] | None = None,
        error: str | None = None,
    ) -> None:
        """A child whose times are known."""
        context = self.context.child()
        self._spans.record(Span(name, context, self.context, start_ns, end_ns, attributes=attributes, error=error))


class OpenSpan:
    """A span that has begun. `context` goes to those who make its children."""

    __slots__ = ("_kind", "_name", "_parent", "_spans", "_start_ns", "context")

    def __init__(self, spans: Spans, name: str, parent: SpanContext, kind: Kind, start_ns: int | None = None) -> None:
        self._spans = spans
        self._name = name
        self._parent = parent
        self._kind: Kind = kind
        self.context = parent.child()
        self._start_ns = time.time_ns() if start_ns is None else start_ns

    def end(self, attributes: Mapping[str, Attribute] | None = None, error: str | None = None) -> None:
        self._spans.record(
            Span(self._name, self.context, self._parent, self._start_ns, time.time_ns(), self._kind, attributes, error)
        )
