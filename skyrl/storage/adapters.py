"""Where adapters lie that vLLM serves: `adapters/<model>/v<version>/` in the state directory, a directory for each
version, which never changes.

Rows hold the path relative to the state directory, so that a state directory may be copied or moved. Whoever reads the
files or sends the path joins the two. The name of a version in vLLM follows from its directory. Knows nothing of who
samples from it.
"""

from __future__ import annotations

from pathlib import Path

from skyrl.storage.base import CheckpointStore
from skyrl.storage.directories import fetch, id_of, safe_name
from skyrl.wire.paths import adapter_name_of

ADAPTERS = "adapters"


def adapter_location(model_id: str, version: int) -> str:
    """The path of a version's directory, relative to the state directory: what rows hold."""
    return f"{ADAPTERS}/{safe_name(model_id)}/v{version:06d}"


def adapter_directory(root: Path, model_id: str, version: int) -> Path:
    """A version's directory; `root` is `adapters` in the state directory."""
    return root.parent / adapter_location(model_id, version)


def adapter_name_in(directory: Path) -> str:
    """The name of the version that a directory is of; empty if it is of none."""
    version = directory.name.removeprefix("v")
    if not directory.name.startswith("v") or not version.isdecimal():
        return ""
    return adapter_name_of(id_of(directory.parent.name), int(version))


def bring_adapter(store: CheckpointStore, key: str, directory: Path) -> None:
    """Fetch a saved adapter to where vLLM reads it, unless it is there. Raises StoreError."""
    if not directory.is_dir():
        fetch(store, key, directory)
