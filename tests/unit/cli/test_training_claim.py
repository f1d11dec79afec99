"""The training claim: one server trains on a database, until it gives no sign of life."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from skyrl.base.config.server import ConfigError
from skyrl.cli.launcher import skyrl_processes
from skyrl.cli.launcher.skyrl_processes import TrainingClaim, server_id
from skyrl.storage.db import claims, engine_state
from skyrl.storage.db.database import Database, Fence
from skyrl.storage.db.engine_publisher import EngineStatePublisher
from skyrl.storage.doorbell import Doorbell
from tests.postgres_server import ON_BOTH

WAIT_S = 60.0


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skyrl_processes, "CLAIM_DEAD_AFTER_S", 0.3)
    monkeypatch.setattr(skyrl_processes, "CLAIM_LOOK_S", 0.01)
    monkeypatch.setattr(skyrl_processes, "CLAIM_HOLD_S", 0.01)


def test_a_state_directory_keeps_its_server_name_and_a_copy_gets_another(tmp_path: Path) -> None:
    original = tmp_path / "state"
    original.mkdir()
    name = server_id(original)
    assert server_id(original) == name
    shutil.copytree(original, tmp_path / "copy")
    other = server_id(tmp_path / "copy")
    assert other != name
    assert server_id(tmp_path / "copy") == other
    assert server_id(original) == name


@ON_BOTH
async def test_a_second_server_is_refused_while_the_first_gives_signs_of_life(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(skyrl_processes, "CLAIM_DEAD_AFTER_S", WAIT_S)
    first, second = TrainingClaim(database, "first"), TrainingClaim(database, "second")
    await first.take()
    database.write(lambda c: engine_state.publish_training(c, ready=True, reason=""))
    holding = asyncio.create_task(first.hold())
    with pytest.raises(ConfigError, match="server first trains on this database"):
        await second.take()
    holding.cancel()
    second.release()
    assert database.read(engine_state.read_state).training_ready, (
        "the second server does not change the first one's state"
    )
    first.release()
    assert not database.read(engine_state.read_state).training_ready
    await second.take()


@ON_BOTH
async def test_an_engine_heartbeat_is_a_sign_of_life(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher of that server may be stalled."""
    monkeypatch.setattr(skyrl_processes, "CLAIM_DEAD_AFTER_S", WAIT_S)
    await TrainingClaim(database, "first").take()
    taking = asyncio.create_task(TrainingClaim(database, "second").take())
    while not taking.done():
        await asyncio.to_thread(database.write, engine_state.beat)
    with pytest.raises(ConfigError, match="server first trains"):
        await taking


@ON_BOTH
async def test_a_second_server_takes_the_claim_of_a_silent_one_which_notices_the_loss(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = TrainingClaim(database, "first"), TrainingClaim(database, "second")
    await first.take()
    await second.take()
    await asyncio.wait_for(first.hold(), WAIT_S)
    assert "another server trains on this database now" in caplog.text
    first.release()
    assert database.read(claims.read_claim).owner == "second"


@ON_BOTH
async def test_the_engine_of_a_server_that_lost_its_claim_cannot_change_the_engine_state(
    database: Database, tmp_path: Path
) -> None:
    """The server was cut off from the database for long. Its launcher will notice the lost claim and stop the
    engine."""
    await TrainingClaim(database, "first").take()
    api = Doorbell(tmp_path / "nobody.sock")
    first, second = (EngineStatePublisher(database, api, Fence(server)) for server in ("first", "second"))
    await first.publish_url("http://127.0.0.1:1")
    assert database.read(engine_state.read_state).inference_proxy_url == "http://127.0.0.1:1"
    await TrainingClaim(database, "second").take()
    await second.publish_url("http://127.0.0.1:2")
    second.training(ready=True, reason="")
    published = database.read(engine_state.read_state)
    first.beat(None)
    await first.publish_url("http://127.0.0.1:1")
    first.training(ready=False, reason="loading the base model")
    first.clear("the engine has stopped")
    assert database.read(engine_state.read_state) == published
    api.close()


async def test_a_server_takes_its_own_claim_again_at_once(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skyrl_processes, "CLAIM_DEAD_AFTER_S", WAIT_S)
    for _ in range(2):  # the second round is a restart after a kill
        await asyncio.wait_for(TrainingClaim(database, "first").take(), WAIT_S / 2)
        database.write(engine_state.beat)


async def test_one_of_two_servers_that_start_at_the_same_time_is_refused(database: Database) -> None:
    await TrainingClaim(database, "gone").take()
    starts = [TrainingClaim(database, name).take() for name in ("first", "second")]
    results = await asyncio.gather(*starts, return_exceptions=True)
    assert [type(error) for error in results if error is not None] == [ConfigError]
