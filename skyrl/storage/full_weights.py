"""The directories of versions of the full weights: `full-weights/<model>/v<number>/` in the state directory.

The directory follows from the version's name, as that of an adapter does.
"""

from __future__ import annotations

from pathlib import Path

from skyrl.storage.directories import id_of, safe_name
from skyrl.types.weights import FullWeights

FULL_WEIGHTS = "full-weights"


def full_directory(state_dir: Path, weights: FullWeights) -> Path:
    """A version's directory below a state directory."""
    return state_dir / FULL_WEIGHTS / safe_name(weights.model_id) / f"v{weights.number:06d}"


def full_weights_in(directory: Path) -> FullWeights | None:
    """The version to which a directory belongs; None if the directory's name is not that of a version."""
    number = directory.name.removeprefix("v")
    return FullWeights.of(id_of(directory.parent.name), int(number)) if number.isdecimal() else None
