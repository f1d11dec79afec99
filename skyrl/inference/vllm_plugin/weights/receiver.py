"""The calls about weights that one vLLM worker answers. One worker is one rank: a vLLM with tensor parallelism has
several, and each answers each call.

Calls return at once. What takes time is a job; the caller asks for its state. Calls come from the engine, between two
of its steps, or at any time from the worker's line. Order of an update from disk: `read`, `job` until it has ended,
`apply`. From a group: `join`, then `receive` for each bucket, and `apply` after the last. From a trainer's memory the
same with `map`, without `join`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from skyrl.inference.vllm_plugin.weights.changes import make
from skyrl.inference.vllm_plugin.weights.checkpoint import entries, tensors
from skyrl.inference.vllm_plugin.weights.checks import Checks
from skyrl.inference.vllm_plugin.weights.errors import WeightsError
from skyrl.inference.vllm_plugin.weights.groups import Groups, Join
from skyrl.inference.vllm_plugin.weights.jobs import Job, Jobs
from skyrl.inference.vllm_plugin.weights.model import Broken, ServedModel
from skyrl.inference.vllm_plugin.weights.plan import elements, plan_of
from skyrl.inference.vllm_plugin.weights.stages import Stages
from skyrl.inference.vllm_plugin.weights.staging import SHOWN, Needed, Staged, named
from skyrl.weights.kept_memory import KeptMemory
from skyrl.weights.segments import SegmentError, opened

logger = logging.getLogger("vllm.skyrl_plugin")


class Receiver:
    """`join(address, port, rank, world, name, backend, timeout_s)` forms a group. `prepare` runs at the start of each
    job's thread."""

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
        self._join = join
        self._device = device
        self._rank = rank
        self._prepare = prepare
        self._jobs = Jobs()
        self._staged: Staged | None = None
        self._kept: Staged | None = None
        """The base of a later update."""
        self._memory = KeptMemory()
        self._freeing: threading.Thread | None = None
        self._groups = Groups()
        self._broken: str | None = None
        self._one_at_a_time = threading.Lock()
        checks = Checks(model, ranks)
        self._calls: dict[str, Callable[..., dict[str, Any]]] = {
            "state": self.state,
            "job": self._jobs.state,
            "stop": self.stop,
            "read": self.read,
            "join_group": self.join_group,
            "leave_group": self.leave_group,
            "receive": self.receive,
            "map": self.map,
            "staged": self.staged,
            "discard": self.discard,
            "apply": self.apply,
            "mark_broken": self.mark_broken,
            "checksum": lambda: {"job": self._start("computing checksums", checks.checksum)},
            "snapshot": lambda: {"job": self._start("taking a snapshot", checks.snapshot)},
            "compare": lambda: {"job": self._start("comparing with the snapshot", checks.compare)},
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
        staged = self._staged
        return {
            "broken": self._broken,
            "groups": self._groups.names(),
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
        self._staged = None
        return {}

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
        kept, self._kept = self._kept, None
        if base is not None:
            if kept is None or kept.version != base:
                held = "none" if kept is None else repr(kept.version)
                raise WeightsError(f"base: the bytes of {base!r} are not kept here, but those of {held}")
            return {"job": self._start("making the new weights", self._making(kept, directory, version, checksums))}
        del kept
        self._forget()

        def work(job: Job) -> dict[str, Any]:
            found = entries(Path(directory))
            staged = Staged(version, keep)
            for name, entry in found.items():  # all headers first: reading takes long
                needed.check(name, entry.shape, entry.dtype)
            if not partial and (missing := [n for n in needed.shapes if n not in found and n not in needed.optional]):
                raise WeightsError(f"model_path: {directory} lacks {named(missing)}")
            if unknown := [name for name in checksums or () if name not in found]:
                raise WeightsError(f"checksums: {directory} has no {named(unknown)}")
            own = {name: entry for name, entry in found.items() if name not in needed.optional}
            tied = {name: entry for name, entry in found.items() if name in needed.optional}
            took = Stages()
            each = chain(*(tensors(part, job.stopped, self._memory.empty) for part in (own, tied)))
            while (read := took.of("read", next, each, None)) is not None:
                name, tensor = read
                given = (checksums or {}).get(name)
                took.of("check", staged.add, needed, name, tensor, given, self._model.has_embedding)
            self._staged = staged
            if job.stopped():  # asked after the line above: a stop in between must not leave anything staged
                self._staged = None
                raise WeightsError("reading was stopped")
            return {"tensors": len(staged.tensors), "bytes": staged.bytes, "seconds": took.seconds}

        return {"job": self._start("reading the new weights", work)}

    def _making(
        self, base: Staged, directory: str, version: str | None, checksums: dict[str, str] | None
    ) -> Callable[[Job], dict[str, Any]]:
        needed = self._model.needed()

        def work(job: Job) -> dict[str, Any]:
            took, staged = Stages(), Staged(version, True, base.tensors, base.bytes)
            found = took.of("read", entries, Path(directory))
            took.of("make", make, staged, found, needed, checksums or {}, job.stopped, self._model.has_embedding)
            self._staged = staged
            if job.stopped():
                self._staged = None
                raise WeightsError("reading was stopped")
            return {"tensors": len(staged.tensors), "bytes": staged.bytes, "seconds": took.seconds}

        self._forget()
        return work

    def join_group(
        self, address: str, port: int, rank_offset: int, world_size: int, name: str, backend: str, timeout_s: float
    ) -> dict[str, Any]:
        """Form a group. The job ends when all members are there. What was staged before is forgotten."""
        self._model.needed()
        self._jobs.check_idle()
        self._groups.check_new(name)
        rank = rank_offset + self._rank
        if not 0 < rank < world_size:
            raise WeightsError(
                f"rank_offset: this rank would be {rank}, in a group of {world_size} with the trainer at 0"
            )
        self._forget()

        def work(job: Job) -> dict[str, Any]:
            try:
                group = self._join(
                    address=address, port=port, rank=rank, world=world_size, name=name, backend=backend,
                    timeout_s=timeout_s,
                )  # fmt: skip
            except Exception as error:
                raise WeightsError(f"the group {name!r} was not formed: {error}") from error
            self._groups.add(name, group)
            if job.stopped():
                self._groups.fail(name, "it was formed after the time for it")
                raise WeightsError(f"the group {name!r} was formed after the time for it")
            return {"rank": rank}

        return {"job": self._start(f"joining the group {name!r}", work)}

    def leave_group(self, name: str) -> dict[str, Any]:
        """Also forgets what was staged. Raises WeightsError for a group that is not there."""
        self._jobs.check_idle()
        self._forget()
        self._groups.leave(name)
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
            self._groups.fail(group, str(error))
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
        members = self._groups.usable(group)
        plan = plan_of(names, dtypes, shapes)
        total = sum(tensor_bytes for *_, tensor_bytes in plan)
        most = 2 * sum(elements(shape) for shape in needed.shapes.values()) * 8
        if total > most:
            raise WeightsError(f"shapes: a bucket of {total} bytes is more than this model can have")
        staged = self._begun(version)

        def work(job: Job) -> dict[str, Any]:
            wrong: WeightsError | None = None
            received = False
            took = Stages()
            rooms = (self._room(staged, needed, name, dtype, shape) for name, dtype, shape, _ in plan)
            arriving = members.broadcast_each(rooms)
            try:
                for name, *_ in plan:
                    if job.stopped() or not self._groups.has(group, members):
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
                if self._staged is not staged or job.stopped():
                    raise WeightsError("the update was stopped")
            except Exception as error:
                if self._staged is staged:
                    self._staged = None
                if not received:
                    self._groups.fail(group, str(error) or type(error).__name__)
                raise
            finally:
                arriving.close()
                self._groups.receiving = None
                if not self._groups.has(group, members):
                    members.close()
            return _progress(staged, needed, took)

        self._groups.receiving = members
        return {"job": self._start("receiving a bucket", work)}

    def map(
        self,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        places: list[int],
        memory: dict[str, Any],
        version: str | None,
        checksums: dict[str, str] | None,
    ) -> dict[str, Any]:
        """Stage tensors that lie in a segment of a trainer on this machine, at these bytes of it: in place if that is
        main memory, which must not change until the update is applied. Answers as `receive`."""
        needed = self._model.needed()
        self._jobs.check_idle()
        plan = plan_of(names, dtypes, shapes)
        staged = self._begun(version)

        def work(job: Job) -> dict[str, Any]:
            took = Stages()
            try:
                segment = took.of("map", opened, memory)
                for (name, dtype, shape, size), begin in zip(plan, places, strict=True):
                    if begin + size > len(segment):
                        raise WeightsError(f"places: {name} ends after the memory's {len(segment)} bytes")
                    tensor = segment[begin : begin + size].view(dtype).view(shape)
                    if segment.is_cuda:
                        tensor = took.of("copy", self._memory.empty(shape, dtype).copy_, tensor)
                    given = (checksums or {}).get(name)
                    took.of("check", staged.add, needed, name, tensor, given, self._model.has_embedding)
                if self._staged is not staged or job.stopped():
                    raise WeightsError("the update was stopped")
            except Exception as error:
                if self._staged is staged:
                    self._staged = None
                if isinstance(error, SegmentError):
                    raise WeightsError(f"memory: {error}") from error
                raise
            return _progress(staged, needed, took)

        return {"job": self._start("mapping new weights", work)}

    def staged(self, version: str | None) -> dict[str, Any]:
        """As the end of `receive`, for all that was staged. Raises WeightsError if that is nothing, or is of another
        version."""
        self._jobs.check_idle()
        if self._staged is None or self._staged.version != version:
            raise WeightsError(f"weight_version: nothing of {version!r} is staged")
        return _progress(self._staged, self._model.needed(), Stages())

    def _begun(self, version: str | None) -> Staged:
        """What is staged of this version. Another version is forgotten."""
        if self._staged is None or (self._staged.tensors and self._staged.version != version):
            if self._staged is not None:
                logger.warning("an update to %r was not finished: it is forgotten", self._staged.version)
            self._forget()
            self._staged = Staged(version)
        return self._staged

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
        return torch.empty if name in staged.tensors or name not in needed.shapes else self._memory.empty

    def _forget(self) -> None:
        """Drop what is staged. No job may run."""
        self._staged = None
        if self._freeing is not None:
            self._freeing.join()
        self._memory.reuse()

    def apply(self, partial: bool) -> dict[str, Any]:
        """Put what is staged into the model. The engine stops until this returns. A full update also repairs a broken
        model. `broken` in the answer: the model is now neither old nor new; `seconds`: of each stage."""
        self._jobs.check_idle()
        staged = self._staged
        if staged is None or not staged.tensors:
            raise WeightsError("there is nothing to apply")
        missing = staged.missing(self._model.needed())
        if missing and not partial:
            raise WeightsError(f"the update lacks {named(missing)}")
        if missing and self._broken is not None:
            raise WeightsError(f"the model is broken ({self._broken}): it needs all its tensors")
        self._staged = None
        seconds: dict[str, float] = {}
        try:
            seconds = self._model.apply(staged.tensors, full=not missing)
        except Broken as broken:
            self._broken = f"an update failed while it changed the model: {broken}"
            logger.error("%s", self._broken)
        else:
            self._broken = None
            self._kept = staged if staged.keep and not missing and not self._model.holds(staged.tensors) else None
        answer = {"broken": self._broken, "tensors": len(staged.tensors), "bytes": staged.bytes, "seconds": seconds}
        del staged
        self._freeing = threading.Thread(target=self._memory.reuse, name="skyrl memory", daemon=True)
        self._freeing.start()  # 0.1 s per GiB, for which the engine need not wait
        return answer

    def mark_broken(self, reason: str) -> dict[str, Any]:
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

    def _start(self, name: str, work: Callable[[Job], dict[str, Any]]) -> int:
        def prepared(job: Job) -> dict[str, Any]:
            self._prepare()
            return work(job)

        return self._jobs.start(name, prepared)


def _progress(staged: Staged, needed: Needed, took: Stages) -> dict[str, Any]:
    missing = staged.missing(needed)
    return {
        "missing": len(missing),
        "some": missing[:SHOWN],
        "bytes": staged.bytes,
        "new": bool(staged.tensors),
        "seconds": took.seconds,
    }
