"""The HTTP table: every request on its way through the hooks to its route.

The hooks trace and count each request, give it an id, check its key, read its body, and log it. A request to a route
without parameters goes straight to its handler: FastAPI's routing, dependencies and middleware cost several times what
the handlers of a sample do themselves. FastAPI reads the parameters of all other routes, or answers that there is no
such path. Does not know what a route does."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import cached_property
from itertools import count
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.datastructures import Headers
from starlette.routing import compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from skyrl import __version__
from skyrl.api.access import Access, check_route, offered_key
from skyrl.api.bodies import BodyReader
from skyrl.api.call import Body, BytesResponse, Call, Hook, Route
from skyrl.api.error_answers import ErrorAnswers
from skyrl.api.routing import Endpoint, Routes
from skyrl.api.signed_links import SignedUrls
from skyrl.base.wire.errors import RequestError
from skyrl.chat.openai.service import ClientGone
from skyrl.runtime.metrics.tallies import Spread, Tally
from skyrl.runtime.processes.logs import about_request, plain
from skyrl.runtime.tracing import RequestTrace, Span, SpanContext, Spans, TraceDecision, current_trace

MAX_REQUEST_ID = 128
"""The most characters of a request id that a client gives."""
_PRINTABLE_ID = re.compile(rf"[!-~]{{1,{MAX_REQUEST_ID}}}")


LONG_POLLS = frozenset({"/api/v1/retrieve_future", "/api/v1/retrieve_futures"})
"""Routes that wait for results. How long they take says nothing about the server."""


DURATION_BOUNDS = (0.005, 0.025, 0.1, 0.5, 2.5, 10)
STATUSES = ("gone", "1xx", "2xx", "3xx", "4xx", "5xx")
"""By the first digit of the status; `gone` if the client went away before its answer."""
OTHER = "other"
"""Route and method of requests that no route takes."""


class RouteTally:
    """The requests of one route. `timed`: their durations are kept."""

    __slots__ = ("duration", "statuses")

    def __init__(self, *, timed: bool) -> None:
        self.statuses = tuple(Tally() for _ in STATUSES)
        self.duration = Spread(DURATION_BOUNDS) if timed else None

    def answered(self, status: int | None, seconds: float) -> None:
        """Count a request. `status` is None if it got no answer."""
        self.statuses[0 if status is None else status // 100].value += 1
        if self.duration is not None:
            self.duration.add(seconds)


class HttpMetrics(Hook, Collector):
    """A hook. Counts each request by its route, and measures how long its answer took. Shows a series once it has
    counted something: most routes never answer with most statuses."""

    name = "metrics"

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._tallies: dict[tuple[str, str], RouteTally] = {}
        self._of_routes: dict[Route | None, RouteTally] = {None: self.route(OTHER, OTHER)}
        if registry is not None:
            registry.register(self)

    def watch(self, routes: Iterable[Route]) -> None:
        """Count the requests of these routes, which are all of them."""
        self._of_routes |= {
            route: self.route(route.method, route.path, timed=route.path not in LONG_POLLS) for route in routes
        }

    def route(self, method: str, path: str, *, timed: bool = True) -> RouteTally:
        return self._tallies.setdefault((path, method), RouteTally(timed=timed))

    def begin(self, call: Call) -> None:
        call.began = time.perf_counter()

    def end(self, call: Call) -> None:
        self._of_routes[call.route].answered(call.status, time.perf_counter() - call.began)

    def collect(self) -> Iterable[Metric]:
        requests = CounterMetricFamily(
            "skyrl_http_requests", "HTTP requests answered.", labels=("route", "method", "status")
        )
        about = "Time from a request's head to its answer's head, without long polls."
        durations = HistogramMetricFamily("skyrl_http_request_duration_seconds", about, labels=("route", "method"))
        for route, each in self._tallies.items():
            for status, tally in zip(STATUSES, each.statuses, strict=True):
                if tally.value:
                    requests.add_metric((*route, status), tally.value)
            if each.duration is not None and (buckets := each.duration.buckets())[-1][1]:
                durations.add_metric(route, buckets, each.duration.sum)
        return requests, durations


class RequestIds(Hook):
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


class AccessCheck(Hook):
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


class BodyMemoryHook(Hook):
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


class TraceHook(Hook):
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


class AccessLog(Hook):
    """A hook. A line has the method, the route, the status, the time until the answer began, the tenant, and the id
    of the command or sample that was recorded: the engine and vLLM log that id."""

    name = "access log"

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


Describe = Callable[[FastAPI, Sequence[Route]], dict[str, Any]]
"""Makes the OpenAPI document of the application's routes."""


class FrameworkRoute:
    """A route that FastAPI runs. Its part of that is made when it is first needed: a millisecond of CPU."""

    def __init__(self, route: Route, endpoint: Endpoint, tag: str) -> None:
        self.route = route
        self._endpoint, self._tag = endpoint, tag
        self._pattern, _, _ = compile_path(route.template)

    @cached_property
    def of_fastapi(self) -> tuple[APIRoute, ASGIApp]:
        """FastAPI's route, and what reads the parameters and runs it."""
        route = APIRoute(self.route.template, self._endpoint, methods=[self.route.method], tags=[self._tag])
        return route, AsyncExitStackMiddleware(route.app)

    def match(self, scope: Scope) -> ASGIApp | None:
        """What runs the route, if method and path fit: then `scope` gets the parameters."""
        if scope["method"] != self.route.method or self._pattern.match(scope["path"]) is None:
            return None
        route, run = self.of_fastapi
        _, of_route = route.matches(scope)
        scope.update(of_route)
        return run


class Framework(FastAPI):
    """FastAPI with all routes, for `/openapi.json` and for requests that no route takes."""

    def __init__(self, routes: Sequence[FrameworkRoute], describe: Describe) -> None:
        super().__init__(
            title="skyrl",
            version=__version__,
            description="A self-hosted server for the Tinker API",
            docs_url=None,  # FastAPI's pages load scripts from other servers; /openapi.json stays
            redoc_url=None,
        )
        self.router.routes += [route.of_fastapi[0] for route in routes]
        self._declared = [route.route for route in routes]
        self._describe = describe

    def openapi(self) -> dict[str, Any]:
        """The document of `/openapi.json`, made at the first call."""
        if self.openapi_schema is None:
            self.openapi_schema = self._describe(self, self._declared)
        return self.openapi_schema


class HttpTable:
    """An ASGI application. Each of `hooks` begins before the route, in their order; no request skips a hook."""

    def __init__(
        self, resources: Sequence[Routes], hooks: Sequence[Hook], errors: ErrorAnswers, describe: Describe
    ) -> None:
        self._describe = describe
        self.routes = tuple(route for routes in resources for route in routes.declared)
        self.hooks = (*hooks,)
        self._errors = errors
        self.direct = {(route.method, route.path): route for route in self.routes if route.is_direct}
        """The routes that are called without FastAPI, by method and path."""
        self._framework_routes = [
            FrameworkRoute(route, endpoint, routes.tag)
            for routes in resources
            for route, endpoint in routes.endpoints()
        ]

    @cached_property
    def framework(self) -> Framework:
        """FastAPI with all routes, made when it is first needed."""
        return Framework(self._framework_routes, self._describe)

    def prepare(self) -> None:
        """Make FastAPI's routes now: that takes a tenth of a second, for which otherwise the first request that needs
        them would hold up all others."""
        assert self.framework.routes

    def find(self, scope: Scope) -> tuple[Route | None, ASGIApp]:
        """The first declared route whose method and path fit, and what reads its parameters and runs it. Without such a
        route, what answers in its place: `/openapi.json`, 404, 405, or the redirect of a last slash."""
        for each in self._framework_routes:
            if (run := each.match(scope)) is not None:
                return each.route, run
        scope["app"] = self.framework
        return None, self.framework.router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.framework(scope, receive, send)
            return
        direct = self.direct.get((scope["method"], scope["path"]))
        route, run = (direct, None) if direct is not None else self.find(scope)
        call = Call(scope, receive, send, route, self.hooks)
        try:
            for hook in self.hooks:
                if (waiting := hook.begin(call)) is not None:
                    await waiting
            if direct is not None:
                response = await direct.run(call)
                if isinstance(response, BytesResponse):
                    await call.answer(response)
                else:
                    await response(scope, receive, call.send)
            elif run is not None:
                scope["call"] = call
                await run(scope, receive, call.send)
        except ClientGone:
            pass
        except Exception as error:  # ErrorAnswers knows each kind, and logs the server's own faults
            if call.answered:
                raise
            await self._answer(call, error)
        finally:
            call.end()

    async def _answer(self, call: Call, error: Exception) -> None:
        try:
            await call.answer(self._errors.answer(call, error))
        except Exception as of_hook:  # the answer has ended the hooks, and one of them has failed
            if call.answered:
                raise
            await call.answer(self._errors.answer(call, of_hook))
