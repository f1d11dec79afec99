"""Which requests are traced, and how their spans reach a collector."""

from __future__ import annotations

import time

import pytest

from skyrl.runtime import tracing as context_module
from skyrl.runtime.tracing import (
    CLOSE_S,
    OtlpSpans,
    RequestTrace,
    Span,
    SpanContext,
    TraceDecision,
    parse_traceparent,
    stored_context,
)
from tests.otlp_receiver import collector

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADER = f"00-{TRACE}-{SPAN}-01".encode()


def headers(value: bytes) -> list[tuple[bytes, bytes]]:
    return [(b"host", b"here"), (b"traceparent", value)]


def test_a_context_is_written_and_read_as_its_header() -> None:
    context = SpanContext.new()
    assert parse_traceparent(context.traceparent.encode()) == (context, True)
    assert stored_context(context.traceparent) == context
    assert stored_context(None) is None
    child = context.child()
    assert (child.trace_id, child.span_id != context.span_id) == (context.trace_id, True)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"00",
        HEADER.upper(),
        HEADER + b"-more",
        HEADER.replace(b"00-", b"ff-", 1),
        HEADER.replace(TRACE.encode(), b"0" * 32),
        HEADER.replace(SPAN.encode(), b"0" * 16),
        HEADER[:-1],
        b"00-" + b"g" * 32 + HEADER[35:],
    ],
)
def test_an_invalid_header_counts_as_none(value: bytes) -> None:
    assert parse_traceparent(value) is None
    assert TraceDecision(0.0).of(headers(value)) is None
    assert TraceDecision(1.0).of(headers(value)) is not None, "the server decides"


def test_a_later_version_of_the_header_may_have_more_parts() -> None:
    assert parse_traceparent(b"01" + HEADER[2:] + b"-more") is not None


def test_the_callers_decision_wins_over_the_ratio() -> None:
    traced = TraceDecision(0.0).of(headers(HEADER))
    assert traced is not None
    context, parent = traced
    assert parent is not None
    assert parent == SpanContext(int(TRACE, 16), int(SPAN, 16))
    assert (context.trace_id, context.span_id != parent.span_id) == (parent.trace_id, True)
    assert TraceDecision(1.0).of(headers(HEADER[:-2] + b"00")) is None


def test_without_a_caller_one_in_so_many_is_traced() -> None:
    assert sum(TraceDecision(0.5).of([]) is not None for _ in range(1000)) in range(350, 650)
    assert TraceDecision(0.0).of([]) is None
    traced = TraceDecision(1.0).of([])
    assert traced is not None
    assert traced[1] is None, "it begins a trace"


def test_callers_cannot_have_any_number_of_requests_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_module, "MAX_ASKED_PER_S", 3)
    now = 5.0
    decision = TraceDecision(0.0, lambda: now)
    assert [decision.of(headers(HEADER)) is not None for _ in range(5)] == [True, True, True, False, False]
    now = 6.0
    assert decision.of(headers(HEADER)) is not None


def test_spans_reach_the_collector_with_their_parents_times_and_errors() -> None:
    with collector() as received:
        spans = OtlpSpans(received.url, "api-0", "1.2")
        first = SpanContext.new()
        trace = RequestTrace(spans, first)
        forward = trace.child("forward", "client")
        trace.record("record", 1_000, 2_000, {"skyrl.request_id": "r1"})
        forward.end(error="the server was away")
        spans.record(Span("asample", first, None, 500, 3_000, "server"))
        spans.close()
        found = received.wait_for("asample", "record", "forward", trace=f"{first.trace_id:032x}")
    assert found["asample"].parent == ""
    assert {found[name].parent for name in ("record", "forward")} == {f"{first.span_id:016x}"}
    assert (found["record"].start_ns, found["record"].end_ns) == (1_000, 2_000)
    assert found["record"].attributes == {"skyrl.request_id": "r1"}
    assert found["forward"].error == "the server was away"
    assert found["forward"].span == f"{forward.context.span_id:016x}", "the header names the span that is sent"
    assert [found[name].kind for name in ("record", "asample", "forward")] == [1, 2, 3]
    assert found["asample"].service == "skyrl"


def test_a_collector_that_is_away_delays_no_stop_and_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    spans = OtlpSpans("http://127.0.0.1:9", "api-0", "1.2")
    spans.record(Span("lost", SpanContext.new(), None, 1, 2))
    began = time.monotonic()
    spans.close()
    assert time.monotonic() - began < CLOSE_S + 5
    (line,) = [
        record for record in caplog.records if record.name.startswith(("skyrl.runtime.tracing", "opentelemetry"))
    ]
    assert line.getMessage().startswith("sending spans: ")
