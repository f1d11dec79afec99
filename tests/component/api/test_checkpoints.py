"""Checkpoints through the API and the engine: list, change, copy, load from another account."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from checkpoint_world import ADAPTER, KEY, OTHER, World, rest_path
from engine_harness import Trainer, files_in
from sqlalchemy import select

from skyrl.api.access import tenant_of_key
from skyrl.base.types.requests import Kind
from skyrl.base.types.weights import AdapterVersion
from skyrl.engine import sweeping
from skyrl.storage.db.futures import futures

SOON_S = -3600.0
"""Files count as old at once. S3 gives times in whole seconds, so a file may seem younger than it is."""


async def test_saved_checkpoints_are_listed_with_their_metadata(world: World) -> None:
    trainer = await world.trainer()
    noted = {"step": "3", "note": "für später"}
    for kind in (Kind.SAVE_WEIGHTS, Kind.SAVE_WEIGHTS_FOR_SAMPLER):
        await trainer.do(kind, path="plain")
        await trainer.do(kind, path="noted", user_metadata=noted, ttl_seconds=7200)
    await trainer.do(Kind.SAVE_WEIGHTS_EXTERNAL, path="export")
    run = f"training_runs/{trainer.model_id}"
    listed = {one["checkpoint_id"]: one for one in (await world.get(f"{run}/checkpoints"))["checkpoints"]}
    assert set(listed) == {
        "weights/plain",
        "weights/noted",
        "sampler_weights/plain",
        "sampler_weights/noted",
        "external_weights/export",
    }
    for kind, type_ in (("weights", "training"), ("sampler_weights", "sampler")):
        plain, with_notes = listed[f"{kind}/plain"], listed[f"{kind}/noted"]
        assert (plain["user_metadata"], plain["expires_at"]) == (None, None)
        assert with_notes["user_metadata"] == noted
        assert with_notes["expires_at"] is not None
        assert with_notes["checkpoint_type"] == type_
        assert with_notes["tinker_path"] == f"tinker://{trainer.model_id}/{kind}/noted"
    assert listed["external_weights/export"]["checkpoint_type"] == "external"
    got = await world.get(run)
    assert got["last_checkpoint"] == listed["weights/noted"]
    assert got["last_sampler_checkpoint"] == listed["sampler_weights/noted"]
    assert (await world.get("training_runs"))["training_runs"] == [got]
    pages = [await world.get(f"checkpoints?limit=2&offset={offset}") for offset in (0, 2, 4)]
    assert all(page["cursor"]["total_count"] == 5 for page in pages)
    assert pages[1]["cursor"] == {"limit": 2, "offset": 2, "total_count": 5}
    ids = [one["checkpoint_id"] for page in pages for one in page["checkpoints"]]
    assert sorted(ids) == sorted(listed)
    assert ids[0] == "external_weights/export", "the newest checkpoint comes first"


async def test_old_sdks_without_exports_do_not_see_exports_in_lists(world: World) -> None:
    trainer = await world.trainer()
    await trainer.do(Kind.SAVE_WEIGHTS_EXTERNAL, path="export")
    await trainer.do(Kind.SAVE_WEIGHTS, path="state")
    for version in ("0.16.1", "0.25.0", "0.30.4", "0.38.0", "1.0.0", "strange"):
        knows = version not in ("0.16.1", "0.25.0")
        client = {"X-Stainless-Package-Version": version}
        for path in (f"training_runs/{trainer.model_id}/checkpoints", "checkpoints"):
            answer = await world.get(path, **client)
            types = sorted(one["checkpoint_type"] for one in answer["checkpoints"])
            assert types == (["external", "training"] if knows else ["training"]), version
            assert answer.get("cursor", {}).get("total_count", len(types)) == len(types)


async def test_each_kind_of_checkpoint_is_deleted_expired_and_published_alone(world: World) -> None:
    trainer = await world.trainer()
    for kind in (Kind.SAVE_WEIGHTS, Kind.SAVE_WEIGHTS_FOR_SAMPLER, Kind.SAVE_WEIGHTS_EXTERNAL):
        await trainer.do(kind, path="x")
    paths = {
        kind: f"tinker://{trainer.model_id}/{kind}/x" for kind in ("weights", "sampler_weights", "external_weights")
    }

    async def listed() -> dict[str, dict[str, Any]]:
        found = await world.get(f"training_runs/{trainer.model_id}/checkpoints")
        return {one["checkpoint_id"].partition("/")[0]: one for one in found["checkpoints"]}

    assert (
        await world.ask("PUT", f"{rest_path(paths['external_weights'])}/ttl", {"ttl_seconds": 3600})
    ).status_code == 200
    assert [kind for kind, one in (await listed()).items() if one["expires_at"]] == ["external_weights"]
    assert (await world.ask("POST", f"{rest_path(paths['sampler_weights'])}/publish")).status_code == 200
    assert [kind for kind, one in (await listed()).items() if one["public"]] == ["sampler_weights"]
    assert (await world.ask("DELETE", rest_path(paths["weights"]))).status_code == 200
    assert (await world.ask("DELETE", rest_path(paths["weights"]))).status_code == 404
    assert set(await listed()) == {"sampler_weights", "external_weights"}
    assert world.events() == [
        "checkpoint_created",
        "checkpoint_created",
        "checkpoint_exported",
        "checkpoint_ttl_changed",
        "checkpoint_published",
        "checkpoint_deleted",
    ]
    await trainer.do(Kind.SAVE_WEIGHTS, path="x")


async def test_the_scope_decides_whether_other_tenants_published_checkpoints_are_listed(world: World) -> None:
    owner, reader = await world.trainer(), await world.trainer(OTHER)
    for name in ("public", "private"):
        await owner.do(Kind.SAVE_WEIGHTS, path=name, user_metadata={"of": "owner"})
    await reader.do(Kind.SAVE_WEIGHTS, path="mine")
    run = f"training_runs/{owner.model_id}"
    assert (await world.ask("GET", f"{run}/checkpoints", key=OTHER)).status_code == 404
    public = f"tinker://{owner.model_id}/weights/public"
    assert (await world.ask("POST", f"{rest_path(public)}/publish")).status_code == 200

    async def names(path: str, key: str = OTHER) -> list[str]:
        return sorted(one["checkpoint_id"] for one in (await world.get(path, key))["checkpoints"])

    assert await names(f"{run}/checkpoints") == ["weights/public"], "the SDK finds a published checkpoint in this way"
    assert await names(f"{run}/checkpoints", KEY) == ["weights/private", "weights/public"]
    assert (await world.ask("GET", f"{run}/checkpoints?access_scope=owned", key=OTHER)).status_code == 404
    assert await names("checkpoints") == ["weights/mine"]
    assert await names("checkpoints?access_scope=accessible") == ["weights/mine", "weights/public"]
    assert (await world.ask("GET", run, key=OTHER)).status_code == 404
    seen = await world.get(f"{run}?access_scope=accessible", OTHER)
    assert seen["last_checkpoint"]["tinker_path"] == public
    assert seen["user_metadata"] is None
    assert (await world.ask("DELETE", f"{rest_path(public)}/publish")).status_code == 200
    assert (await world.ask("GET", f"{run}?access_scope=accessible", key=OTHER)).status_code == 404


# Copy


async def test_a_copy_outlives_its_source(each_world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeping, "GRACE_S", SOON_S)
    monkeypatch.setattr(sweeping, "LISTING_S", SOON_S)
    trainer = await each_world.trainer()
    await trainer.step(1)
    before = await trainer.state()
    sources, copies = [], []
    for kind in (Kind.SAVE_WEIGHTS, Kind.SAVE_WEIGHTS_FOR_SAMPLER):
        sources.append((await trainer.do(kind, path="kept", user_metadata={"a": "b"}, ttl_seconds=3600))["path"])
        wanted = {"source_path": sources[-1], "destination_project_id": "archive"}
        copies.append((await each_world.post("copy_weights", wanted))["tinker_path"])
    for source, copy in zip(sources, copies, strict=True):
        assert copy.split("/")[3:] == source.split("/")[3:], "a copy keeps its kind and name"
        assert (await each_world.ask("DELETE", rest_path(source))).status_code == 200
    await each_world.harness.end(trainer.session)
    for _ in range(2):
        await each_world.harness.sweep()
    assert len(each_world.harness.checkpoint_store.stored()) == 2
    listed = {one["tinker_path"]: one for one in (await each_world.get("checkpoints"))["checkpoints"]}
    assert set(listed) == set(copies)
    assert all(one["user_metadata"] == {"a": "b"} and one["expires_at"] is None for one in listed.values())
    run_id = copies[0].removeprefix("tinker://").partition("/")[0]
    runs = await each_world.get("training_runs?project_id=archive")
    assert run_id in [run["training_run_id"] for run in runs["training_runs"]]
    # Load the copy
    session = await each_world.session()
    load = {"session_id": session, "model_seq_id": 0, "path": copies[0], "optimizer": True}
    promise = await each_world.post("load_weights", load)
    assert (await each_world.outcome(promise["request_id"])).error is None
    loaded = Trainer(each_world.harness, trainer.session, promise["model_id"])
    assert await loaded.state() == before
    # Sample from the copy
    wanted = {"session_id": session, "sampling_session_seq_id": 0, "model_path": copies[1]}
    await each_world.post("create_sampling_session", wanted)
    (row,) = [
        row for row in each_world.harness.checkpoint_rows(copies[1].split("/")[2]) if row.kind == "sampler_weights"
    ]
    assert files_in(each_world.harness.adapter(row.weights)) == {name: before[name] for name in ADAPTER}
    assert row.weights == AdapterVersion(f"{row.model_id}@1")
    # A sampler copy cannot be trained on
    late = await each_world.post("optim_step", {"model_id": run_id, "seq_id": 1, "adam_params": {}})
    failed = await each_world.outcome(late["request_id"])
    assert "not there any more" in (failed.error or "")


async def test_a_copy_can_go_into_a_session_and_can_expire(world: World) -> None:
    trainer = await world.trainer()
    source = (await trainer.do(Kind.SAVE_WEIGHTS, path="kept"))["path"]
    session = await world.session()
    wanted = {"source_path": source, "session_id": session, "model_seq_id": 4, "ttl_seconds": 3600}
    copy = (await world.post("copy_weights", wanted))["tinker_path"]
    assert copy == f"tinker://{session}:train:4/weights/kept"
    (listed,) = (await world.get(f"training_runs/{session}:train:4/checkpoints"))["checkpoints"]
    assert listed["expires_at"] is not None
    again = await world.ask("POST", "copy_weights", wanted)
    assert again.status_code == 400
    assert again.json()["field"] == "model_seq_id"
    assert len(world.harness.checkpoint_store.stored()) == 2
    assert world.checkpoints_counted() == 2
    assert world.events()[-1] == "checkpoint_copied"


async def test_two_requests_with_one_idempotency_key_make_one_copy(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = await world.trainer()
    source = (await trainer.do(Kind.SAVE_WEIGHTS, path="kept"))["path"]
    wanted = {"source_path": source, "destination_project_id": "archive"}
    copy = world.services.checkpoint_store.copy

    def slowly(*arguments: str) -> None:
        time.sleep(0.2)
        copy(*arguments)

    monkeypatch.setattr(world.services.checkpoint_store, "copy", slowly)
    key = {"X-Idempotency-Key": "3b2f"}
    first, second = await asyncio.gather(*(world.post("copy_weights", wanted, **key) for _ in range(2)))
    assert first == second == await world.post("copy_weights", wanted, **key)
    assert await world.post("copy_weights", wanted, **{"X-Idempotency-Key": "other"}) != first
    assert await world.post("copy_weights", wanted) != first
    stranger = await world.ask("POST", "copy_weights", wanted, OTHER, **key)
    assert stranger.status_code == 404, "the same idempotency key of another tenant is another request"
    assert len(world.harness.checkpoint_store.stored()) == 4


@pytest.mark.parametrize(("keys", "most"), [([KEY], 1), ([KEY, OTHER, "tml-third"], 2)])
async def test_a_tenant_copies_one_checkpoint_at_a_time_and_all_together_two(
    world: World, monkeypatch: pytest.MonkeyPatch, keys: list[str], most: int
) -> None:
    trainer = await world.trainer()
    source = (await trainer.do(Kind.SAVE_WEIGHTS, path="kept"))["path"]
    wanted = {"source_path": source, "destination_project_id": "archive", "weights_access_token": KEY}
    copy = world.services.checkpoint_store.copy
    running: list[int] = []
    at_once: list[int] = []

    def slowly(*arguments: str) -> None:
        running.append(1)
        at_once.append(len(running))
        time.sleep(0.2)
        copy(*arguments)
        running.pop()

    monkeypatch.setattr(world.services.checkpoint_store, "copy", slowly)
    answers = await asyncio.gather(*(world.ask("POST", "copy_weights", wanted, key) for key in keys for _ in range(3)))
    assert [answer.status_code for answer in answers] == [200] * len(answers)
    assert len(at_once) == len(answers)
    assert max(at_once) == most


# Access tokens: a request carries another account's key and reads what that account may read


@pytest.mark.parametrize("how", ["field", "header", "token"])
async def test_a_copy_from_another_account_needs_that_accounts_key_or_publication(world: World, how: str) -> None:
    owner = await world.trainer(OTHER)
    source = (await owner.do(Kind.SAVE_WEIGHTS, path="theirs"))["path"]
    wanted: dict[str, Any] = {"source_path": source, "destination_project_id": "mine"}
    assert (await world.ask("POST", "copy_weights", wanted)).status_code == 404
    headers = {}
    if how == "header":
        headers["X-Tinker-Weights-Access-Token"] = OTHER
    else:
        wanted["weights_access_token"] = OTHER if how == "field" else world.services.tokens.issue(tenant_of_key(OTHER))
    copy = (await world.post("copy_weights", wanted, **headers))["tinker_path"]
    assert [one["tinker_path"] for one in (await world.get("checkpoints"))["checkpoints"]] == [copy]
    assert [one["tinker_path"] for one in (await world.get("checkpoints", OTHER))["checkpoints"]] == [source]
    assert world.events(OTHER)[-1] == world.events()[-1] == "checkpoint_copied"


async def test_a_load_from_another_account_needs_that_accounts_key(world: World) -> None:
    owner, mine = await world.trainer(OTHER), await world.trainer()
    await owner.step(1)
    source = (await owner.do(Kind.SAVE_WEIGHTS, path="theirs"))["path"]
    before = await owner.state()
    session = await world.session()
    into = {"model_id": mine.model_id, "path": source, "optimizer": True}
    made = {"session_id": session, "model_seq_id": 0, "path": source, "optimizer": True}

    async def outcome(body: dict[str, Any]) -> tuple[str, str | None]:
        promise = await world.post("load_weights", body)
        return promise["model_id"], (await world.outcome(promise["request_id"])).error

    assert (await outcome(into | {"seq_id": 1}))[1] == f"path: no training checkpoint {source!r}"
    assert (await world.ask("POST", "load_weights", made)).status_code == 404
    forged = {"source_tenant": tenant_of_key(OTHER), "loaded_key": "forged"}
    assert "no training checkpoint" in str((await outcome(into | {"seq_id": 2} | forged))[1])
    assert (await world.ask("POST", "load_weights", made | forged)).status_code == 404
    for number, bad in enumerate(("eyJ.eyJ.bad", 7, ["x"])):
        refused = (await outcome(into | forged | {"seq_id": 3 + number, "weights_access_token": bad}))[1]
        assert str(refused).startswith("weights_access_token: "), "and the refused command uses up its number"
    token = {"weights_access_token": OTHER}
    assert await outcome(into | {"seq_id": 6} | token) == (mine.model_id, None)
    assert await mine.state() == before
    model_id, error = await outcome(made | token)
    assert error is None
    assert await Trainer(world.harness, mine.session, model_id).state() == before
    bodies = world.harness.database.read(lambda c: list(c.execute(select(futures.c.body)).scalars()))
    assert not any(OTHER.encode() in (body or b"") for body in bodies), "an API key is never stored"
    assert not any(b"forged" in (body or b"") for body in bodies)
    assert world.events(OTHER).count("checkpoint_loaded") == 2
