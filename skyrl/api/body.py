"""Reading requests: the caller's tenant, and the body within bounds, before and after decompression."""

from __future__ import annotations

import asyncio
import io

import zstandard
from starlette.requests import Request

from skyrl.api.tokens import Tokens, is_token, tenant_of_key
from skyrl.wire.errors import RequestError

INLINE_BYTES = 16 * 2**10
"""Compressed bodies up to here are decompressed on the event loop; megabytes would hold it up for some 5 ms each."""


def key_of(request: Request) -> str:
    """The API key, or the token in its place. Raises RequestError 401 without one."""
    key = request.headers.get("x-api-key", "")
    if not key:
        raise RequestError("send an API key in X-API-Key", status=401)
    return key


def tenant_of(request: Request) -> str:
    """Who owns what this request makes: a digest of its API key, or what its token says.

    Raises RequestError 401 without a key, InvalidToken for a token that is not one of ours or has expired.
    """
    key = key_of(request)
    tokens: Tokens = request.app.state.tokens
    return tokens.tenant(key) if is_token(key) else tenant_of_key(key)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The decompressed body. Raises RequestError 413 when it is larger than `max_bytes`, 415 for other encodings."""
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
    body = parts[0] if len(parts) == 1 else b"".join(parts)
    encoding = request.headers.get("content-encoding", "identity")
    if encoding == "identity":
        return body
    if encoding != "zstd":
        raise RequestError(f"content-encoding {encoding!r} is not taken; send zstd or none", status=415)
    if len(body) <= INLINE_BYTES:
        return _decompress(body, max_bytes)
    return await asyncio.to_thread(_decompress, body, max_bytes)


def _decompress(body: bytes, max_bytes: int) -> bytes:
    output = io.BytesIO()
    try:
        promised = zstandard.frame_content_size(body)  # -1: the frame does not say
        with zstandard.ZstdDecompressor(max_window_size=2**27).stream_reader(body) as reader:
            while chunk := reader.read(2**20):
                output.write(chunk)
                if output.tell() > max_bytes:
                    raise RequestError(f"the body decompresses to more than {max_bytes} bytes", status=413)
    except zstandard.ZstdError as error:
        raise RequestError(f"the body is not zstd: {error}") from error
    if output.tell() < promised:
        raise RequestError(f"the body is not whole: {output.tell()} bytes of {promised}, decompressed")
    return output.getvalue()


def body_format(request: Request) -> str:
    """ "proto" or "json", from the content type."""
    return "proto" if request.headers.get("content-type", "").startswith("application/x-protobuf") else "json"
