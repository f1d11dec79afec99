"""Checksums of the model's tensors, and whether they are those of an earlier moment. Each is the work of a job."""

from __future__ import annotations

from typing import Any

from skyrl.inference.vllm_plugin.weights.errors import WeightsError
from skyrl.inference.vllm_plugin.weights.jobs import Job
from skyrl.inference.vllm_plugin.weights.model import ServedModel
from skyrl.weights.digests import checksum


class Checks:
    """`ranks` says which part of the model this worker has."""

    def __init__(self, model: ServedModel, ranks: dict[str, int]) -> None:
        self._model = model
        self._ranks = ranks
        self._snapshot: dict[str, str] | None = None

    def checksum(self, _: Job) -> dict[str, Any]:
        """`checksums` (of each tensor), `per_gpu_checksum`, `parallelism_info`."""
        digests = self._model.digests()
        return {"checksums": digests, "per_gpu_checksum": checksum(digests), "parallelism_info": self._ranks}

    def snapshot(self, _: Job) -> dict[str, Any]:
        """Remember the checksums for `compare`."""
        self._snapshot = self._model.digests()
        return {"tensors": len(self._snapshot)}

    def compare(self, _: Job) -> dict[str, Any]:
        """`differing`: the names of the tensors that are not as in the snapshot. Raises WeightsError without one."""
        if self._snapshot is None:
            raise WeightsError("action: compare needs a snapshot first")
        before, now = self._snapshot, self._model.digests()
        return {"differing": sorted(name for name in before.keys() | now if before.get(name) != now.get(name))}
