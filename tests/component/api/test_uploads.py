"""Adapters are uploaded by their owner, checked, and then sampled from and trained on as any checkpoint."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_world import ADAPTER, KEY, OTHER, World, rest_path, world_in
from engine_harness import files_in
from safetensors.torch import load, save
from sqlalchemy import update

from skyrl.base.types.requests import Kind
from skyrl.base.types.weights import AdapterVersion
from skyrl.engine import sweeping
from skyrl.engine.main import layers_text
from skyrl.storage.checkpoint_store.versions import version_directory
from skyrl.storage.db import quotas
from skyrl.storage.db.database import Database
from skyrl.storage.db.engine_state import publish_training
from skyrl.storage.db.uploads import MAX_UNFINISHED, uploads

TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
LORA = {"rank": 4, "seed": 3}


async def publish_layers(world: World) -> None:
    """As the engine's process does when it can train."""
    harness = world.harness
    layers = layers_text(harness.config, harness.backend)

    def publish(database: Database) -> None:
        database.write(lambda c: publish_training(c, ready=True, reason="", layers=layers))

    await asyncio.to_thread(publish, harness.database)


async def exported(world: World) -> dict[str, bytes]:
    """The files of a trained model's export."""
    trainer = await world.trainer(rank=4)
    await trainer.step(1)
    path = (await trainer.do(Kind.SAVE_WEIGHTS_EXTERNAL, path="final"))["path"]
    links = (await world.get(f"{rest_path(path)}/external_weights_urls"))["urls"]
    return {name: (await world.follow_link(link)).content for name, link in links.items()}


async def start(world: World, key: str = KEY, **headers: str) -> dict[str, Any]:
    return await world.post(
        "external_weights_upload_start", {"base_model": "tiny", "lora_config": LORA}, key, **headers
    )


async def put(world: World, started: dict[str, Any], files: dict[str, bytes]) -> None:
    for name, content in files.items():
        link = started["urls"][name]
        answer = await world.http.put(link["url"], content=content, headers=link["headers"])
        assert answer.status_code == 200, answer.text


async def finish(world: World, started: dict[str, Any], key: str = KEY, status: int = 200) -> str:
    answer = await world.ask("POST", "external_weights_upload_finish", {"upload_id": started["upload_id"]}, key)
    assert answer.status_code == status, answer.text
    return answer.json()["tinker_path" if status == 200 else "detail"]


async def test_an_uploaded_adapter_is_sampled_from_and_trained_on(each_world: World) -> None:
    world = each_world
    await publish_layers(world)
    files = await exported(world)
    assert set(files) == ADAPTER
    other_alpha = json.loads(files[CONFIG]) | {"lora_alpha": 8}
    files[CONFIG] = (json.dumps(other_alpha, indent=2) + "\n").encode()
    started = await start(world, OTHER)
    assert set(started["urls"]) == ADAPTER
    await put(world, started, files)
    path = await finish(world, started, OTHER)
    assert await finish(world, started, OTHER) == path, "a second call finds the first one's checkpoint"
    assert world.events(OTHER)[-1] == "checkpoint_uploaded"

    (found,) = (await world.get("checkpoints", OTHER))["checkpoints"]
    assert (found["tinker_path"], found["checkpoint_type"], found["base_model"]) == (path, "external", "tiny")
    assert found["size_bytes"] == sum(map(len, files.values()))
    info = await world.post("weights_info", {"tinker_path": path}, OTHER)
    assert (info["lora_rank"], info["train_unembed"], info["train_mlp"]) == (4, True, True)
    links = (await world.get(f"{rest_path(path)}/external_weights_urls", OTHER))["urls"]
    assert {name: (await world.follow_link(link)).content for name, link in links.items()} == files

    session = await world.session(OTHER)
    await world.post(
        "create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}, OTHER
    )
    weights = AdapterVersion.of(path.removeprefix("tinker://").partition("/")[0], 1)
    brought = files_in(version_directory(world.harness.config.state_dir, weights))
    assert {name: brought[name] for name in ADAPTER} == files, "vLLM reads the files that were sent"

    load = {"session_id": session, "model_seq_id": 1, "path": path}
    outcome = await world.outcome((await world.post("load_weights", load, OTHER))["request_id"], OTHER)
    assert outcome.error is None, outcome.error
    model = {"model_id": f"{session}:train:1", "seq_id": 1, "path": "as-loaded"}
    outcome = await world.outcome((await world.post("save_weights_external", model, OTHER))["request_id"], OTHER)
    saved = f"tinker://{model['model_id']}/external_weights/as-loaded"
    links = (await world.get(f"{rest_path(saved)}/external_weights_urls", OTHER))["urls"]
    assert {name: (await world.follow_link(link)).content for name, link in links.items()} == files
    again = await world.post("load_weights", load | {"model_seq_id": 2, "optimizer": True}, OTHER)
    outcome = await world.outcome(again["request_id"], OTHER)
    assert "holds weights alone" in (outcome.error or "")
    copied = {"source_path": path, "destination_project_id": "p"}
    assert (await world.post("copy_weights", copied, OTHER))["tinker_path"].endswith("/external_weights/upload")


async def test_an_adapter_that_does_not_fit_is_refused_and_may_be_sent_again(world: World) -> None:
    await publish_layers(world)
    files = await exported(world)
    started = await start(world)
    assert "adapter_config.json has not been uploaded" in await finish(world, started, status=400)
    other_class = {name.replace(".layers.", ".language_model.layers."): t for name, t in load(files[TENSORS]).items()}
    await put(world, started, {CONFIG: files[CONFIG], TENSORS: save(other_class)})
    assert "has no layer that this lora_config trains; rename" in await finish(world, started, status=400)
    assert (await world.get("checkpoints"))["cursor"]["total_count"] == 1, "nothing but the export was stored"
    await put(world, started, {CONFIG: json.dumps(json.loads(files[CONFIG]) | {"use_dora": True}).encode()})
    await put(world, started, {TENSORS: files[TENSORS]})
    assert "use_dora" in await finish(world, started, status=400)
    await put(world, started, {CONFIG: files[CONFIG]})
    assert (await finish(world, started)).startswith("tinker://")
    link = started["urls"][CONFIG]["url"]
    assert (await world.http.put(link, content=b"{}")).status_code == 404, "a finished upload takes no files"


async def test_uploads_are_bounded_in_number_size_and_owner(world: World) -> None:
    await publish_layers(world)
    started = await start(world)
    link = started["urls"][TENSORS]["url"]
    for content in (b"x" * 2**22, iter_of(b"x" * 2**16, 64)):
        answer = await world.http.put(link, content=content)
        assert answer.status_code == 413, answer.text
        assert "has at most" in answer.text
    assert (await world.http.put(link, content=b"x", headers={"Content-Encoding": "zstd"})).status_code == 415
    assert (await world.http.put(link.replace(TENSORS, "state.json"), content=b"x")).status_code == 403
    assert (await world.http.put(link.partition("?")[0], content=b"x")).status_code == 403
    assert "no unfinished upload" in await finish(world, started, OTHER, status=404)
    going_on = asyncio.Event()
    slow = asyncio.create_task(world.http.put(link, content=until_set(going_on)))
    await asyncio.sleep(0.2)
    answer = await world.http.put(link, content=b"x")
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "5"), answer.text
    going_on.set()
    assert (await slow).status_code == 200
    for _ in range(MAX_UNFINISHED - 1):
        await start(world)
    body = {"base_model": "tiny", "lora_config": LORA}
    answer = await world.ask("POST", "external_weights_upload_start", body)
    assert answer.status_code == 403, answer.text
    assert (await start(world, OTHER))["upload_id"] != started["upload_id"]
    old = await start(world, OTHER, **{"X-Stainless-Package-Version": "0.39.0"})
    assert all(isinstance(link, str) for link in old["urls"].values()), "0.39 reads no headers"
    assert not list((world.harness.config.state_dir / "scratch").glob("*")), "refused files leave nothing behind"


async def test_unfinished_uploads_count_as_stored(world: World) -> None:
    await publish_layers(world)
    started = await start(world)
    upload = await world.services.uploads.find(started["upload_id"], None)
    held = await world.harness.database.read_async(lambda c: quotas.held(c)[upload.tenant])
    assert held.stored_bytes == upload.most_bytes > 0
    assert await world.harness.database.read_async(lambda c: quotas.stored_bytes(c, upload.tenant)) == upload.most_bytes


async def until_set(event: asyncio.Event) -> AsyncIterator[bytes]:
    yield b"x"
    await event.wait()


async def iter_of(piece: bytes, count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield piece


async def test_an_end_between_the_files_and_the_row_leaves_an_upload_that_can_be_finished(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await publish_layers(world)
    files = await exported(world)
    started = await start(world)
    await put(world, started, files)

    async def die(*_: object) -> None:
        raise OSError("the process is killed here")

    with monkeypatch.context() as patched:
        patched.setattr(world.services.uploads, "finish", die)
        answer = await world.ask("POST", "external_weights_upload_finish", {"upload_id": started["upload_id"]})
        assert answer.status_code == 500
    monkeypatch.setattr(sweeping, "GRACE_S", -3600.0)
    await world.harness.sweep()
    stored = sorted(key.key for key in world.harness.checkpoint_store.stored())
    uploaded = sorted(f"upload-{started['upload_id']}/{name}" for name in ADAPTER)
    assert [key for key in stored if "external_weights" not in key][-2:] == uploaded
    assert not [key for key in stored if "/upload-" in key], "files without a row are swept"
    path = await finish(world, started)
    (links, _) = (await world.get(f"{rest_path(path)}/external_weights_urls")).values()
    assert {name: (await world.follow_link(link)).content for name, link in links.items()} == files


async def test_files_stay_over_a_restart_and_go_with_their_upload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeping, "GRACE_S", -3600.0)
    async with world_in(tmp_path / "state") as world:
        await publish_layers(world)
        files = await exported(world)
        started, given_up = await start(world), await start(world)
        await put(world, started, {CONFIG: files[CONFIG]})
        await put(world, given_up, files)
    async with world_in(tmp_path / "state") as world:
        await publish_layers(world)
        await world.harness.sweep()
        await put(world, started, {TENSORS: files[TENSORS]})

        def expire(database: Database) -> None:
            old = update(uploads).where(uploads.c.id == given_up["upload_id"]).values(expires_at=time.time() - 1)
            database.write(lambda c: c.execute(old))

        await asyncio.to_thread(expire, world.harness.database)
        await world.harness.sweep()
        stored = {key.key for key in world.harness.checkpoint_store.stored() if key.key.startswith("upload-")}
        assert stored == {f"upload-{started['upload_id']}/{name}" for name in ADAPTER}
        assert (await finish(world, started)).startswith("tinker://")
        assert "no unfinished upload" in await finish(world, given_up, status=404)
        await world.harness.sweep()
        left = {key.key.partition("/")[0] for key in world.harness.checkpoint_store.stored()}
        assert not [group for group in left if group.startswith("upload-")]
