"""Why a request waits, as its client learns it: in the answer to a long poll, and in what the SDKs log of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from api_harness import Api, Serve
from engine_harness import data
from fake_upstream import FakeUpstream, after, complete

import skyrl.api.routes.futures
from skyrl.api.app import create_app
from skyrl.api.request_status import finding
from skyrl.base.types.activity import EngineActivity, ModelActivity, RecoveryProgress, WaitsFor, encode_activity
from skyrl.base.types.requests import Kind
from skyrl.http.serving import Server
from skyrl.storage.db import engine_state
from skyrl.storage.db.database import Database
from tests.e2e.sdk.matrix import isolated, versions

pytestmark = pytest.mark.usefixtures("drain_at_once")


NOW = time.time()
"""In these tests no time passes for commands that wait: sentences with seconds are the same on a slow machine."""


@pytest.fixture(autouse=True)
def no_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "time", SimpleNamespace(time=lambda: NOW))


@pytest.fixture(autouse=True)
def polls_end_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skyrl.api.routes.futures, "HOLD_S", 0.02)


async def told(api: Api, database: Database, activity: EngineActivity, *, trains: bool = True) -> None:
    """The engine tells what it does, and the API process reads that."""
    reason = "" if trains else "restoring the models in training"
    database.write(lambda c: engine_state.publish_training(c, ready=trains, reason=reason))
    database.write(lambda c: engine_state.beat(c, encode_activity(activity)))
    await api.services.refresh()


async def training(api: Api) -> tuple[str, list[str]]:
    """A new model, and the request ids of its creation, a pass and a step."""
    session = (await api.post("create_session", {})).json()["session_id"]
    made = await api.post("create_model", {"session_id": session, "model_seq_id": 0, "base_model": "acme/base"})
    model = made.json()["model_id"]
    given = {"data": data(1), "loss_fn": "cross_entropy"}
    bodies = [
        ("forward_backward", {"model_id": model, "seq_id": 1, "forward_backward_input": given}),
        ("optim_step", {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 0.01}}),
    ]
    sent = [await api.post(path, body) for path, body in bodies]
    return model, [answer.json()["request_id"] for answer in (made, *sent)]


def waits(waits_for: WaitsFor, seq_id: int = 0, kind: Kind = Kind.CREATE_MODEL, tenant: str = "t") -> ModelActivity:
    return ModelActivity(tenant, waits_for, NOW - 12, str(kind), seq_id, 2, work_s=3.0)


async def reason(api: Api, request_id: str) -> tuple[str, str]:
    answer = await api.result(request_id)
    assert answer.status_code == 408
    assert answer.json()["type"] == "try_again"
    return answer.json()["queue_state"], answer.json()["queue_state_reason"]


async def test_a_command_says_how_many_commands_of_its_own_come_first(api: Api, database: Database) -> None:
    model, (created, passed, stepped) = await training(api)
    await told(api, database, EngineActivity({model: waits(WaitsFor.NOTHING)}))
    assert await reason(api, created) == ("active", "create_model (command 0) began 12 s ago")
    first = "create_model (command 0) began 12 s ago"
    assert await reason(api, passed) == ("active", f"1 earlier command of this model first: {first}")
    assert await reason(api, stepped) == ("active", f"2 earlier commands of this model first: {first}")


async def test_a_command_says_whose_turns_come_first_and_for_how_long(api: Api, database: Database) -> None:
    model, (created, *_) = await training(api)
    others = {f"s{n}:train:0": waits(WaitsFor.TURN, tenant=f"secret{n}") for n in range(2)}
    await told(api, database, EngineActivity({model: waits(WaitsFor.TURN)} | others))
    state, sentence = await reason(api, created)
    assert state == "paused_capacity"
    assert sentence == ("create_model (command 0) takes turns with 2 other tenants with 4 commands; about 3 s")


async def test_a_missing_command_is_named(api: Api, database: Database) -> None:
    model, (_, passed, _) = await training(api)
    await told(api, database, EngineActivity({model: waits(WaitsFor.GAP, 3, Kind.OPTIM_STEP)}))
    state, sentence = await reason(api, passed)
    assert state == "paused_capacity"
    assert sentence.startswith("command 3 of this model has not arrived")


async def test_while_the_engine_recovers_commands_say_how_far_it_is(api: Api, database: Database) -> None:
    _, (created, *_) = await training(api)
    await told(api, database, EngineActivity(recovery=RecoveryProgress(12, 40)), trains=False)
    assert await reason(api, created) == (
        "paused_capacity",
        "the trainer has restarted, and has repeated 12 of 40 commands",
    )


async def test_without_an_engine_commands_say_why_it_cannot_train(
    api: Api, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    _, (created, *_) = await training(api)
    database.write(lambda c: engine_state.clear(c, "the engine has stopped"))
    await api.services.refresh()
    caplog.set_level(logging.INFO)
    state, sentence = await reason(api, created)
    assert (state, sentence) == ("paused_capacity", "the trainer cannot run commands now: the engine has stopped")
    (line,) = [record for record in caplog.records if sentence in record.getMessage()]
    assert getattr(line, "request_id", None) == created, "the operator's log has the user's sentence"


async def test_a_sample_says_that_the_inference_server_has_it_or_is_away(
    serve: Serve, upstream: FakeUpstream, database: Database
) -> None:
    go = asyncio.Event()
    upstream.default = after(go, complete())
    async with serve() as api:
        sampler = await api.sampler()
        sent = (await api.sample(sampler, 1))["request_id"]
        await upstream.until(lambda server: bool(server.completions))
        state, sentence = await reason(api, sent)
        assert (state, sentence) == ("active", "the inference server has had the sample for 1 s")
    database.write(lambda c: engine_state.publish_url(c, None))
    async with serve() as api:
        lost = (await api.sample(await api.sampler(), 1))["request_id"]
        state, sentence = await reason(api, lost)
        while state == "active":  # the process has not looked for the inference server yet
            state, sentence = await reason(api, lost)
        assert state == "paused_capacity"
        assert sentence == "the inference server has been away for 1 s; the sample is sent when it is back"


@contextlib.asynccontextmanager
async def on_a_port(api: Api) -> AsyncIterator[str]:
    """The API process on a TCP port; yields its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = Server(create_app(api.services), drain_s=0)
        serving = asyncio.create_task(server.serve([listening]))
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving


async def logged(version: str, url: str, directory: Path) -> list[str]:
    """What one SDK logs of requests that wait."""
    python, env = await asyncio.to_thread(isolated, version, directory)
    program = await asyncio.create_subprocess_exec(
        python, "-m", "tests.e2e.sdk.waiter", "--url", url, cwd=directory, env=env, stdout=-1, stderr=-1
    )
    out, err = await program.communicate()
    assert program.returncode == 0, err.decode()
    return out.decode().splitlines()


async def test_the_newest_and_the_oldest_sdk_log_why_their_requests_wait(
    serve: Serve, database: Database, tmp_path: Path
) -> None:
    """No engine runs, and no inference server is published."""
    database.write(lambda c: engine_state.clear(c, "loading the base model"))
    async with serve(served_model_names=["tiny"]) as api, on_a_port(api) as url:
        said: dict[str, list[str]] = {}
        for version in (versions()[0], versions()[-1]):
            said[version] = await logged(version, url, tmp_path / version)
    wanted = [
        "the trainer cannot run commands now: loading the base model",
        "the inference server has been away for",
    ]
    for version, lines in said.items():
        for words in wanted:
            assert any(words in line for line in lines), f"{version}: {lines}"
