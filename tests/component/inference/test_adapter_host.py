"""SharedDirectory brings the files of an adapter version from a real checkpoint store to where the replica reads
them."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from engine_harness import until
from sqlalchemy.exc import OperationalError

from skyrl.base.config.loading import load_config
from skyrl.base.config.server import ServerConfig
from skyrl.base.types.weights import AdapterVersion
from skyrl.inference.adapter_host import (
    LOOKS_AT_ONCE,
    AdapterLost,
    AdapterMissing,
    AdapterUnavailable,
    SharedDirectory,
)
from skyrl.storage.checkpoint_store import directories
from skyrl.storage.checkpoint_store.base import CheckpointStore, StoreError, in_store
from skyrl.storage.checkpoint_store.registry import open_store
from skyrl.storage.checkpoint_store.versions import version_directory, version_in, version_location

ADAPTER = AdapterVersion.of("s1:train:0", 7)
KEY = "s1=3Atrain=3A0/named-1"
FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights"}


@pytest.fixture
def config(tmp_path: Path) -> ServerConfig:
    (tmp_path / "state").mkdir()
    return load_config({"state_dir": tmp_path / "state"})


@pytest.fixture
def store(config: ServerConfig) -> CheckpointStore:
    store = open_store(config)
    with store.writing(KEY) as directory:
        write(directory)
    return store


def write(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in FILES.items():
        (directory / name).write_bytes(content)


def files_in(directory: str) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in Path(directory).iterdir()}


def host_on(state_dir: Path, store: CheckpointStore, keys: dict[AdapterVersion, str]) -> SharedDirectory:
    async def store_key(adapter: AdapterVersion) -> str | None:
        return keys.get(adapter)

    return SharedDirectory(lambda: state_dir, store, store_key)


async def test_existing_files_are_used_unchanged(config: ServerConfig, store: CheckpointStore) -> None:
    write(version_directory(config.state_dir, ADAPTER))
    directory = await host_on(config.state_dir, store, {}).bring(ADAPTER)
    assert directory == f"{config.state_dir}/adapters/s1=3Atrain=3A0/v000007"
    assert files_in(directory) == FILES


async def test_missing_files_are_fetched_by_the_store_key_of_their_checkpoint(
    config: ServerConfig, store: CheckpointStore
) -> None:
    host = host_on(config.state_dir, store, {ADAPTER: KEY})
    places = await asyncio.gather(*(host.bring(ADAPTER) for _ in range(5)))
    assert len(set(places)) == 1
    assert files_in(places[0]) == FILES
    shutil.rmtree(places[0])
    assert files_in(await host.bring(ADAPTER)) == FILES


@pytest.mark.parametrize("keys", [{}, {ADAPTER: "s1=3Atrain=3A0/deleted-2"}])
async def test_an_adapter_without_files_and_stored_copy_raises_adapter_missing(
    config: ServerConfig, store: CheckpointStore, keys: dict[AdapterVersion, str]
) -> None:
    with pytest.raises(AdapterMissing, match="the files of adapter s1:train:0@7 are gone") as caught:
        await host_on(config.state_dir, store, keys).bring(ADAPTER)
    assert caught.value.adapter == ADAPTER
    assert not version_directory(config.state_dir, ADAPTER).exists()


async def test_links_to_memory_that_is_gone_raise_adapter_lost(config: ServerConfig, store: CheckpointStore) -> None:
    """The machine has lost its power before the files were on its disk."""
    directory, memory = version_directory(config.state_dir, ADAPTER), config.state_dir / "memory"
    write(memory)
    directory.mkdir(parents=True)
    for name in FILES:
        (directory / name).symlink_to(memory / name)
    host = host_on(config.state_dir, store, {})
    assert files_in(await host.bring(ADAPTER)) == FILES
    shutil.rmtree(memory)
    with pytest.raises(AdapterUnavailable, match="cannot be brought"):  # the memory may be another host's
        await host.bring(ADAPTER)
    os.utime(directory, (0, 0))
    with pytest.raises(AdapterLost) as caught:
        await host.bring(ADAPTER)
    assert "Save the weights again" in caught.value.sentence


async def test_a_full_disk_or_an_unreachable_database_or_store_raises_adapter_unavailable(
    config: ServerConfig, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk_full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    database_locked = OperationalError("SELECT", None, Exception("database is locked"))
    store_away = StoreError("no route to 10.0.0.7")

    def failing(error: Exception) -> object:
        def fail(*_: object) -> None:
            raise error

        return fail

    async def failing_store_key(_: AdapterVersion) -> None:
        raise database_locked

    async def reason_of_failure(host: SharedDirectory, cause: Exception) -> str:
        with pytest.raises(AdapterUnavailable) as caught:
            await host.bring(ADAPTER)
        assert caught.value.cause is caught.value.__cause__ is cause
        assert caught.value.adapter == ADAPTER
        assert str(caught.value) == f"the files of adapter {ADAPTER.name} cannot be brought to the inference server now"
        return caught.value.reason

    host = host_on(config.state_dir, store, {ADAPTER: KEY})
    with monkeypatch.context() as patched:
        patched.setattr(directories, "_link", failing(disk_full))
        assert await reason_of_failure(host, disk_full) == f"OSError: {disk_full}"
    with monkeypatch.context() as patched:
        patched.setattr(store, "reading", failing(store_away))
        assert await reason_of_failure(host, store_away) == "StoreError: no route to 10.0.0.7"
    host_without_database = SharedDirectory(lambda: config.state_dir, store, failing_store_key)
    reason = await reason_of_failure(host_without_database, database_locked)
    assert reason == "OperationalError: (builtins.Exception) database is locked"
    assert files_in(await host.bring(ADAPTER)) == FILES


@asynccontextmanager
async def busy_store_threads() -> AsyncIterator[None]:
    """Each thread for checkpoint stores waits for a store that does not answer."""
    over = threading.Event()
    busy = [asyncio.create_task(in_store(over.wait)) for _ in range(8)]
    try:
        yield
    finally:
        over.set()
        await asyncio.gather(*busy)


async def test_existing_files_are_found_while_all_store_threads_are_busy(
    config: ServerConfig, store: CheckpointStore
) -> None:
    write(version_directory(config.state_dir, ADAPTER))
    async with busy_store_threads():
        bringing = asyncio.create_task(host_on(config.state_dir, store, {}).bring(ADAPTER))
        await until(bringing.done)
    assert files_in(bringing.result()) == FILES


async def test_the_path_names_the_state_directory_as_the_replica_sees_it(
    tmp_path: Path, store: CheckpointStore
) -> None:
    far = tmp_path / "on another host"
    directory = await host_on(far, store, {ADAPTER: KEY}).bring(ADAPTER)
    assert directory == str(version_directory(far, ADAPTER))
    assert not far.exists()


@pytest.mark.parametrize("model_id", ["s1:train:0", "a/../b", "=3A", "v1"])
def test_the_directory_name_gives_the_adapter_version(tmp_path: Path, model_id: str) -> None:
    adapter = AdapterVersion.of(model_id, 12)
    assert version_in(version_directory(tmp_path, adapter)) == adapter
    assert version_location(adapter).count("/") == 2


@pytest.mark.parametrize("name", ["v12", "v", "12", "v-00001", "v00001a", "final"])
def test_other_directory_names_give_no_adapter_version(tmp_path: Path, name: str) -> None:
    assert version_in(tmp_path / "adapters" / "s1=3Atrain=3A0" / name) is None


async def test_a_file_system_that_hangs_keeps_no_thread_from_others(
    config: ServerConfig, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, over, looking = host_on(config.state_dir, store, {}), threading.Event(), list[Path]()
    for number in range(64):
        write(version_directory(config.state_dir, AdapterVersion.of("s1:train:0", number)))
    is_dir = Path.is_dir

    def hangs(path: Path) -> bool:
        looking.append(path)
        over.wait()
        return is_dir(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "is_dir", hangs)
        bringing = [asyncio.create_task(host.bring(AdapterVersion.of("s1:train:0", n))) for n in range(64)]
        await until(lambda: len(looking) == LOOKS_AT_ONCE)
        reading = asyncio.create_task(asyncio.to_thread(int))  # as the database is read
        await until(reading.done)
        over.set()
        assert len(await asyncio.gather(*bringing)) == 64
