"""The forwarding client: posts a sample job to vLLM and answers for what can go wrong on the way.

Used by the API process (forwarded samples) and by the engine (colocated ones). Knows jobs, endpoints and answers; does
not know futures, tenants or the database. docs/how-it-works/forwarding.md has its failure rules as a table.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from dataclasses import replace
from enum import Enum

import msgspec

from skyrl.sampling import completion
from skyrl.sampling.endpoint import Endpoint, EndpointResolver
from skyrl.sampling.job import SampleJob
from skyrl.sampling.served_context import ServedContext
from skyrl.sampling.transport import Answer, CompletionTransport, Interrupted, NotAccepted
from skyrl.wire.errors import ErrorCategory, FailedRequest

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 1.0
MAX_RETRY_AFTER_S = 30.0
MAX_INTERRUPTIONS = 1
MAX_ABORTS = 1
MAX_RELOADS = 2
BODY_EXCERPT = 200
HEALTH_TIMEOUT_S = 5.0


class _ErrorDetail(msgspec.Struct):
    message: str = ""
    type: str | None = None
    param: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _ErrorDetail | str


class _Life(Enum):
    """What a server's /health says of it. Servers without one are alive as long as they answer."""

    ALIVE = "alive"
    DYING = "dying"
    GONE = "gone"


class _Attempts:
    """What one sample has been through."""

    def __init__(self) -> None:
        self.interruptions = 0
        self.aborts = 0
        self.reloads = 0
        self.backoff_s = FIRST_BACKOFF_S
        self.trouble = "no inference server has been published"
        """What is told when the deadline passes."""


class ForwardingClient:
    """Samples through a vLLM-compatible server. `counts` has one counter per kind of event."""

    def __init__(
        self,
        transport: CompletionTransport,
        endpoint: EndpointResolver,
        *,
        api_key: str | None,
        deadline_s: float,
        zero_fill_logprobs: bool = False,
    ) -> None:
        self._transport = transport
        self._endpoint = endpoint
        self._deadline_s = deadline_s
        self._zero_fill = zero_fill_logprobs
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._loading: dict[tuple[str, int, str], asyncio.Task[None]] = {}
        self._context = ServedContext(transport, self._headers)
        self.counts: Counter[str] = Counter()

    async def sample(self, job: SampleJob) -> completion.SampleAnswer:
        """The encoded SampleResponse, with its token counts.

        Raises FailedRequest with vLLM's message (user) or what went wrong (server).
        """
        deadline = asyncio.get_running_loop().time() + self._deadline_s
        body = None if job.max_tokens is None else completion.encode_request(job)
        headers = {**self._headers, "X-Session-ID": job.session_key}
        attempts = _Attempts()
        failed: Endpoint | None = None
        while True:
            endpoint = await self._endpoint.resolve(failed)
            if endpoint is None:
                await self._back_off(attempts, deadline)
                continue
            remaining = deadline - asyncio.get_running_loop().time()
            if remaining <= 0:
                raise self._gave_up(attempts)
            try:
                asked = body or completion.encode_request(await self._fitting(job, endpoint, remaining))
                answer = await self._transport.post(endpoint.url + completion.PATH, asked, headers, remaining)
            except NotAccepted as error:
                self.counts["not_accepted"] += 1
                failed, attempts.trouble = endpoint, f"{endpoint.url} cannot be reached ({error})"
                await self._back_off(attempts, deadline)
                continue
            except Interrupted as error:
                if attempts.backoff_s > FIRST_BACKOFF_S and asyncio.get_running_loop().time() >= deadline:
                    # The last try was cut short; what was wrong before says more.
                    raise self._gave_up(attempts) from error
                self._count_interruption(attempts, str(error))
                failed, attempts.trouble = endpoint, f"no answer from {endpoint.url} ({error})"
                await self._outlive(endpoint, attempts, deadline)
                continue
            failed = None
            result = await self._take(answer, job, endpoint, attempts, deadline)
            if result is not None:
                return result

    async def _fitting(self, job: SampleJob, endpoint: Endpoint, timeout_s: float) -> SampleJob:
        """A job without `max_tokens`, with what fits this server."""
        room = await self._context.length(endpoint, timeout_s) - len(job.prompt)
        return replace(job, max_tokens=max(1, room))

    def _count_interruption(self, attempts: _Attempts, what: str) -> None:
        self.counts["interrupted"] += 1
        attempts.interruptions += 1
        if attempts.interruptions > MAX_INTERRUPTIONS:
            raise _server_failure(f"the way to the inference server broke {attempts.interruptions} times ({what})")

    async def _back_off(self, attempts: _Attempts, deadline: float, at_least_s: float = 0.0) -> None:
        wait_s = max(attempts.backoff_s * random.uniform(0.75, 1.25), at_least_s * random.uniform(1.0, 1.25))
        if asyncio.get_running_loop().time() + wait_s > deadline:
            raise self._gave_up(attempts)
        await asyncio.sleep(wait_s)
        attempts.backoff_s = min(attempts.backoff_s * 2, MAX_BACKOFF_S)

    def _gave_up(self, attempts: _Attempts) -> FailedRequest:
        return _server_failure(f"gave up after {self._deadline_s:g} s: {attempts.trouble}")

    async def _take(
        self, answer: Answer, job: SampleJob, endpoint: Endpoint, attempts: _Attempts, deadline: float
    ) -> completion.SampleAnswer | None:
        """The result, or None when the request is to be sent again."""
        if 200 <= answer.status < 300:
            try:
                return self._decode(answer, job)
            except completion.AbortedAnswer as error:
                self.counts["aborted"] += 1
                attempts.aborts += 1
                if attempts.aborts > MAX_ABORTS:
                    raise _server_failure(
                        f"the inference server gave the sample up {attempts.aborts} times ({error})"
                    ) from error
                return None
        if answer.status == 429:
            self.counts["upstream_busy"] += 1
            asked_s = min(answer.retry_after_s or 0.0, MAX_RETRY_AFTER_S)
            attempts.trouble = "the inference server answers 429, too many requests"
            await self._back_off(attempts, deadline, asked_s)
            return None
        if answer.status == 404 and job.adapter_path is not None:
            attempts.reloads += 1
            if attempts.reloads > MAX_RELOADS:
                raise _server_failure(
                    f"the inference server loses adapter {job.model} again and again: {_describe(answer)}"
                )
            await self._reload(job.model, job.adapter_path, endpoint, deadline)
            return None
        if 400 <= answer.status < 500 and answer.status not in (401, 403, 405, 408):
            self.counts["refused"] += 1
            raise FailedRequest(_message(answer), ErrorCategory.USER)
        self.counts["upstream_error"] += 1
        if answer.status >= 500 and await self._life(endpoint) is not _Life.ALIVE:
            self._count_interruption(attempts, _describe(answer))
            attempts.trouble = "the inference server is dying"
            await self._outlive(endpoint, attempts, deadline)
            return None
        raise _server_failure(_describe(answer))

    async def _outlive(self, endpoint: Endpoint, attempts: _Attempts, deadline: float) -> None:
        """Wait while a server is dying: what is sent to it now only dies with it.

        vLLM then fails everything in flight with 500 or a reset, turns unhealthy and is gone within about a second.
        """
        await self._back_off(attempts, deadline)
        while await self._life(endpoint) is _Life.DYING:
            await self._back_off(attempts, deadline)

    async def _life(self, endpoint: Endpoint) -> _Life:
        try:
            answer = await self._transport.get(f"{endpoint.url}/health", self._headers, HEALTH_TIMEOUT_S)
        except NotAccepted:
            return _Life.GONE
        except Interrupted:
            return _Life.DYING
        return _Life.DYING if answer.status == 503 else _Life.ALIVE

    def _decode(self, answer: Answer, job: SampleJob) -> completion.SampleAnswer:
        try:
            try:
                return completion.decode_answer(answer.body, job)
            except completion.MissingLogprobs as error:
                self.counts["missing_logprobs"] += 1
                if not self._zero_fill:
                    raise
                logger.warning("request %s: %s; zero-filled, as configured", job.request_id, error)
                return completion.decode_answer(answer.body, job, zero_fill=True)
        except completion.MalformedAnswer as error:
            self.counts["malformed"] += 1
            raise _server_failure(f"{error}; {_describe(answer)}") from error

    async def _reload(self, name: str, path: str, endpoint: Endpoint, deadline: float) -> None:
        """Tell a replica of an adapter it does not know; one load at a time per adapter, whoever needs it."""
        key = (endpoint.url, endpoint.generation, name)
        task = self._loading.get(key)
        if task is None:
            task = self._loading[key] = asyncio.create_task(self._load(name, path, endpoint))
            task.add_done_callback(lambda _: self._loading.pop(key, None))
        try:
            async with asyncio.timeout_at(deadline):
                await asyncio.shield(task)
        except TimeoutError as error:
            raise _server_failure(
                f"gave up after {self._deadline_s:g} s: adapter {name} is being loaded again"
            ) from error

    async def _load(self, name: str, path: str, endpoint: Endpoint) -> None:
        self.counts["adapter_reloads"] += 1
        body = msgspec.json.encode({"lora_name": name, "lora_path": path})
        try:
            answer = await self._transport.post(f"{endpoint.url}/v1/load_lora_adapter", body, self._headers, 60.0)
        except (NotAccepted, Interrupted) as error:
            logger.warning("adapter %s could not be loaded again: %s", name, error)
            return  # the sample is sent again, and finds out whether the server is back
        if answer.status == 200 or (answer.status == 400 and b"already been loaded" in answer.body):
            return
        if answer.status >= 500 and await self._life(endpoint) is not _Life.ALIVE:
            return
        raise _server_failure(f"the inference server lost adapter {name} and cannot load it again: {_describe(answer)}")

    async def probe(self) -> str | None:
        """Why the server cannot sample now; None when its /health answers 200."""
        endpoint = await self._endpoint.resolve()
        if endpoint is None:
            return "no inference server has been published"
        try:
            answer = await self._transport.get(f"{endpoint.url}/health", self._headers, HEALTH_TIMEOUT_S)
        except (NotAccepted, Interrupted) as error:
            return f"{endpoint.url} cannot be reached ({error})"
        return None if answer.status == 200 else _describe(answer)

    async def close(self) -> None:
        loads = list(self._loading.values())
        for load in loads:
            load.cancel()
        await asyncio.gather(*loads, return_exceptions=True)
        await self._transport.close()


def _server_failure(message: str) -> FailedRequest:
    return FailedRequest(message, ErrorCategory.SERVER)


def _message(answer: Answer) -> str:
    """vLLM's own sentence, with the parameter it names."""
    try:
        detail = msgspec.json.decode(answer.body, type=_ErrorBody).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _describe(answer)
    if isinstance(detail, str):
        return detail
    return f"{detail.param}: {detail.message}" if detail.param else detail.message or _describe(answer)


def _describe(answer: Answer) -> str:
    excerpt = answer.body[:BODY_EXCERPT].decode(errors="replace")
    return f"the inference server answered status {answer.status}, {answer.content_type}: {excerpt!r}"
