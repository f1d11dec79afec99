"""Reading a request's body within bounds, before and after decompression."""

from __future__ import annotations

import asyncio
import io

import zstandard
from starlette.requests import Request

from skyrl.wire.errors import RequestError

INLINE_BYTES = 256 * 2**10
"""A body of at most so many bytes, decompressed, is decompressed on the event loop. Megabytes would stop the loop for
some 5 ms each, and are decompressed on a thread."""
SMALL_BYTES = 64 * 2**10
"""A body of at most so many bytes is read without waiting for memory."""
CONTROL_BYTES = 2**20
"""Bodies of everything but samples and training passes: the least that `max_body_bytes` may be."""
SAMPLE_BYTES = 32 * 2**20
"""A body of asample: a prompt of millions of tokens, which becomes a Python list."""


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
