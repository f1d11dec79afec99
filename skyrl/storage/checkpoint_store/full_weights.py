"""Where the files of versions of the full weights are: in the directory `full-weights/<model>/v<number>/` of the state
directory; or, where vLLM runs on other nodes, in the checkpoint store under the key `full-weights-<model>/v<number>`.

Both follow from the version's name, as those of an adapter do.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from skyrl.base.types.weights import FullWeights
from skyrl.storage.checkpoint_store.directories import id_of, safe_name

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
