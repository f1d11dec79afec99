"""Where new weights come from: checkpoints of this machine, a trainer's memory on it, and what trainers broadcast.

A checkpoint is whole, or has what differs from the version before. A broadcast arrives in a group of
`torch.distributed`, which one worker forms with trainers; a group that can no longer be used has failed. Each source
stages tensors in the worker's staging area, in a job.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import torch

from skyrl.inference.vllm_plugin.weights.checkpoint import apply_changes, entries, tensors
from skyrl.inference.vllm_plugin.weights.jobs import Job, Jobs, Stages, WeightsError
from skyrl.inference.vllm_plugin.weights.model import ServedModel
from skyrl.inference.vllm_plugin.weights.staging import Needed, Staged, StagingArea, elements, named, plan_of
from skyrl.weights.segments import SegmentError, opened

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
            took.of(
                "make", apply_changes, staged, found, needed, checksums or {}, job.stopped, self._model.has_embedding
            )
            self._area.stage(staged, job)
            return {"tensors": len(staged.tensors), "bytes": staged.bytes, "seconds": took.seconds}

        self._area.forget()
        return work


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


MOST_GROUPS = 8
"""Of trainers that ended without a word, a group is left each time."""


class Group(Protocol):
    """A torch.distributed group of a trainer (rank 0) and all workers."""

    def broadcast_each(self, tensors: Iterable[torch.Tensor]) -> Generator[torch.Tensor]:
        """Fill each tensor with rank 0's next one, and give it when its values are there; tensors are taken ahead.
        Raises RuntimeError when the group fails or its time is over. When this ends, no tensor is filled any more."""
        ...

    def close(self) -> None: ...


Join = Callable[..., Group]


class Groups:
    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}
        self.failed: dict[str, str] = {}
        """Groups that can no longer be used, and why."""
        self.receiving: Group | None = None
        """The group that a running job receives from."""

    def names(self) -> list[str]:
        return sorted(self._groups)

    def check_new(self, name: str) -> None:
        """Raises WeightsError for a name that is taken."""
        if name in self._groups:
            raise WeightsError(f"group_name: there is a group {name!r} already; destroy it first")

    def add(self, name: str, group: Group) -> None:
        """Too many groups end the oldest one."""
        if len(self._groups) >= MOST_GROUPS:
            self.fail(next(iter(self._groups)), "its trainer did not leave it, and there are too many groups")
        self._groups[name] = group
        self.failed.pop(name, None)

    def usable(self, name: str) -> Group:
        """Raises WeightsError for a group that is not there, or has failed."""
        if name in self.failed:
            raise WeightsError(f"the group {name!r} has failed ({self.failed[name]}); form it again")
        if name not in self._groups:
            raise WeightsError(f"group_name: there is no group {name!r}; call /init_weights_update_group first")
        return self._groups[name]

    def has(self, name: str, group: Group) -> bool:
        """Whether the group of this name is still this one."""
        return self._groups.get(name) is group

    def leave(self, name: str) -> None:
        """Raises WeightsError for a group that is not there."""
        known = self.failed.pop(name, None)
        group = self._groups.pop(name, None)
        if group is None and known is None:
            raise WeightsError(f"group_name: there is no group {name!r}")
        if group is not None:
            group.close()

    def fail(self, name: str, why: str) -> None:
        """A group can no longer be used. A job that receives from it closes it at its end."""
        group = self._groups.pop(name, None)
        if group is None:
            return
        self.failed[name] = why
        if len(self.failed) > MOST_GROUPS:
            del self.failed[next(iter(self.failed))]
        if self.receiving is not group:
            group.close()


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
        arrived = next(arriving)
        if self._device.type == "cpu":
            return arrived
        return self._empty_for(name, staged, needed)(arrived.shape, dtype=arrived.dtype).copy_(arrived)

    def _empty_for(self, name: str, staged: Staged, needed: Needed) -> Callable[..., torch.Tensor]:
        """A name that is sent again takes no more of the staging memory."""
        return torch.empty if name in staged.tensors or name not in needed.shapes else self._area.memory.empty
