"""An answer of server-sent events, which begins once the first event is there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from skyrl.base.wire.errors import RequestError
from skyrl.chat.openai.service import ClientGone, InFlight
from skyrl.runtime.processes.logs import about_request

logger = logging.getLogger(__name__)


async def gone(receive: Receive) -> None:
    """Returns when the client has closed its connection. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """If the stream fails after its first event, it ends with what `failed` makes of the error. If the client reads too
    slowly, the stream ends at its deadline (in the event loop's time), and with it all that it holds."""

    media_type = "text/event-stream"

    def __init__(
        self,
        first: bytes,
        events: AsyncGenerator[bytes, None],
        failed: Callable[[RequestError], bytes],
        in_flight: InFlight,
        request_id: str,
        deadline: float,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._failed = failed
        self._in_flight = in_flight
        self._request_id = request_id
        self._deadline = deadline

    @classmethod
    async def begin(
        cls,
        events: AsyncGenerator[bytes, None],
        failed: Callable[[RequestError], bytes],
        in_flight: InFlight,
        request: Request,
        request_id: str,
        deadline_s: float,
    ) -> EventStream:
        """Wait for the first of the framed events. After it the stream may last `deadline_s`. Raises what the events
        raise before it."""

        async def first() -> bytes:
            return await anext(events)

        try:
            begun = await in_flight.run(first(), gone(request.receive))
            deadline = asyncio.get_running_loop().time() + deadline_s
            return cls(begun, events, failed, in_flight, request_id, deadline)
        except BaseException:
            await events.aclose()
            raise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                await self._in_flight.run(self._send_events(send), gone(receive))
                last = b""
            except ClientGone:
                return
            except TimeoutError:  # nothing more can be sent: what was sent before waits to be read
                logger.warning("a client did not read its stream in time", extra=about_request(self._request_id))
                return
            except RequestError as error:
                last = self._failed(error)
            except Exception as error:  # the answer has begun: the log has the error, and the stream its class
                logger.exception("a stream failed", extra=about_request(self._request_id))
                last = self._failed(RequestError(f"internal error: {type(error).__name__}", status=500))
            await send({"type": "http.response.body", "body": last})
        finally:
            await self._events.aclose()

    async def _send_events(self, send: Send) -> None:
        async with asyncio.timeout_at(self._deadline):
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for framed in self._events:
                await send({"type": "http.response.body", "body": framed, "more_body": True})
