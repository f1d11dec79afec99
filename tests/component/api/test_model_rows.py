"""A model's row and the command that creates the model are stored in one transaction."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from api_harness import BASE, Api, Serve, session_of
from sqlalchemy import insert, select, text

from skyrl.api.access import tenant_of_key
from skyrl.base.wire.rank_pattern import METADATA_KEY
from skyrl.storage.db import models as model_rows
from skyrl.storage.db.database import Database
from skyrl.storage.db.futures import futures
from skyrl.storage.db.models import models
from tests.postgres_server import ON_BOTH

KILLED = """
import asyncio, contextvars, os, signal, sys
from pathlib import Path
import httpx
from sqlalchemy import event
from skyrl.api.app import create_app
from skyrl.api.server import open_services
from skyrl.base.config.server import ServerConfig
from skyrl.storage.db.writer import GroupCommitWriter
from skyrl.runtime.processes.runtime import Runtime

directory, url, session, base = sys.argv[1:]
execute, transact = GroupCommitWriter.execute, GroupCommitWriter.transact

in_request = contextvars.ContextVar("in_request", default=False)

def die(after):
    async def write(self, *arguments):
        result = await after(self, *arguments)
        if in_request.get():
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    return write

async def main():
    config = ServerConfig(base_model=base, state_dir=Path(directory), database_url=url)
    async with open_services(Runtime(config, Path(directory), None, "key")) as services:
        transport = httpx.ASGITransport(create_app(services))
        async with httpx.AsyncClient(transport=transport, base_url="http://api") as http:
            await services.sessions.find(session, "")
            GroupCommitWriter.execute, GroupCommitWriter.transact = die(execute), die(transact)
            wanted = {"session_id": session, "model_seq_id": 0, "base_model": base}
            in_request.set(True)
            await http.post("/api/v1/create_model", json=wanted, headers={"X-API-Key": "tml-one"})

asyncio.run(main())
"""
"""A program with an API process that is killed right after the commit of the first write of a `create_model`."""


async def create(api: Api, session: str, **lora: Any) -> dict[str, Any]:
    wanted = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": lora}
    answer = await api.post("create_model", wanted)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ranks_and_seeds(database: Database) -> list[tuple[int, int]]:
    return database.read(lambda c: [tuple(row) for row in c.execute(select(models.c.lora_rank, models.c.seed))])


@ON_BOTH
async def test_a_process_killed_after_its_first_write_has_stored_model_and_command(
    serve: Serve, database: Database, tmp_path: Path
) -> None:
    async with serve() as api:
        session = session_of(await api.sampler())
    arguments = [str(tmp_path), database.url, session, BASE]
    died = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", KILLED, *arguments], capture_output=True, timeout=300
    )
    assert died.returncode == -signal.SIGKILL, died.stderr.decode()
    commands = database.read(lambda c: c.execute(select(futures.c.seq_id)).all())
    assert (len(ranks_and_seeds(database)), len(commands)) == (1, 1)


@ON_BOTH
async def test_a_model_row_without_a_command_takes_the_values_of_the_next_request(
    serve: Serve, database: Database
) -> None:
    """Earlier versions left such rows when they were killed."""
    async with serve() as api:
        session = session_of(await api.sampler())
        row = {"id": f"{session}:train:0", "session_id": session, "tenant": tenant_of_key("tml-one")}
        row |= {"model_seq_id": 0, "base_model": BASE, "status": "creating", "lora_rank": 16, "lora_alpha": 32.0}
        row |= {"seed": 9, "train_attn": True, "train_mlp": True, "train_unembed": True, "sampler_version": 0}
        row |= {"next_seq": 0, "created_at": 1.0, "last_request_at": 1.0}
        database.write(lambda c: c.execute(insert(models), row))
        first = await create(api, session, rank=4, seed=1)
        assert ranks_and_seeds(database) == [(4, 1)]
        assert await create(api, session, rank=4, seed=1) == first, (
            "a repeated request finds the command and changes nothing"
        )
        info = await api.post("get_info", {"model_id": first["model_id"]})
        assert info.json()["lora_rank"] == 4


@ON_BOTH
async def test_a_model_and_its_command_are_rolled_back_together(serve: Serve, database: Database) -> None:
    refuse = "CREATE TRIGGER refuse BEFORE INSERT ON futures BEGIN SELECT RAISE(ABORT, 'not now'); END"
    if not database.is_sqlite:
        function = "CREATE FUNCTION refuse() RETURNS trigger AS $$ BEGIN RAISE 'not now'; END $$ LANGUAGE plpgsql"
        database.write(lambda c: c.execute(text(function)))
        refuse = "CREATE TRIGGER refuse BEFORE INSERT ON futures FOR EACH ROW EXECUTE FUNCTION refuse()"
    async with serve() as api:
        session = session_of(await api.sampler())
        database.write(lambda c: c.exec_driver_sql(refuse))
        wanted = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 8}}
        assert (await api.post("create_model", wanted)).status_code == 500
        database.write(lambda c: c.execute(text("DROP TRIGGER refuse" + ("" if database.is_sqlite else " ON futures"))))
        assert ranks_and_seeds(database) == []
        await create(api, session, rank=4, seed=1)
        assert ranks_and_seeds(database) == [(4, 1)]


async def test_the_process_keeps_no_times_of_requests_to_closed_models(
    api: Api, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands of closed models are recorded and fail. The process must not keep the time of each of them."""
    monkeypatch.setattr(model_rows, "TOUCH_S", 0.0)
    known = api.services.models
    for number in range(50):
        await known.touch(f"s:train:{number}")
    assert len(known._touched) == 1
    monkeypatch.setattr(model_rows, "TOUCH_S", 3600.0)
    await known.touch("s:train:49")
    assert len(known._touched) == 1


PATTERN = {r"layers\.0\..*": 16, "q_proj": 2}


@ON_BOTH
@pytest.mark.parametrize("way", ["lora_config", "text", "object"])
async def test_other_ranks_in_some_layers_are_stored_in_their_order_and_told(
    serve: Serve, database: Database, way: str
) -> None:
    """In the body of a client's own, or in the metadata, where the SDK's type allows only text."""
    given = {"lora_config": {"rank": 8, "rank_pattern": PATTERN}} if way == "lora_config" else {}
    value: Any = json.dumps(PATTERN) if way == "text" else PATTERN
    given |= {} if way == "lora_config" else {"lora_config": {"rank": 8}, "user_metadata": {METADATA_KEY: value}}
    async with serve() as api:
        wanted = {"session_id": session_of(await api.sampler()), "model_seq_id": 0, "base_model": BASE, **given}
        made = await api.post("create_model", wanted)
        assert made.status_code == 200, made.text
        info = (await api.post("get_info", {"model_id": made.json()["model_id"]})).json()
        plain = await create(api, session_of(await api.sampler()), rank=8)
        of_plain = (await api.post("get_info", {"model_id": plain["model_id"]})).json()
    assert (info["lora_rank"], list(info["lora_rank_pattern"].items())) == (8, list(PATTERN.items()))
    assert "lora_rank_pattern" not in of_plain
    stored = database.read(
        lambda c: c.execute(select(models.c.rank_pattern).order_by(models.c.created_at)).scalars().all()
    )
    assert stored == [[list(each) for each in PATTERN.items()], None]
