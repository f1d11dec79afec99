"""Snapshots of backends that write the same files for a snapshot as for a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from skyrl.base.types.weights import LoraSpec


class StateSnapshots(ABC):
    """`save_snapshot` and `restore_model` of a backend, from its other methods."""

    @abstractmethod
    def create_model(self, model_id: str, spec: LoraSpec) -> None: ...

    @abstractmethod
    def delete_model(self, model_id: str) -> None: ...

    @abstractmethod
    def save_state(self, model_id: str, directory: Path) -> None: ...

    @abstractmethod
    def load_state(self, model_id: str, directory: Path, *, optimizer: bool) -> None: ...

    def save_snapshot(self, model_id: str, directory: Path) -> None:
        """Write the files of `save_state`."""
        self.save_state(model_id, directory)

    def restore_model(self, model_id: str, spec: LoraSpec, directory: Path) -> None:
        """As `Backend.restore_model`. Also raises SafetensorError when files are damaged."""
        self.create_model(model_id, spec)
        try:
            self.load_state(model_id, directory, optimizer=True)
        except Exception:
            self.delete_model(model_id)
            raise
