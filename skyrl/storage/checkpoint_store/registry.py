"""Opens the checkpoint store of a configuration, and counts the bytes that go to it and come from it.

Imports the library for object stores only if one is used.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

from skyrl.base.config.server import ConfigError, ServerConfig
from skyrl.runtime.metrics.storage import TrafficMetrics
from skyrl.storage.checkpoint_store.base import CheckpointStore, StoredKey, StoreError, any_group
from skyrl.storage.checkpoint_store.local import LocalStore


def local_directory(config: ServerConfig) -> Path | None:
    """The local directory of the store; None for an object store."""
    url = config.checkpoint_store
    if url is None:
        return config.checkpoints_dir
    return _path_of(url) if url.startswith("file:") else None


def open_store(config: ServerConfig, traffic: TrafficMetrics | None = None) -> CheckpointStore:
    """The store; with `traffic`, its bytes are counted. Raises ConfigError for a wrong URL or wrong options. Does not
    read from or write to the store yet."""
    store = _open(config)
    return store if traffic is None else CountingStore(store, traffic)


def store_url(config: ServerConfig) -> str:
    """The URL of the store; for the store in the state directory, that of its directory."""
    return config.checkpoint_store or config.checkpoints_dir.as_uri()


def store_at(url: str, options: Mapping[str, str], scratch: Path) -> CheckpointStore:
    """The store at a URL as `checkpoint_store` has it. `scratch` is for files on their way to or from an object store.
    Raises StoreError for a wrong URL or wrong options."""
    if url.startswith("file:"):
        return LocalStore(_path_of(url))
    from skyrl.storage.checkpoint_store.objects import ObjectStore

    return ObjectStore(url, options, scratch)


def _open(config: ServerConfig) -> CheckpointStore:
    scratch = config.state_dir / config.role.process("scratch")  # each engine deletes what it left in its own
    try:
        return store_at(store_url(config), config.checkpoint_store_options, scratch)
    except StoreError as error:
        raise ConfigError(f"checkpoint_store: {error}") from error


def _path_of(url: str) -> Path:
    return Path(unquote(urlsplit(url).path))


class CountingStore:
    """As `store`. Downloads by signed URLs and copies within the store do not come through here."""

    def __init__(self, store: CheckpointStore, traffic: TrafficMetrics) -> None:
        self._store = store
        self._traffic = traffic

    @contextmanager
    def writing(self, key: str) -> Generator[Path]:
        size = 0
        with self._store.writing(key) as directory:
            yield directory
            size = _size(directory)
        self._traffic.written.inc(size)

    @contextmanager
    def reading(self, key: str) -> Generator[Path]:
        with self._store.reading(key) as directory:
            self._traffic.read.inc(_size(directory))
            yield directory

    def stream(self, key: str, file: str) -> Iterator[bytes]:
        for piece in self._store.stream(key, file):
            self._traffic.read.inc(len(piece))
            yield piece

    def copy(self, source: str, key: str) -> None:
        self._store.copy(source, key)

    def files(self, key: str) -> dict[str, int]:
        return self._store.files(key)

    def sign(self, key: str, expires_in_s: float) -> dict[str, str] | None:
        return self._store.sign(key, expires_in_s)

    def delete(self, key: str) -> None:
        self._store.delete(key)

    def stored(self) -> list[StoredKey]:
        return self._store.stored()

    def remove_leftovers(self, before: float, wanted: Callable[[str], bool] = any_group) -> None:
        self._store.remove_leftovers(before, wanted)

    def claim(self, owner: str) -> str:
        return self._store.claim(owner)


def _size(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.iterdir())
