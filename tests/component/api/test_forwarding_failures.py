"""The forwarding client's rule for each kind of failure, over real sockets, against a scripted upstream."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
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
from skyrl.sampling import retries
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

        def make(
            deadline_s: float = DEADLINE_S, max_connections: int | None = None, **options: Any
        ) -> ForwardingClient:
            client = ForwardingClient(
                HttpClient(max_connections),
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


@pytest.fixture
def no_time_for_a_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first back-off is longer than the deadline of a sample."""
    monkeypatch.setattr(retries, "FIRST_BACKOFF_S", 10 * DEADLINE_S)


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


# Success


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


async def test_max_connections_bounds_the_concurrent_requests(connect: Connect, upstream: FakeUpstream) -> None:
    go = asyncio.Event()
    upstream.default = after(go, complete())
    client = connect(max_connections=2)
    samples = [asyncio.create_task(client.sample(JOB)) for _ in range(6)]
    await upstream.until(lambda server: server.busy == 2)
    go.set()
    assert [decoded(sample) for sample in await asyncio.gather(*samples)] == [WHOLE] * 6
    assert upstream.most_busy == 2


async def test_200_samples_at_once_succeed(client: ForwardingClient, upstream: FakeUpstream) -> None:
    go = asyncio.Event()
    upstream.default = after(go, complete())
    samples = [asyncio.create_task(client.sample(JOB)) for _ in range(200)]
    await upstream.until(lambda server: server.busy == 200)
    go.set()
    assert [decoded(sample) for sample in await asyncio.gather(*samples)] == [WHOLE] * 200
    assert len(upstream.completions) == 200


# The request cannot have arrived: read the URL again, back off, repeat until the deadline


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


async def test_a_sample_without_any_url_fails_at_its_deadline(connect: Connect, row: EngineRow) -> None:
    row.publish(None)
    failed = await failure(connect(deadline_s=0.3))
    assert failed.category is ErrorCategory.SERVER
    assert failed.message == "gave up after 0.3 s: no inference server has been published"


async def test_a_sample_without_a_listener_fails_at_its_deadline(connect: Connect, row: EngineRow) -> None:
    row.publish(closed_port())
    failed = await failure(connect(deadline_s=0.3))
    assert failed.category is ErrorCategory.SERVER
    assert "gave up after 0.3 s" in failed.message
    assert f"{row.state.inference_proxy_url} cannot be reached" in failed.message


@pytest.mark.usefixtures("no_time_for_a_retry")
@pytest.mark.parametrize("url", ["http://", "no url at all", "http://127.0.0.1:99999"])
async def test_an_impossible_address_fails_the_sample(client: ForwardingClient, row: EngineRow, url: str) -> None:
    row.publish(url)
    failed = await failure(client)
    assert failed.category is ErrorCategory.SERVER
    assert "cannot be reached" in failed.message


# The connection broke after the request was sent: repeat once, then up to three more times, at last without other
# samples


BROKEN = pytest.mark.parametrize("broken", [reset_after_headers, close_mid_body, hang_up])


@BROKEN
@pytest.mark.parametrize("times", range(1, MAX_INTERRUPTIONS + 1))
async def test_a_sample_is_repeated_after_its_connection_broke(
    client: ForwardingClient, upstream: FakeUpstream, broken: Reply, times: int
) -> None:
    upstream.script += [broken] * times
    assert decoded(await client.sample(JOB)) == WHOLE
    assert len(upstream.completions) == times + 1
    assert client.counts == {"interrupted": times}


@BROKEN
async def test_a_sample_fails_if_its_connection_breaks_every_time(
    client: ForwardingClient, upstream: FakeUpstream, broken: Reply
) -> None:
    upstream.default = broken
    failed = await failure(client)
    assert failed.category is ErrorCategory.SERVER
    assert "broke 4 times during this sample, the last time when no other interrupted sample was sent" in failed.message
    assert len(upstream.completions) == 4


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


async def test_a_sample_without_an_answer_fails_at_its_deadline(
    client: ForwardingClient, upstream: FakeUpstream, clock: LoopClock
) -> None:
    upstream.default = never
    failing = asyncio.create_task(failure(client))
    await upstream.until(lambda server: server.busy == 1)
    clock.advance(DEADLINE_S)
    failed = await failing
    assert failed.category is ErrorCategory.SERVER
    assert failed.message.startswith(f"gave up after 20 s: no answer from {upstream.url}")
    assert len(upstream.completions) == 1


async def test_a_cancelled_sample_closes_its_connection(client: ForwardingClient, upstream: FakeUpstream) -> None:
    upstream.default = never
    sample = asyncio.create_task(client.sample(JOB))
    await upstream.until(lambda server: server.busy == 1)
    sample.cancel()
    await upstream.until(lambda server: server.busy == 0)
    assert upstream.disconnects == 1


# A 2xx answer without a completion


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (reply(200, "<html>Please log in</html>", "text/html"), "text/html: '<html>Please log in</html>'"),
        (reply(200, "it works", "text/plain"), "text/plain: 'it works'"),
        (reply(200, ""), "application/json: ''"),
        (reply(200, "[1, 2]"), "not a completion"),
        (reply(200, b'{"choices": "\xff"}'), "not a completion"),
        (reply(200, '{"object": "list", "data": []}'), "choices"),
        (reply(204, ""), "status 204"),
    ],
)
async def test_a_2xx_answer_that_is_not_a_completion_fails_the_sample(
    client: ForwardingClient, upstream: FakeUpstream, answer: Reply, expected: str
) -> None:
    upstream.default = answer
    failed = await failure(client)
    assert failed.category is ErrorCategory.SERVER
    assert "the inference server answered status 20" in failed.message
    assert expected in failed.message
    assert client.counts == {"malformed": 1}
    assert len(upstream.completions) == 1


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (every_choice(logprobs={"token_logprobs": [-1.0, -2.0]}), "2 logprobs for 3 tokens"),
        (every_choice(logprobs={"token_logprobs": [-1.0] * 4}), "4 logprobs for 3 tokens"),
        (lambda body: body["choices"].clear(), "0 choices for 1 samples"),
        (lambda body: body["choices"].append(body["choices"][0]), "2 choices for 1 samples"),
        (every_choice(token_ids=None), "no token_ids"),
        (lambda body: body["choices"][0].pop("token_ids"), "no token_ids"),
        (every_choice(token_ids=["a"]), "token_ids[0]"),
        (every_choice(token_ids=[2**40, 1, 2]), "not token ids"),
    ],
)
async def test_an_incomplete_completion_fails_the_sample(
    client: ForwardingClient, upstream: FakeUpstream, spoil: Callable[[dict[str, Any]], None], expected: str
) -> None:
    upstream.default = complete(spoil)
    failed = await failure(client)
    assert failed.category is ErrorCategory.SERVER
    assert expected in failed.message
    assert "status 200, application/json" in failed.message
    assert client.counts == {"malformed": 1}
    assert len(upstream.completions) == 1


@pytest.mark.parametrize("job", [{"topk_sample": 2}, {"prompt_logprobs": True}, {"topk_prompt": 2}])
async def test_a_completion_without_a_requested_part_fails_the_sample(
    client: ForwardingClient, upstream: FakeUpstream, job: dict[str, Any]
) -> None:
    upstream.default = complete(every_choice(logprobs={"token_logprobs": [-1.0, -1.0, -1.0]}, prompt_logprobs=None))
    failed = await failure(client, msgspec.structs.replace(JOB, **job))
    assert failed.category is ErrorCategory.SERVER
    assert client.counts == {"malformed": 1}


async def test_top_logprobs_keyed_by_text_fail_the_sample(client: ForwardingClient, upstream: FakeUpstream) -> None:
    """Such a server ignores return_tokens_as_token_ids."""
    by_text = {"token_logprobs": [-1.0] * 3, "top_logprobs": [{" the": -1.0}] * 3}
    upstream.default = complete(every_choice(logprobs=by_text))
    failed = await failure(client, msgspec.structs.replace(JOB, topk_sample=1))
    assert failed.category is ErrorCategory.SERVER
    assert "status 200" in failed.message


# finish_reason


REASONS = pytest.mark.parametrize("reason", ["abort", None, "tool_calls"])


@REASONS
async def test_a_sample_aborted_once_is_sampled_again(
    client: ForwardingClient, upstream: FakeUpstream, reason: str | None
) -> None:
    upstream.script.append(complete(every_choice(finish_reason=reason)))
    assert decoded(await client.sample(JOB)) == WHOLE
    assert client.counts == {"aborted": 1}
    assert upstream.completions[0].body == upstream.completions[1].body


@REASONS
async def test_a_sample_aborted_twice_fails_instead_of_stopping_by_length(
    client: ForwardingClient, upstream: FakeUpstream, reason: str | None
) -> None:
    upstream.default = complete(every_choice(finish_reason=reason))
    failed = await failure(client)
    assert failed.category is ErrorCategory.SERVER
    assert f"aborted the sample 2 times (finish_reason {reason!r})" in failed.message
    assert len(upstream.completions) == 2


async def test_one_aborted_choice_repeats_the_whole_sample(client: ForwardingClient, upstream: FakeUpstream) -> None:
    """The other choices may lack their logprobs, as those of an aborted request may."""

    def abort_last(body: dict[str, Any]) -> None:
        every_choice(logprobs=None)(body)
        body["choices"][-1]["finish_reason"] = "abort"

    upstream.script.append(complete(abort_last))
    result = decoded(await client.sample(msgspec.structs.replace(JOB, num_samples=3)))
    assert [tokens for _, tokens, _ in result] == [[0, 1, 2], [1, 2, 3], [2, 3, 4]]
    assert client.counts == {"aborted": 1}


async def test_the_finish_reason_stop_is_decoded_as_stop(client: ForwardingClient, upstream: FakeUpstream) -> None:
    upstream.default = complete(every_choice(finish_reason="stop"))
    assert decoded(await client.sample(JOB)) == [("STOP", *WHOLE[0][1:])]


# Missing logprobs


MISSING = pytest.mark.parametrize(
    ("logprobs", "filled"),
    [
        (None, [0.0, 0.0, 0.0]),
        ({"token_logprobs": None}, [0.0, 0.0, 0.0]),
        ({"token_logprobs": [-1.0, None, -3.0]}, [-1.0, 0.0, -3.0]),
    ],
)


@MISSING
async def test_missing_logprobs_fail_the_sample(
    client: ForwardingClient, upstream: FakeUpstream, logprobs: Any, filled: list[float]
) -> None:
    upstream.default = complete(every_choice(logprobs=logprobs))
    failed = await failure(client)
    assert failed.category is ErrorCategory.SERVER
    assert "logprob" in failed.message
    assert "status 200" in failed.message
    assert client.counts["missing_logprobs"] == 1


@MISSING
async def test_missing_logprobs_become_zero_if_configured(
    connect: Connect, upstream: FakeUpstream, caplog: pytest.LogCaptureFixture, logprobs: Any, filled: list[float]
) -> None:
    client = connect(zero_fill_logprobs=True)
    upstream.default = complete(every_choice(logprobs=logprobs))
    with caplog.at_level(logging.WARNING):
        assert decoded(await client.sample(JOB)) == [("LENGTH", [0, 1, 2], filled)]
    assert client.counts == {"missing_logprobs": 1}
    assert "request r1" in caplog.text
    assert "zero-filled" in caplog.text


async def test_zero_filling_hides_no_other_fault(connect: Connect, upstream: FakeUpstream) -> None:
    def spoil(body: dict[str, Any]) -> None:
        body["choices"][0]["logprobs"] = None
        body["choices"][1]["token_ids"] = None

    upstream.default = complete(spoil)
    failed = await failure(connect(zero_fill_logprobs=True), msgspec.structs.replace(JOB, num_samples=2))
    assert failed.category is ErrorCategory.SERVER
    assert "no token_ids; the inference server answered status 200" in failed.message


# 4xx: the user's error


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            error(400, "This model's maximum context length is 1024 tokens.", "input_tokens"),
            "input_tokens: This model's",
        ),
        (error(422, "top_k must be -1 or at least 1", "top_k"), "top_k: top_k must be"),
        (error(400, "max_tokens must be at least 1, got 0."), "max_tokens must be at least 1, got 0."),
        (reply(400, {"error": "stop: too many"}), "stop: too many"),
        (error(404, "The model `base` does not exist.", "model"), "model: The model `base` does not exist."),
        (reply(413, "too large", "text/plain"), "the inference server answered status 413, text/plain: 'too large'"),
        (reply(400, b'{"error": "\xff"}'), "status 400, application/json"),
    ],
)
async def test_a_4xx_is_a_user_error_with_the_inference_servers_words(
    client: ForwardingClient, upstream: FakeUpstream, answer: Reply, message: str
) -> None:
    upstream.default = answer
    failed = await failure(client)
    assert failed.category is ErrorCategory.USER
    assert message in failed.message
    assert client.counts == {"refused": 1}
    assert len(upstream.requests) == 1


@pytest.mark.parametrize("status", [401, 403, 405])
async def test_401_403_and_405_are_server_errors(client: ForwardingClient, upstream: FakeUpstream, status: int) -> None:
    upstream.default = error(status, "not like this")
    failed = await failure(client)
    assert failed.category is ErrorCategory.SERVER
    assert f"status {status}" in failed.message
    assert len(upstream.completions) == 1


# 5xx and redirects: the server's error


@pytest.mark.parametrize("status", [500, 501, 507])
async def test_a_5xx_fails_the_sample_with_the_answers_text(
    client: ForwardingClient, upstream: FakeUpstream, status: int
) -> None:
    upstream.default = reply(status, "EngineCore encountered an issue. " + "x" * 1000, "text/plain")
    failed = await failure(client)
    assert failed.category is ErrorCategory.SERVER
    assert f"status {status}, text/plain: 'EngineCore encountered an issue." in failed.message
    assert len(failed.message) < 400
    assert client.counts == {"upstream_error": 2}
    assert len(upstream.completions) == 2


async def test_a_sample_is_repeated_if_the_server_was_replaced_after_its_5xx(
    client: ForwardingClient, upstream: FakeUpstream
) -> None:
    """The client reads the 500 of the dead server late. The next server at the same address is healthy."""
    upstream.script.append(DEAD_ENGINE)
    assert decoded(await client.sample(JOB)) == WHOLE
    assert client.counts == {"upstream_error": 1}


class HealthAfterDeath:
    """/health of a vLLM whose engine has died: 503 for a number of probes, then the reply `then`."""

    def __init__(self, times: int, then: Reply) -> None:
        self.probes = 0
        self._times = times
        self._then = then

    async def __call__(self, request: Any, writer: asyncio.StreamWriter) -> None:
        self.probes += 1
        await (reply(503, "") if self.probes <= self._times else self._then)(request, writer)


DEAD_ENGINE = error(500, "EngineCore encountered an issue. See stack trace (above) for the root cause.")


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


async def test_a_sample_fails_if_the_server_stays_unhealthy_until_the_deadline(
    client: ForwardingClient, upstream: FakeUpstream, clock: LoopClock
) -> None:
    upstream.on_get = reply(503, "")
    upstream.default = DEAD_ENGINE
    failing = asyncio.create_task(failure(client))
    await upstream.until(lambda server: len(server.requests) >= 3)
    clock.advance(DEADLINE_S)
    failed = await failing
    assert failed.category is ErrorCategory.SERVER
    assert failed.message == "gave up after 20 s: the inference server is dying"
    assert len(upstream.completions) == 1


async def test_the_client_follows_no_redirects(client: ForwardingClient, upstream: FakeUpstream) -> None:
    upstream.default = reply(307, "elsewhere", "text/plain", Location="/v1/elsewhere")
    failed = await failure(client)
    assert failed.category is ErrorCategory.SERVER
    assert "status 307" in failed.message
    assert [request.path for request in upstream.requests] == ["/v1/completions"]


async def test_the_client_keeps_no_cookies(client: ForwardingClient, upstream: FakeUpstream, row: EngineRow) -> None:
    """A cookie of a load balancer would send every sample of this process to one replica."""
    row.publish(upstream.url.replace("127.0.0.1", "localhost"))  # clients never keep cookies of bare IP addresses

    async def set_cookie(request: Any, writer: asyncio.StreamWriter) -> None:
        await reply(200, completion(request.json), Set_Cookie="replica=1; Path=/")(request, writer)

    upstream.script.append(set_cookie)
    await client.sample(JOB)
    await client.sample(JOB)
    assert "cookie" not in upstream.completions[1].headers


# Servers and proxies that are temporarily unavailable


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
async def test_a_sample_fails_at_its_deadline_if_the_server_stays_unavailable(
    client: ForwardingClient, upstream: FakeUpstream, clock: LoopClock, status: int
) -> None:
    upstream.default = reply(status, "<html>restarting", "text/html")
    failing = asyncio.create_task(failure(client))
    await upstream.until(lambda server: len(server.completions) >= 3)
    clock.advance(DEADLINE_S)
    failed = await failing
    assert failed.category is ErrorCategory.SERVER
    expected = f"gave up after 20 s: the inference server answered status {status}, text/html: '<html>restarting'"
    assert failed.message == expected


@pytest.mark.parametrize("status", [408, 502, 503, 504])
async def test_the_client_waits_as_long_as_retry_after_says(
    client: ForwardingClient, upstream: FakeUpstream, status: int
) -> None:
    upstream.script.append(reply(status, "", Retry_After="0.4"))
    started = asyncio.get_running_loop().time()
    assert decoded(await client.sample(JOB)) == WHOLE
    assert asyncio.get_running_loop().time() - started >= 0.4


# 429


async def test_a_sample_waits_out_a_429(client: ForwardingClient, upstream: FakeUpstream) -> None:
    upstream.script += [error(429, "busy"), reply(429, "", Retry_After="0.4")]
    started = asyncio.get_running_loop().time()
    assert decoded(await client.sample(JOB)) == WHOLE
    assert asyncio.get_running_loop().time() - started >= 0.4
    assert len(upstream.completions) == 3
    assert client.counts == {"upstream_busy": 2}


async def test_a_429_that_outlasts_the_deadline_fails_the_sample(
    client: ForwardingClient, upstream: FakeUpstream
) -> None:
    upstream.default = reply(429, "", Retry_After="100")
    failed = await failure(client)
    assert failed.category is ErrorCategory.SERVER
    assert "gave up after 20 s: the inference server answers 429" in failed.message
    assert len(upstream.completions) == 1


@pytest.mark.usefixtures("no_time_for_a_retry")
async def test_a_429_with_an_unreadable_retry_after_fails_without_time_for_a_retry(
    client: ForwardingClient, upstream: FakeUpstream
) -> None:
    upstream.default = reply(429, "", Retry_After="soon")
    failed = await failure(client)
    assert failed.category is ErrorCategory.SERVER
    assert "gave up after 20 s: the inference server answers 429" in failed.message


# Unknown adapters


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


async def test_two_lost_adapters_are_both_loaded(client: ForwardingClient, upstream: FakeUpstream) -> None:
    upstream.adapters = set()
    other = msgspec.structs.replace(ADAPTER, model="m2@4", weights=AdapterVersion("m2@4"))
    await asyncio.gather(client.sample(ADAPTER), client.sample(other))
    assert {load.json["lora_name"] for load in upstream.loads} == {"m1@1", "m2@4"}


async def test_a_sample_succeeds_if_the_adapter_is_already_loaded(
    client: ForwardingClient, upstream: FakeUpstream
) -> None:
    """Another process has loaded the adapter meanwhile."""
    upstream.adapters = set()
    upstream.on_load = error(400, "The lora adapter 'm1@1' has already been loaded.")
    assert decoded(await client.sample(ADAPTER)) == WHOLE


@pytest.mark.parametrize(
    "answer",
    [
        error(404, "Loading lora m1@1 failed: No adapter found for /adapters/m1/v1"),
        error(500, "Loading lora m1@1 failed: No adapter found for /adapters/m1/v1"),
        error(400, "Loading lora m1@1 failed: No adapter found for /adapters/m1/v1"),
    ],
)
async def test_an_adapter_that_cannot_be_loaded_fails_the_sample(
    client: ForwardingClient, upstream: FakeUpstream, answer: Reply
) -> None:
    upstream.script.append(error(404, "The model `m1@1` does not exist.", "model"))
    upstream.on_load = answer
    failed = await failure(client, ADAPTER)
    assert failed.category is ErrorCategory.SERVER
    assert "lost adapter m1@1 and cannot load it again" in failed.message
    assert "No adapter found" in failed.message
    assert len(upstream.completions) == 1


async def test_a_sample_waits_for_adapter_files_that_come_late(connect: Connect, upstream: FakeUpstream) -> None:
    """Bringing the files fails more often than MAX_RELOADS allows, but only loads on the server are counted."""
    upstream.adapters = set()
    client = connect(host=UnreachableHost(times=MAX_RELOADS + 2))
    assert decoded(await client.sample(ADAPTER)) == WHOLE
    assert len(upstream.loads) == 1


@pytest.mark.usefixtures("no_time_for_a_retry")
async def test_a_sample_whose_adapter_files_never_come_fails_at_its_deadline(
    connect: Connect, upstream: FakeUpstream
) -> None:
    upstream.adapters = set()
    failed = await failure(connect(host=UnreachableHost()), ADAPTER)
    assert failed.category is ErrorCategory.SERVER
    cause = "the files of adapter m1@1 cannot be brought to the inference server now"
    assert failed.message == f"gave up after 20 s: {cause}", "the message does not name the operator's addresses"
    assert upstream.loads == []


@pytest.mark.parametrize(
    ("status", "kind"), [(503, STORE_AWAY), (502, "Bad Gateway")], ids=["store-away", "replica-away"]
)
async def test_a_sample_waits_while_the_replica_cannot_fetch_its_adapter(
    client: ForwardingClient, upstream: FakeUpstream, status: int, kind: str
) -> None:
    """More often than MAX_RELOADS: such a load has not failed."""
    upstream.script += [error(404, "The model `m1@1` does not exist.", "model")] * (MAX_RELOADS + 2)
    not_now = reply(status, {"error": {"message": "not now", "type": kind, "code": status}})
    answers = [not_now] * (MAX_RELOADS + 1) + [reply(200, b"")]

    async def answer_in_turn(request: Received, writer: asyncio.StreamWriter) -> None:
        await answers.pop(0)(request, writer)

    upstream.on_load = answer_in_turn
    assert decoded(await client.sample(ADAPTER)) == WHOLE
    assert answers == []


async def test_a_sample_whose_adapter_is_not_in_the_store_fails_and_says_so(
    client: ForwardingClient, upstream: FakeUpstream
) -> None:
    upstream.adapters = set()
    upstream.on_load = reply(404, {"error": {"message": "no", "type": NOT_STORED, "code": 404}})
    failed = await failure(client, ADAPTER)
    assert failed.category is ErrorCategory.SERVER
    assert failed.message.endswith("cannot load it again: the files of adapter m1@1 are gone")


async def test_an_adapter_that_is_lost_after_every_load_fails_the_sample(
    client: ForwardingClient, upstream: FakeUpstream
) -> None:
    upstream.default = error(404, "The model `m1@1` does not exist.", "model")
    failed = await failure(client, ADAPTER)
    assert failed.category is ErrorCategory.SERVER
    assert "loses adapter m1@1 again and again" in failed.message
    assert len(upstream.loads) == MAX_RELOADS


async def test_an_adapter_is_loaded_again_on_each_next_server(client: ForwardingClient, upstream: FakeUpstream) -> None:
    """Each next server needs the adapter loaded again."""
    upstream.script += [error(404, "The model `m1@1` does not exist.", "model"), hang_up] * MAX_INTERRUPTIONS
    assert decoded(await client.sample(ADAPTER)) == WHOLE
    assert len(upstream.loads) == MAX_INTERRUPTIONS > MAX_RELOADS


async def test_a_server_that_dies_during_a_load_gets_the_load_again(
    client: ForwardingClient, upstream: FakeUpstream
) -> None:
    upstream.script.append(error(404, "The model `m1@1` does not exist.", "model"))
    upstream.on_load = hang_up
    assert decoded(await client.sample(ADAPTER)) == WHOLE
    assert len(upstream.loads) == 1


async def test_a_load_that_outlasts_the_deadline_fails_the_sample(
    client: ForwardingClient, upstream: FakeUpstream, clock: LoopClock
) -> None:
    upstream.adapters = set()
    upstream.on_load = never
    failing = asyncio.create_task(failure(client, ADAPTER))
    await upstream.until(lambda server: bool(server.loads))
    clock.advance(DEADLINE_S)
    failed = await failing
    assert failed.category is ErrorCategory.SERVER
    assert "gave up after 20 s: adapter m1@1" in failed.message


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


async def test_the_base_model_is_never_loaded_as_an_adapter(client: ForwardingClient, upstream: FakeUpstream) -> None:
    upstream.adapters = set()
    await failure(client)
    assert not upstream.loads


# Without max_tokens


OPEN = msgspec.structs.replace(JOB, max_tokens=None)


def models(*lengths: int | None) -> Reply:
    """The list of served models. Adapters have no max_model_len."""
    return reply(200, {"object": "list", "data": [{"id": f"m{i}", "max_model_len": n} for i, n in enumerate(lengths)]})


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


@pytest.mark.parametrize("answer", [models(None), models(), reply(404, "no"), reply(200, "<html>", "text/html")])
async def test_an_open_max_tokens_fails_if_the_server_gives_no_context_length(
    client: ForwardingClient, upstream: FakeUpstream, answer: Reply
) -> None:
    upstream.on_get = answer
    failed = await failure(client, OPEN)
    assert failed.category is ErrorCategory.USER
    assert failed.message.startswith("sampling_params.max_tokens: ")
    assert not upstream.completions


async def test_a_dying_server_is_asked_again_for_its_context_length(
    client: ForwardingClient, upstream: FakeUpstream
) -> None:
    upstream.on_get = reply(503, "starting")
    sample = asyncio.create_task(client.sample(OPEN))
    await upstream.until(lambda server: len(server.requests) >= 3)
    upstream.on_get = models(20)
    assert decoded(await sample)
    assert upstream.completions[0].json["max_tokens"] == 17


# External servers


async def test_a_fixed_endpoint_is_sampled_from_and_probed(connect: Connect, upstream: FakeUpstream) -> None:
    client = connect(endpoint=FixedEndpoint(upstream.url + "/"))
    assert decoded(await client.sample(JOB)) == WHOLE
    assert await client.probe() is None
    upstream.on_get = reply(503, "starting", "text/plain")
    assert "status 503, text/plain: 'starting'" in (await client.probe() or "")
    assert "cannot be reached" in (await connect(endpoint=FixedEndpoint(closed_port())).probe() or "")
    assert [request.path for request in upstream.requests if request.method == "GET"] == ["/health"] * 2


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
