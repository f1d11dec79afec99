"""The router's ASGI application: who may ask, the router's own routes, then middleware, broadcasts and workers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from dataclasses import dataclass, field

from skyrl.http.admin_key import FORWARDING, AdminKey, forwarded_for
from skyrl.http.messages import (
    Body,
    BodyTooLarge,
    ClientLeft,
    Receive,
    Reply,
    Scope,
    Send,
    WatchedSend,
    json_reply,
)
from skyrl.router.admin import ADMIN_METHODS, VERSION_PATHS, AdminRoutes
from skyrl.router.broadcast import ADAPTERS, BROADCAST, Broadcasts
from skyrl.router.messages import INTERRUPTED, refusal
from skyrl.router.middleware import Chain
from skyrl.router.pool import WorkerPool
from skyrl.router.proxy import Proxy, Truncated
from skyrl.router.registration import HEALTH_PATHS, RegistrationRoutes, is_registration
from skyrl.runtime.metrics.files import CONTENT_TYPE, MetricsDirectory

logger = logging.getLogger(__name__)

CONTROL_BODY_BYTES = 2**20
"""The largest body of a registration or an abort."""


def is_own(path: str) -> bool:
    """Whether the router answers this path itself, or sends it to all workers."""
    return (
        path in BROADCAST
        or path in ADMIN_METHODS
        or path in VERSION_PATHS
        or path in ("/statusz", "/metrics", "/retrieve_from_text")
        or is_registration(path)
    )


@dataclass(eq=False)
class ToWorkers:
    """Behind the middleware: requests for all workers, and requests for one."""

    broadcasts: Broadcasts
    proxy: Proxy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path in BROADCAST:
            body = await Body(receive, CONTROL_BODY_BYTES).collect()
            reply = await self.broadcasts.answer(scope["method"], path, scope["query_string"], scope["headers"], body)
            await reply.send(send)
        elif path == "/retrieve_from_text":
            hint = "no middleware stores texts: start the router with --middleware radix"
            await refusal(404, "no_radix_cache", hint).send(send)
        else:
            await self.proxy(scope, receive, send)


@dataclass(eq=False)
class RouterApp:
    """`key`: what clients must send as a Bearer token; None: anybody may ask. `admin_key` opens all routes."""

    pool: WorkerPool
    registration: RegistrationRoutes
    admin: AdminRoutes
    chain: Chain
    proxy: Proxy
    counts: Counter[str]
    published: MetricsDirectory
    policy: str
    max_body_bytes: int
    admin_key: AdminKey
    key: AdminKey | None = None
    started: float = field(default_factory=time.monotonic)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        sent = WatchedSend(send)
        try:
            await self._answer(scope, receive, sent)
        except ClientLeft:
            return
        except asyncio.CancelledError:  # uvicorn cancels what still runs when the time to drain is over
            if sent.status is None:
                message = "the router stops; a worker may have processed the request"
                await refusal(502, INTERRUPTED, message).send(send)
        except Truncated as error:
            logger.warning("an answer broke off: %s", error)  # returning in mid-answer closes the connection
        except BodyTooLarge as error:
            await refusal(413, "body_too_large", str(error)).send(send)
        except Exception:  # logged, counted and answered with 500
            self.counts["internal_errors"] += 1
            logger.exception("%s %s failed in the router", scope["method"], scope["path"])
            if sent.status is None:
                await refusal(500, "internal_error", "the router failed; its log says why").send(send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = await self._own_reply(scope, receive)
        if reply is not None:
            await reply.send(send)
            return
        if not any(name in FORWARDING for name, _ in scope["headers"]):
            scope = {**scope, "headers": [*scope["headers"], *forwarded_for(scope.get("client"))]}
        await self.chain.app(scope, receive, send)

    async def _own_reply(self, scope: Scope, receive: Receive) -> Reply | None:
        """None for a request that goes to workers."""
        method, path, query = scope["method"], scope["path"], scope["query_string"]
        if (refused := self._refusal(scope)) is not None:
            status, message = refused
            return refusal(status, "unauthorized" if status == 401 else "forbidden", message)
        if path == "/statusz":
            return json_reply(200, self.status())
        if path == "/metrics":
            return Reply(200, [(b"content-type", CONTENT_TYPE.encode())], await self.published.answer())
        if is_registration(path):
            raw_path = (scope.get("raw_path") or path.encode()).decode("latin-1")
            if not raw_path.startswith("/workers/"):
                raw_path = path
            body = await Body(receive, CONTROL_BODY_BYTES).collect()
            return self.registration.answer(method, raw_path, query, body)
        if path in ADMIN_METHODS or path in VERSION_PATHS:
            body = Body(receive, self.max_body_bytes)
            return await self.admin.answer(method, path, query, scope["headers"], body)
        return None

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """The status and the message for a client that may not ask this; None for one that may."""
        path = scope["path"]
        if self.admin_key.is_in(scope["headers"]) or path in HEALTH_PATHS:
            return None
        if path in ADMIN_METHODS or path in ADAPTERS or (path.startswith("/workers/") and scope["method"] == "PUT"):
            refusal = self.admin_key.refusal(scope)
            if refusal is not None:
                return refusal
        if self.key is not None and not self.key.is_in(scope["headers"]):
            return 401, "Authorization: Bearer <the router's key> is missing or wrong"
        return None

    def status(self) -> dict[str, object]:
        """What `GET /statusz` shows."""
        return {
            "uptime_s": round(time.monotonic() - self.started, 1),
            "policy": self.policy,
            "routable": self.pool.routable,
            "waiting": self.proxy.slots.waiting,
            "counts": dict(self.counts),
            "workers": self.pool.counts(),
            "middleware": self.chain.stats(),
        }
