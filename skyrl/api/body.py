"""Reading requests: the caller, and the body within bounds, before and after decompression."""

from __future__ import annotations

import asyncio
import io
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import zstandard
from starlette.requests import Request

from skyrl.api.access import Access, Caller, check_route
from skyrl.db.keys import ALL_SCOPES
from skyrl.wire.errors import RequestError

INLINE_BYTES = 256 * 2**10
"""What is no larger decompressed is decompressed on the event loop; megabytes would hold it up for some 5 ms each."""
MAX_KEY = 2_000
"""Characters of a key or a token: tenants of the last 4,096 keys are remembered by them."""
SMALL_BYTES = 64 * 2**10
"""A body that needs no room of its own."""
CONTROL_BYTES = 2**20
"""Bodies of everything but samples and training passes: the least that `max_body_bytes` may be."""
SAMPLE_BYTES = 32 * 2**20
"""A body of asample: a prompt of millions of tokens, which becomes a Python list."""


def key_of(request: Request) -> str:
    """The API key, or the token in its place. Raises RequestError 401 without one."""
    key = request.headers.get("x-api-key", "")
    if not key:
        raise RequestError("send an API key in X-API-Key", status=401)
    if len(key) > MAX_KEY:
        raise RequestError(f"the API key in X-API-Key has more than {MAX_KEY} characters", status=401)
    return key


def caller_of(request: Request) -> Caller:
    """Whom a request comes from, if its key may ask for that route.

    Raises RequestError 401 without a key that is taken, InvalidToken for a token that is not, RequestError 403 for a
    scope that the key lacks.
    """
    access: Access = request.app.state.access
    caller = access.caller(key_of(request))
    if caller.scopes != ALL_SCOPES:
        route = request.scope.get("route")  # there is none on the short way of `Application`, whose paths are whole
        check_route(caller, request.scope["path"] if route is None else route.path)
    return caller


def tenant_of(request: Request) -> str:
    """Who owns what this request makes. Raises as `caller_of` does."""
    return caller_of(request).tenant


class LargeBodies(Protocol):
    """`skyrl.api.body_memory.Bodies`."""

    def of(self, request: Request, tenant: str) -> AbstractAsyncContextManager[bytes]: ...


async def read_body(request: Request) -> bytes:
    """The decompressed body of everything but samples and training passes: one that is not small waits until there is
    room for it. Raises RequestError 413 when it is larger than CONTROL_BYTES, 415 for other encodings."""
    if _is_small(request):
        return await expand(request, await receive(request, CONTROL_BYTES), CONTROL_BYTES)
    bodies: LargeBodies = request.app.state.bodies
    async with bodies.of(request, request.headers.get("x-api-key", "")) as body:
        return body


def _is_small(request: Request) -> bool:
    declared = request.headers.get("content-length")
    if declared is None:
        return "transfer-encoding" not in request.headers  # there is no body
    return declared.isdigit() and int(declared) <= SMALL_BYTES


async def receive(request: Request, max_bytes: int) -> bytes:
    """The body as it comes. Raises RequestError 413 when it is larger than `max_bytes`."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise RequestError(f"the body has {declared} bytes; at most {max_bytes} are taken", status=413)
    parts: list[bytes] = []
    size = 0
    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise RequestError("the client went away before the body was complete")
        part, more = message.get("body", b""), message.get("more_body", False)
        size += len(part)
        if size > max_bytes:
            raise RequestError(f"the body has more than the {max_bytes} bytes that are taken", status=413)
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def expanded_size(request: Request, body: bytes, max_bytes: int) -> int:
    """Bytes that `expand` may take for this body: what its frame promises, or all that it may; 0 if it is no zstd."""
    if request.headers.get("content-encoding") != "zstd":
        return 0
    try:
        promised = zstandard.frame_content_size(body)
    except zstandard.ZstdError:
        return 0
    return min(promised, max_bytes) if promised >= 0 else max_bytes


async def expand(request: Request, body: bytes, max_bytes: int) -> bytes:
    """The body decompressed, if it was compressed. Raises RequestError 413 when it is larger than `max_bytes`, 415 for
    other encodings than zstd."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding == "identity":
        return body
    if encoding != "zstd":
        raise RequestError(f"content-encoding {encoding!r} is not taken; send zstd or none", status=415)
    if expanded_size(request, body, max_bytes) <= INLINE_BYTES:
        return _decompress(body, max_bytes)
    return await asyncio.to_thread(_decompress, body, max_bytes)


def _too_large(bound: int) -> RequestError:
    return RequestError(f"the body decompresses to more than {bound} bytes", status=413)


_PIECE = 2**20


def _decompress(body: bytes, max_bytes: int) -> bytes:
    output = io.BytesIO()
    try:
        promised = zstandard.frame_content_size(body)  # -1: the frame does not say
        bound = min(max_bytes, promised) if promised >= 0 else max_bytes
        if promised > max_bytes:
            raise _too_large(max_bytes)
        with zstandard.ZstdDecompressor(max_window_size=2**27).stream_reader(body) as reader:
            ended = False
            while chunk := reader.read(_PIECE):
                if ended or 0 <= promised == output.tell():
                    raise RequestError("the body holds more than one zstd frame; send one")
                ended = len(chunk) < _PIECE  # the reader stops at the end of a frame
                output.write(chunk)
                if output.tell() > bound:
                    raise _too_large(bound)
    except zstandard.ZstdError as error:
        raise RequestError(f"the body is not zstd: {error}") from error
    if output.tell() < promised:
        raise RequestError(f"the body is not whole: {output.tell()} bytes of {promised}, decompressed")
    return output.getvalue()


def body_format(request: Request) -> str:
    """ "proto" or "json", from the content type."""
    return "proto" if request.headers.get("content-type", "").startswith("application/x-protobuf") else "json"
