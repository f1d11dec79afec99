"""A collector of OpenTelemetry spans that keeps them: what a server with `otlp_endpoint` sends to it.

Knows spans as the protocol has them; what they mean is for `benchmarks.timeline`.
"""

from __future__ import annotations

import gzip
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Span:
    """`began` and `ended` are seconds since the epoch. `process` is the name that the sender gives itself."""

    process: str
    name: str
    trace: bytes
    began: float
    ended: float
    attributes: dict[str, Any]


class Collector:
    """Receives on a free port between `with` and its end."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        spans = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
                spans.extend(spans_of(body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="collector", daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def spans_of(body: bytes) -> list[Span]:
    """The spans of an export request in protobuf."""
    found: list[Span] = []
    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        process = _values(resource.resource.attributes).get("service.instance.id") or "vllm"
        for scope in resource.scope_spans:
            for span in scope.spans:
                times = (span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9)
                found.append(Span(process, span.name, span.trace_id, *times, _values(span.attributes)))
    return found


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value") or "string_value") for each in attributes}
