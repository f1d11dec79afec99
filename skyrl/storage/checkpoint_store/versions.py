"""Where the files of versions of adapters and of the full weights are.

A version is in the directory `adapters/<model>/v<number>/` or `full-weights/<model>/v<number>/` of the state
directory. In the checkpoint store it has the key `adapters-<model>/v<number>` or `full-weights-<model>/v<number>`. No
other key has this form: the key of a named save ends with the id of the save.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from skyrl.base.adapter_files import PEFT_JSON, PEFT_TENSORS
from skyrl.base.types.weights import AdapterVersion, FullWeights
from skyrl.storage.checkpoint_store.directories import id_of, safe_name

ADAPTER_FILES = frozenset({PEFT_JSON, PEFT_TENSORS})
"""The files of an adapter in PEFT's format."""
_KINDS: dict[str, type[AdapterVersion | FullWeights]] = {"adapters": AdapterVersion, "full-weights": FullWeights}


def is_adapter(files: Collection[str]) -> bool:
    """Whether these are the names of an adapter's files."""
    return set(files) == ADAPTER_FILES


def is_full_version(files: Collection[str]) -> bool:
    """Whether these are the names of the files of a version: a model in Hugging Face's format, without an optimizer."""
    weights = any(name.startswith("model") and name.endswith(".safetensors") for name in files)
    return weights and "config.json" in files and not any(name.startswith("optimizer") for name in files)


def version_location(version: AdapterVersion | FullWeights) -> str:
    """The path of a version's directory, relative to the state directory."""
    kind = "full-weights" if isinstance(version, FullWeights) else "adapters"
    return f"{kind}/{safe_name(version.model_id)}/v{version.number:06d}"


def version_directory(state_dir: Path, version: AdapterVersion | FullWeights) -> Path:
    """A version's directory below a state directory."""
    return state_dir / version_location(version)


def version_key(version: AdapterVersion | FullWeights) -> str:
    """The key of a version in the checkpoint store."""
    return version_location(version).replace("/", "-", 1)


def version_in(directory: Path) -> AdapterVersion | FullWeights | None:
    """The version to which a directory belongs; None if the directory's name is not that of a version."""
    return _version(*directory.parts[-3:])


def version_at(key: str) -> AdapterVersion | FullWeights | None:
    """The version that is stored under this key; None for the keys of other saves."""
    group, _, name = key.partition("/")
    kind = next((kind for kind in _KINDS if group.startswith(f"{kind}-")), "")
    return _version(kind, group.removeprefix(f"{kind}-"), name)


def _version(kind: str, group: str, name: str) -> AdapterVersion | FullWeights | None:
    number = name.removeprefix("v")
    if kind not in _KINDS or not number.isdecimal():
        return None
    version = _KINDS[kind].of(id_of(group), int(number))
    return version if version_location(version) == f"{kind}/{group}/{name}" else None


def model_of(group: str) -> str:
    """The model whose files are stored under keys that begin with `group`."""
    for kind in _KINDS:
        group = group.removeprefix(f"{kind}-")
    return id_of(group)
