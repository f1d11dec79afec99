"""A collector for tests: takes spans over OTLP/HTTP, as a real one does, and keeps them."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Received:
    """One span. Ids are in hexadecimal; `parent` is empty for the first span of a trace. Times are in nanoseconds."""

    service: str
    name: str
    trace: str
    span: str
    parent: str
    start_ns: int
    end_ns: int
    kind: int
    attributes: dict[str, Any]
    error: str | None


@dataclass
class Collector:
    url: str
    spans: list[Received] = field(default_factory=list)
    came: threading.Condition = field(default_factory=threading.Condition)

    def wait_for(self, *names: str, trace: str, timeout_s: float = 30.0) -> dict[str, Received]:
        """The spans of these names in one trace, by name, once all have come."""

        def found() -> dict[str, Received]:
            return {span.name: span for span in self.spans if span.trace == trace and span.name in names}

        with self.came:
            assert self.came.wait_for(lambda: found().keys() == set(names), timeout_s), (names, self.spans)
            return found()


def _value(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value"))


def _received(body: bytes) -> list[Received]:
    spans: list[Received] = []
    for group in ExportTraceServiceRequest.FromString(body).resource_spans:
        about = {pair.key: _value(pair.value) for pair in group.resource.attributes}
        for scope in group.scope_spans:
            spans += [
                Received(
                    service=about.get("service.name", ""),
                    name=span.name,
                    trace=span.trace_id.hex(),
                    span=span.span_id.hex(),
                    parent=span.parent_span_id.hex(),
                    start_ns=span.start_time_unix_nano,
                    end_ns=span.end_time_unix_nano,
                    kind=span.kind,
                    attributes={pair.key: _value(pair.value) for pair in span.attributes},
                    error=span.status.message if span.status.code == 2 else None,
                )
                for span in scope.spans
            ]
    return spans


@contextmanager
def collector() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            with running.came:
                running.spans += _received(body)
                running.came.notify_all()
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running = Collector(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield running
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
