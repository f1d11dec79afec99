"""Opens the checkpoint store of a configuration.

Imports the library for object stores only if one is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from skyrl.base.config.server import ConfigError, ServerConfig
from skyrl.storage.checkpoint_store.base import CheckpointStore, CountBytes, StoreError, not_counted
from skyrl.storage.checkpoint_store.local import LocalStore
from skyrl.storage.shares import SavesDisk


def local_directory(config: ServerConfig) -> Path | None:
    """The local directory of the store; None for an object store."""
    url = config.checkpoint_store
    if url is None:
        return config.checkpoints_dir
    return _path_of(url) if url.startswith("file:") else None


def saves_disk(config: ServerConfig) -> SavesDisk | None:
    """The disk of the store; None for an object store."""
    directory = local_directory(config)
    return None if directory is None else SavesDisk(directory, config.min_free_disk_bytes)


def open_store(config: ServerConfig, count: CountBytes = not_counted) -> CheckpointStore:
    """The store. Raises ConfigError for a wrong URL or wrong options. Does not read from or write to it yet."""
    scratch = config.state_dir / config.role.process("scratch")  # each engine deletes what it left in its own
    try:
        return store_at(store_url(config), config.checkpoint_store_options, scratch, count)
    except StoreError as error:
        raise ConfigError(f"checkpoint_store: {error}") from error


def store_url(config: ServerConfig) -> str:
    """The URL of the store; for the store in the state directory, that of its directory."""
    return config.checkpoint_store or config.checkpoints_dir.as_uri()


def store_at(url: str, options: Mapping[str, str], scratch: Path, count: CountBytes = not_counted) -> CheckpointStore:
    """The store at a URL as `checkpoint_store` has it. `scratch` is for files on their way to or from an object store.
    Raises StoreError for a wrong URL or wrong options."""
    if url.startswith("file:"):
        return LocalStore(_path_of(url), count)
    from skyrl.storage.checkpoint_store.objects import ObjectStore

    return ObjectStore(url, options, scratch, count)


def _path_of(url: str) -> Path:
    return Path(unquote(urlsplit(url).path))
