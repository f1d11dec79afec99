"""One tenant cannot fill the disk: its passes, samples, sessions and turns are refused at its share, and no others."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from agent_world import CHAT, Server, user
from api_harness import BASE, Api, Serve, sample_body
from fake_upstream import FakeUpstream
from sqlalchemy import func, select

from skyrl.api.access import tenant_of_key
from skyrl.storage import shares
from skyrl.storage.db.agents import turns
from skyrl.storage.db.database import Database
from skyrl.storage.db.futures import futures
from skyrl.storage.futures.store import SHORT_BYTES

pytestmark = pytest.mark.usefixtures("drain_at_once")

LEAST = 40_000
OTHER = {"X-API-Key": "tml-two"}
FULL = {"min_free_disk_bytes": 2**60}
"""So much of the disk is to stay free that nothing is left to share."""
NOTE = {"user_metadata": {"note": "x" * 12_000}}


@pytest.fixture(autouse=True)
def little_is_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "LEAST_BYTES", LEAST)


def refused(answer: httpx.Response) -> None:
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "5"), answer.text
    assert "which is its share: requests with their results are deleted" in answer.json()["detail"]


def stored(database: Database) -> int:
    return database.read(lambda c: c.execute(select(func.count()).select_from(futures)).scalar_one())


async def model_of(api: Api, **headers: str) -> str:
    session = (await api.post("create_session", {}, **headers)).json()["session_id"]
    await api.post("create_model", {"session_id": session, "model_seq_id": 0, "base_model": BASE}, **headers)
    return f"{session}:train:0"


def a_pass(model: str, seq_id: int) -> dict[str, Any]:
    given = {"data": [], "loss_fn": "x" * 10_000}
    return {"model_id": model, "seq_id": seq_id, "forward_backward_input": given}


async def test_passes_are_refused_at_the_tenants_share_and_not_recorded(serve: Serve, database: Database) -> None:
    async with serve(**FULL) as api:
        mine, theirs = await model_of(api), await model_of(api, **OTHER)
        for seq_id in range(5, 8):  # behind numbers that never come
            assert (await api.post("forward_backward", a_pass(mine, seq_id))).status_code == 200
        assert (await api.post("forward_backward", a_pass(mine, 8))).status_code == 200
        before = stored(database)
        refused(await api.post("forward_backward", a_pass(mine, 9)))
        refused(await api.post("forward", a_pass(mine, 9)))
        another = {"session_id": mine.partition(":")[0], "model_seq_id": 1, "base_model": BASE}
        refused(await api.post("create_model", another))
        assert (await api.http.get("/statusz")).json()["quotas"]["refused"] == {shares.SHARE_OF_DISK: 3}
        registry = api.services.metrics.registry
        assert registry.get_sample_value("skyrl_samples_refused_total", {"reason": "share"}) == 3
        assert stored(database) == before
        again = await api.post("forward_backward", a_pass(mine, 8))
        assert again.status_code == 200, "a repeat adds nothing"
        step = {"model_id": mine, "seq_id": 1, "adam_params": {}}
        refused(await api.post("optim_step", step | {"not": "x" * SHORT_BYTES}))
        assert (await api.post("optim_step", step)).status_code == 200, "later commands wait for it"
        seq_id = 10
        while (later := await api.post("optim_step", step | {"seq_id": seq_id})).status_code == 200:
            seq_id += 1
        refused(later)
        assert LEAST / 2 < (seq_id - 10) * shares.ROW_BYTES < LEAST, "but not without an end"
        assert (await api.post("forward_backward", a_pass(theirs, 1), **OTHER)).status_code == 200


async def test_without_a_shortage_nothing_is_refused(api: Api) -> None:
    mine = await model_of(api)
    for seq_id in range(1, 10):
        assert (await api.post("forward_backward", a_pass(mine, seq_id))).status_code == 200


async def test_results_count_until_they_are_deleted(serve: Serve, upstream: FakeUpstream) -> None:
    tenant = tenant_of_key("tml-one")
    async with serve(**FULL, result_retention_s=3600.0) as api:
        sampler = await api.sampler()
        before = api.services.shares.held(tenant)
        promise = await api.sample(sampler, 0)
        while (answer := await api.result(promise["request_id"])).status_code == 408:
            pass
        assert answer.status_code == 200
        assert api.services.shares.held(tenant) > before, "the result is still in the database"
        api.services.shares.hold(tenant, LEAST)
        refused(await api.post("asample", sample_body(sampler, 1)))


async def test_sessions_are_refused_at_the_tenants_share(serve: Serve) -> None:
    async with serve(**FULL) as api:
        made = 0
        while (answer := await api.post("create_session", NOTE)).status_code == 200:
            made += 1
            done = await api.post(f"sessions/{answer.json()['session_id']}/finish", {})
            assert done.status_code == 200
        refused(answer)
        assert made == 4
        agent = {"model": BASE, "metadata": {"note": "x"}}
        refused(await api.post("agent_sessions", agent))
        assert (await api.post("agent_sessions", agent, **OTHER)).status_code == 200
        assert (await api.post("create_session", NOTE, **OTHER)).status_code == 200


async def test_sampling_sessions_are_refused_at_the_tenants_share(serve: Serve) -> None:
    async with serve(**FULL) as api:
        session = (await api.post("create_session", {})).json()["session_id"]
        asked = {"session_id": session, "base_model": BASE}
        made = 0
        while (
            answer := await api.post("create_sampling_session", asked | {"sampling_session_seq_id": made})
        ).status_code == 200:
            made += 1
        refused(answer)
        assert LEAST / 2 < made * shares.ROW_BYTES < LEAST


async def test_a_turn_is_refused_at_the_tenants_share(server: Server, database: Database) -> None:
    shares_of_process, tenant = server.api.services.shares, tenant_of_key("tml-one")
    agent = await server.agent()
    before = shares_of_process.held(tenant)
    await agent.say([user("y" * 5_000)])
    assert shares_of_process.held(tenant) > before + 5_000
    shares_of_process.hold(tenant, LEAST)
    shares_of_process._spare_bytes = 2**60
    answer = await agent.ask(CHAT, messages=[user("more")])
    assert answer.status_code == 429, answer.text
    assert "which is its share" in answer.text
    assert database.read(lambda c: c.execute(select(func.count()).select_from(turns)).scalar_one()) == 1
