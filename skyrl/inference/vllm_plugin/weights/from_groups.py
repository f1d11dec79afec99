"""What trainers broadcast to their groups as new weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from skyrl.inference.vllm_plugin.weights.errors import WeightsError
from skyrl.inference.vllm_plugin.weights.groups import Groups, Join
from skyrl.inference.vllm_plugin.weights.jobs import Job, Jobs
from skyrl.inference.vllm_plugin.weights.model import ServedModel
from skyrl.inference.vllm_plugin.weights.plan import elements, plan_of
from skyrl.inference.vllm_plugin.weights.stages import Stages
from skyrl.inference.vllm_plugin.weights.staging import Needed, Staged
from skyrl.inference.vllm_plugin.weights.staging_area import StagingArea


class FromGroups:
    """`join(address, port, rank, world, name, backend, timeout_s)` forms a group; `rank` is this worker's among those
    of its vLLM. Tensors arrive on `device`."""

    def __init__(
        self, model: ServedModel, area: StagingArea, jobs: Jobs, join: Join, device: torch.device, rank: int
    ) -> None:
        self._model = model
        self._area = area
        self._jobs = jobs
        self._join = join
        self._device = device
        self._rank = rank
        self.groups = Groups()

    def join_group(
        self, address: str, port: int, rank_offset: int, world_size: int, name: str, backend: str, timeout_s: float
    ) -> dict[str, Any]:
        """Form a group. The job ends when all members are there. What was staged before is forgotten."""
        self._model.needed()
        self._jobs.check_idle()
        self.groups.check_new(name)
        rank = rank_offset + self._rank
        if not 0 < rank < world_size:
            raise WeightsError(
                f"rank_offset: this rank would be {rank}, in a group of {world_size} with the trainer at 0"
            )
        self._area.forget()

        def work(job: Job) -> dict[str, Any]:
            try:
                group = self._join(
                    address=address, port=port, rank=rank, world=world_size, name=name, backend=backend,
                    timeout_s=timeout_s,
                )  # fmt: skip
            except Exception as error:
                raise WeightsError(f"the group {name!r} was not formed: {error}") from error
            self.groups.add(name, group)
            if job.stopped():
                self.groups.fail(name, "it was formed after the time for it")
                raise WeightsError(f"the group {name!r} was formed after the time for it")
            return {"rank": rank}

        return {"job": self._jobs.start(f"joining the group {name!r}", work)}

    def leave_group(self, name: str) -> dict[str, Any]:
        """Also forgets what was staged. Raises WeightsError for a group that is not there."""
        self._jobs.check_idle()
        self._area.forget()
        self.groups.leave(name)
        return {}

    def fail_group(self, name: str, why: str) -> dict[str, Any]:
        """The caller has refused a bucket that the trainer may be sending: it would be taken for the next one. Does
        nothing for a group that is not there."""
        self.groups.fail(name, why)
        return {}

    def receive(self, group: str, **bucket: Any) -> dict[str, Any]:
        """Stage one bucket: rank 0 broadcasts each tensor in this order. The job ends with `missing`, the number of
        tensors that a full update still needs, the names of some, and the `seconds` of each stage. After an error the
        whole update must be sent again. A tensor that the model cannot take is received all the same, so that the
        trainer does not hang.

        A group whose bucket is not received whole has failed: what the trainer sent for it would be taken for tensors
        of the next bucket."""
        try:
            return self._receive(group, **bucket)
        except WeightsError as error:
            self.groups.fail(group, str(error))
            raise

    def _receive(
        self,
        group: str,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        version: str | None,
        checksums: dict[str, str] | None,
    ) -> dict[str, Any]:
        needed = self._model.needed()
        self._jobs.check_idle()
        members = self.groups.usable(group)
        plan = plan_of(names, dtypes, shapes)
        total = sum(tensor_bytes for *_, tensor_bytes in plan)
        most = 2 * sum(elements(shape) for shape in needed.shapes.values()) * 8
        if total > most:
            raise WeightsError(f"shapes: a bucket of {total} bytes is more than this model can have")
        staged = self._area.begun(version, f"group {group}")

        def work(job: Job) -> dict[str, Any]:
            wrong: WeightsError | None = None
            received = False
            took = Stages()
            rooms = (self._room(staged, needed, name, dtype, shape) for name, dtype, shape, _ in plan)
            arriving = members.broadcast_each(rooms)
            try:
                for name, *_ in plan:
                    if job.stopped() or not self.groups.has(group, members):
                        raise WeightsError(f"the update was stopped before {name}")
                    try:
                        tensor = took.of("receive", self._received, arriving, staged, needed, name)
                    except Exception as error:
                        why = str(error) or type(error).__name__
                        raise WeightsError(f"the group {group!r} failed at {name}: {why}") from error
                    try:
                        if wrong is None:
                            given = (checksums or {}).get(name)
                            took.of("check", staged.add, needed, name, tensor, given, self._model.has_embedding)
                    except WeightsError as error:
                        wrong = error
                received = True
                if wrong is not None:
                    raise wrong
                if self._area.staged is not staged or job.stopped():
                    raise WeightsError("the update was stopped")
            except Exception as error:
                self._area.drop(staged)
                if not received:
                    self.groups.fail(group, str(error) or type(error).__name__)
                raise
            finally:
                arriving.close()
                self.groups.receiving = None
                if not self.groups.has(group, members):
                    members.close()
            return staged.progress(needed, took.seconds)

        self.groups.receiving = members
        return {"job": self._jobs.start("receiving a bucket", work)}

    def _room(
        self, staged: Staged, needed: Needed, name: str, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> torch.Tensor:
        """Where a tensor of a group arrives: in the staging memory, or on the GPU."""
        if self._device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=self._device)
        return self._empty_for(name, staged, needed)(shape, dtype=dtype)

    def _received(self, arriving: Iterator[torch.Tensor], staged: Staged, needed: Needed, name: str) -> torch.Tensor:
        """The next tensor of the group, in main memory."""
        arrived = next(arriving)
        if self._device.type == "cpu":
            return arrived
        return self._empty_for(name, staged, needed)(arrived.shape, dtype=arrived.dtype).copy_(arrived)

    def _empty_for(self, name: str, staged: Staged, needed: Needed) -> Callable[..., torch.Tensor]:
        """A name that is sent again takes no more of the staging memory."""
        return torch.empty if name in staged.tensors or name not in needed.shapes else self._area.memory.empty
