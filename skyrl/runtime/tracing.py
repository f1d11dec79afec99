"""Traces of requests (OpenTelemetry): which requests are traced, and the spans that are sent to a collector.

A request is traced when its caller says so (W3C `traceparent`); otherwise this process decides, for one in so many. A
thread of its own sends the spans: OTLP over HTTP, in batches. `current_trace` is that of the request which is
being worked on, for code that does not see the request.
"""

from __future__ import annotations

import logging
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, Self

from skyrl import __version__
from skyrl.base.config.server import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace import SpanContext as OtelContext


_TRACEPARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
"""https://www.w3.org/TR/trace-context/#traceparent-header; versions after 00 may have more parts."""
_VERSION_0 = 55
"""The length of a header of version 00, which has no more parts."""
MAX_ASKED_PER_S = 100
"""The most requests per second whose callers ask for a trace: a traced sample costs a third more CPU."""


@dataclass(frozen=True, slots=True)
class SpanContext:
    """The ids of one span of a trace that is recorded: 128 and 64 bits, neither zero."""

    trace_id: int
    span_id: int

    @classmethod
    def new(cls) -> Self:
        """The first span of a new trace."""
        return cls(random.getrandbits(128) or 1, _new_span_id())

    def child(self) -> SpanContext:
        """A new span in the same trace."""
        return SpanContext(self.trace_id, _new_span_id())

    @property
    def traceparent(self) -> str:
        """The header that makes the receiver's spans children of this span."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-01"


def _new_span_id() -> int:
    return random.getrandbits(64) or 1


def parse_traceparent(value: bytes) -> tuple[SpanContext, bool] | None:
    """The caller's span, and whether the caller records its trace. None for an invalid header, which counts as none."""
    match = _TRACEPARENT.fullmatch(value)
    if match is None or (value.startswith(b"00") and len(value) != _VERSION_0):
        return None
    trace_id, span_id, flags = (int(part, 16) for part in match.groups())
    return (SpanContext(trace_id, span_id), bool(flags & 1)) if trace_id and span_id else None


def stored_context(traceparent: str | None) -> SpanContext | None:
    """The context that was stored as its header; None if there is none."""
    found = None if traceparent is None else parse_traceparent(traceparent.encode())
    return None if found is None else found[0]


class TraceDecision:
    """Decides for each request of one process. `ratio` is the part of the requests without a caller's decision that is
    traced, from 0 to 1."""

    def __init__(self, ratio: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._ratio = ratio
        self._clock = clock
        self._second = 0
        self._asked = 0

    def of(self, headers: Iterable[tuple[bytes, bytes]]) -> tuple[SpanContext, SpanContext | None] | None:
        """The context of the request's own span, and that of its parent if the caller has one; None for a request that
        is not traced."""
        for name, value in headers:
            if name == b"traceparent" and (parent := parse_traceparent(value)) is not None:
                context, recorded = parent
                return (context.child(), context) if recorded and self._may_ask() else None
        return (SpanContext.new(), None) if random.random() < self._ratio else None

    def _may_ask(self) -> bool:
        second = int(self._clock())
        if second != self._second:
            self._second, self._asked = second, 0
        self._asked += 1
        return self._asked <= MAX_ASKED_PER_S


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


current_trace: ContextVar[RequestTrace | None] = ContextVar("current_trace", default=None)
"""None for a request that is not traced, and outside of requests."""


def open_spans(endpoint: str | None, process: str) -> Spans | None:
    """Spans to the collector; None without one. `process` is this process's name in traces. Raises ConfigError."""
    return None if endpoint is None else OtlpSpans(endpoint, process, __version__)
