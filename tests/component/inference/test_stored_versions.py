"""Versions of the full weights come to a node from a real checkpoint store before a fake sidecar reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from engine_harness import until
from test_remote import CountedStore

from skyrl.base.types.weights import FullWeights
from skyrl.http.messages import Body, fields_of, json_reply
from skyrl.inference.remote.cache import NodeCache, NodeFiles
from skyrl.inference.remote.references import BASE_MODEL, reference_to
from skyrl.inference.remote.sidecar import MAX_BODY, UPDATE, KeyNeeded, StoredVersions
from skyrl.storage.checkpoint_store.base import StoreError
from skyrl.storage.checkpoint_store.registry import store_at
from skyrl.storage.checkpoint_store.versions import is_full_version, version_key

ONE, TWO, THREE, FOUR = (version_key(FullWeights.of("s1:train:0", number)) for number in (1, 2, 3, 4))


def files_of(key: str) -> dict[str, bytes]:
    return {"config.json": b"{}", "model.safetensors": f"weights of {key}".encode()}


def _files_in(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()} if directory.is_dir() else {}


@dataclass
class FakeSidecar:
    """An ASGI application that reads the files of an update."""

    reads: list[dict[str, bytes]] = field(default_factory=list)
    bodies: list[Any] = field(default_factory=list)
    refuses: bool = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = await Body(receive, 2 * MAX_BODY).collect()
        assert int(dict(scope["headers"]).get(b"content-length", b"0")) == len(body)
        self.bodies.append(request := fields_of(body))
        if files := _files_in(Path(str(request.get("model_path")))):
            self.reads.append(files)
        await json_reply(400 if self.refuses else 200, {"success": not self.refuses}).send(send)


@dataclass
class Placed:
    """A sidecar on the node, and what is around it."""

    sidecar: FakeSidecar
    versions: StoredVersions
    cache: NodeCache

    async def ask(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        transport = httpx.ASGITransport(cast(Any, self.versions))
        async with httpx.AsyncClient(transport=transport, base_url="http://node") as client:
            return await client.post(path, json=body)

    async def stage(self, key: str) -> httpx.Response:
        return await self.ask(UPDATE, {"model_path": reference_to(key), "weight_version": key, "stage_only": True})

    async def apply(self, key: str) -> httpx.Response:
        return await self.ask(UPDATE, {"model_path": reference_to(key), "weight_version": key})

    async def update(self, key: str) -> None:
        for answer in (await self.stage(key), await self.apply(key)):
            assert answer.status_code == 200, answer.text


class World:
    def __init__(self, directory: Path) -> None:
        self.root = directory / "node"
        self.store = CountedStore(store_at((directory / "store").as_uri(), {}, directory / "scratch"))
        self._base = directory / "base"
        self._base.mkdir()
        (self._base / "config.json").write_bytes(b"of the base model")

    def put(self, *keys: str) -> None:
        for key in keys:
            with self.store._store.writing(key) as directory:
                for name, content in files_of(key).items():
                    (directory / name).write_bytes(content)

    def place(self) -> Placed:
        sidecar = FakeSidecar()
        cache = NodeCache(self.store, self.root, 2**30, is_full_version)  # type: ignore[arg-type]

        async def base_model() -> Path:
            return self._base

        return Placed(sidecar, StoredVersions(sidecar, NodeFiles(cache), base_model, "10.0.0.3"), cache)

    def on_node(self) -> list[str]:
        """The versions that the node has."""
        return sorted(path.name.partition("-")[0] for path in (self.root / "stored").iterdir())


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_a_reference_becomes_the_directory_of_files_from_the_store(world: World) -> None:
    world.put(ONE)
    placed = world.place()
    await placed.update(ONE)
    assert placed.sidecar.reads == [files_of(ONE)] * 2
    staged, applied = placed.sidecar.bodies
    assert staged == {"model_path": applied["model_path"], "weight_version": ONE, "stage_only": True}
    assert world.root in Path(staged["model_path"]).parents


async def test_the_base_models_name_becomes_its_directory_and_other_requests_pass_unchanged(world: World) -> None:
    placed = world.place()
    assert (await placed.ask(UPDATE, {"model_path": BASE_MODEL})).status_code == 200
    assert placed.sidecar.reads == [{"config.json": b"of the base model"}]
    for path, body in (
        (UPDATE, {"model_path": "/shared/step-7", "flush_cache": False}),
        (UPDATE, {"model_path": 7}),
        (UPDATE, {}),
        (UPDATE, {"model_path": reference_to("../../etc/passwd")}),
        ("/pause_generation", {"mode": "in_place", "model_path": BASE_MODEL}),
    ):
        await placed.ask(path, body)
        assert placed.sidecar.bodies[-1] == body
    assert world.store.reads == 0


async def test_the_vllms_of_a_node_fetch_a_version_once_and_old_ones_go_with_the_last(world: World) -> None:
    world.put(ONE, TWO)
    first, second = world.place(), world.place()
    for key in (ONE, TWO):
        await asyncio.gather(first.stage(key), second.stage(key))
        assert world.store.reads == (1 if key is ONE else 2)
        await first.apply(key)
        assert "v000001" in world.on_node(), "the second one has it, or may read it again"
        await second.apply(key)
    await until(lambda: world.on_node() == ["v000002"])
    assert first.sidecar.reads == second.sidecar.reads == [files_of(key) for key in (ONE, ONE, TWO, TWO)]


async def test_versions_that_were_read_and_never_applied_do_not_pile_up(world: World) -> None:
    world.put(ONE, TWO, THREE, FOUR)
    placed = world.place()
    await placed.update(ONE)
    placed.sidecar.refuses = True
    for key in (TWO, THREE, FOUR):
        assert (await placed.stage(key)).status_code == 400
    await until(lambda: world.on_node() == ["v000001", "v000004"])
    placed.sidecar.refuses = False
    assert (await placed.ask(UPDATE, {"model_path": BASE_MODEL})).status_code == 200
    await until(lambda: world.on_node() == [])


async def test_a_version_that_a_request_reads_stays_while_another_is_brought(world: World) -> None:
    world.put(ONE, TWO)
    placed = world.place()
    asked, go = asyncio.Event(), asyncio.Event()
    reads = placed.versions._sidecar

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        if not asked.is_set():
            asked.set()
            await go.wait()
        await reads(scope, receive, send)

    placed.versions._sidecar = slow
    first = asyncio.create_task(placed.stage(ONE))
    await asked.wait()
    await placed.stage(TWO)
    await asyncio.sleep(0.1)
    go.set()
    assert (await first).status_code == 200
    assert placed.sidecar.reads == [files_of(TWO), files_of(ONE)]
    await placed.apply(TWO)
    await until(lambda: world.on_node() == ["v000002"])


async def test_the_next_start_of_a_vllm_has_the_version_without_the_store(world: World) -> None:
    world.put(ONE)
    ended = world.place()
    await ended.update(ONE)
    ended.cache.close()
    world.store.error = StoreError("away")
    started = world.place()
    await started.update(ONE)
    assert world.store.reads == 1


@pytest.mark.parametrize(
    ("error", "why"),
    [(StoreError("no route to 10.0.0.7"), "StoreError: no route"), (OSError(28, "No space left"), "No space left")],
)
async def test_a_version_that_cannot_be_fetched_is_refused_with_a_sentence_and_tried_again(
    world: World, error: Exception, why: str
) -> None:
    world.put(ONE)
    placed = world.place()
    world.store.error = error
    answer = await placed.stage(ONE)
    assert (answer.status_code, answer.json()["success"]) == (500, False)
    assert answer.json()["message"].startswith(f"{reference_to(ONE)} cannot be brought to node 10.0.0.3: ")
    assert why in answer.json()["message"]
    assert placed.sidecar.bodies == []
    world.store.error = None
    await placed.update(ONE)


async def test_a_version_that_is_gone_from_the_store_is_refused(world: World) -> None:
    placed = world.place()
    answer = await placed.stage(ONE)
    assert answer.status_code == 500
    assert answer.json()["message"].endswith("the checkpoint store has no such version any more")
    with world.store._store.writing(TWO) as directory:
        for name, content in (files_of(TWO) | {"optimizer-00001.safetensors": b""}).items():
            (directory / name).write_bytes(content)
    assert "no such version" in (await placed.stage(TWO)).text, "a checkpoint of the training state is no version"


async def test_nothing_is_answered_without_a_key() -> None:
    sidecar = FakeSidecar()
    app = KeyNeeded(sidecar, "admin", None, "client")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(cast(Any, app)), base_url="http://node") as client:
        for path in ("/generate", "/health", UPDATE):
            for headers in ({}, {"Authorization": "Bearer wrong"}):
                assert (await client.post(path, json={}, headers=headers)).status_code == 401
            assert sidecar.bodies == []
        for key in ("admin", "client"):
            assert (await client.get("/health", headers={"Authorization": f"Bearer {key}"})).status_code == 200
