"""What a new user of the server meets first: its start, its root page, unknown paths, wrong kinds of weights, a
disk that is full."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from api_harness import BASE, Api, Serve, session_of
from fake_upstream import FakeUpstream
from sqlalchemy import insert, select, text

from skyrl import __version__
from skyrl.api import served
from skyrl.api.bodies import SMALL_BYTES
from skyrl.api.served import Readiness
from skyrl.api.server import open_services
from skyrl.base.config.loading import load_config
from skyrl.runtime.processes.host_resources import SPARE_DISK_BYTES
from skyrl.runtime.processes.runtime import Runtime
from skyrl.storage.db.checkpoints import checkpoints
from skyrl.storage.db.database import Database
from skyrl.storage.db.faults import DatabaseError
from skyrl.storage.db.models import models
from tests.postgres_server import ON_BOTH


async def test_the_root_describes_the_server_and_names_existing_paths_only(api: Api) -> None:
    answer = await api.http.get("/", headers={"X-API-Key": ""})
    assert answer.status_code == 200
    about = answer.json()
    assert (about["name"], about["version"]) == ("skyrl", __version__)
    assert str(api.services.config.state_dir) not in answer.text
    for path in about["paths"].values():
        assert (await api.http.get(path)).status_code == 200, path


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_base_url_that_ends_in_the_prefix_gets_an_explanation(api: Api, method: str) -> None:
    answer = await api.http.request(method, "/api/v1/api/v1/create_session", json={})
    assert answer.status_code == 404
    expected = "no such path '/api/v1/api/v1/create_session'; the base URL ends before /api/v1"
    request_id = answer.headers["x-request-id"]
    assert answer.json() == {"detail": expected, "field": None, "request_id": request_id}


async def test_the_404_names_the_unknown_path(api: Api) -> None:
    for path, ending in (("/healthz", "'/healthz'"), ("/v2/models", "'/v2/models'"), ("/" + "x" * 5_000, "...'")):
        answer = await api.http.get(path)
        assert answer.status_code == 404
        assert answer.json()["detail"].startswith("no such path ")
        assert answer.json()["detail"].endswith(ending)
        assert len(answer.text) < 300


async def test_a_refusal_repeats_a_bounded_part_of_a_value(api: Api) -> None:
    answer = await api.post("session_heartbeat", {"session_id": "x" * 900_000})
    assert answer.status_code == 404
    assert (answer.json()["field"], len(answer.json()["detail"])) == ("session_id", 4_003)


# Checkpoints of another kind


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("weights", "training state, saved by save_weights"),
        ("external_weights", "an export, made by save_weights_external"),
    ],
)
async def test_the_error_tells_weights_of_the_wrong_kind_from_missing_weights(
    api: Api, database: Database, kind: str, what: str
) -> None:
    session = session_of(await api.sampler())
    made = (await api.post("create_model", {"session_id": session, "model_seq_id": 0, "base_model": BASE})).json()
    shape = database.read(lambda c: c.execute(select(models).where(models.c.id == made["model_id"])).one())
    copied = ("tenant", "base_model", "lora_rank", "lora_alpha", "seed", "train_attn", "train_mlp", "train_unembed")
    row: dict[str, Any] = {name: getattr(shape, name) for name in copied}
    row |= {"model_id": shape.id, "kind": kind, "name": "a", "store_key": "g/a", "size_bytes": 1, "created_at": 1.0}
    database.write(lambda c: c.execute(insert(checkpoints), row | {"public": False}))
    path = f"tinker://{shape.id}/{kind}/a"
    wanted = {"session_id": session, "sampling_session_seq_id": 5, "model_path": path}
    answer = await api.post("create_sampling_session", wanted)
    assert answer.status_code == 404
    detail = f"model_path: {path!r} is {what}; sample from what save_weights_for_sampler saved"
    request_id = answer.headers["x-request-id"]
    assert answer.json() == {"detail": detail, "field": "model_path", "request_id": request_id}
    stranger = {"session_id": session_of(await api.sampler(**{"X-API-Key": "tml-two"}))} | {
        name: wanted[name] for name in ("sampling_session_seq_id", "model_path")
    }
    answer = await api.post("create_sampling_session", stranger, **{"X-API-Key": "tml-two"})
    assert answer.json()["detail"] == f"model_path: no sampler weights {path!r}", (
        "other tenants do not learn that the checkpoint exists"
    )


async def test_the_model_directory_is_accepted_as_the_base_models_name(serve: Serve, tmp_path: Any) -> None:
    """The SDK loads a tokenizer by the base model's name. With the directory as the name it needs no model hub."""
    async with serve(served_model_names=("tiny",)) as api:
        session = session_of(await _named(api, "tiny"))
        made = await api.post("create_model", {"session_id": session, "model_seq_id": 0, "base_model": "tiny"})
        info = await api.post("get_info", {"model_id": made.json()["model_id"]})
        name = api.services.config.base_model_path
        wanted = {"session_id": session, "sampling_session_seq_id": 8, "base_model": name}
        assert (await api.post("create_sampling_session", wanted)).status_code == 200
        assert info.status_code == 200


async def _named(api: Api, name: str) -> str:
    session = (await api.post("create_session", {})).json()["session_id"]
    wanted = {"session_id": session, "sampling_session_seq_id": 0, "base_model": name}
    return (await api.post("create_sampling_session", wanted)).json()["sampling_session_id"]


# Readiness


async def flood(api: Api, count: int) -> list[httpx.Response]:
    return await asyncio.gather(*(api.http.get("/readyz", headers={"X-API-Key": ""}) for _ in range(count)))


async def test_many_probes_cause_one_read_of_the_database(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = 0
    read, reading, go = api.services.served[0].watch._read, asyncio.Event(), asyncio.Event()

    async def slow() -> Any:
        nonlocal reads
        reads += 1
        reading.set()
        await go.wait()
        return await read()

    monkeypatch.setattr(api.services.served[0].watch, "_read", slow)
    monkeypatch.setattr(served, "FRESH_S", 3600.0)
    answers = asyncio.create_task(flood(api, 500))
    await reading.wait()
    background = reads
    go.set()
    assert {answer.status_code for answer in await answers} == {200}
    await flood(api, 100)
    assert reads < background + 10, "600 probes cause one read; a slow machine reads some times in the background"


async def test_many_probes_probe_an_external_server_once(
    serve: Serve, upstream: FakeUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "FRESH_S", 3600.0)
    async with serve(external_inference_url=upstream.url) as api:
        client = api.services.served[0].sampling.client
        assert client is not None
        probe, probes = client.probe, 0

        async def counted() -> str | None:
            nonlocal probes
            probes += 1
            return await probe()

        monkeypatch.setattr(client, "probe", counted)
        assert len({answer.text for answer in await flood(api, 200)}) == 1
        await flood(api, 50)
        assert probes == 1


async def test_readiness_is_computed_again_after_a_second_and_after_a_failure() -> None:
    now, found = 0.0, [["starting"], OSError("away"), []]

    async def find() -> list[str]:
        one = found.pop(0)
        if isinstance(one, Exception):
            raise one
        return one

    watched = Readiness(find, lambda: now)
    assert await watched.now() == await watched.now() == ["starting"]
    now = 1.0
    waiting = await asyncio.gather(*(watched.now() for _ in range(3)), return_exceptions=True)
    assert [str(one) for one in waiting] == ["away"] * 3
    assert await watched.now() == []


async def test_a_cancelled_probe_does_not_cancel_the_shared_check() -> None:
    go = asyncio.Event()

    async def find() -> list[str]:
        await go.wait()
        return ["found"]

    watched = Readiness(find)
    first, second = asyncio.create_task(watched.now()), asyncio.create_task(watched.now())
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    go.set()
    assert await second == ["found"]


BUILD = """
import sys
from pathlib import Path

from skyrl.api.access import Tokens
from skyrl.api.services import Services
from skyrl.api.signed_links import SignedUrls
from skyrl.base.config.server import ServerConfig
from skyrl.inference.features import InferenceFeatures
from skyrl.runtime.processes.runtime import Runtime

OPENING = ("open", "os.listdir", "os.mkdir", "os.scandir", "socket.__new__", "sqlite3.connect", "subprocess.Popen",
           "_thread.start_new_thread")
seen = []
directory = Path(sys.argv[1])
runtime = Runtime(ServerConfig(base_model="acme/base", state_dir=directory / "state"), directory, None, None)
state, features = runtime.config.state_dir, InferenceFeatures(False, False, False)
parts = runtime, Tokens.open(state), SignedUrls.open(state, None), [features]
Services(*parts)  # imports what is imported late
sys.addaudithook(lambda event, given: seen.append((event, given)) if event in OPENING else None)
Services(*parts)
print(*seen, sep="\\n", end="")
"""


def test_building_an_api_process_opens_no_file_no_socket_and_no_thread(tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, "-c", BUILD, str(tmp_path)], capture_output=True, text=True, check=True)
    assert ran.stdout == ""


@ON_BOTH
@pytest.mark.parametrize("missing", ["api_keys", "api_processes"], ids=["first read", "first write"])
async def test_a_start_that_fails_closes_what_it_has_opened(tmp_path: Path, migrated_url: str, missing: str) -> None:
    with closing(Database(migrated_url)) as database:
        database.write(lambda c: c.execute(text(f"DROP TABLE {missing}")))
    config = load_config({"base_model": BASE, "state_dir": tmp_path, "database_url": migrated_url})
    open_before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(DatabaseError, match=missing):
        async with open_services(Runtime(config, tmp_path, None, "key")):
            pass
    assert "group-commit" not in {thread.name for thread in threading.enumerate()}
    assert set(os.listdir("/proc/self/fd")) <= open_before  # garbage of an earlier test may have been closed meanwhile
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".sock")]


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Less space is free than the server keeps in reserve."""
    usage = SimpleNamespace(free=60 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    return usage


async def test_readyz_reports_the_full_disk_and_the_server_stays_ready(api: Api, full: SimpleNamespace) -> None:
    deadline = time.monotonic() + 60
    while True:  # an earlier answer may be cached for a while
        answer = await api.http.get("/readyz")
        (reason,) = answer.json()["reasons"] or [""]
        if reason or time.monotonic() > deadline:
            break
    assert answer.status_code == 200
    assert answer.json()["ready"] is True
    assert reason.startswith("disk: the server's disk has 60 MiB free, less than the 512 MiB")


async def test_a_large_pass_is_refused_with_headers_that_make_the_sdk_print_the_reason(
    api: Api, full: SimpleNamespace
) -> None:
    body = b"x" * (SMALL_BYTES + 1)
    answer = await api.http.post("/api/v1/forward_backward", content=body)
    assert answer.status_code == 503
    assert answer.json()["detail"].startswith("the server's disk is full")
    assert answer.headers["x-should-retry"] == "false"
    assert answer.headers["x-deprecation-level"] == "error"
    assert answer.headers["x-deprecation-note"] == answer.json()["detail"]
    assert float(answer.headers["retry-after"]) > 0
    full.free = SPARE_DISK_BYTES + 2 * len(body)
    answer = await api.http.post("/api/v1/forward_backward", content=body)
    assert answer.status_code == 400, "the body is read now, and is invalid"
