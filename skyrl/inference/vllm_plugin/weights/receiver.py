"""The calls about weights that one vLLM worker answers. One worker is one rank: a vLLM with tensor parallelism has
several, and each answers each call.

Calls return at once. What takes time is a job, also checksums and comparisons of the model's tensors; the caller asks
for its state. Calls come from the engine, between two of its steps, or at any time from the worker's line. Order of an
update from disk: `read`, `job` until it has ended, `apply`. From a group: `join`, then `receive` for each bucket, and
`apply` after the last. From a trainer's memory the same with `map`, without `join`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from skyrl.inference.vllm_plugin.weights.jobs import Job, Jobs, WeightsError
from skyrl.inference.vllm_plugin.weights.model import Broken, ServedModel
from skyrl.inference.vllm_plugin.weights.sources import FromDisk, FromGroups, FromMemory, Join, source_of
from skyrl.inference.vllm_plugin.weights.staging import SHOWN, StagingArea, named
from skyrl.weights.tensors import checksum


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


logger = logging.getLogger("vllm.skyrl_plugin")

NOT_IN_SERVICE = "new weights are loaded, and were not put into service; update them"


class Receiver:
    """`join(address, port, rank, world, name, backend, timeout_s)` forms a group. `rank`: of this worker in its
    vLLM. `prepare` runs at the start of each job's thread."""

    def __init__(
        self,
        model: ServedModel,
        join: Join,
        device: torch.device,
        ranks: dict[str, int],
        rank: int,
        prepare: Callable[[], None],
    ) -> None:
        self._model = model
        self._jobs = Jobs(prepare)
        self._area = StagingArea()
        self._groups = FromGroups(model, self._area, self._jobs, join, device, rank)
        self._broken: str | None = None
        self._one_at_a_time = threading.Lock()
        checks = Checks(model, ranks)
        self._calls: dict[str, Callable[..., dict[str, Any]]] = {
            "state": self.state,
            "job": lambda numbers, wait_s=0.0: self._jobs.state(numbers[rank], wait_s),
            "stop": self.stop,
            "read": FromDisk(model, self._area, self._jobs).read,
            "join_group": self._groups.join_group,
            "leave_group": self._groups.leave_group,
            "fail_group": self._groups.fail_group,
            "receive": self._groups.receive,
            "map": FromMemory(model, self._area, self._jobs).map,
            "staged": self.staged,
            "discard": self.discard,
            "apply": self.apply,
            "mark_broken": self.mark_broken,
            "checksum": lambda: {"job": self._jobs.start("computing checksums", checks.checksum)},
            "snapshot": lambda: {"job": self._jobs.start("taking a snapshot", checks.snapshot)},
            "compare": lambda: {"job": self._jobs.start("comparing with the snapshot", checks.compare)},
            "reset_tensors": self.reset_tensors,
            "weight": self.weight,
        }

    def answer(self, call: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """`{"ok": true, ...}`, or `{"ok": false, "error", "status"}`."""
        waits = call in ("job", "stop")  # and they change nothing here
        try:
            with nullcontext() if waits else self._one_at_a_time:
                return {"ok": True, **self._calls[call](**arguments)}
        except WeightsError as error:
            return {"ok": False, "error": str(error), "status": error.status}

    def state(self) -> dict[str, Any]:
        """`broken`: why nobody may sample from the model; null for a whole model."""
        staged = self._area.staged
        return {
            "broken": self._broken,
            "groups": self._groups.groups.names(),
            "staged": 0 if staged is None else len(staged.tensors),
            "staged_bytes": 0 if staged is None else staged.bytes,
            "version": None if staged is None else staged.version,
            "missing": None if staged is None else staged.missing(self._model.needed())[:SHOWN],
        }

    def stop(self) -> dict[str, Any]:
        self._jobs.stop()
        return {}

    def discard(self) -> dict[str, Any]:
        """Forget what was staged. The model is as it was."""
        self._jobs.stop()
        self._area.staged = None
        return {}

    def staged(self, version: str | None, update: str | None = None) -> dict[str, Any]:
        """As the end of `map`, for all that was staged. Raises WeightsError if that is nothing, or is of another
        update."""
        self._jobs.check_idle()
        if self._area.staged is None or not self._area.holds(version, source_of(update)):
            raise WeightsError(f"weight_version: nothing of {version!r} is staged, or another update has replaced it")
        return self._area.staged.progress(self._model.needed(), {})

    def apply(self, partial: bool) -> dict[str, Any]:
        """Put what is staged into the model. The engine stops until this returns. A full update also repairs a broken
        model. `broken` in the answer: the model is now neither old nor new; `seconds`: of each stage. Until
        `mark_broken` with null the new weights count as broken: the sidecar that was to name them may have ended."""
        self._jobs.check_idle()
        staged = self._area.staged
        if staged is None or not staged.tensors:
            raise WeightsError("there is nothing to apply")
        missing = staged.missing(self._model.needed())
        if missing and not partial:
            raise WeightsError(f"the update lacks {named(missing)}")
        if missing and self._broken is not None:
            raise WeightsError(f"the model is broken ({self._broken}): it needs all its tensors")
        self._area.staged = None
        seconds: dict[str, float] = {}
        broken: str | None = None
        try:
            seconds = self._model.apply(staged.tensors, full=not missing)
        except Broken as error:
            self._broken = broken = f"an update failed while it changed the model: {error}"
            logger.error("%s", broken)
        else:
            self._broken = NOT_IN_SERVICE
            keeps = staged.keep and not missing and not self._model.holds(staged.tensors)
            self._area.keep_base(staged if keeps else None)
            self._model.copy_taken(staged.tensors)
        answer = {"broken": broken, "tensors": len(staged.tensors), "bytes": staged.bytes, "seconds": seconds}
        del staged
        self._area.free_memory()
        return answer

    def mark_broken(self, reason: str | None) -> dict[str, Any]:
        """`reason` null: the model is whole, and its version is named."""
        self._broken = reason
        return {}

    def reset_tensors(self) -> dict[str, Any]:
        """Random numbers instead of the weights, so that a test sees whether an update replaces all of them."""
        self._jobs.check_idle()
        self._model.needed()
        self._broken = "its tensors were reset by /weights_checker"
        self._model.reset()
        return {}

    def weight(self, name: str, most: int) -> dict[str, Any]:
        return {"rows": self._model.read(name, most)}
