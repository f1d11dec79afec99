"""The HTTP client of one vLLM. Maps vLLM's failures to the sidecar's errors; knows nothing of SGLang's fields."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import closing
from typing import Any, NamedTuple

import msgspec

from skyrl.http.answers import header_of
from skyrl.http.client import AnswerStream, HttpClient, lines_of
from skyrl.http.connection import HEAD_TOO_LONG, NOT_HTTP, HeaderList, Interrupted, NotAccepted
from skyrl.http.messages import JSON
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
        key = settings.vllm_api_key
        self.headers: HeaderList = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
        """What every request to vLLM carries."""
        self._client = HttpClient(connect_s=settings.connect_s)

    @property
    def has_key(self) -> bool:
        return bool(self.headers)

    async def open(
        self,
        method: str,
        target: bytes,
        lines: bytes,
        body: bytes | AsyncIterator[bytes] = b"",
        length: int | None = None,
    ) -> AnswerStream:
        """Send a request to `target`, path and query, and wait for the head of its answer, which must be closed.
        `lines` are its headers, `length` that of its body: see `AnswerStream.ask`. Raises VllmAway, VllmBroke,
        VllmInterrupted."""
        try:
            return await self._client.open(method, self._settings.vllm_url, target, lines, body, length)
        except NotAccepted as error:
            kind = VllmAway if isinstance(error.__cause__, TimeoutError) else VllmGone
            raise kind(f"vLLM cannot be reached: {error}") from error
        except Interrupted as error:
            if str(error).startswith((NOT_HTTP, HEAD_TOO_LONG)):
                raise VllmBroke(f"vLLM's answer cannot be read: {error}") from error
            raise VllmInterrupted(f"vLLM closed the connection: {error}") from error

    async def close(self) -> None:
        await self._client.close()

    async def call(self, method: str, path: str, body: Any = None, timeout_s: float | None = None) -> Any:
        """The JSON of a short answer. Raises SidecarError; NotOffered if vLLM does not have the path."""
        return _json(await self.call_raw(method, path, body, timeout_s))

    async def call_raw(self, method: str, path: str, body: Any = None, timeout_s: float | None = None) -> bytes:
        """As `call`, for an answer that is not JSON."""
        timeout_s = self._settings.control_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                status, answer = await self._exchange(method, path, body)
        except TimeoutError:
            raise VllmAway(f"vLLM did not answer {path} within {timeout_s:g} s") from None
        if status == 404 and b'"detail"' in answer and b"Not Found" in answer:
            raise NotOffered(f"{NO_DEV_MODE}: it has no {path}")
        return self._whole(status, answer)

    async def health(self) -> Health:
        """vLLM's own answer. Raises SidecarError."""
        try:
            async with asyncio.timeout(self._settings.control_s):
                with closing(await self._send("GET", "/health", None)) as response:
                    start = header_of(response.headers, START_HEADER.encode())
                    return Health(response.status, await self.read(response), start)
        except TimeoutError:
            raise VllmAway(f"vLLM did not answer /health within {self._settings.control_s:g} s") from None

    async def complete(self, body: dict[str, Any], request_id: str, path: str = COMPLETIONS) -> Any:
        """The whole answer of a route that samples; waits as long as vLLM samples. Cancelling closes the connection,
        and vLLM then ends the sample. Raises SidecarError."""
        return _json(self._whole(*await self._exchange("POST", path, body, request_id)))

    async def stream(self, body: dict[str, Any], request_id: str, path: str = COMPLETIONS) -> AsyncIterator[Any]:
        """The chunks of a stream, until `[DONE]`. Raises SidecarError."""
        with closing(await self._send("POST", path, body, request_id)) as response:
            try:
                if response.status != 200:
                    self._whole(response.status, await self.read(response))
                async for line in _lines(response):
                    if not line.startswith(b"data:"):
                        continue
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        return
                    yield _json(data)
            except Interrupted as error:
                raise VllmInterrupted(f"vLLM's stream broke: {error}") from error
        raise VllmInterrupted("vLLM's stream ended early")

    async def _exchange(self, method: str, path: str, body: Any, request_id: str | None = None) -> tuple[int, bytes]:
        with closing(await self._send(method, path, body, request_id)) as response:
            return response.status, await self.read(response)

    async def _send(self, method: str, path: str, body: Any, request_id: str | None = None) -> AnswerStream:
        headers = self.headers if request_id is None else [*self.headers, (b"x-request-id", request_id.encode())]
        data, length = b"", None
        if body is not None:
            data, headers = msgspec.json.encode(body), [*headers, JSON]
            length = len(data)
        target, lines = path.encode(), lines_of(headers)
        try:
            return await self.open(method, target, lines, data, length)
        except VllmInterrupted:  # vLLM closed an idle connection just as it was used, or it ended with this request
            return await self.open(method, target, lines, data, length)

    async def read(self, response: AnswerStream) -> bytes:
        """The whole body. Raises VllmBroke for a larger one than is taken, VllmInterrupted."""
        most = self._settings.max_answer_bytes
        try:
            body, whole = await response.read_all(most)
        except Interrupted as error:
            raise VllmInterrupted(f"vLLM's answer broke: {error}") from error
        if not whole:
            raise VllmBroke(f"vLLM's answer has more than {most} bytes")
        return body

    def _whole(self, status: int, answer: bytes) -> bytes:
        """The answer, if it is none of a failure."""
        if status != 200:
            raise _failure(status, *_message(answer), has_key=self.has_key)
        return answer


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


def _json(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise VllmBroke(f"vLLM's answer is not JSON: {error}") from error


async def _lines(pieces: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    rest = b""
    async for chunk in pieces:
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > MAX_LINE:
            raise VllmBroke(f"vLLM's stream has a line of more than {MAX_LINE} bytes")
        for line in lines:
            yield line
