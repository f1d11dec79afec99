"""Checkpoints of this machine as new weights: whole ones, and files with what differs from the version before."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

from skyrl.inference.vllm_plugin.weights.changes import make
from skyrl.inference.vllm_plugin.weights.checkpoint import entries, tensors
from skyrl.inference.vllm_plugin.weights.errors import WeightsError
from skyrl.inference.vllm_plugin.weights.jobs import Job, Jobs
from skyrl.inference.vllm_plugin.weights.model import ServedModel
from skyrl.inference.vllm_plugin.weights.stages import Stages
from skyrl.inference.vllm_plugin.weights.staging import Staged, named
from skyrl.inference.vllm_plugin.weights.staging_area import StagingArea

SOURCE = "disk"


class FromDisk:
    def __init__(self, model: ServedModel, area: StagingArea, jobs: Jobs) -> None:
        self._model = model
        self._area = area
        self._jobs = jobs

    def read(
        self,
        directory: str,
        version: str | None,
        checksums: dict[str, str] | None,
        partial: bool,
        keep: bool = False,
        base: str | None = None,
    ) -> dict[str, Any]:
        """Stage a checkpoint of this machine. The job ends with `tensors`, `bytes` and `seconds` of each stage. `keep`:
        after `apply` its bytes stay, as the base of a later one. `base`: the directory has what differs from it."""
        needed = self._model.needed()
        self._jobs.check_idle()
        kept = self._area.take_base()
        if base is not None:
            if kept is None or kept.version != base:
                held = "none" if kept is None else repr(kept.version)
                raise WeightsError(f"base: the bytes of {base!r} are not kept here, but those of {held}")
            return {
                "job": self._jobs.start("making the new weights", self._making(kept, directory, version, checksums))
            }
        del kept
        self._area.forget()

        def work(job: Job) -> dict[str, Any]:
            found = entries(Path(directory))
            staged = Staged(version, SOURCE, keep)
            for name, entry in found.items():  # all headers first: reading takes long
                needed.check(name, entry.shape, entry.dtype)
            if not partial and (missing := [n for n in needed.shapes if n not in found and n not in needed.optional]):
                raise WeightsError(f"model_path: {directory} lacks {named(missing)}")
            if unknown := [name for name in checksums or () if name not in found]:
                raise WeightsError(f"checksums: {directory} has no {named(unknown)}")
            own = {name: entry for name, entry in found.items() if name not in needed.optional}
            tied = {name: entry for name, entry in found.items() if name in needed.optional}
            took = Stages()
            each = chain(*(tensors(part, job.stopped, self._area.memory.empty) for part in (own, tied)))
            while (read := took.of("read", next, each, None)) is not None:
                name, tensor = read
                given = (checksums or {}).get(name)
                took.of("check", staged.add, needed, name, tensor, given, self._model.has_embedding)
            self._area.stage(staged, job)
            return {"tensors": len(staged.tensors), "bytes": staged.bytes, "seconds": took.seconds}

        return {"job": self._jobs.start("reading the new weights", work)}

    def _making(
        self, base: Staged, directory: str, version: str | None, checksums: dict[str, str] | None
    ) -> Callable[[Job], dict[str, Any]]:
        needed = self._model.needed()

        def work(job: Job) -> dict[str, Any]:
            took, staged = Stages(), Staged(version, SOURCE, True, base.tensors, base.bytes)
            found = took.of("read", entries, Path(directory))
            took.of("make", make, staged, found, needed, checksums or {}, job.stopped, self._model.has_embedding)
            self._area.stage(staged, job)
            return {"tensors": len(staged.tensors), "bytes": staged.bytes, "seconds": took.seconds}

        self._area.forget()
        return work
