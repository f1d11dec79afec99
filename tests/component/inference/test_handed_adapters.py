"""A new adapter comes to a node in one message, before the checkpoint store has it: what a host does with the message,
with hostile ones, and when it is killed in the middle of one."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import cast

import httpx
import pytest
from engine_harness import files_in, until
from test_remote import API_KEY, FILES, KEY, LOAD, Node, Vllm, counted, local_node

from skyrl.inference.remote import cache, hand_over, middleware
from skyrl.inference.remote.hand_over import CONTENT_TYPE, MAX_HEAD, AdapterMessage
from skyrl.inference.remote.references import reference_to
from skyrl.inference.remote.settings import API_KEY as KEY_VARIABLE
from skyrl.inference.remote.settings import CACHE, STORE
from skyrl.inference.vllm_client import VllmClient, VllmError, is_missing, load_request
from skyrl.runtime.processes.ports import free_port

__all__ = ["local_node"]
LARGE = {"adapter_config.json": b"{}", "adapter_model.safetensors": bytes(range(256)) * 12_000}


def written(directory: Path, files: Mapping[str, bytes]) -> Path:
    directory.mkdir(parents=True)
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return directory


def client_of(vllm: Vllm, key: str = API_KEY) -> VllmClient:
    client = VllmClient("http://node", key)
    client._http._transport = httpx.ASGITransport(cast(Callable[..., object], vllm.middleware))  # pyright: ignore
    return client


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_an_adapter_in_a_message_is_loaded_without_the_store(
    local_node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    if elsewhere:
        monkeypatch.setattr(middleware, "sizes_of", lambda _: {})  # this machine has no such files
    store = counted(monkeypatch, local_node)
    store.error = AssertionError("the store was asked")
    first, second = local_node.vllm(), local_node.vllm()
    files = written(tmp_path / "held", LARGE)
    for vllm in (first, second):
        await client_of(vllm).load_adapter("a", reference_to(KEY), files)
        assert vllm.app.files_of("a") == LARGE
    await client_of(first).load_adapter("a", reference_to(KEY), files)
    assert len(local_node.stored()) == 1
    assert first.app.loaded["a"] != second.app.loaded["a"]
    assert (await local_node.vllm().load(KEY)).status_code == 200, "by its reference, too"
    seen = [json.loads(body) for path, body in first.app.seen if path == LOAD]
    assert [each.keys() for each in seen] == [{"lora_name", "lora_path"}] * 2


@pytest.mark.parametrize("held", ["/nowhere", "", 7, {}, "a\0b", "/", "x" * 5000])
async def test_a_directory_that_is_no_adapter_on_this_machine_is_asked_for_as_a_message(
    local_node: Node, held: object
) -> None:
    body = {**load_request("a", reference_to(KEY)), "held": held}
    vllm = local_node.vllm()
    assert (await vllm.ask(LOAD, body)).status_code == 409
    assert not vllm.app.seen
    assert local_node.stored() == []


async def test_a_load_by_reference_waits_for_the_message_that_is_coming(
    local_node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = counted(monkeypatch, local_node)
    vllm, go = local_node.vllm(), asyncio.Event()
    files = written(tmp_path / "held", FILES)

    async def slowly() -> AsyncIterator[bytes]:
        with AdapterMessage(load_request("a", reference_to(KEY)), files) as message:
            async for piece in message.pieces():
                yield piece
                await go.wait()

    sending = asyncio.create_task(send(vllm, slowly()))
    await until(lambda: KEY in vllm.middleware._files._coming)
    waiting = asyncio.create_task(vllm.load(KEY))
    await until(lambda: KEY in vllm.middleware._files.bringing)
    go.set()
    statuses = [(await each).status_code for each in (sending, waiting)]
    assert sorted(statuses) == [200, 400], "whoever is second hears that the name has already been loaded"
    assert store.reads == 0
    assert not vllm.middleware._files._coming


async def send(vllm: Vllm, content: bytes | AsyncIterator[bytes], key: str = API_KEY) -> httpx.Response:
    transport = httpx.ASGITransport(cast(Callable[..., object], vllm.middleware))  # pyright: ignore
    headers = {"content-type": CONTENT_TYPE, "authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://node") as client:
        return await client.post(LOAD, content=content, headers=headers)


def message_of(files: object, path: object = reference_to(KEY), content: bytes = b"") -> bytes:
    return json.dumps({"lora_name": "a", "lora_path": path, "files": files}).encode() + b"\n" + content


CONFIG, TENSORS = FILES
SIZES = {CONFIG: 2, TENSORS: 3}


@pytest.mark.parametrize(
    ("content", "status"),
    [
        *((content, 400) for content in (b"", b"{}", b"\n", b"[]\n", b"[" * 9_000 + b"\n", b"x" * (MAX_HEAD + 1))),
        *(
            (message_of(files), 400)
            for files in (None, [], {}, {CONFIG: 2}, SIZES | {"../x": 1}, SIZES | {TENSORS: -1})
        ),
        *((message_of(SIZES | {TENSORS: size}), 400) for size in (True, "3", 1.5, None)),
        (message_of(SIZES | {CONFIG: 2**20 + 1}), 400),
        (message_of(SIZES | {TENSORS: 2**30}), 413),
        *((message_of(SIZES, path, b"{}abc"), 400) for path in (7, "/etc", "skyrl-store:../../etc/x", "skyrl-store:a")),
        *((message_of(SIZES, content=content), 400) for content in (b"", b"{}", b"{}ab", b"{}abcd")),
    ],
)
async def test_hostile_messages_are_refused_and_leave_nothing(local_node: Node, content: bytes, status: int) -> None:
    vllm = local_node.vllm()
    answer = await send(vllm, content)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]
    assert not vllm.app.seen
    stored = local_node.settings.cache / "stored"
    assert not stored.exists() or list(stored.iterdir()) == []
    assert not vllm.middleware._files._coming


async def test_a_message_without_the_key_is_not_read(local_node: Node) -> None:
    vllm = local_node.vllm()
    assert (await send(vllm, message_of(SIZES, content=b"{}abc"), key="wrong")).status_code == 401
    assert not local_node.settings.cache.exists()


async def test_a_body_beyond_all_adapters_ends_with_413(local_node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hand_over, "MOST_BYTES", 2**12)
    assert (await send(local_node.vllm(), message_of(SIZES, content=b"x" * (MAX_HEAD + 2**12)))).status_code == 413


async def test_a_message_to_a_full_disk_is_to_be_repeated_and_its_files_may_be_gone(
    local_node: Node, tmp_path: Path
) -> None:
    local_node.settings.cache.write_bytes(b"a file")
    vllm, files = local_node.vllm(), written(tmp_path / "held", FILES)
    with pytest.raises(VllmError) as refused:
        await client_of(vllm).load_adapter("a", reference_to(KEY), files)
    assert refused.value.status == 503
    with pytest.raises(FileNotFoundError):
        await client_of(vllm).load_adapter("a", reference_to(KEY), tmp_path / "gone")


async def test_files_of_another_boot_are_fetched_again(
    local_node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were not synced: a loss of power may have left them without their bytes."""
    files = written(tmp_path / "held", FILES)
    vllm = local_node.vllm()
    await client_of(vllm).load_adapter("a", reference_to(KEY), files)
    (boot := tmp_path / "boot_id").write_text("another")
    monkeypatch.setattr(cache, "_BOOT_ID", boot)
    vllm.end()
    started = local_node.vllm()
    answer = await started.load(KEY)
    assert is_missing(answer.status_code, answer.content)
    local_node.put(KEY, LARGE)
    assert (await started.load(KEY)).status_code == 200
    assert started.app.files_of("a") == LARGE


HOST = """
import json, sys
import uvicorn
from skyrl.inference.remote.middleware import StoredAdapterLoads

async def vllm(scope, receive, send):
    if scope["type"] == "http":
        body = (await receive()).get("body")
        path = json.loads(body)["lora_path"] if body else ""
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": path.encode()})

uvicorn.run(StoredAdapterLoads(vllm), port=int(sys.argv[1]), lifespan="off", log_level="critical")
"""
"""The host in a process of its own, around an application that answers a load with the directory that it was given."""


class Host:
    def __init__(self, node: Node, all_hosts: list[Host]) -> None:
        all_hosts.append(self)
        self.port = free_port()
        settings = node.settings
        variables = {KEY_VARIABLE: API_KEY, STORE: settings.store, CACHE: str(settings.cache)}
        self._process = subprocess.Popen(
            [sys.executable, "-c", HOST, str(self.port)], env={"PYTHONPATH": ":".join(sys.path), **variables}
        )
        self.client = VllmClient(f"http://127.0.0.1:{self.port}", API_KEY)

    async def ready(self) -> Host:
        while await self.client.health() is None:
            assert self._process.poll() is None
            await asyncio.sleep(0.02)
        return self

    async def load(self, key: str) -> httpx.Response:
        return await self.client._http.post(LOAD, json=load_request("a", reference_to(key)))

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    """The processes that a test has started. Those that run end with it."""
    started: list[Host] = []
    yield started
    for host in started:
        host.kill()


async def test_a_host_that_is_killed_in_a_message_has_nothing_of_it_and_after_one_everything(
    local_node: Node, tmp_path: Path, hosts: list[Host]
) -> None:
    files = written(tmp_path / "held", LARGE)
    host = await Host(local_node, hosts).ready()
    head = f"POST {LOAD} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {API_KEY}\r\n"
    with AdapterMessage(load_request("a", reference_to(KEY)), files) as message:
        head += "".join(f"{name}: {value}\r\n" for name, value in message.headers.items())
        body = b"".join([piece async for piece in message.pieces()])
    with socket.create_connection(("127.0.0.1", host.port)) as connection:
        await asyncio.to_thread(connection.sendall, f"{head}\r\n".encode() + body[: len(body) // 2])
        stored = local_node.settings.cache / "stored"
        await until(lambda: any(stored.glob(".tmp-*/adapter_model.safetensors")))
        host.kill()

    host = await Host(local_node, hosts).ready()
    answer = await host.load(KEY)
    assert is_missing(answer.status_code, answer.content), "half a message is no adapter"
    await host.client.load_adapter("a", reference_to(KEY), files)
    host.kill()

    host = await Host(local_node, hosts).ready()
    answer = await host.load(KEY)
    assert files_in(answer.text) == LARGE
    host.kill()
