"""Tensors in a trainer's memory on this machine as new weights."""

from __future__ import annotations

from typing import Any

from skyrl.inference.vllm_plugin.weights.errors import WeightsError
from skyrl.inference.vllm_plugin.weights.jobs import Job, Jobs
from skyrl.inference.vllm_plugin.weights.model import ServedModel
from skyrl.inference.vllm_plugin.weights.plan import plan_of
from skyrl.inference.vllm_plugin.weights.stages import Stages
from skyrl.inference.vllm_plugin.weights.staging_area import StagingArea
from skyrl.weights.segments import SegmentError, opened


def source_of(update: str | None) -> str:
    """For `Staged`."""
    return f"memory {update or ''}"


class FromMemory:
    def __init__(self, model: ServedModel, area: StagingArea, jobs: Jobs) -> None:
        self._model = model
        self._area = area
        self._jobs = jobs

    def map(
        self,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        places: list[int],
        memory: dict[str, Any],
        version: str | None,
        checksums: dict[str, str] | None,
        update: str | None = None,
    ) -> dict[str, Any]:
        """Stage tensors that lie in a segment of a trainer on this machine, at these bytes of it: in place if that is
        main memory, which must not change until the update is applied. `update`: the trainer's name for the update.
        Answers as `receive`."""
        needed = self._model.needed()
        self._jobs.check_idle()
        plan = plan_of(names, dtypes, shapes)
        staged = self._area.begun(version, source_of(update))

        def work(job: Job) -> dict[str, Any]:
            took = Stages()
            try:
                segment = took.of("map", opened, memory)
                for (name, dtype, shape, size), begin in zip(plan, places, strict=True):
                    if begin + size > len(segment):
                        raise WeightsError(f"places: {name} ends after the memory's {len(segment)} bytes")
                    if begin % dtype.itemsize:
                        raise WeightsError(
                            f"places: {name} begins at byte {begin}, which is no multiple of {dtype.itemsize}"
                        )
                    tensor = segment[begin : begin + size].view(dtype).view(shape)
                    if segment.is_cuda:
                        tensor = took.of("copy", self._area.memory.empty(shape, dtype).copy_, tensor)
                    given = (checksums or {}).get(name)
                    took.of("check", staged.add, needed, name, tensor, given, self._model.has_embedding)
                if self._area.staged is not staged or job.stopped():
                    raise WeightsError("the update was stopped")
            except Exception as error:
                self._area.drop(staged)
                if isinstance(error, SegmentError):
                    raise WeightsError(f"memory: {error}") from error
                raise
            return staged.progress(needed, took.seconds)

        return {"job": self._jobs.start("mapping new weights", work)}
