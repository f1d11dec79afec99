"""Where the files of versions of adapters and of the full weights are.

A version of an adapter is in the directory `adapters/<model>/v<number>/` of the state directory, and in the checkpoint
store under the key `adapters-<model>/v<number>`. A version of the full weights is in the directory
`full-weights/<model>/v<number>/` of the state directory; or, where vLLM runs on other nodes, in the checkpoint store
under the key `full-weights-<model>/v<number>`.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from skyrl.base.types.weights import AdapterVersion, FullWeights
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


FULL_WEIGHTS = "full-weights"


def full_directory(state_dir: Path, weights: FullWeights) -> Path:
    """A version's directory below a state directory."""
    return state_dir / FULL_WEIGHTS / safe_name(weights.model_id) / f"v{weights.number:06d}"


def full_weights_in(directory: Path) -> FullWeights | None:
    """The version to which a directory belongs; None if the directory's name is not that of a version."""
    number = directory.name.removeprefix("v")
    return FullWeights.of(id_of(directory.parent.name), int(number)) if number.isdecimal() else None


def full_key(weights: FullWeights) -> str:
    """The key of a version in the checkpoint store. No other key has this form."""
    return f"{FULL_WEIGHTS}-{safe_name(weights.model_id)}/v{weights.number:06d}"


def full_at(key: str) -> FullWeights | None:
    """The version that is stored under this key; None for the keys of other saves."""
    group, _, name = key.partition("/")
    number, model = name.removeprefix("v"), group.removeprefix(f"{FULL_WEIGHTS}-")
    if not number.isdecimal():
        return None
    weights = FullWeights.of(id_of(model), int(number))
    return weights if key == full_key(weights) else None


def is_full_version(files: Collection[str]) -> bool:
    """Whether these are the names of the files of a version: a model in Hugging Face's format, without an optimizer."""
    weights = any(name.startswith("model") and name.endswith(".safetensors") for name in files)
    return weights and "config.json" in files and not any(name.startswith("optimizer") for name in files)
