"""The hooks of the HTTP table: they trace and count each request, give it an id, check its key, read its body, and
log it. `create_app` lists them in their order."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Coroutine, Iterable
from itertools import count
from typing import Any

from starlette.datastructures import Headers

from skyrl.api.access import Access, check_route, offered_key
from skyrl.api.bodies import BodyReader
from skyrl.api.call import Call
from skyrl.api.metrics import HttpMetrics
from skyrl.api.route import Body, Route
from skyrl.api.signed_links import SignedUrls
from skyrl.base.wire.errors import RequestError
from skyrl.runtime.processes.logs import about_request, plain
from skyrl.runtime.tracing import RequestTrace, Span, SpanContext, Spans, TraceDecision, current_trace

MAX_KEY = 2_000
"""The most characters of a key or a token. `skyrl.api.access` keeps the last 4,096 keys in memory."""
MAX_REQUEST_ID = 128
"""The most characters of a request id that a client gives."""
_PRINTABLE_ID = re.compile(rf"[!-~]{{1,{MAX_REQUEST_ID}}}")


LONG_POLLS = frozenset({"/api/v1/retrieve_future", "/api/v1/retrieve_futures"})
"""Routes that wait for results. How long they take says nothing about the server."""


class RequestMetrics:
    """Counts each request by its route, and measures how long its answer took."""

    name = "metrics"

    def __init__(self, metrics: HttpMetrics, routes: Iterable[Route]) -> None:
        self._tallies = {
            route: metrics.route(route.method, route.path, timed=route.path not in LONG_POLLS) for route in routes
        }
        self._other = metrics.other

    def begin(self, call: Call) -> None:
        call.began = time.perf_counter()

    def end(self, call: Call) -> None:
        tally = self._other if call.route is None else self._tallies[call.route]
        tally.answered(call.status, time.perf_counter() - call.began)


class RequestIds:
    """Gives each request an id: the client's `X-Request-Id` if that is printable ASCII of at most MAX_REQUEST_ID
    characters, else a number of this process. The answer carries the id in the same header."""

    name = "request id"

    def __init__(self) -> None:
        self._prefix = f"{secrets.token_hex(4)}-"
        self._numbers = count(1)

    def begin(self, call: Call) -> None:
        offered = call.received.get("x-request-id")
        if offered is not None and _PRINTABLE_ID.fullmatch(offered):
            call.id = offered
        else:
            call.id = f"{self._prefix}{next(self._numbers):x}"
        call.headers.append((b"x-request-id", call.id.encode()))

    def end(self, call: Call) -> None:
        """Nothing to do: the call puts the header on the answer."""


class AccessCheck:
    """Finds the caller by the key, and refuses a request that may not use its route: with 401 if its key is missing or
    not accepted, with 403 if its key lacks the route's scope or its link was not signed here or has expired."""

    name = "access"

    def __init__(self, access: Access, urls: SignedUrls) -> None:
        self._access = access
        self._urls = urls

    def begin(self, call: Call) -> None:
        route = call.route
        if route is None or route.scope == "open":
            return
        if route.scope == "signed":
            self._urls.verify(call.request)
            return
        call.caller = caller = self._access.caller(key_of(call.received))
        check_route(caller, route.scope)

    def end(self, call: Call) -> None:
        """Nothing to do."""


class BodyMemoryHook:
    """Reads the body of a route that declares one: a small one at once, as nearly all are. A large body waits until
    there is memory for it. The memory for a sample or a training pass is given back when the route answers: by then the
    body is in the database."""

    name = "body memory"

    def __init__(self, bodies: BodyReader) -> None:
        self._bodies = bodies

    def begin(self, call: Call) -> Coroutine[Any, Any, None] | None:
        if call.route is None or (body := call.route.body) is None:
            return None
        if call.whole is not None:
            call.body = call.whole.whole_body
            return None
        return self._read(call, body)

    async def _read(self, call: Call, body: Body) -> None:
        if (small := self._bodies.small(call.request)) is not None:
            call.body = await small
        elif body.bound == "control":
            call.body = await self._bodies.control(call.request, call.tenant)
        else:
            call.large_body = large_body = self._bodies.of(call.request, call.tenant, body.bound)
            call.body = await large_body.read()

    def end(self, call: Call) -> None:
        if call.large_body is not None:
            call.large_body.release()


def key_of(headers: Headers) -> str:
    """The API key, or the token in its place. Raises RequestError 401 without one."""
    key = offered_key(headers)
    if not key:
        raise RequestError("send an API key in X-API-Key, or in Authorization as Bearer", status=401)
    if len(key) > MAX_KEY:
        raise RequestError(f"the API key has more than {MAX_KEY} characters", status=401)
    return key


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


logger = logging.getLogger("skyrl.access")


class AccessLog:
    """A hook. A line has the method, the route, the status, the time until the answer began, the tenant, and the id
    of the command or sample that was recorded: the engine and vLLM log that id."""

    name = "access log"

    def begin(self, call: Call) -> None:
        """Nothing to do: the call has the time of its arrival."""

    def end(self, call: Call) -> None:
        scope = call.scope
        if call.route is not None and call.route.path in UNTRACED:
            return
        path = plain(scope["path"]) if call.route is None else call.route.path
        milliseconds = round((time.perf_counter() - call.began) * 1e3, 1)
        tenant = None if call.known_tenant is None else call.known_tenant[:8]
        about = {"route": path, "status": call.status, "duration_ms": milliseconds, "tenant": tenant}
        extra = about_request(call.id, **about, recorded=call.recorded)
        line = f"{scope['method']} {path} {call.status} {milliseconds:.1f} ms {tenant or '-'} {call.recorded or '-'}"
        logger.info("%s", line, extra=extra)
