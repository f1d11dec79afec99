"""Reads a request's body within limits, before and after decompression."""

from __future__ import annotations

import asyncio
import io

import zstandard
from starlette.requests import Request

from skyrl.base.wire.errors import RequestError

INLINE_BYTES = 256 * 2**10
"""The most bytes, decompressed, of a body that is decompressed on the event loop. A larger body goes to a thread: on
the loop each megabyte would stop the process for some 5 ms."""
SMALL_BYTES = 64 * 2**10
"""The most bytes of a body that is read without waiting for memory."""
CONTROL_BYTES = 2**20
"""The most bytes of any other body than that of a sample or a training pass. `max_body_bytes` may not be less."""
SAMPLE_BYTES = 32 * 2**20
"""The most bytes of a body of asample: a prompt of millions of tokens, which becomes a Python list."""


def is_small(request: Request) -> bool:
    """Whether the body, received and decompressed, has at most SMALL_BYTES."""
    if request.headers.get("content-encoding", "identity") != "identity":
        return False
    declared = request.headers.get("content-length")
    if declared is None:
        return "transfer-encoding" not in request.headers  # there is no body
    return declared.isdigit() and int(declared) <= SMALL_BYTES


async def receive(request: Request, max_bytes: int) -> bytes:
    """The body as received. Raises RequestError 413 when it is larger than `max_bytes`."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise RequestError(f"the body has {declared} bytes; at most {max_bytes} are accepted", status=413)
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
            raise RequestError(f"the body has more than {max_bytes} bytes, the most that are accepted", status=413)
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def expanded_size(request: Request, body: bytes, max_bytes: int) -> int:
    """The most bytes that `expand` returns for this body: the size that its zstd frame states, or `max_bytes` if it
    states none. 0 if the body is not zstd."""
    if request.headers.get("content-encoding") != "zstd":
        return 0
    try:
        stated_size = zstandard.frame_content_size(body)
    except zstandard.ZstdError:
        return 0
    return min(stated_size, max_bytes) if stated_size >= 0 else max_bytes


async def expand(request: Request, body: bytes, max_bytes: int) -> bytes:
    """The decompressed body. Raises RequestError 413 when it is larger than `max_bytes`, 415 for other encodings than
    zstd."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding == "identity":
        return body
    if encoding != "zstd":
        raise RequestError(f"content-encoding {encoding!r} is not supported; send zstd or none", status=415)
    if expanded_size(request, body, max_bytes) <= INLINE_BYTES:
        return _decompress(body, max_bytes)
    return await asyncio.to_thread(_decompress, body, max_bytes)


def _too_large(limit: int) -> RequestError:
    return RequestError(f"the body decompresses to more than {limit} bytes", status=413)


_PIECE_BYTES = 2**20


def _decompress(body: bytes, max_bytes: int) -> bytes:
    output = io.BytesIO()
    try:
        stated_size = zstandard.frame_content_size(body)  # -1: the frame states no size
        limit = min(max_bytes, stated_size) if stated_size >= 0 else max_bytes
        if stated_size > max_bytes:
            raise _too_large(max_bytes)
        with zstandard.ZstdDecompressor(max_window_size=2**27).stream_reader(body) as reader:
            ended = False
            while chunk := reader.read(_PIECE_BYTES):
                if ended or 0 <= stated_size == output.tell():
                    raise RequestError("the body holds more than one zstd frame; send one")
                ended = len(chunk) < _PIECE_BYTES  # the reader stops at the end of a frame
                output.write(chunk)
                if output.tell() > limit:
                    raise _too_large(limit)
    except zstandard.ZstdError as error:
        raise RequestError(f"the body is not zstd: {error}") from error
    if output.tell() < stated_size:
        raise RequestError(f"the body is incomplete: {output.tell()} of {stated_size} bytes, decompressed")
    return output.getvalue()


def body_format(request: Request) -> str:
    """ "proto" or "json", from the content type."""
    return "proto" if request.headers.get("content-type", "").startswith("application/x-protobuf") else "json"
