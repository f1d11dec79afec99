"""The answers that the router gives by itself, in one form: {"error": {"message", "type", "code"}}.

`code` tells a client whether the request may have run: see docs/reference/router.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from skyrl.router.messages import HeaderList, Send

Header = tuple[bytes, bytes]

NO_WORKER = "no_available_workers"
"""No worker is routable. No worker has seen the request."""
BUSY = "router_busy"
"""Too many requests wait. No worker has seen the request."""
INTERRUPTED = "worker_interrupted"
"""The connection to the worker broke. The worker may have run the request, so the router does not send it again."""
RETRY_AFTER_S = 1


def refusal(status: int, code: str, message: str) -> tuple[HeaderList, bytes]:
    """The headers and the body."""
    kind = "invalid_request_error" if status < 500 else "service_unavailable"
    body = json.dumps({"error": {"message": message, "type": kind, "code": code}}, separators=(",", ":")).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"x-smg-error-code", code.encode()),
    ]
    if status == 503:
        headers.append((b"retry-after", b"%d" % RETRY_AFTER_S))
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return headers, body


async def refuse(send: Send, status: int, code: str, message: str, more_headers: Iterable[Header] = ()) -> None:
    headers, body = refusal(status, code, message)
    await send({"type": "http.response.start", "status": status, "headers": [*headers, *more_headers]})
    await send({"type": "http.response.body", "body": body, "more_body": False})
