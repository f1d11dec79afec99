"""The forwarding client: sends a sample job to vLLM, and sends it again when something goes wrong on the way.

The API process uses it for forwarded samples, the engine for colocated ones. Knows jobs, endpoints and answers; does
not know futures, tenants or the database. docs/how-it-works/forwarding.md has the failure rules as a table. Here
`sample` comes first, then one try (`_try`), then what follows from its answer (`_take`), and last the ways to wait.
"""

from __future__ import annotations

import asyncio
import logging
import random
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TypeVar

from skyrl.inference.adapter_host import AdapterHost, AdapterUnavailable
from skyrl.processes.backoff import Backoff
from skyrl.sampling import completion, prompt_apart
from skyrl.sampling.adapter_loads import AdapterLoads
from skyrl.sampling.answer_bound import answer_bound
from skyrl.sampling.attempts import Attempts
from skyrl.sampling.endpoint import Endpoint, EndpointResolver, EndpointUnknown
from skyrl.sampling.error_messages import describe, message_of, server_failure
from skyrl.sampling.health import HEALTH_TIMEOUT_S, Health, health_of
from skyrl.sampling.job import MAX_SAMPLED, SampleJob
from skyrl.sampling.served_context import ContextNotKnownYet, ServedContext
from skyrl.sampling.suspects import Suspects
from skyrl.sampling.transport import Answer, CompletionTransport, Interrupted, NotAccepted
from skyrl.sampling.verdict import Verdict, verdict_of
from skyrl.types.weights import AdapterVersion
from skyrl.wire.errors import ErrorCategory, FailedRequest

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 1.0
MAX_GATEWAY_BACKOFF_S = 5.0
"""After 502 and 504. A proxy answers these also for a sample that the server dies of, so the pauses are longer."""
MAX_RETRY_AFTER_S = 30.0
MAX_INTERRUPTIONS = 3
"""One interruption more fails a sample, if no other suspect was sent beside it."""
MAX_ABORTS = 1
MAX_ERRORS = 1
"""Failures of a server that says it is well: it may be the successor of the server that failed."""
MAX_RELOADS = 2
GIVE_WAY_S, USUAL_S = 0.0002, sys.getswitchinterval()
"""After how long a thread gives Python's lock back to another one that asks for it, in the whole process: while a large
answer is decoded, and otherwise."""

T = TypeVar("T")


def _giving_way(work: Callable[[], T]) -> T:
    """Run `work` with GIVE_WAY_S: the event loop gives the lock up at each system call, and would wait USUAL_S (5 ms)
    to get it again. Of two at a time the first to end sets USUAL_S for both, so GIVE_WAY_S never stays behind."""
    sys.setswitchinterval(GIVE_WAY_S)
    try:
        return work()
    finally:
        sys.setswitchinterval(USUAL_S)


class ForwardingClient:
    """Samples through a vLLM-compatible server. `host` brings adapters to it that it does not know. `counts` has one
    counter per kind of event."""

    def __init__(
        self,
        transport: CompletionTransport,
        endpoint: EndpointResolver,
        host: AdapterHost,
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
        self.counts: Counter[str] = Counter()
        self._loads = AdapterLoads(transport, host, self._headers, self.counts)
        self._context = ServedContext(transport, self._headers)
        self._suspects = Suspects()
        self._decoder = ThreadPoolExecutor(1, "answers")
        """One thread: decoding holds Python's lock most of the time, and the objects of one answer are enough."""

    async def sample(self, job: SampleJob, priority: int | None = None) -> completion.SampleAnswer:
        """The encoded SampleResponse, with its token counts. `priority` is for the server, which runs the lowest first.

        Raises FailedRequest with vLLM's message (user) or what went wrong (server).
        """
        deadline = asyncio.get_running_loop().time() + self._deadline_s
        if not prompt_apart.is_apart(job):
            return await self._ask(job, priority, deadline)
        prompt = await self._ask(prompt_apart.prompt_part(job), priority, deadline)
        sequences = await self._ask(prompt_apart.sequences_part(job), priority, deadline)
        return prompt_apart.joined(sequences, prompt)

    async def _ask(self, job: SampleJob, priority: int | None, deadline: float) -> completion.SampleAnswer:
        """One request to the server, sent as often as the failure rules say."""
        headers = {**self._headers, "X-Session-ID": job.session_key}
        attempts = Attempts(job, priority, headers, deadline, Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S, jitter=0.25))
        try:
            while True:
                try:
                    endpoint = await self._endpoint.resolve(attempts.failed)
                except EndpointUnknown as error:
                    attempts.trouble = str(error)
                    endpoint = None
                if endpoint is None:
                    await self._back_off(attempts)
                    continue
                attempt = self._try_in_turn if attempts.suspect else self._try
                if (result := await attempt(attempts, endpoint)) is not None:
                    return result
        finally:
            if attempts.suspect:
                self._suspects.remove(attempts.interruptions)

    async def _try_in_turn(self, attempts: Attempts, endpoint: Endpoint) -> completion.SampleAnswer | None:
        """`_try`, when it is this suspect's turn, and not while the server is dying of the one before."""
        try:
            async with asyncio.timeout_at(attempts.deadline):
                attempts.alone = await self._suspects.wait_turn(attempts.interruptions)
        except TimeoutError as error:
            raise self._gave_up(attempts) from error
        try:
            await self._while_dying(endpoint, attempts)
            return await self._try(attempts, endpoint)
        finally:
            self._suspects.end_turn()

    async def _try(self, attempts: Attempts, endpoint: Endpoint) -> completion.SampleAnswer | None:
        """Send it once. The result, or None when it is to be sent again."""
        now = asyncio.get_running_loop().time
        remaining = attempts.deadline - now()
        if remaining <= 0:
            raise self._gave_up(attempts)
        try:
            job, asked = attempts.job, attempts.body
            if asked is None:
                job = await self._fitting(job, endpoint, remaining)
                asked = completion.encode_request(job, attempts.priority)
            url, bound = endpoint.url + completion.PATH, answer_bound(job)
            answer = await self._transport.post(url, asked, attempts.headers, remaining, bound)
        except ContextNotKnownYet as error:
            return await self._take(error.answer, endpoint, attempts)
        except NotAccepted as error:
            self.counts["not_accepted"] += 1
            attempts.reloads = 0  # whoever listens next may be another server
            attempts.failed, attempts.trouble = endpoint, f"{endpoint.url} cannot be reached ({error})"
            await self._back_off(attempts)
            return None
        except Interrupted as error:
            if attempts.backoff.waited and now() >= attempts.deadline:
                # The last try was cut short; what was wrong before says more.
                raise self._gave_up(attempts) from error
            self._count_interruption(attempts, str(error))
            attempts.failed, attempts.trouble = endpoint, f"no answer from {endpoint.url} ({error})"
            await self._outlive(endpoint, attempts)
            return None
        attempts.failed = None
        try:
            return await self._take(answer, endpoint, attempts)
        finally:
            answer.release()

    async def _fitting(self, job: SampleJob, endpoint: Endpoint, timeout_s: float) -> SampleJob:
        """A job without `max_tokens`, with what fits this server, and its result the bound of one request."""
        room = await self._context.length(endpoint, timeout_s) - len(job.prompt)
        room = min(room, MAX_SAMPLED // (job.num_samples * (1 + job.topk_sample)))
        return replace(job, max_tokens=max(1, room))

    async def _take(self, answer: Answer, endpoint: Endpoint, attempts: Attempts) -> completion.SampleAnswer | None:
        """The result, or None when the request is to be sent again."""
        verdict = verdict_of(answer, has_adapter=isinstance(attempts.job.weights, AdapterVersion))
        match verdict:
            case Verdict.READ:
                return await self._read(answer, attempts)
            case Verdict.WAIT | Verdict.WAIT_LONGER:
                self.counts["upstream_busy" if answer.status == 429 else "upstream_away"] += 1
                busy = "the inference server answers 429, too many requests"
                attempts.trouble = busy if answer.status == 429 else describe(answer)
                asked_s = min(answer.retry_after_s or 0.0, MAX_RETRY_AFTER_S)
                longest_s = MAX_GATEWAY_BACKOFF_S if verdict is Verdict.WAIT_LONGER else None
                await self._back_off(attempts, asked_s, longest_s)
            case Verdict.LOAD_ADAPTER:
                await self._load_adapter(answer, endpoint, attempts)
            case Verdict.REFUSE:
                self.counts["refused"] += 1
                raise FailedRequest(message_of(answer), ErrorCategory.USER)
            case Verdict.FAIL:
                self.counts["upstream_error"] += 1
                raise server_failure(describe(answer))
            case Verdict.ASK_HEALTH:
                self.counts["upstream_error"] += 1
                await self._ask_health(answer, endpoint, attempts)
        return None

    async def _load_adapter(self, answer: Answer, endpoint: Endpoint, attempts: Attempts) -> None:
        adapter = attempts.job.weights
        assert isinstance(adapter, AdapterVersion)
        attempts.reloads += 1
        if attempts.reloads > MAX_RELOADS:
            raise server_failure(
                f"the inference server loses adapter {adapter.name} again and again: {describe(answer)}"
            )
        try:
            async with asyncio.timeout_at(attempts.deadline):
                await self._loads.load(adapter, endpoint)
        except TimeoutError as error:
            attempts.trouble = f"adapter {adapter.name} is being loaded again"
            raise self._gave_up(attempts) from error
        except AdapterUnavailable as error:
            attempts.reloads -= 1  # the server was not asked
            attempts.trouble = str(error)
            await self._back_off(attempts)

    async def _ask_health(self, answer: Answer, endpoint: Endpoint, attempts: Attempts) -> None:
        """A server that is dying interrupts the sample; one that is well may fail it once, not twice."""
        if await health_of(self._transport, endpoint, self._headers) is not Health.ALIVE:
            self._count_interruption(attempts, describe(answer))
            attempts.trouble = "the inference server is dying"
            await self._outlive(endpoint, attempts)
            return
        attempts.errors += 1
        if attempts.errors > MAX_ERRORS:
            raise server_failure(describe(answer))
        await self._back_off(attempts)

    async def _read(self, answer: Answer, attempts: Attempts) -> completion.SampleAnswer | None:
        """The result of a 2xx answer, or None when vLLM gave the sample up and it is to be sent again."""
        job = attempts.job
        if not answer.whole:
            self.counts["malformed"] += 1
            raise server_failure(
                "the inference server's answer is longer than what was asked for can be, or than one answer may be; "
                f"if it is a right one, ask for fewer samples in one request; {describe(answer)}"
            )
        try:
            try:
                return await self._decode(answer.body, job)
            except completion.MissingLogprobs as error:
                self.counts["missing_logprobs"] += 1
                if not self._zero_fill:
                    raise
                logger.warning("request %s: %s; zero-filled, as configured", job.request_id, error)
                return await self._decode(answer.body, job, zero_fill=True)
        except completion.AbortedAnswer as error:
            self.counts["aborted"] += 1
            attempts.aborts += 1
            if attempts.aborts > MAX_ABORTS:
                raise server_failure(
                    f"the inference server gave the sample up {attempts.aborts} times ({error})"
                ) from error
            return None
        except completion.MalformedAnswer as error:
            self.counts["malformed"] += 1
            raise server_failure(f"{error}; {describe(answer)}") from error

    async def _decode(self, body: bytes, job: SampleJob, *, zero_fill: bool = False) -> completion.SampleAnswer:
        if len(body) <= completion.LARGE_BYTES:
            return completion.decode_answer(body, job, zero_fill=zero_fill)
        decode = partial(completion.decode_answer, body, job, zero_fill=zero_fill)
        return await asyncio.get_running_loop().run_in_executor(self._decoder, _giving_way, decode)

    def _count_interruption(self, attempts: Attempts, what: str) -> None:
        self.counts["interrupted"] += 1
        if attempts.alone and attempts.interruptions >= MAX_INTERRUPTIONS:
            raise server_failure(
                f"the way to the inference server broke {attempts.interruptions + 1} times under this sample, at last "
                f"when it was sent apart from others like it ({what})"
            )
        if attempts.suspect:
            self._suspects.remove(attempts.interruptions)
        attempts.interruptions += 1
        if attempts.suspect:
            self._suspects.add(attempts.interruptions)
        attempts.reloads = 0

    async def _outlive(self, endpoint: Endpoint, attempts: Attempts) -> None:
        """Wait while a server is dying: what is sent to it now only dies with it.

        vLLM then fails everything in flight with 500 or a reset, turns unhealthy and is gone within about a second.
        """
        await self._back_off(attempts)
        await self._while_dying(endpoint, attempts)

    async def _while_dying(self, endpoint: Endpoint, attempts: Attempts) -> None:
        while await health_of(self._transport, endpoint, self._headers) is Health.DYING:
            await self._back_off(attempts)

    async def _back_off(self, attempts: Attempts, at_least_s: float = 0.0, longest_s: float | None = None) -> None:
        """Wait, longer each time, `at_least_s` this time, and the next time `longest_s` at most.

        Raises FailedRequest when the wait would end after the deadline.
        """
        wait_s = max(attempts.backoff.pause(longest_s), at_least_s * random.uniform(1.0, 1.25))
        if asyncio.get_running_loop().time() + wait_s > attempts.deadline:
            raise self._gave_up(attempts)
        await asyncio.sleep(wait_s)

    def _gave_up(self, attempts: Attempts) -> FailedRequest:
        return server_failure(f"gave up after {self._deadline_s:g} s: {attempts.trouble}")

    async def probe(self) -> str | None:
        """Why the server cannot sample now; None when its /health answers 200."""
        try:
            endpoint = await self._endpoint.resolve()
        except EndpointUnknown as error:
            return str(error)
        if endpoint is None:
            return "no inference server has been published"
        try:
            answer = await self._transport.get(f"{endpoint.url}/health", self._headers, HEALTH_TIMEOUT_S)
        except (NotAccepted, Interrupted) as error:
            return f"{endpoint.url} cannot be reached ({error})"
        return None if answer.status == 200 else describe(answer)

    async def close(self) -> None:
        await self._loads.close()
        await self._transport.close()
        self._decoder.shutdown(wait=False, cancel_futures=True)
