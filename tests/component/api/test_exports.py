"""Downloads of saved weights: archives and exported files, through links that need no API key."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import tarfile
import threading
import time
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import pyrage
import pytest
from checkpoint_world import ADAPTER, KEY, OTHER, World, rest_path, world_in
from safetensors.torch import load_file, save_file

from skyrl.base.types.requests import Kind
from skyrl.storage.checkpoint_store.base import MANIFEST

age: Any = pyrage


def unpacked(archive: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        files = {name: opened.extractfile(name) for name in opened.getnames()}
        return {name: file.read() for name, file in files.items() if file is not None}


@pytest.mark.parametrize("kind", [Kind.SAVE_WEIGHTS, Kind.SAVE_WEIGHTS_FOR_SAMPLER])
async def test_an_archive_holds_the_adapter(each_world: World, kind: Kind) -> None:
    trainer = await each_world.trainer()
    await trainer.step(1)
    path = (await trainer.do(kind, path="final.1"))["path"]
    state = await trainer.state()
    requested_at = time.time()
    as_json = await each_world.ask("GET", f"{rest_path(path)}/archive", Accept="application/json")
    assert as_json.status_code == 200
    old_sdk = [("X-API-Key", KEY), ("Accept", "application/json"), ("Accept", "application/gzip")]
    as_redirect = await each_world.http.get(f"/api/v1/{rest_path(path)}/archive", headers=old_sdk)
    assert as_redirect.status_code == 302
    expires = parsedate_to_datetime(as_redirect.headers["expires"])
    assert as_redirect.headers["expires"].endswith(" GMT")
    assert expires.timestamp() > requested_at + 600
    urls = (as_json.json()["url"], as_redirect.headers["location"])
    contents = []
    for url in urls:
        answer = await each_world.follow_link(url)
        assert answer.status_code == 200
        assert int(answer.headers["content-length"]) == len(answer.content)
        files = unpacked(answer.content)
        assert list(files) == [*sorted(ADAPTER), MANIFEST]
        assert {name: files[name] for name in ADAPTER} == {name: state[name] for name in ADAPTER}
        contents.append(answer.content)
    assert gzip.decompress(contents[1]) == contents[0]
    assert each_world.events()[-2:] == ["checkpoint_downloaded"] * 2


async def test_an_adapter_that_travels_to_nodes_has_an_archive(tmp_path: Path) -> None:
    async with world_in(tmp_path / "state", ray_address="local") as world:
        trainer = await world.trainer()
        await trainer.step(1)
        path = (await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="final"))["path"]
        answer = await world.ask("GET", f"{rest_path(path)}/archive", Accept="application/json")
        archive = await world.follow_link(answer.json()["url"])
        assert archive.status_code == 200
        assert list(unpacked(archive.content)) == [*sorted(ADAPTER), MANIFEST]


async def test_a_link_is_valid_for_one_save_of_one_path_and_expires(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = await world.trainer()
    path = (await trainer.do(Kind.SAVE_WEIGHTS, path="final"))["path"]
    await trainer.do(Kind.SAVE_WEIGHTS, path="other")
    url = (await world.get(f"{rest_path(path)}/archive", Accept="application/json"))["url"]
    assert (await world.follow_link(url)).status_code == 200
    for forged in (url.replace("/final", "/other"), url.replace("expires=1", "expires=2"), f"{url[:-1]}x", url[:-70]):
        answer = await world.follow_link(forged)
        assert answer.status_code == 403, forged
        assert set(answer.json()) == {"detail", "field", "request_id"}
    with monkeypatch.context() as later:
        now = time.time()
        later.setattr("skyrl.api.signed_links.time.time", lambda: now + 3601)
        assert (await world.follow_link(url)).json()["field"] == "expires"
    await trainer.do(Kind.SAVE_WEIGHTS, path="final", overwrite=True)
    assert (await world.follow_link(url)).status_code == 404
    again = (await world.get(f"{rest_path(path)}/archive", Accept="application/json"))["url"]
    assert (await world.follow_link(again)).status_code == 200
    assert (await world.ask("DELETE", rest_path(path))).status_code == 200
    assert (await world.follow_link(again)).status_code == 404


async def test_a_hanging_checkpoint_store_does_not_block_reads_of_the_database(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = await world.trainer()
    path = (await trainer.do(Kind.SAVE_WEIGHTS, path="final"))["path"]
    back = threading.Event()
    files = world.services.checkpoint_store.files
    monkeypatch.setattr(world.services.checkpoint_store, "files", lambda key: back.wait() and files(key))
    # More requests than any thread pool has threads, so later requests queue behind them.
    many = [asyncio.create_task(world.ask("GET", f"{rest_path(path)}/archive")) for _ in range(50)]
    try:
        async with asyncio.timeout(60):
            for _ in range(20):
                assert (await world.get("training_runs"))["training_runs"] != []
    finally:
        back.set()
    assert {answer.status_code for answer in await asyncio.gather(*many)} == {302}


async def test_any_tenant_may_download_a_published_archive_and_the_owner_sees_the_event(world: World) -> None:
    trainer = await world.trainer()
    path = (await trainer.do(Kind.SAVE_WEIGHTS, path="final"))["path"]
    assert (await world.ask("GET", f"{rest_path(path)}/archive", key=OTHER)).status_code == 404
    await world.post(f"{rest_path(path)}/publish", None)
    url = (await world.ask("GET", f"{rest_path(path)}/archive", key=OTHER)).headers["location"]
    assert (await world.follow_link(url)).status_code == 200
    assert world.events()[-1] == "checkpoint_downloaded"
    assert world.events(OTHER) == []


async def test_a_state_in_the_first_format_loads_but_has_no_archive(world: World) -> None:
    trainer = await world.trainer()
    await trainer.step(1)
    path = (await trainer.do(Kind.SAVE_WEIGHTS, path="old"))["path"]
    (row,) = world.harness.checkpoint_rows(trainer.model_id)
    before = await trainer.state()
    directory = world.harness.config.checkpoints_dir / row.store_key
    peft = load_file(directory / "adapter_model.safetensors")
    named = {f"weights.{n.removeprefix('base_model.model.').removesuffix('.weight')}": t for n, t in peft.items()}
    save_file(named | load_file(directory / "optimizer.safetensors"), directory / "state.safetensors")
    about = json.loads((directory / "state.json").read_text())
    (directory / "state.json").write_text(json.dumps(about | {"format": 1}))
    for name in (*ADAPTER, "optimizer.safetensors", MANIFEST):
        (directory / name).unlink()
    await trainer.step(2)
    await trainer.do(Kind.LOAD_WEIGHTS, path=path, optimizer=True)
    assert await trainer.state() == before
    answer = await world.ask("GET", f"{rest_path(path)}/archive")
    assert answer.status_code == 404
    assert "older version" in answer.json()["detail"]


@pytest.mark.parametrize("encrypted", [False, True])
async def test_exported_files_are_downloaded_one_by_one(each_world: World, encrypted: bool) -> None:
    trainer = await each_world.trainer()
    await trainer.step(1)
    adapter = {name: content for name, content in (await trainer.state()).items() if name in ADAPTER}
    reader, second = age.x25519.Identity.generate(), age.x25519.Identity.generate()
    recipients = [str(reader.to_public()), str(second.to_public())] if encrypted else None
    saved = await trainer.do(Kind.SAVE_WEIGHTS_EXTERNAL, path="download", age_encryption_recipients=recipients)
    path = f"tinker://{trainer.model_id}/external_weights/download"
    assert saved == {"type": "save_weights_external", "path": path}
    answer = await each_world.get(f"{rest_path(path)}/external_weights_urls")
    expires = answer["expires"]
    assert expires.endswith("+00:00")
    assert set(answer["urls"]) == ({f"{name}.age" for name in ADAPTER} if encrypted else ADAPTER)
    fetched = {name: await each_world.follow_link(url) for name, url in answer["urls"].items()}
    assert all(int(one.headers["content-length"]) == len(one.content) for one in fetched.values())
    if encrypted:
        for identity in (reader, second):
            opened = {name: age.decrypt(one.content, [identity]) for name, one in fetched.items()}
            assert {name.removesuffix(".age"): content for name, content in opened.items()} == adapter
        (row,) = each_world.harness.checkpoint_rows(trainer.model_id)
        assert not any(b"lora_A" in content for content in each_world.harness.stored(row).values())
    else:
        assert {name: one.content for name, one in fetched.items()} == adapter
    direct = each_world.harness.config.checkpoint_store is not None
    assert all(url.startswith("http://api/") != direct for url in answer["urls"].values())
    assert (await each_world.ask("DELETE", rest_path(path))).status_code == 200
    if not direct:
        assert (await each_world.follow_link(next(iter(answer["urls"].values())))).status_code == 404


async def test_files_of_a_store_that_clients_cannot_reach_are_streamed_through_the_api(
    tmp_path: Path, on_s3: dict[str, Any]
) -> None:
    flags = on_s3 | {"presigned_downloads": False, "public_url": "https://skyrl.example/prefix/"}
    async with world_in(tmp_path / "state", **flags) as world:
        trainer = await world.trainer()
        path = (await trainer.do(Kind.SAVE_WEIGHTS_EXTERNAL, path="export"))["path"]
        urls = (await world.get(f"{rest_path(path)}/external_weights_urls"))["urls"]
        for name, url in urls.items():
            assert url.startswith("https://skyrl.example/prefix/api/v1/downloads/")
            answer = await world.follow_link(url.replace("https://skyrl.example/prefix", "http://api"))
            assert answer.content == (await trainer.state())[name]


async def test_an_ssh_key_may_be_a_recipient(world: World) -> None:
    trainer = await world.trainer()
    key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHsKLqeplhpW+uObz5dvMgjz1OxfM/XXUB+VHtZ6isGN alice@rust"
    await trainer.do(Kind.SAVE_WEIGHTS_EXTERNAL, path="export", age_encryption_recipients=[key])
    (row,) = world.harness.checkpoint_rows(trainer.model_id)
    assert all(b"-> ssh-ed25519" in content for content in world.harness.stored(row).values())


async def test_an_invalid_recipient_fails_the_export(world: World) -> None:
    good = str(age.x25519.Identity.generate().to_public())
    trainer = await world.trainer()
    for given, field in (
        (["age1nonsense"], "age_encryption_recipients[0]"),
        ([good, "ssh-ed25519 AAAA"], "age_encryption_recipients[1]"),
        (["AGE-SECRET-KEY-1QQQ"], "age_encryption_recipients[0]"),
        ([], "age_encryption_recipients"),
        ([good] * 11, "age_encryption_recipients"),
        (good, "age_encryption_recipients"),
        ([7], "age_encryption_recipients[0]"),
    ):
        failed = await trainer.fails(Kind.SAVE_WEIGHTS_EXTERNAL, path="export", age_encryption_recipients=given)
        assert failed.error_category == "user"
        assert (failed.error or "").startswith(f"{field}: "), failed.error
        assert "AGE-SECRET-KEY" not in (failed.error or "")
    assert world.harness.checkpoint_store.stored() == []


async def test_an_export_can_be_neither_trained_on_nor_sampled_from(world: World) -> None:
    trainer = await world.trainer()
    path = (await trainer.do(Kind.SAVE_WEIGHTS_EXTERNAL, path="export"))["path"]
    failed = await trainer.fails(Kind.LOAD_WEIGHTS, path=path)
    assert (failed.error or "").startswith("path: ")
    assert "external_weights/export' cannot be trained on" in (failed.error or "")
    session = await world.session()
    for route, body, field in (
        ("load_weights", {"session_id": session, "model_seq_id": 0, "path": path}, "path"),
        (
            "create_sampling_session",
            {"session_id": session, "sampling_session_seq_id": 0, "model_path": path},
            "model_path",
        ),
    ):
        answer = await world.ask("POST", route, body)
        assert answer.status_code == 404
        assert answer.json()["field"] == field
