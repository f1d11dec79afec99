"""The forwarding client's rule for each kind of failure, over real sockets, against a scripted upstream.

`CASES` is the table of the rules: what the server answers, and what becomes of the sample. Tests of their own have what
takes turns: addresses that change, servers that come back, deadlines."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
from adapter_hosts import HostWithAllAdapters, UnreachableHost
from fake_upstream import (
    FakeUpstream,
    Received,
    Reply,
    after,
    close_mid_body,
    closed_port,
    complete,
    completion,
    error,
    every_choice,
    fake_upstream,
    hang_up,
    never,
    reply,
    reset_after_headers,
)
from loop_clock import LoopClock

from skyrl.base.types.weights import AdapterVersion
from skyrl.base.wire import tinker_pb2 as pb
from skyrl.base.wire.errors import ErrorCategory, FailedRequest
from skyrl.http.client import HttpClient
from skyrl.inference.remote.references import NOT_STORED, STORE_AWAY
from skyrl.sampling import retries, servers
from skyrl.sampling.client import MAX_INTERRUPTIONS, MAX_RELOADS, ForwardingClient
from skyrl.sampling.completion import SampleAnswer
from skyrl.sampling.job import MAX_SAMPLED, SampleJob
from skyrl.sampling.servers import EngineEndpoint, FixedEndpoint
from skyrl.storage.db.engine_state import EngineState
from tests.sample_jobs import JOB

ADAPTER = msgspec.structs.replace(JOB, model="m1@1", weights=AdapterVersion("m1@1"))


class EngineRow:
    """The engine's row, as the client reads it."""

    def __init__(self, url: str | None) -> None:
        self.state = EngineState(inference_proxy_url=url, generation=1)
        self.reads = 0
        self._read = asyncio.Event()

    async def __call__(self) -> EngineState:
        self.reads += 1
        self._read.set()
        return self.state

    def publish(self, url: str | None) -> None:
        self.state = EngineState(inference_proxy_url=url, generation=self.state.generation + 1)

    async def read_again(self, times: int = 1) -> None:
        async with asyncio.timeout(60):
            for _ in range(times):
                self._read.clear()
                await self._read.wait()


@pytest.fixture
async def upstream() -> AsyncIterator[FakeUpstream]:
    async with fake_upstream() as server:
        yield server


@pytest.fixture
def row(upstream: FakeUpstream) -> EngineRow:
    return EngineRow(upstream.url)


Connect = Callable[..., ForwardingClient]
DEADLINE_S = 20.0


@pytest.fixture
async def connect(row: EngineRow) -> AsyncIterator[Connect]:
    """Makes clients and closes them at the end."""
    async with contextlib.AsyncExitStack() as stack:

        def make(deadline_s: float = DEADLINE_S, **options: Any) -> ForwardingClient:
            client = ForwardingClient(
                HttpClient(),
                options.pop("endpoint", EngineEndpoint(row)),
                options.pop("host", HostWithAllAdapters()),
                api_key="key",
                deadline_s=deadline_s,
                **options,
            )
            stack.push_async_callback(client.close)
            return client

        yield make


@pytest.fixture
def client(connect: Connect) -> ForwardingClient:
    return connect()


@pytest.fixture
async def clock() -> LoopClock:
    return LoopClock()


def decoded(answer: SampleAnswer) -> list[tuple[str, list[int], list[float]]]:
    """(stop reason, tokens, logprobs) of each sequence."""
    sequences = pb.SampleResponse.FromString(answer.body).sequences
    return [
        (
            pb.StopReason.Name(sequence.stop_reason),
            np.frombuffer(sequence.tokens, np.int32).tolist(),
            np.frombuffer(sequence.logprobs, np.float32).tolist(),
        )
        for sequence in sequences
    ]


WHOLE = [("LENGTH", [0, 1, 2], [-1.0, -2.0, -3.0])]


async def failure(client: ForwardingClient, job: SampleJob = JOB) -> FailedRequest:
    with pytest.raises(FailedRequest) as caught:
        await client.sample(job)
    return caught.value


OPEN = msgspec.structs.replace(JOB, max_tokens=None)


DEAD_ENGINE = error(500, "EngineCore encountered an issue. See stack trace (above) for the root cause.")
UNKNOWN_ADAPTER = error(404, "The model `m1@1` does not exist.", "model")
RESTARTING = "<html>restarting"


def models(*lengths: int | None) -> Reply:
    """The list of served models. Adapters have no max_model_len."""
    return reply(200, {"object": "list", "data": [{"id": f"m{i}", "max_model_len": n} for i, n in enumerate(lengths)]})


def aborted_last(body: dict[str, Any]) -> None:
    """The other choices may lack their logprobs, as those of an aborted request may."""
    every_choice(logprobs=None)(body)
    body["choices"][-1]["finish_reason"] = "abort"


def no_ids_at_last(body: dict[str, Any]) -> None:
    every_choice(logprobs=None)(body)
    body["choices"][-1]["token_ids"] = None


@dataclass(frozen=True)
class Case:
    """The server answers with `answers`, one after the other, then with `default`; and to a load with `on_load`. The
    sample fails with `error`, or has `result`; `sent` completions and `loads` are asked for."""

    name: str
    answers: Sequence[Reply] = ()
    default: Reply | None = None
    error: ErrorCategory | None = None
    says: tuple[str, ...] = ()
    result: Any = field(default_factory=lambda: WHOLE)
    counts: dict[str, int] | None = None
    sent: int | None = None
    job: SampleJob = JOB
    on_get: Reply | None = None
    on_load: Reply | None = None
    loads: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    no_time: bool = False
    """The first back-off is longer than the deadline of a sample."""


SERVER, USER = ErrorCategory.SERVER, ErrorCategory.USER
FILLING = {"zero_fill_logprobs": True}
ZEROS = [("LENGTH", [0, 1, 2], [0.0, 0.0, 0.0])]
THREE = [[0, 1, 2], [1, 2, 3], [2, 3, 4]]
GONE = reply(404, {"error": {"message": "no", "type": NOT_STORED, "code": 404}})
LATE, NEVER = {"host": UnreachableHost(times=MAX_RELOADS + 2)}, {"host": UnreachableHost()}
NOT_NOW = "the files of adapter m1@1 cannot be brought to the inference server now"
job = partial(msgspec.structs.replace, JOB)


def fails(name: str, default: Reply, *says: str, error: ErrorCategory = SERVER, **more: Any) -> Case:
    return Case(name, default=default, error=error, says=says, **more)


def refused(name: str, answer: Reply, says: str) -> Case:
    """A 4xx is the user's error, in the inference server's words."""
    return fails(name, answer, says, error=USER, counts={"refused": 1}, sent=1)


BREAKS: tuple[Any, ...] = (reset_after_headers, close_mid_body, hang_up)
NO_LOGPROBS = complete(every_choice(logprobs=None))
ABORTED = complete(every_choice(finish_reason="abort"))
MALFORMED: dict[str, Any] = {"counts": {"malformed": 1}, "sent": 1}
GAVE_UP = "gave up after 20 s: "

CASES = [
    # The connection broke after the request was sent: repeat once, then up to three more times, at last without others.
    *(
        Case(f"{broken.__name__}-{times}", [broken] * times, counts={"interrupted": times}, sent=times + 1)
        for broken in BREAKS
        for times in range(1, MAX_INTERRUPTIONS + 1)
    ),
    *(
        fails(each.__name__, each, "broke 4 times during this sample, the last time when no other inter", sent=4)
        for each in BREAKS
    ),
    # A 2xx answer without a whole completion; tests/unit/sampling/test_completion_codec.py has all kinds of those
    fails("login", reply(200, "<html>Log in</html>", "text/html"), "status 200, text/html: '<html>Log", **MALFORMED),
    fails("no-utf-8", reply(200, b'{"choices": "\xff"}'), "not a completion", "status 200", **MALFORMED),
    fails("no-content", reply(204, ""), "status 204", **MALFORMED),
    fails("no-ids", complete(every_choice(token_ids=None)), "no token_ids; ", "status 200, appl", **MALFORMED),
    # Its finish_reason; of several choices one is enough
    Case("aborted", [ABORTED], counts={"aborted": 1}, sent=2),
    fails("aborted-twice", ABORTED, "aborted the sample 2 times (finish_reason 'abort')", sent=2),
    Case("one-aborted", [complete(aborted_last)], job=job(num_samples=3), result=THREE, counts={"aborted": 1}),
    Case("stop", default=complete(every_choice(finish_reason="stop")), result=[("STOP", *WHOLE[0][1:])]),
    # Missing logprobs
    fails("no-logprobs", NO_LOGPROBS, "logprob", "status 200", sent=1),
    Case("filled", default=NO_LOGPROBS, options=FILLING, result=ZEROS, counts={"missing_logprobs": 1}),
    fails("no-ids-filling", complete(no_ids_at_last), "no token_ids; ", job=job(num_samples=2), options=FILLING),
    # 4xx: the user's error; 401, 403 and 405 are the server's
    refused("too-long", error(400, "This model's maximum context length is 9", "input_tokens"), "input_tokens: This m"),
    refused("no-param", error(422, "max_tokens must be at least 1"), "max_tokens must be at least 1"),
    refused("error-as-text", reply(400, {"error": "stop: too many"}), "stop: too many"),
    refused("no-model", error(404, "The model `base` does not exist.", "model"), "model: The model `base` does not"),
    refused("no-json", reply(413, "large", "text/plain"), "the inference server answered status 413, text/plain: 'l"),
    refused("refusal-no-utf-8", reply(400, b'{"error": "\xff"}'), "status 400, application/json"),
    *(fails(str(status), error(status, "no"), f"status {status}", sent=1) for status in (401, 403, 405)),
    # 5xx and redirects: the server's error
    *(
        fails(str(status), reply(status, "x" * 999), f"status {status}", counts={"upstream_error": 2}, sent=2)
        for status in (500, 501, 507)
    ),
    # The client reads the 500 of the dead server late. The next server at the same address is healthy.
    Case("replaced-after-its-500", [DEAD_ENGINE], counts={"upstream_error": 1}),
    fails("redirect", reply(307, "elsewhere", Location="/v1/elsewhere"), "status 307", sent=1),
    # 429; Retry-After may be neither a number nor a date
    fails("busy", reply(429, "", Retry_After="100"), f"{GAVE_UP}the inference server answers 429", sent=1),
    fails("busy-2", reply(429, "", Retry_After="soon"), f"{GAVE_UP}the inference server answers 429", no_time=True),
    # Unknown adapters. Another process may have loaded one meanwhile; the base model is none.
    Case("loaded-already", [UNKNOWN_ADAPTER], job=ADAPTER, on_load=error(400, "has already been loaded"), loads=1),
    *(
        fails(
            f"load-{status}", UNKNOWN_ADAPTER, "lost adapter m1@1 and cannot load it again", "No adapter found",
            job=ADAPTER, on_load=error(status, "No adapter found for /adapters/m1/v1"), sent=1, loads=1,
        )
        for status in (400, 404, 500)
    ),
    fails(
        "not-yet-in-the-store", UNKNOWN_ADAPTER, f"{GAVE_UP}{NOT_NOW}",
        job=ADAPTER, on_load=GONE, loads=1, no_time=True,
    ),
    # Bringing the files fails more often than MAX_RELOADS allows, but only loads on the server are counted.
    Case("files-come-late", [UNKNOWN_ADAPTER] * (MAX_RELOADS + 3), job=ADAPTER, options=LATE, loads=1),
    # The message does not name the operator's addresses.
    fails("files-never-come", UNKNOWN_ADAPTER, f"{GAVE_UP}{NOT_NOW}", job=ADAPTER, options=NEVER, no_time=True),
    fails("lost-always", UNKNOWN_ADAPTER, "loses adapter m1@1 again and again", job=ADAPTER, loads=MAX_RELOADS),
    # Each next server needs the adapter loaded again.
    Case("next-servers", [UNKNOWN_ADAPTER, hang_up] * MAX_INTERRUPTIONS, job=ADAPTER, loads=MAX_INTERRUPTIONS),
    Case("dies-during-a-load", [UNKNOWN_ADAPTER], job=ADAPTER, on_load=hang_up, loads=1),
    # Without max_tokens: the server must say how long its context is
    *(
        fails(name, complete(), "sampling_params.max_tokens: ", error=USER, job=OPEN, on_get=answer, sent=0)
        for name, answer in (
            ("no-context", models(None)),
            ("no-models", models()),
            ("models-404", reply(404, "no")),
            ("models-html", reply(200, "<html>", "text/html")),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_the_rule_of(
    case: Case, connect: Connect, upstream: FakeUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case.no_time:
        monkeypatch.setattr(retries, "FIRST_BACKOFF_S", 10 * DEADLINE_S)
    client = connect(**case.options)
    upstream.script += case.answers
    upstream.default = case.default or upstream.default
    upstream.on_get = case.on_get or upstream.on_get
    upstream.on_load = case.on_load or upstream.on_load
    if case.error is None:
        found = decoded(await client.sample(case.job))
        assert found == case.result or [tokens for _, tokens, _ in found] == case.result
    else:
        failed = await failure(client, case.job)
        assert failed.category is case.error
        assert [words for words in case.says if words not in failed.message] == [], failed.message
        assert len(failed.message) < 400
    if case.counts is not None:
        assert client.counts == case.counts
    if case.sent is not None:
        assert len(upstream.completions) == case.sent
    assert len(upstream.loads) == case.loads
    assert len({request.body for request in upstream.completions}) <= 1, "a request is sent again as it was"


async def test_a_completion_is_requested_and_decoded(client: ForwardingClient, upstream: FakeUpstream) -> None:
    assert decoded(await client.sample(JOB)) == WHOLE
    (request,) = upstream.completions
    assert request.method == "POST"
    assert request.headers["authorization"] == "Bearer key"
    assert request.headers["x-session-id"] == "s1:sample:0:1"
    assert request.json["model"] == "base"
    assert request.json["prompt"] == [5, 6, 7]
    assert request.json["stream"] is False
    assert not client.counts


async def test_the_endpoint_is_read_once_while_it_works(client: ForwardingClient, row: EngineRow) -> None:
    await asyncio.gather(*(client.sample(JOB) for _ in range(20)))
    await client.sample(JOB)
    assert row.reads == 1


async def test_a_refused_sample_waits_for_the_next_url(
    client: ForwardingClient, upstream: FakeUpstream, row: EngineRow
) -> None:
    row.publish(closed_port())
    sample = asyncio.create_task(client.sample(JOB))
    await row.read_again(3)
    assert not sample.done()
    row.publish(upstream.url)
    assert decoded(await sample) == WHOLE
    assert len(upstream.completions) == 1
    assert client.counts["not_accepted"] >= 2
    assert client.counts["interrupted"] == 0


async def test_every_waiting_sample_moves_to_the_next_url(
    client: ForwardingClient, upstream: FakeUpstream, row: EngineRow
) -> None:
    async with fake_upstream() as old:
        row.publish(old.url)
        await client.sample(JOB)
    samples = [asyncio.create_task(client.sample(JOB)) for _ in range(20)]
    await row.read_again(2)
    row.publish(upstream.url)
    assert [decoded(sample) for sample in await asyncio.gather(*samples)] == [WHOLE] * 20
    assert len(upstream.completions) == 20


async def test_a_sample_waits_until_a_url_is_published(
    client: ForwardingClient, upstream: FakeUpstream, row: EngineRow
) -> None:
    row.publish(None)
    sample = asyncio.create_task(client.sample(JOB))
    await row.read_again(3)
    row.publish(upstream.url + "/")
    assert decoded(await sample) == WHOLE
    assert not client.counts


async def test_samples_that_wait_for_a_url_share_one_read_of_the_row() -> None:
    gate, reads = asyncio.Event(), 0

    async def read() -> EngineState:
        nonlocal reads
        reads += 1
        await gate.wait()
        return EngineState()

    endpoint = EngineEndpoint(read)
    waiting = [asyncio.create_task(endpoint.resolve()) for _ in range(50)]
    await asyncio.sleep(0)
    gate.set()
    assert await asyncio.gather(*waiting) == [None] * 50
    assert reads == 1


async def test_a_sample_follows_a_dying_server_to_its_next_address(
    client: ForwardingClient, upstream: FakeUpstream, row: EngineRow
) -> None:
    """The server dies during a request, is unreachable, and comes back at another address."""

    async def die(*_: Any) -> None:
        row.publish(closed_port())
        raise ConnectionError

    async with fake_upstream(default=die) as dying:
        row.publish(dying.url)
        sample = asyncio.create_task(client.sample(JOB))
        await row.read_again(3)
    row.publish(upstream.url)
    assert decoded(await sample) == WHOLE
    assert client.counts["interrupted"] == 1


async def test_a_cancelled_sample_closes_its_connection(client: ForwardingClient, upstream: FakeUpstream) -> None:
    upstream.default = never
    sample = asyncio.create_task(client.sample(JOB))
    await upstream.until(lambda server: server.busy == 1)
    sample.cancel()
    await upstream.until(lambda server: server.busy == 0)
    assert upstream.disconnects == 1


class HealthAfterDeath:
    """/health of a vLLM whose engine has died: 503 for a number of probes, then the reply `then`."""

    def __init__(self, times: int, then: Reply) -> None:
        self.probes = 0
        self._times = times
        self._then = then

    async def __call__(self, request: Any, writer: asyncio.StreamWriter) -> None:
        self.probes += 1
        await (reply(503, "") if self.probes <= self._times else self._then)(request, writer)


async def test_a_500_of_a_dying_server_counts_as_an_interruption(
    client: ForwardingClient, upstream: FakeUpstream
) -> None:
    """The dying server answers 500 until it exits, so the client sends nothing until /health is good again."""
    upstream.on_get = health = HealthAfterDeath(3, reply(200, ""))
    upstream.script.append(DEAD_ENGINE)
    assert decoded(await client.sample(JOB)) == WHOLE
    assert health.probes == 4
    assert len(upstream.completions) == 2
    assert client.counts == {"upstream_error": 1, "interrupted": 1}


async def test_a_sample_follows_a_server_that_comes_back_at_another_address(
    client: ForwardingClient, upstream: FakeUpstream, row: EngineRow
) -> None:
    async with fake_upstream(default=DEAD_ENGINE, on_get=HealthAfterDeath(2, never)) as dying:
        row.publish(dying.url)
        sample = asyncio.create_task(client.sample(JOB))
        await dying.until(lambda server: len(server.requests) == 4)
        row.publish(closed_port())
    await row.read_again(2)
    row.publish(upstream.url)
    assert decoded(await sample) == WHOLE
    assert len(dying.completions) == 1


async def test_a_sample_that_killed_the_engine_twice_alone_fails_by_name(
    client: ForwardingClient, upstream: FakeUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each completion the server fails some health probes, then is healthy again."""
    monkeypatch.setattr(retries, "MAX_BACKOFF_S", retries.FIRST_BACKOFF_S)
    probes: Counter[int] = Counter()

    async def dies_and_returns(request: Received, writer: asyncio.StreamWriter) -> None:
        deaths = len(upstream.completions)
        probes[deaths] += 1
        await (hang_up if probes[deaths] <= 3 else reply(200, ""))(request, writer)

    upstream.on_get = dies_and_returns
    upstream.default = DEAD_ENGINE
    failed = await failure(client)
    assert failed.category is ErrorCategory.SERVER
    assert f"engine died 2 times while it computed request {JOB.request_id} and no other" in failed.message
    assert "EngineCore encountered an issue" in failed.message
    assert len(upstream.completions) == 2


async def test_the_client_keeps_no_cookies(client: ForwardingClient, upstream: FakeUpstream, row: EngineRow) -> None:
    """A cookie of a load balancer would send every sample of this process to one replica."""
    row.publish(upstream.url.replace("127.0.0.1", "localhost"))  # clients never keep cookies of bare IP addresses

    async def set_cookie(request: Any, writer: asyncio.StreamWriter) -> None:
        await reply(200, completion(request.json), Set_Cookie="replica=1; Path=/")(request, writer)

    upstream.script.append(set_cookie)
    await client.sample(JOB)
    await client.sample(JOB)
    assert "cookie" not in upstream.completions[1].headers


@pytest.mark.parametrize("status", [408, 502, 503, 504])
@pytest.mark.parametrize("health", [200, 404, 503])
async def test_a_sample_waits_while_the_server_is_temporarily_unavailable(
    client: ForwardingClient, upstream: FakeUpstream, monkeypatch: pytest.MonkeyPatch, status: int, health: int
) -> None:
    """The client also waits if a load balancer has no /health, or answers 503 there."""
    monkeypatch.setattr(retries, "FIRST_BACKOFF_S", 0.001)
    monkeypatch.setattr(retries, "MAX_BACKOFF_S", 0.01)
    monkeypatch.setattr(retries, "MAX_GATEWAY_BACKOFF_S", 0.01)
    upstream.on_get = reply(health, "")
    upstream.script += [reply(status, "<html>restarting", "text/html")] * 12
    assert decoded(await client.sample(JOB)) == WHOLE
    assert len(upstream.requests) == 13, "the client sends no health probe"
    assert client.counts == {"upstream_away": 12}


@pytest.mark.parametrize("status", [408, 502, 503, 504])
async def test_the_client_waits_as_long_as_retry_after_says(
    client: ForwardingClient, upstream: FakeUpstream, status: int
) -> None:
    upstream.script.append(reply(status, "", Retry_After="0.4"))
    started = asyncio.get_running_loop().time()
    assert decoded(await client.sample(JOB)) == WHOLE
    assert asyncio.get_running_loop().time() - started >= 0.4


async def test_a_sample_waits_out_a_429(client: ForwardingClient, upstream: FakeUpstream) -> None:
    upstream.script += [error(429, "busy"), reply(429, "", Retry_After="0.4")]
    started = asyncio.get_running_loop().time()
    assert decoded(await client.sample(JOB)) == WHOLE
    assert asyncio.get_running_loop().time() - started >= 0.4
    assert len(upstream.completions) == 3
    assert client.counts == {"upstream_busy": 2}


async def test_a_lost_adapter_is_loaded_once_for_all_samples(client: ForwardingClient, upstream: FakeUpstream) -> None:
    upstream.adapters = set()
    all_refused = asyncio.Event()
    upstream.on_load = after(all_refused, reply(200, "Success", "text/plain"))
    samples = [asyncio.create_task(client.sample(ADAPTER)) for _ in range(30)]
    await upstream.until(lambda server: len(server.completions) == 30 and bool(server.loads))
    all_refused.set()
    assert [decoded(sample) for sample in await asyncio.gather(*samples)] == [WHOLE] * 30
    (load,) = upstream.loads
    assert load.json == {"lora_name": "m1@1", "lora_path": "/adapters/m1@1"}
    assert load.headers["authorization"] == "Bearer key"
    assert len(upstream.completions) == 60
    assert client.counts == {"adapter_reloads": 1}


async def test_a_server_that_dies_before_it_has_loaded_an_adapter_has_not_lost_it(
    client: ForwardingClient, upstream: FakeUpstream
) -> None:
    """vLLM's API server answers for some seconds after its engine's death: 404 for an adapter that it does not know,
    and 500 to a load."""
    upstream.adapters = set()
    dying = False

    async def load(request: Received, writer: asyncio.StreamWriter) -> None:
        nonlocal dying
        dying = len(upstream.loads) <= MAX_RELOADS + 2
        await (error(500, "EngineDeadError") if dying else reply(200, "Success", "text/plain"))(request, writer)

    async def health(request: Received, writer: asyncio.StreamWriter) -> None:
        nonlocal dying
        was_dying, dying = dying, False
        if was_dying:
            upstream.adapters = set()
        await reply(503 if was_dying else 200, "")(request, writer)

    upstream.on_load, upstream.controls["/health"] = load, health
    assert decoded(await client.sample(ADAPTER)) == WHOLE
    assert (client.counts["adapter_reloads"], len(upstream.loads)) == (1, MAX_RELOADS + 3)


async def test_two_lost_adapters_are_both_loaded(client: ForwardingClient, upstream: FakeUpstream) -> None:
    upstream.adapters = set()
    other = msgspec.structs.replace(ADAPTER, model="m2@4", weights=AdapterVersion("m2@4"))
    await asyncio.gather(client.sample(ADAPTER), client.sample(other))
    assert {load.json["lora_name"] for load in upstream.loads} == {"m1@1", "m2@4"}


@pytest.mark.parametrize(
    ("status", "kind"), [(503, STORE_AWAY), (502, "Bad Gateway")], ids=["store-away", "replica-away"]
)
async def test_a_sample_waits_while_the_replica_cannot_fetch_its_adapter(
    client: ForwardingClient, upstream: FakeUpstream, status: int, kind: str
) -> None:
    """More often than MAX_RELOADS: such a load has not failed."""
    upstream.script += [UNKNOWN_ADAPTER] * (MAX_RELOADS + 2)
    not_now = reply(status, {"error": {"message": "not now", "type": kind, "code": status}})
    answers = [not_now] * (MAX_RELOADS + 1) + [reply(200, b"")]

    async def answer_in_turn(request: Received, writer: asyncio.StreamWriter) -> None:
        await answers.pop(0)(request, writer)

    upstream.on_load = answer_in_turn
    assert decoded(await client.sample(ADAPTER)) == WHOLE
    assert answers == []


async def test_closing_the_client_cancels_a_load(connect: Connect, upstream: FakeUpstream) -> None:
    client = connect()
    upstream.adapters = set()
    upstream.on_load = never
    sample = asyncio.create_task(client.sample(ADAPTER))
    await upstream.until(lambda server: bool(server.loads))
    sample.cancel()
    await asyncio.gather(sample, return_exceptions=True)
    await client.close()
    await upstream.until(lambda server: server.busy == 0)
    assert upstream.disconnects == 1


async def test_the_context_length_is_read_from_the_server_once(
    client: ForwardingClient, upstream: FakeUpstream
) -> None:
    upstream.on_get = models(None, 20, None)
    await client.sample(OPEN)
    await client.sample(OPEN)
    await client.sample(msgspec.structs.replace(OPEN, prompt=list(range(25))))
    assert [request.json["max_tokens"] for request in upstream.completions] == [17, 17, 1]
    assert [request.path for request in upstream.requests if request.method == "GET"] == ["/v1/models"]


async def test_an_open_max_tokens_is_bounded_by_the_size_of_one_answer(
    client: ForwardingClient, upstream: FakeUpstream
) -> None:
    upstream.on_get = models(10**6)
    await client.sample(msgspec.structs.replace(OPEN, num_samples=64))
    assert [request.json["max_tokens"] for request in upstream.completions] == [MAX_SAMPLED // 64]


async def test_the_context_length_is_read_again_from_the_next_server(
    client: ForwardingClient, upstream: FakeUpstream, row: EngineRow
) -> None:
    upstream.on_get = models(20)
    await client.sample(OPEN)
    async with fake_upstream(on_get=models(30)) as other:
        row.publish(other.url)
        await upstream.stop()
        await client.sample(OPEN)
    assert [request.json["max_tokens"] for request in other.completions] == [27]


async def test_a_long_list_of_models_is_read(client: ForwardingClient, upstream: FakeUpstream) -> None:
    """vLLM names each loaded adapter in some 600 bytes; the list of 3,000 adapters exceeds the bound for other
    answers."""
    upstream.on_get = models(20, *[None] * 50_000)
    await client.sample(OPEN)
    assert upstream.completions[0].json["max_tokens"] == 17


@pytest.mark.parametrize("status", [408, 429, 502, 503, 504])
async def test_the_context_length_is_asked_until_the_server_behind_the_proxy_answers(
    client: ForwardingClient, upstream: FakeUpstream, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "FIRST_BACKOFF_S", 0.001)
    upstream.controls["/v1/models"] = reply(status, "<html>", "text/html")
    sample = asyncio.create_task(client.sample(OPEN))
    await upstream.until(lambda server: len(server.requests) > 2 * MAX_INTERRUPTIONS)
    upstream.controls["/v1/models"] = models(20)
    assert decoded(await sample)
    assert upstream.completions[0].json["max_tokens"] == 17
    assert "interrupted" not in client.counts


async def test_the_context_length_is_asked_twice_of_a_server_that_answers_500(
    client: ForwardingClient, upstream: FakeUpstream
) -> None:
    upstream.controls["/v1/models"] = reply(500, "no", "text/plain")
    failed = await failure(client, OPEN)
    assert failed.category is ErrorCategory.SERVER
    assert "status 500" in failed.message
    assert [request.path for request in upstream.requests].count("/v1/models") == 2


async def test_a_fixed_endpoint_is_sampled_from_and_probed(connect: Connect, upstream: FakeUpstream) -> None:
    client = connect(endpoint=FixedEndpoint(upstream.url + "/"))
    assert decoded(await client.sample(JOB)) == WHOLE
    assert await client.probe() is None
    upstream.on_get = reply(503, "starting", "text/plain")
    assert "status 503, text/plain: 'starting'" in (await client.probe() or "")
    assert "cannot be reached" in (await connect(endpoint=FixedEndpoint(closed_port())).probe() or "")
    assert [request.path for request in upstream.requests if request.method == "GET"] == ["/health"] * 2


@pytest.mark.parametrize(
    ("address", "says"),
    [
        (None, "no inference server has been published"),
        (closed_port(), "cannot be reached"),
        ("http://", "cannot be reached"),
        ("no url at all", "cannot be reached"),
        ("http://127.0.0.1:99999", "cannot be reached"),
    ],
)
async def test_a_sample_without_a_server_fails_at_its_deadline(
    client: ForwardingClient, row: EngineRow, clock: LoopClock, address: str | None, says: str
) -> None:
    row.publish(address)
    failing = asyncio.create_task(failure(client))
    await row.read_again(3)  # before each try
    clock.advance(DEADLINE_S)
    failed = await failing
    assert failed.category is ErrorCategory.SERVER
    assert failed.message.startswith("gave up after 20 s: ")
    assert says in failed.message


@pytest.mark.parametrize(
    ("answer", "health", "least", "says"),
    [
        (never, None, 1, "no answer from {url}"),
        (DEAD_ENGINE, reply(503, ""), 3, "the inference server is dying"),
        *(
            (reply(status, RESTARTING, "text/html"), None, 3, f"the inference server answered status {status}, text/h")
            for status in (408, 502, 503, 504)
        ),
    ],
)
async def test_a_sample_fails_at_its_deadline_if_the_server_stays_as_it_is(
    client: ForwardingClient, upstream: FakeUpstream, clock: LoopClock, answer: Reply, health: Reply | None,
    least: int, says: str,
) -> None:  # fmt: skip
    upstream.default, upstream.on_get = answer, health or upstream.on_get
    failing = asyncio.create_task(failure(client))
    await upstream.until(lambda server: len(server.requests) >= least and (least > 1 or server.busy == 1))
    clock.advance(DEADLINE_S)
    failed = await failing
    assert failed.category is ErrorCategory.SERVER
    assert failed.message.startswith("gave up after 20 s: " + says.format(url=upstream.url))


async def test_an_adapter_that_the_store_lacks_may_come_and_is_gone_after_a_while(
    client: ForwardingClient, upstream: FakeUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([GONE, reply(200, b"")])

    async def late(request: Received, writer: asyncio.StreamWriter) -> None:
        await next(answers)(request, writer)

    upstream.script += [UNKNOWN_ADAPTER] * 2
    upstream.on_load = late
    assert decoded(await client.sample(ADAPTER)) == WHOLE
    assert len(upstream.loads) == 2
    monkeypatch.setattr(servers, "IN_STORE_S", 0.0)
    upstream.default, upstream.on_load = UNKNOWN_ADAPTER, GONE
    assert "files of adapter m1@1 are gone" in (await failure(client, ADAPTER)).message


async def test_a_load_that_outlasts_the_deadline_fails_the_sample(
    client: ForwardingClient, upstream: FakeUpstream, clock: LoopClock
) -> None:
    upstream.adapters, upstream.on_load = set(), never
    failing = asyncio.create_task(failure(client, ADAPTER))
    await upstream.until(lambda server: bool(server.loads))
    clock.advance(DEADLINE_S)
    assert "gave up after 20 s: adapter m1@1" in (await failing).message
