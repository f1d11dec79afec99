"""The directories of adapter versions: `adapters/<model>/v<number>/` in the state directory of the training server.

The directory follows from the version's name. So no row holds a path, and a state directory may be copied or moved.
"""

from __future__ import annotations

from pathlib import Path

from skyrl.storage.directories import id_of, safe_name
from skyrl.types.weights import AdapterVersion

ADAPTERS = "adapters"


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
