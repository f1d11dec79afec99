"""The router's ASGI application: who may ask, the router's own routes, then middleware, broadcasts and workers."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections import Counter

from skyrl.router import refusals
from skyrl.router.broadcast import BROADCAST, Broadcasts
from skyrl.router.messages import AsgiApp, BodyTooLarge, ClientLeft, Message, Receive, Request, Scope, Send
from skyrl.router.plugins import Chain
from skyrl.router.pool import WorkerPool
from skyrl.router.proxy import Proxy, Truncated
from skyrl.router.registration import RegistrationRoutes, is_registration
from skyrl.router.reply import Reply

logger = logging.getLogger(__name__)

CONTROL_BODY_BYTES = 2**20
"""The largest body of a registration or an abort."""
OPEN_PATHS = frozenset(("/health", "/liveness", "/readiness", "/readyz"))
"""Answered without a key: load balancers ask them."""


def is_own(path: str) -> bool:
    """Whether the router answers this path itself, or sends it to all workers."""
    return path in BROADCAST or path in ("/statusz", "/retrieve_from_text") or is_registration(path)


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
            await refusals.refuse(send, 404, "no_radix_cache", hint)
            return
        await self._proxy(scope, receive, send)


class RouterApp:
    """`key`: what clients must send as a Bearer token; None: anybody may ask."""

    def __init__(
        self,
        pool: WorkerPool,
        registration: RegistrationRoutes,
        chain: Chain,
        proxy: Proxy,
        counts: Counter[str],
        *,
        policy: str,
        key: str | None = None,
    ) -> None:
        self._pool = pool
        self._registration = registration
        self._chain = chain
        self._proxy = proxy
        self._counts = counts
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
                await refusals.refuse(send, 502, refusals.INTERRUPTED, message)
        except Truncated as error:
            logger.warning("an answer broke off: %s", error)  # returning in mid-answer closes the connection
        except BodyTooLarge:
            await refusals.refuse(send, 413, "body_too_large", f"this body may have {CONTROL_BODY_BYTES} bytes")
        except Exception:
            self._counts["internal_errors"] += 1
            logger.exception("%s %s failed in the router", scope["method"], scope["path"])
            if not started:
                await refusals.refuse(send, 500, "internal_error", "the router failed; its log says why")

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if self.bearer is not None and path not in OPEN_PATHS and not self._has_key(scope):
            await refusals.refuse(
                send, 401, "unauthorized", "Authorization: Bearer <the router's key> is missing or wrong"
            )
            return
        if path == "/statusz":
            body = json.dumps(self.status(), separators=(",", ":")).encode()
            await _reply(send, Reply(200, [(b"content-type", b"application/json")], body))
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
        await self._app(scope, receive, send)

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
