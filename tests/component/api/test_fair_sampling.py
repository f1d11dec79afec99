"""Which priority the inference server gets with each sample."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path

import pytest
from api_harness import Api, Serve, sample_body
from fake_upstream import FakeUpstream, Received, after, complete, completion, never, reply
from sqlalchemy import select

import skyrl.api.server
from skyrl.api.access import tenant_of_key
from skyrl.api.server import open_services
from skyrl.base.wire.results import encode_json
from skyrl.inference.vllm_plugin.protocol import TENANT_TAGS
from skyrl.runtime.processes.runtime import Runtime
from skyrl.storage.db.database import Database
from skyrl.storage.db.processes import clocks
from tests.postgres_server import ON_POSTGRES

FIRST, SECOND = "tml-one", "tml-two"


async def send(api: Api, key: str, sampler: str, *seq_ids: int) -> list[str]:
    answers = [await api.post("asample", sample_body(sampler, seq_id), **{"X-API-Key": key}) for seq_id in seq_ids]
    return [answer.json()["request_id"] for answer in answers]


def priorities(upstream: FakeUpstream) -> dict[str, list[int]]:
    """The priorities, without tenants' tags, by sampling session, ordered by the numbers of the samples."""
    sent: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for each in upstream.completions:
        sampler, _, seq_id = each.headers["x-session-id"].rpartition(":")
        sent[sampler].append((int(seq_id), each.json["priority"] // TENANT_TAGS))
    return {sampler: [priority for _, priority in sorted(theirs)] for sampler, theirs in sent.items()}


async def test_a_priority_tells_tenants_apart(api: Api, upstream: FakeUpstream) -> None:
    for key in (FIRST, SECOND, FIRST):
        sampler = await api.sampler(**{"X-API-Key": key})
        (request_id,) = await send(api, key, sampler, 0)
        await api.result(request_id, **{"X-API-Key": key})
    first, second, again = (each.json["priority"] % TENANT_TAGS for each in upstream.completions)
    assert first == again != second


async def test_few_samples_run_before_another_tenants_queue(api: Api, upstream: FakeUpstream) -> None:
    go = asyncio.Event()
    upstream.default = after(go, complete())
    many, few = await api.sampler(), await api.sampler(**{"X-API-Key": SECOND})
    await send(api, FIRST, many, *range(30))
    await upstream.until(lambda server: server.busy == 30)
    last = (await send(api, SECOND, few, 0, 1))[-1]
    await upstream.until(lambda server: server.busy == 32)
    sent = priorities(upstream)
    assert sent[many] == sorted(set(sent[many]))
    assert sent[few] == sent[many][:2], "the second tenant runs beside the first samples, not behind the last ones"
    go.set()
    await api.result(last, **{"X-API-Key": SECOND})


async def test_the_virtual_time_advances_with_answered_samples(api: Api, upstream: FakeUpstream) -> None:
    go = asyncio.Event()
    upstream.default = after(go, complete())
    many, few = await api.sampler(), await api.sampler(**{"X-API-Key": SECOND})
    answered = await send(api, FIRST, many, *range(10))
    await upstream.until(lambda server: server.busy == 10)
    go.set()
    for request_id in answered:
        await api.result(request_id)
    upstream.default = never
    await send(api, FIRST, many, *range(10, 20))
    await send(api, SECOND, few, 0)
    await upstream.until(lambda server: server.busy == 10 + 1)
    sent = priorities(upstream)
    assert sent[many][8] < sent[few][0] <= sent[many][10]
    await api.finish(many)
    await api.post(f"sessions/{few.partition(':')[0]}/finish", {}, **{"X-API-Key": SECOND})


async def test_another_tenant_begins_where_the_replica_is_that_is_behind(api: Api, upstream: FakeUpstream) -> None:
    """Of ten samples, one replica has answered the first, and another one the last."""
    replicas = {"0": "http://behind", "9": "http://ahead"}

    async def answer(request: Received, writer: asyncio.StreamWriter) -> None:
        replica = replicas.get(request.headers["x-session-id"].rpartition(":")[2])
        if replica is None:
            await never(request, writer)
        else:
            await reply(200, completion(request.json), X_Skyrl_Worker=replica)(request, writer)

    go = asyncio.Event()
    upstream.default = after(go, answer)
    many, few = await api.sampler(), await api.sampler(**{"X-API-Key": SECOND})
    first, *_, last = await send(api, FIRST, many, *range(10))
    await upstream.until(lambda server: server.busy == 10)
    go.set()
    for request_id in (first, last):
        await api.result(request_id)
    upstream.default = never
    await send(api, SECOND, few, 1)
    await upstream.until(lambda server: len(server.completions) == 11)
    sent = priorities(upstream)
    assert sent[few][0] == sent[many][0] < sent[many][1]
    await api.finish(many)
    await api.post(f"sessions/{few.partition(':')[0]}/finish", {}, **{"X-API-Key": SECOND})


@pytest.mark.usefixtures("drain_at_once")
async def test_samples_from_before_a_restart_get_priorities(serve: Serve, upstream: FakeUpstream) -> None:
    upstream.default = never
    async with serve() as api:
        many = await api.sampler()
        await send(api, FIRST, many, *range(5))
        await upstream.until(lambda server: server.busy == 5)
    upstream.completions.clear()
    upstream.default = complete()
    async with serve() as api:
        await api.services.sampling.drain(60.0)
        assert len(set(priorities(upstream)[many])) == 5


@pytest.mark.parametrize("uses_priority", [False, True])
async def test_an_external_server_gets_priorities_only_if_configured(
    serve: Serve, upstream: FakeUpstream, uses_priority: bool
) -> None:
    async with serve(external_inference_url=upstream.url, external_inference_priority=uses_priority) as api:
        (request_id,) = await send(api, FIRST, await api.sampler(), 0)
        await api.result(request_id)
    (sent,) = upstream.completions
    assert ("priority" in sent.json) == uses_priority


@ON_POSTGRES
async def test_a_new_process_continues_at_the_virtual_time_of_the_others(
    serve: Serve, upstream: FakeUpstream, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise all samples of the new process would run before those of the older process."""
    monkeypatch.setattr(skyrl.api.server, "BEAT_S", 0.02)
    go = asyncio.Event()
    upstream.default = after(go, complete())
    async with serve(api_processes=2) as api:
        sampler = await api.sampler()
        promises = await send(api, FIRST, sampler, *range(10))
        await upstream.until(lambda server: server.busy == 10)
        go.set()
        for request_id in promises:
            await api.result(request_id)
        order = api.services.served[0].sampling.gate.order
        assert order is not None
        now = order.now
        assert now > 0
        async with asyncio.timeout(60):
            while await database.read_async(lambda c: c.execute(select(clocks.c.clock)).scalar()) != now:
                pass  # the next heartbeat writes the time
        async with open_services(Runtime(api.services.config, tmp_path, None, "key", slot=1)) as later:
            promise = await later.sampling.submit(encode_json(sample_body(sampler, 10)), tenant_of_key(FIRST))
            assert await later.futures.wait(promise.request_id, tenant_of_key(FIRST), 60.0)
    sent = priorities(upstream)[sampler]
    assert sent[10] == sent[9], "the new process continues at the time of the others, not at zero"
