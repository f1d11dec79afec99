"""Tensors for the model that have arrived in a worker and are not in its model yet, and what the model needs.

A request describes the tensors of a bucket (`plan_of`). `Staged` is one update with its tensors. `StagingArea` holds
the one update of a worker, with the memory in which it lies.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from skyrl.inference.vllm_plugin.weights.jobs import Job, WeightsError
from skyrl.weights.segments import KeptMemory
from skyrl.weights.tensors import FLOATS, INTEGERS, NAMED, digest, dtype_name

SHOWN = 5
"""How many names an error shows."""


@dataclass(frozen=True, slots=True)
class Needed:
    """The tensors of a full update, with the names and shapes of the model's checkpoint. `optional`: names that may be
    left out, because the model has one tensor under two names. `largest`: the model's dtype holds no larger number."""

    shapes: Mapping[str, tuple[int, ...]]
    floats: Mapping[str, bool]
    optional: frozenset[str]
    largest: float = math.inf

    def check(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Raises WeightsError for a tensor that the model does not have in this form."""
        wanted = self.shapes.get(name)
        if wanted is None:
            if name in self.optional:
                return
            raise WeightsError(f"names: the model has no {name}")
        if shape != wanted:
            raise WeightsError(f"shapes: {name} has the shape {list(shape)}, the model's is {list(wanted)}")
        if dtype not in (FLOATS if self.floats[name] else INTEGERS):
            kind = "a floating-point" if self.floats[name] else "an integer"
            raise WeightsError(f"dtypes: {name} is {dtype_name(dtype)}, the model has {kind} tensor")

    def check_values(self, name: str, values: torch.Tensor) -> None:
        """Raises WeightsError for values that the model's tensor of this name must not have."""
        if not is_finite(values):
            raise WeightsError(f"{name} has a value that is not a finite number")
        if not _fits(values, self.largest):
            raise WeightsError(f"{name} has a value larger than {self.largest:g}, the largest of the model's dtype")


@dataclass(slots=True)
class Staged:
    """`version` belongs to the whole update. `source` names the update: two with one version are not mixed. `keep`: its
    bytes are the base of a later update."""

    version: str | None
    source: str
    keep: bool = False
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    bytes: int = 0

    def add(
        self,
        needed: Needed,
        name: str,
        tensor: torch.Tensor,
        checksum: str | None,
        in_model: Callable[[torch.Tensor], bool],
    ) -> None:
        """`in_model`: whether the model has a tied tensor with these values. Raises WeightsError for a tensor that must
        not get into the model."""
        needed.check(name, tuple(tensor.shape), tensor.dtype)
        if checksum is not None and checksum != (found := digest(name, tensor)):
            raise WeightsError(f"checksums: {name} arrived with the digest {found}, not with {checksum}")
        needed.check_values(name, tensor)
        if name not in needed.shapes:
            if not self._has(tensor) and not in_model(tensor):
                raise WeightsError(
                    f"names: the model's {name} is tied to another tensor, which has other values: send that one before"
                )
            return
        old = self.tensors.get(name)
        self.bytes += tensor.nbytes - (0 if old is None else old.nbytes)
        self.tensors[name] = tensor

    def _has(self, tensor: torch.Tensor) -> bool:
        same = (other for other in self.tensors.values() if other.shape == tensor.shape and other.dtype == tensor.dtype)
        return any(torch.equal(other, tensor) for other in same)

    def missing(self, needed: Needed) -> list[str]:
        """Names that a full update still needs."""
        return [name for name in needed.shapes if name not in self.tensors and name not in needed.optional]

    def progress(self, needed: Needed, seconds: dict[str, float]) -> dict[str, Any]:
        """The end of a job that has staged tensors, in JSON. `seconds`: of each of its stages."""
        missing = self.missing(needed)
        return {
            "missing": len(missing),
            "some": missing[:SHOWN],
            "bytes": self.bytes,
            "new": bool(self.tensors),
            "seconds": seconds,
        }


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is infinite or not a number. A sum in the tensor's own dtype shows it with one pass and no
    memory: for another dtype torch converts a copy first. A sum that overflows is looked at again."""
    if not tensor.dtype.is_floating_point:
        return True
    if tensor.dtype.itemsize == 1:
        return bool(torch.isfinite(tensor.to(torch.float32)).all())
    return bool(torch.isfinite(tensor.sum())) or all(bool(torch.isfinite(one)) for one in tensor.aminmax())


def _fits(tensor: torch.Tensor, largest: float) -> bool:
    """Whether no element becomes infinite in a dtype whose largest number is `largest`."""
    if not tensor.dtype.is_floating_point or not tensor.numel() or torch.finfo(tensor.dtype).max <= largest:
        return True
    least, most = (tensor.to(torch.float32) if tensor.dtype.itemsize == 1 else tensor).aminmax()
    return -largest <= float(least) and float(most) <= largest


def named(names: list[str]) -> str:
    """A few of the names, for an error."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"


logger = logging.getLogger("vllm.skyrl_plugin")


class StagingArea:
    """A job may find at its end that what it has staged was dropped meanwhile: then `staged` is something else."""

    def __init__(self) -> None:
        self.staged: Staged | None = None
        self.memory = KeptMemory()
        self._base: Staged | None = None
        self._freeing: threading.Thread | None = None

    def begun(self, version: str | None, source: str) -> Staged:
        """What is staged of this update. Another one is forgotten. No job may run."""
        if not self.holds(version, source):
            if self.staged is not None and self.staged.tensors:
                logger.warning("an update to %r was not finished: it is forgotten", self.staged.version)
            self.forget()
            self.staged = Staged(version, source)
        assert self.staged is not None
        return self.staged

    def holds(self, version: str | None, source: str) -> bool:
        """Whether something of this update is staged, perhaps no tensor yet."""
        return self.staged is not None and (self.staged.version, self.staged.source) == (version, source)

    def stage(self, staged: Staged, job: Job) -> None:
        """At the end of a job that has read a whole update. Raises WeightsError if the job was told to stop."""
        self.staged = staged
        if job.stopped():  # asked after the line above: a stop in between must not leave anything staged
            self.staged = None
            raise WeightsError("reading was stopped")

    def drop(self, staged: Staged) -> None:
        """A job has failed with this update, unless another one is here by now."""
        if self.staged is staged:
            self.staged = None

    def forget(self) -> None:
        """Drop what is staged, and begin with the memory anew. No job may run."""
        self.staged = None
        if self._freeing is not None:
            self._freeing.join()
        self.memory.reuse()

    def keep_base(self, staged: Staged | None) -> None:
        """The bytes of this update are the base of a later one; None: there is no base."""
        self._base = staged

    def take_base(self) -> Staged | None:
        """The update whose bytes were kept, which is the caller's now."""
        base, self._base = self._base, None
        return base

    def free_memory(self) -> None:
        """After an update was applied: its memory is the next one's. In a thread: it takes 0.1 s per GiB, for which the
        engine need not wait."""
        self._freeing = threading.Thread(target=self.memory.reuse, name="skyrl memory", daemon=True)
        self._freeing.start()


def plan_of(
    names: list[str], dtypes: list[str], shapes: list[list[int]]
) -> list[tuple[str, torch.dtype, tuple[int, ...], int]]:
    """Name, dtype, shape and bytes of each tensor. Raises WeightsError."""
    if not len(names) == len(dtypes) == len(shapes):
        raise WeightsError(
            f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes: the numbers must be equal"
        )
    if len(set(names)) != len(names):
        raise WeightsError("names: a name occurs twice")
    plan = []
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        kind = NAMED.get(dtype.removeprefix("torch."))
        if kind is None:
            raise WeightsError(f"dtypes: {dtype!r}, of {name}, is not one of {', '.join(NAMED)}")
        plan.append((name, kind, tuple(shape), elements(shape) * kind.itemsize))
    return plan


def elements(shape: list[int] | tuple[int, ...]) -> int:
    """How many elements a tensor of this shape has."""
    product = 1
    for size in shape:
        product *= size
    return product
