"""SharedDirectory brings the files of an adapter version from a real checkpoint store to where the replica reads
them."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from skyrl.config.loading import load_config
from skyrl.config.server import ServerConfig
from skyrl.inference.adapter_host import AdapterMissing, SharedDirectory
from skyrl.storage.adapters import adapter_directory, adapter_in, adapter_location
from skyrl.storage.base import CheckpointStore
from skyrl.storage.registry import open_store
from skyrl.types.weights import AdapterVersion

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
    write(adapter_directory(config.state_dir, ADAPTER))
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
    assert not adapter_directory(config.state_dir, ADAPTER).exists()


async def test_the_path_names_the_state_directory_as_the_replica_sees_it(
    tmp_path: Path, store: CheckpointStore
) -> None:
    far = tmp_path / "on another host"
    directory = await host_on(far, store, {ADAPTER: KEY}).bring(ADAPTER)
    assert directory == str(adapter_directory(far, ADAPTER))
    assert not far.exists()


@pytest.mark.parametrize("model_id", ["s1:train:0", "a/../b", "=3A", "v1"])
def test_the_directory_name_gives_the_adapter_version(tmp_path: Path, model_id: str) -> None:
    adapter = AdapterVersion.of(model_id, 12)
    assert adapter_in(adapter_directory(tmp_path, adapter)) == adapter
    assert adapter_location(adapter).count("/") == 2


@pytest.mark.parametrize("name", ["v12", "v", "12", "v-00001", "v00001a", "final"])
def test_other_directory_names_give_no_adapter_version(tmp_path: Path, name: str) -> None:
    assert adapter_in(tmp_path / "adapters" / "s1=3Atrain=3A0" / name) is None
