"""What tracing and the access log cost, in microseconds of CPU per call.

Usage: python -m benchmarks.trace_cost
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from skyrl.runtime.processes.log_format import about_request, formatter
from skyrl.runtime.tracing.context import SpanContext, TraceDecision
from skyrl.runtime.tracing.spans import OtlpSpans, Span

CALLS = 20_000
SPANS = 400
"""Spans of one round: less than a batch (512), so that none is sent before all are recorded."""
ROUNDS = 5
HEADERS = [(b"host", b"h"), (b"x-api-key", b"k"), *((b"x-stainless-%d" % n, b"v") for n in range(12))]


def cost_us(call: Callable[[], object]) -> float:
    """The least CPU time of this thread per call, of several rounds."""
    rounds: list[float] = []
    for _ in range(ROUNDS):
        began = time.thread_time()
        for _ in range(CALLS):
            call()
        rounds.append((time.thread_time() - began) / CALLS * 1e6)
    return round(min(rounds), 2)


class Collector(BaseHTTPRequestHandler):
    """Takes spans and does nothing with them."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...


def collect(listening: socket.socket) -> None:
    server = HTTPServer(("127.0.0.1", 0), Collector, bind_and_activate=False)
    server.socket.close()
    server.socket = listening
    server.serve_forever()


def span_cost_us() -> tuple[float, float]:
    """The least cost of a span, of several rounds: of this thread, and of the thread that encodes and sends."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        collector = multiprocessing.get_context("fork").Process(target=collect, args=(listening,), daemon=True)
        collector.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    context = SpanContext.new()
    attributes = {"skyrl.request_id": "r", "skyrl.kind": "EXTERNAL"}
    recorded: list[float] = []
    sent: list[float] = []
    for _ in range(ROUNDS):
        spans = OtlpSpans(url, "benchmark", "0")
        thread, process = time.thread_time(), time.process_time()
        for _ in range(SPANS):
            spans.record(Span("forward", context.child(), context, 1, 2, "client", attributes))
        thread = time.thread_time() - thread
        spans.close()
        recorded.append(thread / SPANS * 1e6)
        sent.append((time.process_time() - process - thread) / SPANS * 1e6)
    collector.terminate()
    return round(min(recorded), 1), round(min(sent), 1)


def main() -> None:
    recorded, sent = span_cost_us()
    decision = TraceDecision(0.0)
    found = {
        "request that is not traced": cost_us(lambda: decision.of(HEADERS)),
        "span, in the task that records it": recorded,
        "span, in the thread that sends it": sent,
    }
    logger = logging.getLogger("benchmark.access")
    logger.propagate = False
    with Path(os.devnull).open("w") as nowhere:
        for kind in ("text", "json"):
            handler = logging.StreamHandler(nowhere)
            handler.setFormatter(formatter("json" if kind == "json" else "text", "api-0"))
            logger.handlers = [handler]
            extra = about_request("r-1", route="/api/v1/asample", status=200, duration_ms=1.5, tenant="3a1f0b6c")
            found[f"line of the access log, {kind}"] = cost_us(lambda: logger.warning("%s", "POST", extra=extra))  # noqa: B023
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
