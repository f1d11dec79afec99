"""Requests that are not the sidecar's own go to vLLM as they are, and vLLM's answers to the client, in both directions
as they come. Reads neither bodies nor answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

import aiohttp

from skyrl.inference.sidecar.call import Call, HeaderList
from skyrl.inference.sidecar.errors import ClientLeft, VllmAway, VllmInterrupted
from skyrl.inference.sidecar.in_flight import InFlight
from skyrl.inference.sidecar.vllm import Vllm

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
SAMPLING = frozenset(
    {
        *("/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/responses", "/v1/messages"),
        *("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/systemone"),
        *("/cohere/v2/chat", "/generative_scoring", "/inference/v1/generate", "/invocations"),
    }
)
"""Paths that count as in flight."""


async def pass_through(call: Call, vllm: Vllm, in_flight: InFlight) -> None:
    """Requests that sample wait while generation is paused. Raises ClientLeft, and SidecarError if nothing has been
    answered yet."""
    body = _Body(call)
    samples = call.method == "POST" and call.path in SAMPLING
    work = _when_generating(call, vllm, body, in_flight) if samples else _forward(call, vllm, body)
    forwarding = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(body.client_left())
    try:
        await asyncio.wait({forwarding, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not forwarding.done():
            raise ClientLeft
        forwarding.result()
    finally:
        forwarding.cancel()
        leaving.cancel()
        await asyncio.wait({forwarding, leaving})


async def _when_generating(call: Call, vllm: Vllm, body: _Body, in_flight: InFlight) -> None:
    if not in_flight.gate.is_open:
        await body.keep()
    async with in_flight.passing():
        await _forward(call, vllm, body)


class _Body:
    """The body of a request, as vLLM's client reads it."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._read = asyncio.Event()
        self._kept: bytes | None = None
        names = {name.lower(): value for name, value in call.scope["headers"]}
        self.given = b"transfer-encoding" in names or names.get(b"content-length", b"0") != b"0"

    async def keep(self) -> None:
        """Read the whole body now: only then a client that leaves is seen. Raises TooLarge, ClientLeft."""
        self._kept = await self._call.body()
        self._read.set()

    async def chunks(self) -> AsyncIterator[bytes]:
        if self._kept is not None:
            yield self._kept
            return
        async for chunk in self._call.body_chunks():
            yield chunk
        self._read.set()

    async def client_left(self) -> None:
        """Wait until the client leaves. Whoever reads the body sees it until then."""
        if self.given:
            await self._read.wait()
        await self._call.left()


async def _forward(call: Call, vllm: Vllm, body: _Body) -> None:
    raw_path: bytes = call.scope.get("raw_path") or call.path.encode()
    target = raw_path.decode("latin-1") + (f"?{call.query.decode('latin-1')}" if call.query else "")
    headers = [(_text(name), _text(value)) for name, value in _request_headers(call.scope["headers"], vllm)]
    try:
        response = await vllm.session.request(
            call.method,
            vllm.url(target),
            data=body.chunks() if body.given else None,
            headers=headers,
            allow_redirects=False,
            skip_auto_headers=("Content-Type",),
        )
    except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError) as error:
        raise VllmAway(f"vLLM cannot be reached: {error}") from error
    except (aiohttp.ClientError, OSError) as error:
        raise VllmInterrupted(f"vLLM closed the connection: {str(error) or type(error).__name__}") from error
    async with response:
        await call.start(response.status, [pair for pair in response.raw_headers if pair[0].lower() not in HOP_BY_HOP])
        try:
            async for chunk in response.content.iter_any():
                await call.write(chunk, more=True)
        except (aiohttp.ClientError, OSError) as error:
            raise VllmInterrupted(f"vLLM's answer broke: {error}") from error
        await call.write(b"", more=False)


def _request_headers(given: HeaderList, vllm: Vllm) -> Iterable[tuple[bytes, bytes]]:
    """A key of the client's is for this server; vLLM gets its own, if the operator has given one."""
    left_out = HOP_BY_HOP | {b"host", b"expect"} | ({b"authorization"} if vllm.has_key else set())
    yield from (pair for pair in given if pair[0].lower() not in left_out)
    yield from ((name.encode(), value.encode()) for name, value in vllm.headers.items())


def _text(value: bytes) -> str:
    """As the HTTP client wants a header: it encodes UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")
