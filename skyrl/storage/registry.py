"""Opens the checkpoint store of a configuration. Imports the library for object stores only if one is used."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from skyrl.config.server import ConfigError, ServerConfig
from skyrl.metrics.storage import TrafficMetrics
from skyrl.storage.base import CheckpointStore, StoreError
from skyrl.storage.counting import CountingStore
from skyrl.storage.local import LocalStore


def local_directory(config: ServerConfig) -> Path | None:
    """The local directory of the store; None for an object store."""
    url = config.checkpoint_store
    if url is None:
        return config.checkpoints_dir
    return Path(unquote(urlsplit(url).path)) if url.startswith("file:") else None


def open_store(config: ServerConfig, traffic: TrafficMetrics | None = None) -> CheckpointStore:
    """The store; with `traffic`, its bytes are counted. Raises ConfigError for a wrong URL or wrong options. Does not
    read from or write to the store yet."""
    store = _open(config)
    return store if traffic is None else CountingStore(store, traffic)


def _open(config: ServerConfig) -> CheckpointStore:
    directory, url = local_directory(config), config.checkpoint_store
    if directory is not None:
        return LocalStore(directory)
    assert url is not None
    from skyrl.storage.objects import ObjectStore

    try:
        return ObjectStore(url, config.checkpoint_store_options, config.state_dir / "scratch")
    except StoreError as error:
        raise ConfigError(f"checkpoint_store: {error}") from error
