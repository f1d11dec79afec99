"""The HTTP client of one vLLM. Maps vLLM's failures to the sidecar's errors; knows nothing of SGLang's fields."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import aiohttp
import msgspec
from yarl import URL

from skyrl.inference.sidecar.errors import (
    NotOffered,
    Refused,
    SidecarError,
    VllmAway,
    VllmBroke,
    VllmGone,
    VllmInterrupted,
)
from skyrl.inference.sidecar.settings import SidecarSettings
from skyrl.inference.vllm_plugin.protocol import INCARNATION as START_HEADER

KEEP_ALIVE_S = 3.0
"""uvicorn, which vLLM runs, closes idle connections after 5 s."""
MAX_LINE = 8 * 2**20
"""Bytes of one line of a stream."""
_PLACE = re.compile(r"'loc': 'body\.(\w+)")
COMPLETIONS = "/v1/completions"
_SCALE_OUT = "--enable-scale-out"
"""In the error by which vLLM refuses the route for pictures if the route was not switched on."""
NO_DEV_MODE = "vLLM was started without VLLM_SERVER_DEV_MODE=1"


class Health(NamedTuple):
    """`start` names the start of vLLM that answers; None if vLLM does not tell."""

    status: int
    body: bytes
    start: str | None


class Vllm:
    """Open it in the event loop that uses it. `close` ends all connections."""

    def __init__(self, settings: SidecarSettings) -> None:
        self._settings = settings
        self._base = settings.vllm_url
        self._headers = {} if settings.vllm_api_key is None else {"Authorization": f"Bearer {settings.vllm_api_key}"}
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=settings.connect_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            read_bufsize=2**18,
            skip_auto_headers=("User-Agent", "Accept-Encoding", "Accept"),
        )

    @property
    def has_key(self) -> bool:
        return bool(self._headers)

    @property
    def headers(self) -> dict[str, str]:
        """What every request to vLLM carries."""
        return self._headers

    def url(self, path_and_query: str) -> URL:
        return URL(self._base + path_and_query, encoded=True)

    async def close(self) -> None:
        await self.session.close()

    async def call(self, method: str, path: str, body: Any = None, timeout_s: float | None = None) -> Any:
        """The JSON of a short answer. Raises SidecarError; NotOffered if vLLM does not have the path."""
        return _json(await self.call_raw(method, path, body, timeout_s))

    async def call_raw(self, method: str, path: str, body: Any = None, timeout_s: float | None = None) -> bytes:
        """As `call`, for an answer that is not JSON."""
        timeout_s = self._settings.control_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                status, answer = await self._exchange(method, path, body, {})
        except TimeoutError:
            raise VllmAway(f"vLLM did not answer {path} within {timeout_s:g} s") from None
        if status == 404 and _is_unknown_route(answer):
            raise NotOffered(f"{NO_DEV_MODE}: it has no {path}")
        if status != 200:
            raise _failure(status, *_message(answer), has_key=self.has_key)
        return answer

    async def health(self) -> Health:
        """vLLM's own answer. Raises SidecarError."""
        try:
            async with asyncio.timeout(self._settings.control_s):
                async with await self._send("GET", "/health", None, {}) as response:
                    return Health(response.status, await self.read(response), response.headers.get(START_HEADER))
        except TimeoutError:
            raise VllmAway(f"vLLM did not answer /health within {self._settings.control_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise VllmInterrupted(f"vLLM's answer broke: {_named(error)}") from error

    async def complete(self, body: dict[str, Any], request_id: str, path: str = COMPLETIONS) -> Any:
        """The whole answer of a route that samples; waits as long as vLLM samples. Cancelling closes the connection,
        and vLLM then ends the sample. Raises SidecarError."""
        return self._decoded(*await self._exchange("POST", path, body, {"X-Request-Id": request_id}))

    async def stream(self, body: dict[str, Any], request_id: str, path: str = COMPLETIONS) -> AsyncIterator[Any]:
        """The chunks of a stream, until `[DONE]`. Raises SidecarError."""
        headers = {"X-Request-Id": request_id}
        async with await self._send("POST", path, body, headers) as response:
            try:
                if response.status != 200:
                    self._decoded(response.status, await self.read(response))
                    raise VllmBroke(f"vLLM answered a stream with the status {response.status}")
                async for line in _lines(response.content):
                    if not line.startswith(b"data:"):
                        continue
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        return
                    yield _json(data)
            except (aiohttp.ClientError, OSError) as error:
                raise VllmInterrupted(f"vLLM's stream broke: {_named(error)}") from error
        raise VllmInterrupted("vLLM's stream ended early")

    async def _exchange(self, method: str, path: str, body: Any, headers: dict[str, str]) -> tuple[int, bytes]:
        async with await self._send(method, path, body, headers) as response:
            try:
                return response.status, await self.read(response)
            except (aiohttp.ClientError, OSError) as error:
                raise VllmInterrupted(f"vLLM's answer broke: {_named(error)}") from error

    async def _send(self, method: str, path: str, body: Any, headers: dict[str, str]) -> aiohttp.ClientResponse:
        data = None if body is None else msgspec.json.encode(body)
        headers = self._headers | headers | ({} if data is None else {"Content-Type": "application/json"})
        for attempt in (1, 2):
            try:
                return await self.session.request(
                    method, self.url(path), data=data, headers=headers, allow_redirects=False
                )
            except aiohttp.ClientConnectorError as error:
                raise VllmGone(f"vLLM cannot be reached: {_named(error)}") from error
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                # vLLM closed an idle connection just as it was used, or it ended with this request.
                if attempt == 2:
                    raise VllmInterrupted(f"vLLM closed the connection: {_named(error)}") from error
            except aiohttp.ServerTimeoutError as error:
                raise VllmAway(f"vLLM cannot be reached: {_named(error)}") from error
            except aiohttp.ClientError as error:
                raise VllmBroke(f"vLLM's answer is not HTTP: {_named(error)}") from error
        raise AssertionError("unreachable")

    async def read(self, response: aiohttp.ClientResponse) -> bytes:
        """The whole body. Raises VllmBroke for a larger one than is taken, aiohttp's errors."""
        most, chunks, size = self._settings.max_answer_bytes, [], 0
        async for chunk in response.content.iter_any():
            size += len(chunk)
            if size > most:
                raise VllmBroke(f"vLLM's answer has more than {most} bytes")
            chunks.append(chunk)
        return b"".join(chunks)

    def _decoded(self, status: int, answer: bytes) -> Any:
        if status == 200:
            return _json(answer)
        raise _failure(status, *_message(answer), has_key=self.has_key)


def _failure(status: int, message: str, param: str | None, *, has_key: bool) -> SidecarError:
    if status == 403 and _SCALE_OUT in message:
        return NotOffered(f"image_data: vLLM was started without {_SCALE_OUT}")
    if status in (401, 403):
        key = "refuses the sidecar's key" if has_key else "wants a key"
        return VllmBroke(f"vLLM {key}: see --vllm-api-key")
    if status in (429, 503):
        return VllmAway(f"vLLM: {message}")
    if 400 <= status < 500:
        return Refused(message, param)
    return VllmInterrupted(f"vLLM answered {status}: {message}")


def _message(answer: bytes) -> tuple[str, str | None]:
    """The words of an error of vLLM, and the field that it names."""
    try:
        body = json.loads(answer)
    except ValueError:
        return answer[:1000].decode("utf-8", "replace"), None
    error = body.get("error", body.get("detail", body)) if isinstance(body, dict) else body
    if not isinstance(error, dict):
        return str(error), None
    message, param = str(error.get("message", error)), error.get("param")
    if param is None and (found := _PLACE.search(message)):  # vLLM's checks of types name the place in the body
        param = found[1]
    return message, param.removeprefix("body.") if isinstance(param, str) else None


def _is_unknown_route(answer: bytes) -> bool:
    return b'"detail"' in answer and b"Not Found" in answer


def _json(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise VllmBroke(f"vLLM's answer is not JSON: {error}") from error


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    rest = b""
    async for chunk in content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > MAX_LINE:
            raise VllmBroke(f"vLLM's stream has a line of more than {MAX_LINE} bytes")
        for line in lines:
            yield line


def _named(error: BaseException) -> str:
    return str(error) or type(error).__name__
