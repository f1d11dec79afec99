"""What the forwarding client knows of inference servers: what their answers mean, and each server's address, health,
context length, loaded adapters and weights.

`verdict_of` says which action follows from an answer's status, or from the one code of skyrl's router that says more
than its status; docs/how-it-works/forwarding.md has the table. The client counts how often a sample was sent, and may
fail a sample although the verdict is to send it again. `EngineEndpoint` reads the address that the engine has
published. `ServedContext` gives jobs without `max_tokens` a number that fits the server's context: vLLM reads null as
16 tokens. `AdapterLoads` loads an adapter into a server that has lost it, once for all samples that need it.
`CurrentWeightsCheck` tells whether full weights can still be sampled from, on a server whose weights are replaced while
it serves: the database says which are current, and each answer says which it has used.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import msgspec
from msgspec.structs import replace

from skyrl.base.types.weights import EVERYTHING, AdapterVersion, Scope, WeightsRef
from skyrl.base.wire.errors import ErrorCategory, FailedRequest
from skyrl.http.answers import Answer
from skyrl.http.client import HttpClient
from skyrl.http.connection import Interrupted, NotAccepted
from skyrl.inference import vllm_client
from skyrl.inference.adapter_host import ON_ITS_WAY_S, AdapterHost, AdapterLost, AdapterMissing, AdapterUnavailable
from skyrl.inference.metrics import AdapterMetrics, Load
from skyrl.sampling.adapter_probe import AdapterProbe
from skyrl.sampling.job import MAX_SAMPLED, SampleJob
from skyrl.storage.db import full_weights
from skyrl.storage.db.database import Database
from skyrl.storage.db.engine_state import EngineState
from skyrl.storage.db.faults import DatabaseError, is_transient, reason
from skyrl.storage.db.full_weights import WeightsReplaced, replaced_sentence

BODY_EXCERPT = 200


class ErrorDetail(msgspec.Struct):
    """An error as vLLM and skyrl's router write it."""

    message: str = ""
    param: str | None = None
    code: str | int | None = None


class _ErrorBody(msgspec.Struct):
    error: ErrorDetail | str


_decode_error = msgspec.json.Decoder(_ErrorBody).decode


def server_failure(message: str) -> FailedRequest:
    return FailedRequest(message, ErrorCategory.SERVER)


def error_in(answer: Answer) -> ErrorDetail:
    """The error of an answer; the message describes an answer that has none."""
    try:
        error = _decode_error(answer.body).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ErrorDetail(describe(answer))
    if isinstance(error, str):
        return ErrorDetail(error)
    return error if error.message else replace(error, message=describe(answer))


def message_of(answer: Answer) -> str:
    """vLLM's own sentence, with the parameter that it names."""
    error = error_in(answer)
    return f"{error.param}: {error.message}" if error.param else error.message


def describe(answer: Answer) -> str:
    excerpt = answer.body[:BODY_EXCERPT].decode(errors="replace")
    return f"the inference server answered status {answer.status}, {answer.content_type}: {excerpt!r}"


class Verdict(Enum):
    """The action that follows from an answer."""

    READ = "the answer is a completion: decode it"
    WAIT = "the server, or a proxy before it, does not take the sample now: wait, and send the sample again"
    WAIT_LONGER = "a proxy got no answer from the server: wait, longer than for WAIT, and send the sample again"
    INTERRUPTED = "the replica behind the router broke off: count an interruption, and send the sample again"
    LOAD_ADAPTER = "the server does not know the adapter: load the adapter, and send the sample again"
    REFUSE = "the sample cannot be computed as it was asked for: fail it, category user"
    ASK_HEALTH = "the server failed: ask its /health whether it is dying, and send the sample again"
    FAIL = "sending the sample again would not help: fail it, category server"


_BY_STATUS = {
    401: Verdict.FAIL,
    403: Verdict.FAIL,
    405: Verdict.FAIL,
    408: Verdict.WAIT,
    429: Verdict.WAIT,
    502: Verdict.WAIT_LONGER,
    503: Verdict.WAIT,
    504: Verdict.WAIT_LONGER,
}


WORKER_INTERRUPTED = "worker_interrupted"
"""The code of skyrl's router for a request that a replica may have processed, and did not answer."""


def verdict_of(answer: Answer, *, has_adapter: bool) -> Verdict:
    """`has_adapter`: whether the sample needs an adapter, which the server may have lost."""
    status = answer.status
    if 200 <= status < 300:
        return Verdict.READ
    if status == 404 and has_adapter:
        return Verdict.LOAD_ADAPTER
    if status == 502 and error_in(answer).code == WORKER_INTERRUPTED:
        return Verdict.INTERRUPTED
    if (verdict := _BY_STATUS.get(status)) is not None:
        return verdict
    if status >= 500:
        return Verdict.ASK_HEALTH
    return Verdict.REFUSE if status >= 400 else Verdict.FAIL


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A base URL without a trailing slash. `generation` distinguishes endpoints published at the same URL."""

    url: str
    generation: int


class EndpointUnknown(Exception):
    """The address cannot be looked up now. The text gives the reason, without secrets: tenants read it."""


class EndpointResolver(Protocol):
    """`resolve()` for each sample, `resolve(stale=endpoint)` after that endpoint failed. Raises EndpointUnknown."""

    async def resolve(self, stale: Endpoint | None = None) -> Endpoint | None: ...


class FixedEndpoint:
    """An inference server that skyrl does not manage. Its address never changes."""

    def __init__(self, url: str) -> None:
        self._endpoint = Endpoint(url.rstrip("/"), 0)

    async def resolve(self, stale: Endpoint | None = None) -> Endpoint | None:
        return self._endpoint


class EngineEndpoint:
    """The address in the engine's row, cached. As long as the endpoint works, the cache is read without a lock. After a
    failure one caller reads the row again for all callers that wait."""

    def __init__(self, read: Callable[[], Awaitable[EngineState]]) -> None:
        self._read = read
        self._lock = asyncio.Lock()
        self._cached: Endpoint | None = None
        self._reads = 0
        self._away = False
        """Whether the last read failed because the database is away."""

    async def resolve(self, stale: Endpoint | None = None) -> Endpoint | None:
        """The endpoint, None while none is published. If the endpoint `stale` has just failed, the row is read again;
        the same endpoint is returned only if the row still has it.

        Raises EndpointUnknown while the database is away.
        """
        cached, reads = self._cached, self._reads
        if cached is not None and cached is not stale:
            return cached
        async with self._lock:
            # Another caller may have read the row while this one waited for the lock, also if no URL is published.
            if self._reads == reads or (self._cached is not None and self._cached is stale and not self._away):
                await self._refresh()
            if self._away:
                raise EndpointUnknown("the server's database cannot be used now")
            return self._cached

    async def _refresh(self) -> None:
        try:
            state = await self._read()
        except DatabaseError as error:
            if not is_transient(error):
                raise
            if not self._away:
                logger.error("samples wait: the inference server's address cannot be read: %s", reason(error))
            self._away = True
        else:
            self._away = False
            url = state.inference_proxy_url
            self._cached = None if url is None else Endpoint(url.rstrip("/"), state.generation)
        self._reads += 1


HEALTH_TIMEOUT_S = 5.0


class Health(Enum):
    """DYING: /health answers 503, or breaks off. GONE: the server cannot be reached. ALIVE: any other answer, so also a
    404 of a server without /health."""

    ALIVE = "alive"
    DYING = "dying"
    GONE = "gone"


async def health_of(transport: HttpClient, endpoint: Endpoint, headers: Mapping[str, str]) -> Health:
    try:
        answer = await transport.get(f"{endpoint.url}/health", headers, HEALTH_TIMEOUT_S)
    except NotAccepted:
        return Health.GONE
    except Interrupted:
        return Health.DYING
    return Health.DYING if answer.status == 503 else Health.ALIVE


class Span(msgspec.Struct, frozen=True):
    """Output tokens [start, end) were sampled by the weights of this version."""

    version: str
    start: int
    end: int


class OtherWeights(Exception):
    """An answer began with other weights than the ones that were asked for. Nobody may get it. `versions` began it;
    none are known if the server does not tell."""

    def __init__(self, versions: Iterable[str]) -> None:
        self.versions = sorted(set(versions))
        super().__init__(
            f"the answer began with the weights {', '.join(self.versions) or 'that the server did not tell'}"
        )


NOT_TOLD = msgspec.Raw(b"null")
_decode_spans = msgspec.json.Decoder(list[Span] | None).decode


def spans_in(told: msgspec.Raw) -> list[Span] | None:
    """What a choice tells of its versions; None if it tells nothing that can be read. Servers that never change their
    weights may have another field of this name."""
    try:
        return _decode_spans(told)
    except msgspec.DecodeError:
        return None


def check_began(spans: Iterable[list[Span] | None], wanted: str) -> None:
    """Raise OtherWeights unless one of an answer's sequences began with the wanted version.

    The sequences of a request begin one after another. If the weights change in between, the later ones begin with the
    new version, as the later tokens of the earlier ones do."""
    first = [of_sequence[0].version for of_sequence in spans if of_sequence]
    if wanted not in first:
        raise OtherWeights(first)


class CurrentWeightsCheck:
    """Reads the database at each call. `scope`: the names of the base model (`BaseModelSlot.own`)."""

    def __init__(self, database: Database, scope: Scope = EVERYTHING) -> None:
        self._database = database
        self._scope = scope

    async def replaced(self, weights: WeightsRef) -> str | None:
        """Why nobody can sample from `weights` any more; None if they are current."""
        now = await self._database.read_async(lambda c: full_weights.current(c, self._scope))
        return None if weights == now else replaced_sentence(weights, now)

    async def check(self, weights: WeightsRef, field: str) -> None:
        """Raises WeightsReplaced, naming `field`."""
        if (sentence := await self.replaced(weights)) is not None:
            raise WeightsReplaced(sentence, field=field)


MODELS_BYTES = 16 * 2**20
"""The largest list of models that is read: some 25,000 loaded adapters."""
_RETRY = (Verdict.WAIT, Verdict.WAIT_LONGER, Verdict.ASK_HEALTH, Verdict.INTERRUPTED)


class ContextNotKnownYet(Exception):
    """The server, or a proxy before the server, did not send the list of models now. The client handles `answer`
    like an answer to a sample."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(f"/v1/models answered status {answer.status}")
        self.answer = answer


class _Model(msgspec.Struct):
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class ServedContext:
    """Remembers the context length of each endpoint."""

    def __init__(self, transport: HttpClient, headers: dict[str, str]) -> None:
        self._transport = transport
        self._headers = headers
        self._lengths: dict[Endpoint, int] = {}

    async def with_max_tokens(self, job: SampleJob, endpoint: Endpoint, timeout_s: float) -> SampleJob:
        """The job with the largest `max_tokens` that fits after its prompt and under the bound MAX_SAMPLED.

        Raises NotAccepted, Interrupted, ContextNotKnownYet, FailedRequest.
        """
        if endpoint not in self._lengths:
            self._lengths[endpoint] = await self._ask_length(endpoint, timeout_s)
        fitting = self._lengths[endpoint] - len(job.prompt)
        fitting = min(fitting, MAX_SAMPLED // (job.num_samples * (1 + job.topk_sample)))
        return replace(job, max_tokens=max(1, fitting))

    async def _ask_length(self, endpoint: Endpoint, timeout_s: float) -> int:
        """In tokens, prompt included."""
        answer = await self._transport.get(f"{endpoint.url}/v1/models", self._headers, timeout_s, MODELS_BYTES)
        if verdict_of(answer, has_adapter=False) in _RETRY:
            raise ContextNotKnownYet(answer)
        try:
            models = msgspec.json.decode(answer.body, type=_Models).data
        except (msgspec.DecodeError, UnicodeDecodeError):
            models = []
        finally:
            answer.release()
        known = [model.max_model_len for model in models if model.max_model_len is not None]
        if not known:
            raise FailedRequest(
                "sampling_params.max_tokens: the inference server does not say how many tokens fit "
                f"(/v1/models: status {answer.status}); give a number",
                ErrorCategory.USER,
            )
        return max(known)


LOAD_TIMEOUT_S = 60.0
IN_STORE_S = 120.0
"""How long an adapter may be missing in the checkpoint store: an engine that was killed in the moment before it had put
it there does so when it starts again."""


class AdapterLoads:
    """One load at a time per adapter and server; all samples that need the adapter wait for the same load. `host`
    brings the files to the server. Each that a server has done counts as `adapter_reloads`."""

    def __init__(
        self,
        transport: HttpClient,
        host: AdapterHost,
        headers: Mapping[str, str],
        counts: Counter[str],
        metrics: AdapterMetrics | None = None,
        probe: AdapterProbe | None = None,
    ) -> None:
        """`probe`: finds out whether servers use adapters at all; None for servers that skyrl runs."""
        self._transport = transport
        self._probe = probe
        self._host = host
        self._headers = headers
        self._counts = counts
        self._metrics = metrics or AdapterMetrics()
        self._loading: dict[tuple[str, int, str], asyncio.Task[bool]] = {}
        self._not_found: dict[str, float] = {}
        """By adapter that a server did not find: when it was first asked, in monotonic seconds."""

    async def load(self, adapter: AdapterVersion, endpoint: Endpoint) -> bool:
        """Whether the adapter is loaded; if not, the server cannot be reached or is dying.

        Raises FailedRequest if the server refuses the load, with the server's answer, or if the adapter's files are
        missing. Raises AdapterUnavailable if the files cannot be brought to the server now. If one caller is cancelled,
        the load goes on for the others.
        """
        key = (endpoint.url, endpoint.generation, adapter.name)
        task = self._loading.get(key)
        if task is None:
            task = self._loading[key] = asyncio.create_task(self._load(adapter, endpoint))
            task.add_done_callback(lambda _: self._loading.pop(key, None))
        return await asyncio.shield(task)

    async def _load(self, adapter: AdapterVersion, endpoint: Endpoint) -> bool:
        with self._metrics.load() as load:
            return await self._bring_and_load(adapter, endpoint, load)

    async def _bring_and_load(self, adapter: AdapterVersion, endpoint: Endpoint, load: Load) -> bool:
        failure = f"the inference server lost adapter {adapter.name} and cannot load it again"
        try:
            directory = await self._host.bring(adapter)
        except AdapterLost as error:
            raise FailedRequest(error.sentence, ErrorCategory.USER) from error
        except AdapterMissing as error:
            raise server_failure(f"{failure}: {error}") from error
        except AdapterUnavailable as error:
            logger.warning("%s; samples from it wait (%s)", error, error.reason)
            raise
        if self._probe is not None and await self._probe.ignored(endpoint.url, directory):
            raise server_failure(
                f"the inference server takes adapters such as {adapter.name}, and samples the base model with them: "
                "its layers have other names than the trainer's. Run it with skyrl's plugin, or serve the same files"
            )
        body = msgspec.json.encode(vllm_client.load_request(adapter.name, directory))
        try:
            answer = await self._transport.post(endpoint.url + vllm_client.PATH, body, self._headers, LOAD_TIMEOUT_S)
        except (NotAccepted, Interrupted) as error:
            logger.warning("adapter %s could not be loaded again: %s", adapter.name, error)
            return False
        load.ok = vllm_client.is_loaded(answer.status, answer.body)
        if load.ok:
            self._not_found.pop(adapter.name, None)
            self._counts["adapter_reloads"] += answer.status == 200  # else the engine was loading it meanwhile
            return True
        missing = vllm_client.is_missing(answer.status, answer.body)
        if missing and not self._may_come(adapter.name, IN_STORE_S):
            raise server_failure(f"{failure}: {AdapterMissing(adapter)}")
        again = missing or vllm_client.is_to_repeat(answer.status, answer.body)
        if again or (self._probe is not None and answer.status == 404 and self._may_come(adapter.name, ON_ITS_WAY_S)):
            error = AdapterUnavailable(adapter, RuntimeError(describe(answer)))
            logger.warning("%s; samples from it wait (%s)", error, error.reason)
            raise error
        if answer.status >= 500 and await health_of(self._transport, endpoint, self._headers) is not Health.ALIVE:
            return False
        raise server_failure(f"{failure}: {describe(answer)}")

    def _may_come(self, name: str, within_s: float) -> bool:
        """Whether the server may find the files later: the training server puts them on its disk, or into the
        checkpoint store, after it has answered (`skyrl.storage.checkpoint_store.held`)."""
        now = time.monotonic()
        self._not_found = {each: at for each, at in self._not_found.items() if at > now - 2 * IN_STORE_S}
        return self._not_found.setdefault(name, now) > now - within_s

    async def close(self) -> None:
        loads = list(self._loading.values())
        for load in loads:
            load.cancel()
        await asyncio.gather(*loads, return_exceptions=True)
