"""The router's ASGI application: who may ask, the router's own routes, then middleware, broadcasts and workers."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections import Counter

from skyrl.http.admin_key import FORWARDING, AdminKey, forwarded_for
from skyrl.router import messages
from skyrl.router.admin import ADMIN_METHODS, VERSION_PATHS, AdminRoutes
from skyrl.router.broadcast import ADAPTERS, BROADCAST, Broadcasts
from skyrl.router.messages import AsgiApp, BodyTooLarge, ClientLeft, Message, Receive, Reply, Request, Scope, Send
from skyrl.router.middleware import Chain
from skyrl.router.pool import WorkerPool
from skyrl.router.proxy import Proxy, Truncated
from skyrl.router.registration import RegistrationRoutes, is_registration
from skyrl.runtime.metrics.files import CONTENT_TYPE, MetricsDirectory

logger = logging.getLogger(__name__)

CONTROL_BODY_BYTES = 2**20
"""The largest body of a registration or an abort."""
OPEN_PATHS = frozenset(("/health", "/liveness", "/readiness", "/readyz"))
"""Answered without a key: load balancers ask them."""


def is_own(path: str) -> bool:
    """Whether the router answers this path itself, or sends it to all workers."""
    return (
        path in BROADCAST
        or path in ADMIN_METHODS
        or path in VERSION_PATHS
        or path in ("/statusz", "/metrics", "/retrieve_from_text")
        or is_registration(path)
    )


async def _reply(send: Send, reply: Reply) -> None:
    headers = [(name.lower(), value) for name, value in reply.headers if name.lower() != b"content-length"]
    headers.append((b"content-length", b"%d" % len(reply.body)))
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body, "more_body": False})


class ToWorkers:
    """Behind the middleware: requests for all workers, and requests for one."""

    def __init__(self, broadcasts: Broadcasts, proxy: Proxy) -> None:
        self._broadcasts = broadcasts
        self._proxy = proxy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path in BROADCAST:
            request = Request(scope, receive, CONTROL_BODY_BYTES)
            answer = self._broadcasts.answer
            reply = await answer(request.method, path, request.query, request.headers.raw, request.body)
            assert reply is not None
            await _reply(send, reply)
            return
        if path == "/retrieve_from_text":
            hint = "no middleware stores texts: start the router with --middleware radix"
            await messages.refuse(send, 404, "no_radix_cache", hint)
            return
        await self._proxy(scope, receive, send)


class RouterApp:
    """`key`: what clients must send as a Bearer token; None: anybody may ask. `admin_key` opens all routes."""

    def __init__(
        self,
        pool: WorkerPool,
        registration: RegistrationRoutes,
        admin: AdminRoutes,
        chain: Chain,
        proxy: Proxy,
        counts: Counter[str],
        published: MetricsDirectory,
        *,
        policy: str,
        max_body_bytes: int,
        admin_key: AdminKey,
        key: str | None = None,
    ) -> None:
        self._pool = pool
        self._registration = registration
        self._admin = admin
        self._admin_key = admin_key
        self._max_body_bytes = max_body_bytes
        self._chain = chain
        self._proxy = proxy
        self._counts = counts
        self._published = published
        self._policy = policy
        self.bearer = None if key is None else f"Bearer {key}".encode()
        self._app: AsgiApp = chain.app
        self._started = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._answer(scope, receive, watched_send)
        except ClientLeft:
            return
        except asyncio.CancelledError:  # uvicorn cancels what still runs when the time to drain is over
            if not started:
                message = "the router stops; a worker may have processed the request"
                await messages.refuse(send, 502, messages.INTERRUPTED, message)
        except Truncated as error:
            logger.warning("an answer broke off: %s", error)  # returning in mid-answer closes the connection
        except BodyTooLarge as error:
            await messages.refuse(send, 413, "body_too_large", str(error))
        except Exception:  # logged, counted and answered with 500
            self._counts["internal_errors"] += 1
            logger.exception("%s %s failed in the router", scope["method"], scope["path"])
            if not started:
                await messages.refuse(send, 500, "internal_error", "the router failed; its log says why")

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if (refusal := self._refusal(scope)) is not None:
            status, message = refusal
            await messages.refuse(send, status, "unauthorized" if status == 401 else "forbidden", message)
            return
        if path == "/statusz":
            body = json.dumps(self.status(), separators=(",", ":")).encode()
            await _reply(send, Reply(200, [(b"content-type", b"application/json")], body))
            return
        if path == "/metrics":
            answer = await self._published.answer()
            await _reply(send, Reply(200, [(b"content-type", CONTENT_TYPE.encode())], answer))
            return
        if is_registration(path):
            request = Request(scope, receive, CONTROL_BODY_BYTES)
            raw_path = scope.get("raw_path") or path.encode()
            reply = await self._registration.answer(
                request.method, raw_path.decode("latin-1"), request.query, request.body
            )
            if reply is not None:
                await _reply(send, reply)
                return
            scope, receive = request.to_asgi()
        if path in ADMIN_METHODS or path in VERSION_PATHS:
            request = Request(scope, receive, self._max_body_bytes)
            answer = self._admin.answer
            await _reply(send, await answer(request.method, path, request.query, request.headers.raw, request.body))
            return
        if not any(name in FORWARDING for name, _ in scope["headers"]):
            scope = {**scope, "headers": [*scope["headers"], *forwarded_for(scope.get("client"))]}
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """The status and the message for a client that may not ask this; None for one that may."""
        path = scope["path"]
        if self._admin_key.is_given(scope) or path in OPEN_PATHS:
            return None
        if path in ADMIN_METHODS or path in ADAPTERS or (path.startswith("/workers/") and scope["method"] == "PUT"):
            refusal = self._admin_key.refusal(scope)
            if refusal is not None:
                return refusal
        if self.bearer is not None and not self._has_key(scope):
            return 401, "Authorization: Bearer <the router's key> is missing or wrong"
        return None

    def _has_key(self, scope: Scope) -> bool:
        assert self.bearer is not None
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return hmac.compare_digest(given, self.bearer)

    def status(self) -> dict[str, object]:
        """What `GET /statusz` shows."""
        return {
            "uptime_s": round(time.monotonic() - self._started, 1),
            "policy": self._policy,
            "routable": self._pool.routable,
            "waiting": self._proxy.waiting,
            "counts": dict(self._counts),
            "workers": self._pool.counts(),
            "middleware": self._chain.stats(),
        }
