"""Where the files of adapter versions are: in the directory `adapters/<model>/v<number>/` of the state directory, and
in the checkpoint store under the key `adapters-<model>/v<number>`.

Both follow from the version's name. So no row holds a path, and a state directory may be copied or moved.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from skyrl.base.types.weights import AdapterVersion
from skyrl.storage.checkpoint_store.directories import id_of, safe_name

ADAPTERS = "adapters"
ADAPTER_FILES = frozenset({"adapter_config.json", "adapter_model.safetensors"})
"""The files of an adapter in PEFT's format."""


def is_adapter(files: Collection[str]) -> bool:
    """Whether these are the names of an adapter's files."""
    return set(files) == ADAPTER_FILES


def adapter_location(adapter: AdapterVersion) -> str:
    """The path of a version's directory, relative to the state directory."""
    return f"{ADAPTERS}/{safe_name(adapter.model_id)}/v{adapter.number:06d}"


def adapter_directory(state_dir: Path, adapter: AdapterVersion) -> Path:
    """A version's directory below a state directory."""
    return state_dir / adapter_location(adapter)


def adapter_in(directory: Path) -> AdapterVersion | None:
    """The version to which a directory belongs; None if the directory's name is not that of a version."""
    number = directory.name.removeprefix("v")
    if not number.isdecimal():
        return None
    adapter = AdapterVersion.of(id_of(directory.parent.name), int(number))
    return adapter if f"{ADAPTERS}/{directory.parent.name}/{directory.name}" == adapter_location(adapter) else None


def adapter_key(adapter: AdapterVersion) -> str:
    """The key in the checkpoint store of a version that is not on the training server's disk alone. No other key has
    this form: the key of a named save ends with the id of the save."""
    return f"{ADAPTERS}-{safe_name(adapter.model_id)}/v{adapter.number:06d}"


def adapter_at(key: str) -> AdapterVersion | None:
    """The version that is stored under this key; None for the keys of other saves."""
    group, _, name = key.partition("/")
    number, model = name.removeprefix("v"), group.removeprefix(f"{ADAPTERS}-")
    if not number.isdecimal():
        return None
    adapter = AdapterVersion.of(id_of(model), int(number))
    return adapter if key == adapter_key(adapter) else None
