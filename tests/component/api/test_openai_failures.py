"""OpenAI requests when something fails or goes: the inference server before and after the first event, the client, the
process, the checkpoint. The upstream on a real socket answers as each test tells it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from typing import Any

import pytest
from api_harness import LONG_S, Api, Serve, scrape
from engine_harness import until
from fake_upstream import FakeUpstream, Received, Reply, after, error, hang_up, never, reply
from loop_clock import LoopClock
from openai_requests import (
    ADAPTER,
    DEAD,
    ONE,
    PATH,
    PROMPT,
    RUN,
    TOTAL,
    TWO,
    Connection,
    answer_of,
    ask,
    complete,
    counted,
    data_of,
    events,
    piece,
    refusal,
    save,
    used,
)
from sqlalchemy import delete, select, update

import skyrl.api.server
from skyrl.base.wire.errors import RequestError
from skyrl.chat.openai.service import InFlight
from skyrl.storage.db import adapter_versions
from skyrl.storage.db import adapter_versions as adapter_uses
from skyrl.storage.db.checkpoints import checkpoints
from skyrl.storage.db.database import Database
from skyrl.storage.db.usage import UsageKind


@pytest.fixture(autouse=True)
def answers(upstream: FakeUpstream) -> None:
    upstream.default = complete


# Failures before the first byte: the request is sent again


@pytest.mark.parametrize("stream", [False, True])
async def test_an_adapter_that_the_server_has_lost_is_loaded_again(
    api: Api, upstream: FakeUpstream, database: Database, stream: bool
) -> None:
    save(database)
    upstream.adapters = set()
    upstream.default = events(piece("hi", 1, "stop")) if stream else complete
    (api.services.config.state_dir / "adapters").mkdir()
    directory = api.services.config.state_dir / "adapters" / RUN.replace(":", "=3A") / "v000003"
    directory.mkdir(parents=True)
    assert (await ask(api, PROMPT | {"model": PATH, "stream": stream})).status_code == 200
    assert [load.json for load in upstream.loads] == [{"lora_name": ADAPTER.name, "lora_path": str(directory)}]


@pytest.mark.parametrize("fault", [hang_up, error(503, "starting"), reply(500, "x")], ids=["gone", "503", "500"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_of_the_server_is_not_seen_by_the_caller(
    api: Api, upstream: FakeUpstream, stream: bool, fault: Reply
) -> None:
    upstream.script.append(fault)
    upstream.default = events(piece("hi", 1, "stop")) if stream else complete
    answer = await ask(api, PROMPT | {"stream": stream})
    assert answer.status_code == 200
    assert len(upstream.completions) == 2


@pytest.mark.parametrize("first", [events(done=False), events(DEAD)], ids=["no event", "an error"])
async def test_a_stream_that_dies_before_its_first_event_begins_again(
    api: Api, upstream: FakeUpstream, first: Reply
) -> None:
    upstream.script.append(first)
    upstream.default = events(piece("hi", 1, "stop"))
    assert [e["choices"][0]["text"] for e in data_of(await ask(api, PROMPT | {"stream": True}))[:-1]] == ["hi"]


async def test_an_aborted_answer_is_asked_for_again(api: Api, upstream: FakeUpstream) -> None:
    async def abort(request: Received, writer: asyncio.StreamWriter) -> None:
        await reply(200, answer_of(request, "abort"))(request, writer)

    upstream.script.append(abort)
    assert (await ask(api, PROMPT)).json()["choices"][0]["finish_reason"] == "stop"


async def test_a_failure_that_stays_is_a_503_that_tells_nothing_of_the_server(
    serve: Serve, upstream: FakeUpstream, caplog: pytest.LogCaptureFixture
) -> None:
    upstream.default, clock = error(503, "no GPU at /secret/path"), LoopClock()
    async with serve(forwarding_deadline_s=LONG_S) as api:
        asking = asyncio.create_task(ask(api, PROMPT, **{"X-Request-Id": "find-me"}))
        await upstream.until(lambda server: len(server.completions) >= 2)  # the first answer has been read
        clock.advance(LONG_S)
        answer = await asking
    assert refusal(answer) == (503, None, "inference_failed")
    assert answer.headers["x-should-retry"] == "false"
    assert "secret" not in answer.text
    assert "find-me" in answer.text
    assert "/secret/path" in caplog.text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_of_the_server_reaches_the_caller_under_the_callers_names(
    api: Api, upstream: FakeUpstream, database: Database, stream: bool
) -> None:
    save(database)
    sentence = "This model's maximum context length is 100 tokens."
    upstream.default = error(400, f"{sentence} ({ADAPTER.name})", "input_tokens")
    answer = await ask(api, PROMPT | {"model": PATH, "stream": stream})
    assert refusal(answer) == (400, "prompt", "context_length_exceeded")
    assert answer.json()["error"]["message"] == f"{sentence} ({PATH})."
    assert len(upstream.completions) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "shape", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"choice": ["a"]}}]
)
async def test_a_shape_at_which_a_healthy_server_fails_is_the_callers_mistake(
    api: Api, upstream: FakeUpstream, shape: dict[str, Any], stream: bool
) -> None:
    upstream.default = error(500, "Internal server error")
    answer = await ask(api, PROMPT | shape | {"stream": stream})
    assert refusal(answer) == (400, next(iter(shape)), "invalid_value")
    plain = await ask(api, PROMPT | {"stream": stream})
    assert refusal(plain) == (503, None, "inference_failed")


# Failures after the first event


@pytest.mark.parametrize(
    "rest",
    [
        events(piece("a", 1), done=False),
        events(piece("a", 1), DEAD),
        events(piece("a", 1), piece("", 1, "abort")),
        events(piece("a", 1), {"choices": "?"}),
    ],
    ids=["broken off", "an error", "aborted", "nonsense"],
)
async def test_a_stream_that_breaks_off_ends_with_an_error_and_without_done(
    api: Api, upstream: FakeUpstream, database: Database, rest: Reply
) -> None:
    upstream.default = rest
    first, last = data_of(await ask(api, PROMPT | {"stream": True}))
    assert first["choices"][0]["text"] == "a"
    assert last["error"]["code"] == "inference_failed"
    assert "/some/path" not in json.dumps(last)
    assert len(upstream.completions) == 1
    assert await counted(api, database) == {UsageKind.PREFILL: 3.0, UsageKind.SAMPLE: 1.0}


async def test_a_stream_that_is_read_too_slowly_ends_at_its_deadline(
    serve: Serve, upstream: FakeUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client keeps its connection and reads nothing after the first event."""

    async def wait(_: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    upstream.default = events(*[piece("a", number) for number in range(9)], done=False, then=wait)
    async with serve(forwarding_deadline_s=0.5) as api:
        connection = Connection(api, PROMPT | {"stream": True}, readable=2)
        async with connection:
            await connection.began.wait()
            async with asyncio.timeout(LONG_S):
                await connection.task
        await upstream.until(lambda server: server.busy == 0)
        assert len(api.services.openai_in_flight) == 0


# Usage


@pytest.mark.parametrize("options", [None, {"include_usage": True}, {"continuous_usage_stats": True}])
async def test_a_stream_has_the_usage_that_the_caller_asked_for(
    api: Api, upstream: FakeUpstream, database: Database, options: Any
) -> None:
    upstream.default = events(piece("a", 1), piece("b", 2, "stop"), TOTAL)
    body = PROMPT | {"stream": True} | ({"stream_options": options} if options else {})
    *got, done = data_of(await ask(api, body))
    assert done == "[DONE]"
    numbers = [event.get("usage", {}).get("completion_tokens") for event in got]
    assert (
        numbers
        == {None: [None, None], "include_usage": [None, None, 2], "continuous_usage_stats": [1, 2]}[
            next(iter(options)) if options else None
        ]
    )
    (sent,) = upstream.completions
    assert sent.json["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert await counted(api, database) == {
        UsageKind.PREFILL: 2.0,
        UsageKind.PREFILL_CACHED: 1.0,
        UsageKind.SAMPLE: 2.0,
    }


async def test_a_whole_answer_is_counted_for_its_tenant(api: Api, database: Database) -> None:
    await ask(api, PROMPT)
    await ask(api, PROMPT, **{"X-API-Key": "tml-two"})
    expected = {UsageKind.PREFILL: 2.0, UsageKind.PREFILL_CACHED: 1.0, UsageKind.SAMPLE: 2.0}
    assert await counted(api, database) == expected
    assert used(database) == {(tenant, "", kind): n for tenant in (ONE, TWO) for kind, n in expected.items()}


# Clients that go


@pytest.mark.parametrize("stream", [False, True])
async def test_the_server_is_free_at_once_when_the_client_goes(
    api: Api, upstream: FakeUpstream, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    upstream.default = never
    async with Connection(api, PROMPT | {"stream": stream}):
        await upstream.until(lambda server: server.busy == 1)
    await upstream.until(lambda server: server.busy == 0)
    assert upstream.disconnects == 1
    assert len(api.services.openai_in_flight) == 0
    after = await scrape(api)
    assert after["skyrl_samples_total{outcome=cancelled}"] == 1
    assert after["skyrl_http_requests_total{method=POST,route=/v1/completions,status=gone}"] == 1
    assert not [record for record in caplog.records if "refusals" in record.name], "nobody was refused"


async def test_the_server_is_free_at_once_when_the_client_goes_in_mid_stream(
    api: Api, upstream: FakeUpstream, database: Database
) -> None:
    async def wait(_: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    upstream.default = events(piece("a", 1), done=False, then=wait)
    async with Connection(api, PROMPT | {"stream": True}) as connection:
        await connection.began.wait()
    await upstream.until(lambda server: server.busy == 0)
    assert upstream.disconnects == 1
    assert await counted(api, database) == {UsageKind.PREFILL: 3.0, UsageKind.SAMPLE: 1.0}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_process_that_ends_tells_the_clients_of_running_requests(
    serve: Serve, upstream: FakeUpstream, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    async def wait(_: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(skyrl.api.server, "DRAIN_S", 0.05)
    upstream.default = events(piece("a", 1), done=False, then=wait) if stream else never
    async with serve() as api, Connection(api, PROMPT | {"stream": stream}) as connection:
        if stream:
            await connection.began.wait()
        else:
            await upstream.until(lambda server: server.busy == 1)
        await skyrl.api.server.drain(api.services)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LONG_S):
                await asyncio.shield(connection.task)
        sent = connection.sent
        assert refusal(await ask(api, PROMPT)) == (503, None, None)
    assert sent[0]["status"] == (200 if stream else 503)
    assert b"the server is stopping" in sent[-1]["body"]
    assert b"[DONE]" not in sent[-1]["body"]


async def test_new_requests_are_refused_while_running_ones_end(api: Api, upstream: FakeUpstream) -> None:
    go = asyncio.Event()
    upstream.default = after(go, complete)
    running = asyncio.create_task(ask(api, PROMPT))
    await upstream.until(lambda server: server.busy == 1)
    draining = asyncio.create_task(api.services.openai_in_flight.drain(LONG_S))
    await asyncio.sleep(0)
    refused = await ask(api, PROMPT)
    go.set()
    await draining
    assert refusal(refused) == (503, None, None)
    assert refused.headers["retry-after"] == "1"
    assert (await running).status_code == 200


async def test_nothing_begins_after_the_end() -> None:
    """A stream whose first event came just before the end would otherwise go on."""

    async def wait() -> None:
        await asyncio.Event().wait()

    in_flight = InFlight()
    await in_flight.drain(0)
    async with asyncio.timeout(LONG_S):
        with pytest.raises(RequestError, match="stopping"):
            await in_flight.run(wait(), wait())


# Adapters in use


def held(database: Database) -> bool:
    return ADAPTER in database.read(lambda c: adapter_versions.held(c, adapter_uses.time.time(), [ADAPTER]))


async def test_an_adapter_stays_while_a_request_runs_although_its_checkpoint_was_deleted(
    api: Api, upstream: FakeUpstream, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(database)
    go = asyncio.Event()
    upstream.default = after(go, complete)
    running = asyncio.create_task(ask(api, PROMPT | {"model": PATH}))
    await upstream.until(lambda server: server.busy == 1)
    database.write(lambda c: c.execute(delete(checkpoints)))
    assert held(database)
    passed = adapter_uses.RENEW_BEFORE_S + 1
    database.write(
        lambda c: c.execute(update(adapter_uses.uses).values(used_until=adapter_uses.uses.c.used_until - passed))
    )
    monkeypatch.setattr(adapter_uses, "time", Later(passed))
    await api.services.adapter_uses.renew()
    (row,) = database.read(lambda c: list(c.execute(select(adapter_uses.uses))))
    assert row.used_until > adapter_uses.time.time() + adapter_uses.RENEW_BEFORE_S
    go.set()
    assert (await running).status_code == 200
    monkeypatch.setattr(adapter_uses, "time", Later(passed + adapter_uses.HOLD_S + 1))
    await api.services.adapter_uses.renew()
    assert not held(database)


class Later:
    """The module `time`, some seconds later."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def time(self) -> float:
        return time.time() + self._seconds


async def test_requests_for_one_adapter_write_one_row_in_minutes(api: Api, database: Database) -> None:
    save(database)
    writes = 0
    real = api.services.adapter_uses._writer.transact

    async def counting(change: Any) -> Any:
        nonlocal writes
        writes += 1
        return await real(change)

    api.services.adapter_uses._writer = type("Writer", (), {"transact": staticmethod(counting)})()  # type: ignore[assignment]
    for _ in range(5):
        await ask(api, PROMPT | {"model": PATH})
    await ask(api, PROMPT)
    assert writes == 1


async def test_the_process_renews_the_hold_on_adapters_of_running_requests(
    serve: Serve, upstream: FakeUpstream, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    def used_until() -> float:
        return database.read(lambda c: c.execute(select(adapter_uses.uses.c.used_until)).scalar_one())

    monkeypatch.setattr(skyrl.api.server, "ADAPTER_USES_S", 0.01)
    monkeypatch.setattr(adapter_uses, "RENEW_BEFORE_S", adapter_uses.HOLD_S + 1)
    monkeypatch.setattr(skyrl.api.server, "DRAIN_S", 0.05)
    save(database)
    upstream.default = never
    async with serve() as api, Connection(api, PROMPT | {"model": PATH}):
        await upstream.until(lambda server: server.busy == 1)
        first = used_until()
        await until(lambda: used_until() > first)
