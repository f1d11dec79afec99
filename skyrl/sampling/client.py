"""The forwarding client: sends a request to vLLM, and sends it again when the connection or the server fails.

The API process uses it for forwarded samples and for OpenAI requests, the engine for colocated samples. Knows
exchanges, endpoints and answers; does not know futures, tenants or the database. docs/how-it-works/forwarding.md has
the failure rules as a table. In `ForwardingClient`, `sample` and `exchange` come first, then one try (`_try`), then the
handling of its answer (`_handle`). The pauses between tries are those of `retries`.

A job with several sequences and prompt logprobs becomes two requests: one for the prompt, one for the sequences. vLLM
repeats the prompt's rows in every choice: 16 sequences of a prompt of 2,000 tokens with 20 `topk_prompt_logprobs` are
57 MB of JSON in one answer, and 4 MB in two. In one request vLLM also computes the prompt once per sequence, because a
request for prompt logprobs does not use the prefix cache. The second of two requests finds the prompt in the cache.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from skyrl.base.types.weights import AdapterVersion
from skyrl.base.wire.results import add_prompt
from skyrl.http.answers import Answer
from skyrl.http.client import HttpClient
from skyrl.http.connection import Interrupted, NotAccepted
from skyrl.inference.adapter_host import AdapterHost, AdapterUnavailable
from skyrl.inference.metrics import AdapterMetrics
from skyrl.runtime.tracing import OpenSpan, current_trace
from skyrl.sampling import completion
from skyrl.sampling.adapter_probe import AdapterProbe
from skyrl.sampling.completion import SampleAnswer
from skyrl.sampling.exchanges import AnswerReader, Exchange, PictureExchange, PictureSends, SampleExchange
from skyrl.sampling.job import SampleJob
from skyrl.sampling.retries import (
    Attempts,
    CrashIsolation,
    Flights,
    Running,
    SampleWait,
    StaleWeightsRetry,
    Waits,
    backoff,
)
from skyrl.sampling.servers import (
    HEALTH_TIMEOUT_S,
    AdapterLoads,
    ContextNotKnownYet,
    CurrentWeightsCheck,
    Endpoint,
    EndpointResolver,
    EndpointUnknown,
    Health,
    OtherWeights,
    ServedContext,
    Verdict,
    describe,
    health_of,
    server_failure,
    verdict_of,
)
from skyrl.storage.db.pictures import PictureFiles


def is_apart(job: SampleJob) -> bool:
    """Whether a job becomes two requests. A greedy job does not, because it asks vLLM for one sequence."""
    return job.num_samples > 1 and not job.greedy and job.wants_prompt


def prompt_part(job: SampleJob) -> SampleJob:
    """The first request: the prompt's rows, and one token, because vLLM samples at least one; it is thrown away.

    Temperature and seed stay, because the draws of alternatives depend on them.
    """
    return replace(
        job, num_samples=1, max_tokens=1, stop_strings=[], stop_token_ids=[], ignore_eos=False, topk_sample=0
    )


def sequences_part(job: SampleJob) -> SampleJob:
    """The second request: the sequences. Seeds and stops stay, so they are the sequences of the whole job."""
    return replace(job, prompt_logprobs=False, prompt_logprobs_last_n=None, topk_prompt=0, target=None, alternatives=0)


def joined_answers(sequences: SampleAnswer, prompt: SampleAnswer) -> SampleAnswer:
    """The answer to the whole job. The prompt counts once, with the cached tokens of the first request. The second
    request finds the prompt in the cache only because of the first, so its cached tokens do not count; what it has
    computed nevertheless was computed again. A server that has found nothing may be one that does not report it."""
    again = sequences.computed_again
    if sequences.cached_tokens:
        again += sequences.prompt_tokens - sequences.cached_tokens
    body, upstream_s = add_prompt(sequences.body, prompt.body), sequences.upstream_s + prompt.upstream_s
    cached = prompt.cached_tokens
    return replace(sequences, body=body, cached_tokens=cached, upstream_s=upstream_s, computed_again=again)


MAX_INTERRUPTIONS = 3
"""One more interruption fails a sample, if no other suspect was sent at the same time."""
MAX_DEATHS = 1
"""Deaths of the engine while it computed no other request of this process. One is allowed: it may have had another
cause."""
MAX_ABORTS = 1
MAX_ERRORS = 1
"""Failures of a server that reports good health. One is allowed, because the server that failed may have been replaced
by the server that was asked."""
MAX_RELOADS = 2

T = TypeVar("T")


class _RouterStatus(msgspec.Struct):
    routable: int


_decode_router_status = msgspec.json.Decoder(_RouterStatus).decode


class ForwardingClient:
    """Samples through a vLLM-compatible server. `host` brings adapters to the server that the server does not know.
    `counts` has one counter per kind of event.

    `replicas` are the URLs of the servers behind skyrl's own router; the caller may change them. An answer of that
    router names the replica that it is about, and the client asks this replica for its health and loads adapters there.
    No other server is ever asked because an answer names it. Without `replicas` the client loads adapters at the
    endpoint, and skyrl's router passes a load on to all replicas.

    With `shares_keys` the endpoint is that router. For it, samples of one sampling session have one key: its replica
    then has their common prefix in its cache, and the router spreads them if the replica has much to do. Other routers
    do not spread one key; for them each sample has its own.

    `current_weights` tells whether weights are still current, on a server whose full weights are replaced while it
    serves. There an answer that began with other weights is given to nobody: the sample fails if its weights were
    replaced, and is sent again if the inference server does not have them yet.

    `pictures` has the files of jobs with pictures; None if there are no such jobs. `probe`: None for servers that skyrl
    runs.
    """

    def __init__(
        self,
        transport: HttpClient,
        endpoint: EndpointResolver,
        host: AdapterHost,
        *,
        api_key: str | None,
        deadline_s: float,
        zero_fill_logprobs: bool = False,
        replicas: Collection[str] = (),
        current_weights: CurrentWeightsCheck | None = None,
        shares_keys: bool = False,
        metrics: AdapterMetrics | None = None,
        pictures: PictureFiles | None = None,
        probe: AdapterProbe | None = None,
    ) -> None:
        self._transport = transport
        self._endpoint = endpoint
        self._deadline_s = deadline_s
        self._replicas = replicas
        self._shares_keys = shares_keys or bool(replicas)
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self.counts: Counter[str] = Counter()
        self._loads = AdapterLoads(transport, host, self._headers, self.counts, metrics, probe)
        self._versions = StaleWeightsRetry(current_weights, self.counts)
        self._context = ServedContext(transport, self._headers)
        self._waits = Waits(transport, self._headers, replicas, deadline_s)
        self._isolation = CrashIsolation()
        self._flights = Flights()
        self._reader = AnswerReader(self.counts, zero_fill=zero_fill_logprobs)
        self._pictures = None if pictures is None else PictureSends(pictures)
        self.running = Running()

    def sample(self, job: SampleJob, priority: int | None = None) -> Coroutine[Any, Any, completion.SampleAnswer]:
        """The encoded SampleResponse, with its token counts. The server runs samples of lower `priority` first.

        Raises FailedRequest: category user with vLLM's message, or category server with the last failure.
        """
        deadline = asyncio.get_running_loop().time() + self._deadline_s
        return (self._sample_apart if is_apart(job) else self._sample)(job, priority, deadline)

    async def _sample_apart(self, job: SampleJob, priority: int | None, deadline: float) -> completion.SampleAnswer:
        prompt = await self._sample(prompt_part(job), priority, deadline)
        sequences = await self._sample(sequences_part(job), priority, deadline)
        return joined_answers(sequences, prompt)

    def _sample(
        self, job: SampleJob, priority: int | None, deadline: float
    ) -> Coroutine[Any, Any, completion.SampleAnswer]:
        if job.pictures is None:
            return self._request(SampleExchange(job, priority, self._transport, self._context, self._reader), deadline)
        assert self._pictures is not None
        exchange = PictureExchange(job, priority, self._transport, self._context, self._reader, self._pictures)
        return self._request(exchange, deadline)

    async def exchange(self, exchange: Exchange[T]) -> T:
        """What the exchange reads from the server's answer. Raises FailedRequest, and what the exchange raises."""
        return await self._request(exchange, asyncio.get_running_loop().time() + self._deadline_s)

    def _request(self, exchange: Exchange[T], deadline: float) -> Coroutine[Any, Any, T]:
        """One request to the server, in the trace of the request that it is for. Returns the coroutine that does it,
        because every coroutine around another one costs each sample time."""
        key = exchange.shared_key if self._shares_keys else exchange.key
        headers = {**self._headers, "X-Session-ID": key, **exchange.headers}
        if (trace := current_trace.get()) is not None:
            return self._traced(exchange, headers, deadline, trace.child("forward", "client"))
        return self._repeated(exchange, headers, deadline)

    async def _traced(self, exchange: Exchange[T], headers: dict[str, str], deadline: float, span: OpenSpan) -> T:
        error = None
        try:
            return await self._repeated(exchange, headers | {"traceparent": span.context.traceparent}, deadline)
        except BaseException as raised:
            error = type(raised).__name__
            raise
        finally:
            model = str(exchange.weights)
            span.end({"gen_ai.operation.name": exchange.operation, "gen_ai.request.model": model}, error)

    async def _repeated(self, exchange: Exchange[T], headers: Mapping[str, str], deadline: float) -> T:
        """The request, repeated as the failure rules say."""
        attempts = Attempts(exchange, headers, deadline, backoff())
        self.running.add(attempts)
        try:
            while True:
                try:
                    endpoint = await self._endpoint.resolve(attempts.failed)
                except EndpointUnknown as error:
                    attempts.trouble = str(error)
                    endpoint = None
                if endpoint is None:
                    await self._waits.back_off(attempts)
                    continue
                attempt = self._try_as_suspect if attempts.is_suspect else self._try
                if (result := await attempt(attempts, endpoint)) is not None:
                    return result
        finally:
            self.running.remove(attempts)
            if attempts.is_suspect:
                self._isolation.remove(attempts.interruptions)

    async def _try_as_suspect(self, attempts: Attempts[T], endpoint: Endpoint) -> T | None:
        """`_try`, once it is this suspect's turn and the server is not dying of the suspect before."""
        attempts.wait_for(SampleWait.SUSPECTS, asyncio.get_running_loop().time())
        try:
            async with asyncio.timeout_at(attempts.deadline):
                attempts.sent_alone = await self._isolation.wait_turn(attempts.interruptions)
        except TimeoutError as error:
            raise self._waits.deadline_failure(attempts) from error
        try:
            await self._waits.wait_while_dying(endpoint, attempts)
            return await self._try(attempts, endpoint)
        finally:
            self._isolation.end_turn()

    async def _try(self, attempts: Attempts[T], endpoint: Endpoint) -> T | None:
        """Send the request once. The result, or None if the request must be sent again."""
        now = asyncio.get_running_loop().time
        remaining = attempts.deadline - now()
        if remaining <= 0:
            raise self._waits.deadline_failure(attempts)
        flight = self._flights.start()
        try:
            attempts.sent_at = now()
            try:
                answer = await attempts.exchange.send(endpoint, attempts.headers, remaining)
            finally:
                attempts.was_alone = self._flights.end(flight)
        except ContextNotKnownYet as error:
            return await self._handle(error.answer, endpoint, attempts)
        except NotAccepted as error:
            self.counts["not_accepted"] += 1
            attempts.reloads.clear()  # the next server at this address may be another one
            attempts.failed, attempts.trouble = endpoint, f"{endpoint.url} cannot be reached ({error})"
            await self._waits.back_off(attempts)
            return None
        except Interrupted as error:
            if attempts.backoff.waited and now() >= attempts.deadline:
                # The deadline ended this try early; the trouble before says more.
                raise self._waits.deadline_failure(attempts) from error
            self._count_interruption(attempts, str(error))
            attempts.failed, attempts.trouble = endpoint, f"no answer from {endpoint.url} ({error})"
            await self._waits.wait_out_death(endpoint, attempts)
            return None
        attempts.failed = None
        try:
            return await self._handle(answer, endpoint, attempts)
        finally:
            answer.release()

    async def _handle(self, answer: Answer, endpoint: Endpoint, attempts: Attempts[T]) -> T | None:
        """The result, or None if the request must be sent again."""
        server = self._answered_by(answer, endpoint)
        verdict = verdict_of(answer, has_adapter=isinstance(attempts.exchange.weights, AdapterVersion))
        match verdict:
            case Verdict.READ:
                try:
                    return await attempts.exchange.read(answer)
                except completion.AbortedAnswer as error:
                    self._count_abort(attempts, error)
                except OtherWeights as error:
                    attempts.trouble, waits_for = await self._versions.why_again(attempts.exchange.weights, error)
                    await self._waits.back_off(attempts, waits_for=waits_for)
            case Verdict.WAIT | Verdict.WAIT_LONGER:
                self.counts["upstream_busy" if answer.status == 429 else "upstream_away"] += 1
                busy = "the inference server answers 429, too many requests"
                attempts.trouble = busy if answer.status == 429 else describe(answer)
                waits_for = SampleWait.BUSY if answer.status == 429 else SampleWait.AWAY
                is_long = verdict is Verdict.WAIT_LONGER
                await self._waits.back_off(attempts, answer.retry_after_s or 0.0, waits_for, is_long=is_long)
            case Verdict.LOAD_ADAPTER:
                await self._load_adapter(answer, server, attempts)
            case Verdict.REFUSE:
                self.counts["refused"] += 1
                raise attempts.exchange.refusal(answer)
            case Verdict.FAIL:
                self.counts["upstream_error"] += 1
                raise server_failure(describe(answer))
            case Verdict.ASK_HEALTH:
                self.counts["upstream_error"] += 1
                await self._ask_health(answer, server, attempts)
            case Verdict.INTERRUPTED:
                self._count_interruption(attempts, describe(answer))
                attempts.trouble = describe(answer)
                await self._waits.wait_out_death(server, attempts)
        return None

    def _answered_by(self, answer: Answer, endpoint: Endpoint) -> Endpoint:
        """The replica that an answer is about, or the endpoint if the answer names none of the replicas."""
        named = answer.worker in self._replicas
        return Endpoint(answer.worker or "", endpoint.generation) if named else endpoint

    async def _load_adapter(self, answer: Answer, server: Endpoint, attempts: Attempts[Any]) -> None:
        adapter = attempts.exchange.weights
        assert isinstance(adapter, AdapterVersion)
        attempts.reloads[server] = reloads = attempts.reloads.get(server, 0) + 1
        if reloads > MAX_RELOADS:
            raise server_failure(
                f"the inference server loses adapter {adapter.name} again and again: {describe(answer)}"
            )
        attempts.wait_for(SampleWait.LOADING, asyncio.get_running_loop().time())
        try:
            async with asyncio.timeout_at(attempts.deadline):
                loaded = await self._loads.load(adapter, server)
        except TimeoutError as error:
            attempts.trouble = f"adapter {adapter.name} is being loaded again"
            raise self._waits.deadline_failure(attempts) from error
        except AdapterUnavailable as error:
            attempts.reloads[server] -= 1  # the server got no request to load
            attempts.trouble = str(error)
            await self._waits.back_off(attempts, waits_for=SampleWait.LOADING)
        else:
            if not loaded:
                attempts.reloads[server] -= 1  # it has not lost the adapter once more
                attempts.trouble = f"the inference server is away or dying, and has not loaded adapter {adapter.name}"
                await self._waits.wait_out_death(server, attempts)

    async def _ask_health(self, answer: Answer, server: Endpoint, attempts: Attempts[Any]) -> None:
        """After a 5xx: a dying server has interrupted the sample; a healthy one may fail it MAX_ERRORS times."""
        was_alone = attempts.was_alone
        health = await health_of(self._transport, server, self._headers)
        if health is not Health.ALIVE:
            self._count_interruption(attempts, describe(answer))
            if health is Health.DYING and was_alone:
                self._count_death(attempts, describe(answer))
            attempts.trouble = "the inference server is dying"
            await self._waits.wait_out_death(server, attempts)
            return
        attempts.errors += 1
        if attempts.errors > MAX_ERRORS:
            raise attempts.exchange.failure(answer)
        await self._waits.back_off(attempts)

    def _count_abort(self, attempts: Attempts[Any], error: completion.AbortedAnswer) -> None:
        self.counts["aborted"] += 1
        attempts.aborts += 1
        if attempts.aborts > MAX_ABORTS:
            raise server_failure(
                f"the inference server aborted the sample {attempts.aborts} times ({error})"
            ) from error

    def _count_death(self, attempts: Attempts[Any], reason: str) -> None:
        """A server that answers and has lost its engine. A server that is stopped or restarted breaks connections."""
        attempts.deaths += 1
        if attempts.deaths > MAX_DEATHS:
            raise server_failure(
                f"the inference server's engine died {attempts.deaths} times while it computed request "
                f"{attempts.exchange.request_id} and no other, so the request is not sent again; the log of the "
                f"inference server says why it died, and the kernel's log if it took too much memory ({reason})"
            )

    def _count_interruption(self, attempts: Attempts[Any], reason: str) -> None:
        self.counts["interrupted"] += 1
        if attempts.sent_alone and attempts.interruptions >= MAX_INTERRUPTIONS:
            raise server_failure(
                f"the connection to the inference server broke {attempts.interruptions + 1} times during this sample, "
                f"the last time when no other interrupted sample was sent ({reason})"
            )
        if attempts.is_suspect:
            self._isolation.remove(attempts.interruptions)
        attempts.interruptions += 1
        if attempts.is_suspect:
            self._isolation.add(attempts.interruptions)
        attempts.reloads.clear()

    async def probe(self) -> str | None:
        """Why the server cannot sample now; None if its /health answers 200."""
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

    async def replicas_in_use(self) -> int:
        """How many replicas skyrl's router sends samples to; 0 if the router does not answer."""
        try:
            endpoint = await self._endpoint.resolve()
            if endpoint is None:
                return 0
            answer = await self._transport.get(f"{endpoint.url}/statusz", self._headers, HEALTH_TIMEOUT_S)
            return _decode_router_status(answer.body).routable
        except (EndpointUnknown, NotAccepted, Interrupted, msgspec.DecodeError):
            return 0

    async def close(self) -> None:
        await self._loads.close()
        await self._transport.close()
        self._reader.close()
