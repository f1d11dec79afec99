"""Adapters come to a node from a real checkpoint store, a local one or one on S3, before a fake vLLM loads them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from engine_harness import until

from skyrl.base.config.loading import load_config
from skyrl.base.types.weights import AdapterVersion
from skyrl.inference import vllm_client
from skyrl.inference.remote import cache, middleware
from skyrl.inference.remote.cache import NodeCache
from skyrl.inference.remote.middleware import MAX_BODY, StoredAdapterLoads
from skyrl.inference.remote.references import key_in, reference_to
from skyrl.inference.remote.settings import NodeSettings, node_environment
from skyrl.storage.checkpoint_store.base import CheckpointStore, StoreError
from skyrl.storage.checkpoint_store.directories import sizes_of
from skyrl.storage.checkpoint_store.registry import store_at
from skyrl.storage.checkpoint_store.versions import is_adapter, version_at, version_key

ADAPTER = AdapterVersion.of("s1:train:0", 7)
KEY = "s1=3Atrain=3A0/named-1"
FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights"}
API_KEY = "key-of-vllm"
LOAD, UNLOAD = middleware.LOAD, middleware.UNLOAD


@dataclass
class FakeVllm:
    """An ASGI application that loads and unloads adapters as vLLM does, with its check of the key."""

    loaded: dict[str, Path] = field(default_factory=dict)
    seen: list[tuple[str, bytes]] = field(default_factory=list)
    refusal: int | None = None
    breaks: bool = False
    """Loads adapters without an answer."""
    go: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.go.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = (await receive()).get("body", b"")
        self.seen.append((scope["path"], body))
        headers = dict(scope["headers"])
        if scope["path"] == "/health":
            await _reply(send, 200, b"")
        elif headers.get(b"authorization") != f"Bearer {API_KEY}".encode():
            await _reply(send, 401, b'{"error":"Unauthorized"}')
        elif self.refusal is not None:
            await _reply(send, self.refusal, b'{"error":{"message":"refused"}}')
        elif scope["path"] == LOAD:
            await self._load(headers, body, send)
        elif scope["path"] == UNLOAD:
            known = self.loaded.pop(json.loads(body)["lora_name"], None)
            await _reply(send, 404 if known is None else 200, b"")
        else:
            await _reply(send, 200, body)

    async def _load(self, headers: dict[bytes, bytes], body: bytes, send: Any) -> None:
        assert int(headers[b"content-length"]) == len(body)
        fields = json.loads(body)
        name, path = fields["lora_name"], Path(fields["lora_path"])
        await self.go.wait()
        if name in self.loaded:
            await _reply(send, 400, b'{"error":{"message":"has already been loaded"}}')
        elif not _exists(path):
            await _reply(send, 404, b'{"error":{"message":"No adapter found","type":"NotFoundError"}}')
        else:
            self.loaded[name] = path
            if self.breaks:
                raise ConnectionError
            await _reply(send, 200, b"Success")

    def files_of(self, name: str) -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in self.loaded[name].iterdir()}


def _exists(path: Path) -> bool:
    return path.is_dir()


async def _reply(send: Any, status: int, body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": body})


@dataclass
class Node:
    """One node: its settings, its store, and the vLLMs on it."""

    settings: NodeSettings
    store: CheckpointStore

    def vllm(self, grace_s: float = 0.0) -> Vllm:
        app = FakeVllm()
        return Vllm(app, StoredAdapterLoads(app, self.settings, grace_s))

    def put(self, key: str, files: Mapping[str, bytes] = FILES) -> None:
        with self.store.writing(key) as directory:
            for name, content in files.items():
                (directory / name).write_bytes(content)

    def stored(self) -> list[str]:
        """The adapters that the node has, without the links of its vLLMs."""
        root = self.settings.cache / "stored"
        return sorted(path.name for path in root.iterdir()) if root.is_dir() else []

    def locks(self) -> list[str]:
        """Lock files of single adapters."""
        return [path.name for path in (self.settings.cache / "locks").iterdir() if path.name != "replicas"]


@dataclass
class Vllm:
    app: FakeVllm
    middleware: StoredAdapterLoads

    async def ask(self, path: str, body: Any, key: str = API_KEY) -> httpx.Response:
        transport = httpx.ASGITransport(cast(Any, self.middleware))
        async with httpx.AsyncClient(transport=transport, base_url="http://node") as client:
            return await client.post(path, json=body, headers={"Authorization": f"Bearer {key}"})

    async def load(self, key: str, name: str = "a") -> httpx.Response:
        return await self.ask(LOAD, vllm_client.load_request(name, reference_to(key)))

    async def unload(self, name: str = "a") -> httpx.Response:
        return await self.ask(UNLOAD, {"lora_name": name})

    async def health(self) -> None:
        await self.ask("/health", {})

    def end(self) -> None:
        """As the end of the process: its lock is released, and its files stay."""
        self.middleware._cache.close()


@pytest.fixture(params=["local", "s3"])
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Node:
    url, options = (tmp_path / "store").as_uri(), {}
    if request.param == "s3":
        bucket = request.getfixturevalue("new_bucket")()
        url, options = bucket.url, bucket.options
    settings = NodeSettings(url, tmp_path / "node", API_KEY, options)
    return Node(settings, store_at(url, options, tmp_path / "scratch"))


@pytest.fixture
def local_node(tmp_path: Path) -> Node:
    url = (tmp_path / "store").as_uri()
    return Node(NodeSettings(url, tmp_path / "node", API_KEY), store_at(url, {}, tmp_path / "scratch"))


class CountedStore:
    """A store that counts downloads, and can be held or taken away."""

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self.reads = 0
        self.error: Exception | None = None
        self.go = True

    def files(self, key: str) -> dict[str, int]:
        if self.error is not None:
            raise self.error
        return self._store.files(key)

    @contextlib.contextmanager
    def reading(self, key: str) -> Iterator[Path]:
        self.reads += 1
        while not self.go:
            time.sleep(0.005)
        with self._store.reading(key) as directory:
            yield directory


def counted(monkeypatch: pytest.MonkeyPatch, node: Node) -> CountedStore:
    store = CountedStore(node.store)
    monkeypatch.setattr(middleware, "store_at", lambda *_: store)
    return store


@pytest.mark.parametrize("key", [version_key(ADAPTER), KEY])
async def test_vllm_loads_the_files_of_a_reference_from_a_directory_of_its_own(node: Node, key: str) -> None:
    node.put(key)
    vllm = node.vllm()
    answer = await vllm.load(key)
    assert vllm_client.is_loaded(answer.status_code, answer.content)
    assert vllm.app.files_of("a") == FILES
    assert node.settings.cache / "replicas" in vllm.app.loaded["a"].parents
    again = await vllm.load(key)
    assert vllm_client.is_loaded(again.status_code, again.content)
    assert vllm.app.files_of("a") == FILES


async def test_two_vllms_of_a_node_fetch_an_adapter_once_and_unload_it_apart(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.put(KEY)
    store = counted(monkeypatch, node)
    first, second = node.vllm(), node.vllm()
    store.go = False
    loads = [asyncio.create_task(vllm.load(KEY, name)) for vllm in (first, second) for name in ("a", "b")]
    await until(lambda: store.reads > 0)
    store.go = True
    assert [(await load).status_code for load in loads] == [200] * 4
    assert store.reads == 1
    assert first.app.loaded["a"] == first.app.loaded["b"] != second.app.loaded["a"]

    node.store.delete(KEY)
    assert (await first.unload("a")).status_code == 200
    await first.health()
    assert first.app.files_of("b") == FILES, "vLLM has another adapter with these files"
    gone = first.app.loaded["b"]
    await first.unload("b")
    await first.health()
    await until(lambda: not gone.exists())
    assert second.app.files_of("a") == FILES
    for name in ("a", "b"):
        await second.unload(name)
    await second.health()
    await until(lambda: node.stored() == [])
    await until(lambda: node.locks() == [])


async def test_files_stay_for_the_grace_time_after_unloading(local_node: Node) -> None:
    """vLLM may read them for a request that still runs, and dies if they are gone."""
    local_node.put(KEY)
    vllm = local_node.vllm(grace_s=1000.0)
    await vllm.load(KEY)
    directory = vllm.app.loaded["a"]
    await vllm.unload()
    await vllm.health()
    assert not vllm.middleware._files.releasing
    assert directory.is_dir()
    assert (await vllm.load(KEY)).status_code == 200
    assert not vllm.middleware._unused_at


async def test_files_stay_while_vllm_loads_them_and_after_a_load_without_an_answer(local_node: Node) -> None:
    for key in (KEY, "group/other-1"):
        local_node.put(key)
    vllm = local_node.vllm()
    vllm.app.go.clear()
    loading = [asyncio.create_task(vllm.load(KEY, name)) for name in ("a", "a", "b")]
    await until(lambda: len(vllm.app.seen) == 3)
    await vllm.health()
    assert not vllm.middleware._files.releasing
    vllm.app.go.set()
    assert sorted([(await load).status_code for load in loading]) == [200, 200, 400]
    await vllm.health()
    assert vllm.app.files_of("a") == vllm.app.files_of("b") == FILES

    vllm.app.breaks = True
    with pytest.raises(ConnectionError):
        await vllm.load("group/other-1", "c")
    await vllm.health()
    assert not vllm.middleware._unused_at
    assert vllm.app.files_of("c") == FILES
    vllm.app.breaks = False
    assert (await vllm.load("group/other-1", "c")).status_code == 400
    assert (await vllm.unload("c")).status_code == 200
    await vllm.health()
    await until(lambda: len(local_node.stored()) == 1)


async def test_files_of_a_load_that_was_cancelled_leave_the_node(
    local_node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    local_node.put(KEY)
    store = counted(monkeypatch, local_node)
    vllm = local_node.vllm()
    store.go = False
    fetching = asyncio.create_task(vllm.load(KEY))
    await until(lambda: store.reads > 0)
    fetching.cancel()
    await asyncio.wait([fetching])
    store.go = True
    await until(lambda: not vllm.middleware._files.bringing)
    await vllm.health()
    await until(lambda: local_node.stored() == [])

    vllm.app.go.clear()
    loading = asyncio.create_task(vllm.load(KEY))
    await until(lambda: LOAD in [path for path, _ in vllm.app.seen])
    loading.cancel()
    await asyncio.wait([loading])
    await vllm.health()
    assert len(local_node.stored()) == 1, "vLLM may have loaded the adapter"
    vllm.app.go.set()
    assert (await vllm.load(KEY)).status_code == 200
    await vllm.unload()
    await vllm.health()
    await until(lambda: local_node.stored() == [])
    assert not vllm.middleware._loading


async def test_a_fetch_that_fails_in_the_grace_time_keeps_no_files(
    local_node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    local_node.put(KEY)
    vllm = local_node.vllm(grace_s=1000.0)
    await vllm.load(KEY)
    await vllm.unload()

    def fail(*_: object) -> Path:
        raise OSError("no links")

    with monkeypatch.context() as patched:
        patched.setattr(NodeCache, "cached", fail)
        assert (await vllm.load(KEY)).status_code == 503
    vllm.middleware._unused_at = dict.fromkeys(vllm.middleware._unused_at, 0.0)  # the grace time is over
    await vllm.health()
    await until(lambda: local_node.stored() == [])


async def test_an_adapter_that_vllm_refuses_leaves_the_node(local_node: Node) -> None:
    local_node.put(KEY)
    vllm = local_node.vllm()
    vllm.app.refusal = 500
    assert (await vllm.load(KEY)).status_code == 500
    await vllm.health()
    await until(lambda: local_node.stored() == [])
    vllm.app.refusal = None
    assert (await vllm.load(KEY)).status_code == 200
    assert vllm.app.files_of("a") == FILES


async def test_a_store_without_the_adapter_gives_an_answer_that_clients_take_for_missing(node: Node) -> None:
    node.put(KEY, FILES | {"optimizer.safetensors": b"moments"})
    vllm = node.vllm()
    for key in ("s1=3Atrain=3A0/deleted-2", KEY):
        answer = await vllm.load(key)
        assert vllm_client.is_missing(answer.status_code, answer.content), answer.text
    assert not vllm.app.seen
    assert node.stored() == node.locks() == []


async def test_a_store_that_is_away_gives_503_without_the_reason_and_the_next_load_tries_again(
    local_node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    local_node.put(KEY)
    store = counted(monkeypatch, local_node)
    store.error = StoreError("no route to 10.0.0.7")
    vllm = local_node.vllm()
    answer = await vllm.load(KEY)
    assert vllm_client.is_to_repeat(answer.status_code, answer.content)
    assert "10.0.0.7" not in answer.text
    assert "StoreError: no route to 10.0.0.7" in caplog.text
    store.error = None
    assert (await vllm.load(KEY)).status_code == 200
    store.error = StoreError("away")
    second = local_node.vllm()
    assert (await second.load(KEY)).status_code == 200, "the node has the files"


async def test_a_full_disk_and_a_directory_that_cannot_be_made_give_503(
    local_node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    local_node.put(KEY)
    local_node.settings.cache.write_bytes(b"a file")
    vllm = local_node.vllm()
    assert (await vllm.load(KEY)).status_code == 503
    local_node.settings.cache.unlink()
    assert (await vllm.load(KEY)).status_code == 200


@pytest.mark.parametrize(
    "key",
    [
        *("", "one-part", "/etc/passwd", "../../etc/passwd", "a/../b", "a/..", "a/.tmp-0123456789abcdef", "a//b"),
        *("a/b/c", "a/b\n", "a/b\0", "ä/b", "a/%2e%2e", "a/b?x", "a\\b/c", "a" * 1000 + "/" + "b" * 1000),
    ],
)
async def test_hostile_keys_are_refused_before_the_store_is_asked(
    local_node: Node, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = counted(monkeypatch, local_node)
    store.error = AssertionError("the store was asked")
    assert key_in(reference_to(key)) is None
    vllm = local_node.vllm()
    answer = await vllm.load(key)
    assert answer.status_code == 400
    assert not vllm.app.seen


async def test_long_keys_of_named_saves_can_be_loaded(local_node: Node) -> None:
    key = f"{'m' * 200}/{'n' * 180}-0123456789ab-01234567"
    local_node.put(key)
    assert (await local_node.vllm().load(key)).status_code == 200


async def test_a_request_without_the_key_goes_to_vllm_and_fetches_nothing(
    local_node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    local_node.put(KEY)
    store = counted(monkeypatch, local_node)
    vllm = local_node.vllm()
    body = vllm_client.load_request("a", reference_to(KEY))
    for key in ("", "wrong", f"{API_KEY} "):
        assert (await vllm.ask(LOAD, body, key)).status_code == 401
    assert store.reads == 0
    assert not local_node.settings.cache.exists()


async def test_other_requests_pass_unchanged(local_node: Node, tmp_path: Path) -> None:
    vllm = local_node.vllm()
    directory = tmp_path / "an adapter"
    directory.mkdir()
    assert (await vllm.ask(LOAD, {"lora_name": "d", "lora_path": str(directory)})).status_code == 200
    assert vllm.app.loaded["d"] == directory
    for body in ([1], "text", {"lora_name": "d"}, {"lora_path": 7, "lora_name": "d"}):
        with contextlib.suppress(Exception):  # the fake fails as the real one refuses
            await vllm.ask(LOAD, body)
        assert json.loads(vllm.app.seen[-1][1]) == body
    answer = await vllm.ask("/v1/completions", {"prompt": "x" * 2 * MAX_BODY})
    assert answer.json() == {"prompt": "x" * 2 * MAX_BODY}
    assert (await vllm.ask(LOAD, {"lora_path": "x" * 2 * MAX_BODY})).status_code == 413


async def test_a_started_vllm_deletes_the_directories_of_those_that_have_ended(local_node: Node) -> None:
    local_node.put(KEY)
    dead, living = local_node.vllm(), local_node.vllm()
    for vllm in (dead, living):
        await vllm.load(KEY)
    (local_node.settings.cache / "stored" / ".tmp-0123456789abcdef").mkdir()
    dead.end()
    started = local_node.vllm()
    await started.load(KEY)
    assert not dead.app.loaded["a"].exists()
    assert living.app.files_of("a") == started.app.files_of("a") == FILES
    assert len(local_node.stored()) == 2, "what may still be written stays"


async def test_a_deleted_directory_is_made_again(local_node: Node) -> None:
    for key in (KEY, "group/other-1"):
        local_node.put(key)
    vllm = local_node.vllm()
    await vllm.load(KEY)
    shutil.rmtree(local_node.settings.cache)
    assert (await vllm.load("group/other-1", "other")).status_code == 503
    assert (await vllm.load("group/other-1", "other")).status_code == 200
    assert (await local_node.vllm().load(KEY)).status_code == 200
    assert vllm.app.files_of("other") == FILES, "the next vLLM does not take this one for ended"


async def test_downloads_of_dead_vllms_are_deleted(local_node: Node) -> None:
    root, name = local_node.settings.cache, ".tmp-0123456789abcdef"
    left = [root / "stored" / name, root / "scratch" / name]
    for directory in left:
        directory.mkdir(parents=True)
        os.utime(directory, (0, 0))
    NodeCache(local_node.store, root, 2**30, is_adapter).open()
    assert not any(directory.exists() for directory in left)


async def test_a_link_that_fails_leaves_nothing_behind(local_node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    local_node.put(KEY)
    await local_node.vllm().load(KEY)
    root = local_node.settings.cache
    files = NodeCache(local_node.store, root, 2**30, is_adapter)
    files.open()

    def full(source: Path, target: Path) -> None:
        (target / "begun").touch()
        raise OSError(errno.ENOSPC, "no space left on device")

    before = sorted(root.rglob("*"))
    with monkeypatch.context() as patch:
        patch.setattr(cache, "link_files", full)
        with pytest.raises(OSError, match="no space left"):
            files.cached(KEY)
    assert sorted(root.rglob("*")) == before
    assert (files.cached(KEY) or Path()).is_dir()


async def test_the_files_of_an_ended_vllm_wait_for_its_next_start_and_then_go(local_node: Node) -> None:
    local_node.put(KEY)
    vllm = local_node.vllm()
    await vllm.load(KEY)
    vllm.end()
    root = local_node.settings.cache
    NodeCache(local_node.store, root, 2**30, is_adapter).open()
    assert len(local_node.stored()) == 1
    for path in (root / "stored").iterdir():
        os.utime(path, (0, 0))
    NodeCache(local_node.store, root, 2**30, is_adapter).open()
    assert local_node.stored() == []


async def test_a_save_that_another_fetch_deletes_meanwhile_does_not_fail_this_one(
    local_node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sizes(directory: Path) -> dict[str, int]:
        monkeypatch.undo()
        shutil.rmtree(directory)
        return sizes_of(directory)

    local_node.put(KEY)
    local_node.put("group/other")
    first = local_node.vllm()
    await first.load("group/other", "other")
    first.end()
    monkeypatch.setattr(cache, "sizes_of", sizes)
    await local_node.vllm().load(KEY)
    assert [name.partition("-")[0] for name in local_node.stored()] == [KEY.rpartition("/")[2].partition("-")[0]]


async def test_the_least_recently_used_adapters_make_room_and_loaded_ones_stay(local_node: Node) -> None:
    keys = [f"group/saved-{number}" for number in range(4)]
    for key in keys:
        local_node.put(key, {"adapter_config.json": b"{}", "adapter_model.safetensors": bytes(98)})
    node = replace(local_node, settings=replace(local_node.settings, cache_bytes=250))
    vllm, other = node.vllm(), node.vllm()
    await vllm.load(keys[0], "loaded")
    for number in (1, 2):
        await other.load(keys[number], str(number))
        other.end()
        for path in (node.settings.cache / "stored").iterdir():
            used_at = path.stat().st_mtime - 10
            os.utime(path, (used_at, used_at))
        other = node.vllm()
    await other.load(keys[3], "last")
    kept = {name[: len("saved-0")] for name in node.stored()}
    assert kept == {"saved-0", "saved-3"}
    assert len(vllm.app.files_of("loaded")) == 2


async def test_vllm_answers_other_requests_while_a_store_hangs(
    local_node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in (KEY, "group/other-1"):
        local_node.put(key)
    store = counted(monkeypatch, local_node)
    vllm = local_node.vllm()
    await vllm.load("group/other-1", "other")
    store.go = False
    loading = asyncio.create_task(vllm.load(KEY))
    await until(lambda: store.reads == 2)
    await vllm.health()
    assert (await vllm.load("group/other-1", "again")).status_code == 200
    loading.cancel()  # the client gives up; the next one waits for the same fetch
    repeated = asyncio.create_task(vllm.load(KEY))
    store.go = True
    assert (await repeated).status_code == 200
    assert store.reads == 2


def test_the_store_reaches_the_middleware_by_the_environment(tmp_path: Path) -> None:
    config = load_config({"state_dir": tmp_path, "ray_address": "local"})
    environment = node_environment(config) | {"VLLM_API_KEY": "k", "SKYRL_NODE_CACHE": "/c"}
    settings = NodeSettings.from_environment(environment)
    assert settings == NodeSettings((tmp_path / "checkpoints").as_uri(), Path("/c"), "k")
    options = {"endpoint": "http://store", "region": "x"}
    config = load_config(
        {"ray_address": "auto", "checkpoint_store": "s3://bucket/prefix", "checkpoint_store_options": options}
    )
    settings = NodeSettings.from_environment(node_environment(config) | {"VLLM_API_KEY": "k"})
    assert (settings.store, settings.store_options) == ("s3://bucket/prefix", options)
    with pytest.raises(ValueError, match="SKYRL_NODE_STORE is not set"):
        NodeSettings.from_environment({"VLLM_API_KEY": "k"})


@pytest.mark.parametrize("model_id", ["s1:train:0", "a/../b", "=3A", "v1", "..", "adapters-x"])
def test_the_key_gives_the_version_and_no_other_key_does(model_id: str) -> None:
    adapter = AdapterVersion.of(model_id, 12)
    assert version_at(version_key(adapter)) == adapter
    assert key_in(reference_to(version_key(adapter))) is not None
    for key in (KEY, "adapters-m/v12", "adapters-m/v000012-0123456789ab-01234567", "m/v000012", "adapters-m"):
        assert version_at(key) is None
    assert version_at("x/v-00001") is None
