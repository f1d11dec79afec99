"""Counts the operations that a training step starts on its device, and how often it waits for the device.

Runs on a CPU. Knows torch's operations. Knows nothing of batches or tables.

Counted is each operation that torch's dispatcher gives to the device's kernels, below autograd, in forward and in
backward: products, elementwise operations, sums, copies between dtypes or layouts. One of them is one launch on CUDA,
or a few. Views, empty tensors and questions about shapes launch nothing, so they are not counted. Copies from the host
to the device are counted apart (`uploads`): on a CPU they do nothing. `waits`: how often the host waits until the
device has finished everything: where it reads a number or an array, uploads memory that is not pinned, asks for places
that are not zero, or ends a command. `behind`: how often it waits for a copy to arrive while the device computes a
later micro-batch.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from skyrl.trainer.device import HOST

_NO_LAUNCH = {
    *("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "empty_permuted"),
    *("detach", "alias", "_unsafe_view", "_reshape_alias", "lift_fresh", "set_", "resize_", "record_stream"),
    *("is_same_size", "_has_compatible_shallow_copy_type", "_local_scalar_dense"),
}
"""Operations that start nothing on a device: they make a view or memory, or answer from the shape. The last one reads a
number; the host waits for it, and the copy of four bytes is not counted."""
_WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "unique_consecutive", "_unique2"}


FORWARD = "forward"
"""The phase with which a micro-batch begins."""


class Operations(TorchDispatchMode):
    """Inside, counts operations, copies to the device (`uploads`) and waits of the host for it (`waits`, `behind`), by
    the phase in which they start. Not for several threads."""

    def __init__(self) -> None:
        super().__init__()
        self._host = _HostCopies(self)
        self.counts: dict[str, Counter[str]] = {}
        """By phase, how often each operation has started, by name."""
        self.uploads: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.behind: Counter[str] = Counter()
        self._phases = ["other"]
        self._forwards = 0
        self._copies: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()
        """Of copies to the host their numbers, and how many forwards had begun before."""
        self._made = self._arrived = 0
        """The numbers of the last copy, and of the last one that is known to have arrived."""
        self.is_counting = False
        """Between enter and exit, and outside of kernels of `as_one`."""

    def __enter__(self) -> Self:
        self.is_counting = True
        self._host.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.is_counting = False
        super().__exit__(*error)
        self._host.__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in _WAITS or (name == "index" and _has_mask(args[1])):
            self.waited()
        made = func(*args, **(kwargs or {}))
        if self.is_counting and not func.is_view and name not in _NO_LAUNCH:
            self.started(name, self._phases[-1], func, args, kwargs or {}, made)
        return made

    def started(
        self, name: str, phase: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any
    ) -> None:
        """An operation has started, with these arguments and results. `func`: torch's; None: a kernel of `as_one`."""
        self.counts.setdefault(phase, Counter())[name] += 1

    def as_one(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, each call of which is counted as one operation of this name: what it starts inside is not
        counted. So a fused kernel is counted that computes the same and is not there on a CPU."""

        @functools.wraps(function)
        def kernel(*args: Any, **kwargs: Any) -> Any:
            if not self.is_counting:
                return function(*args, **kwargs)
            self.is_counting = False
            try:
                made = function(*args, **kwargs)
            finally:
                self.is_counting = True
            self.started(name, self._phases[-1], None, args, kwargs, made)
            return made

        return kernel

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what starts inside under this name; a phase inside another one is counted apart."""
        self._phases.append(name)
        self._forwards += name == FORWARD
        try:
            yield
        finally:
            self._phases.pop()

    def waited(self, *arguments: Any) -> None:
        """One more wait; the arguments are those of a function in whose place this one is called."""
        self.waits[self._phases[-1]] += 1

    def uploaded(self, *, waits: bool) -> None:
        self.uploads[self._phases[-1]] += 1
        if waits:
            self.waited()

    @contextmanager
    def copies(self, kind: Any) -> Iterator[None]:
        """Inside, count the waits for copies to the host: each is begun where one of this kind is made, and waited for
        where it is `read`. Copies arrive in the order in which they were begun."""
        init, read = kind.__init__, kind.read

        def begin(copy: Any, *arguments: Any) -> None:
            init(copy, *arguments)
            self._made += 1
            self._copies[copy] = self._made, self._forwards

        def wait(copy: Any) -> Any:
            number, forwards = self._copies[copy]
            if number > self._arrived:
                self._arrived = number
                (self.waits if forwards == self._forwards else self.behind)[self._phases[-1]] += 1
            return read(copy)

        with patch.object(kind, "__init__", begin), patch.object(kind, "read", wait):
            yield

    def totals(self) -> dict[str, int]:
        """Operations by phase, and `uploads` and `waits` of all phases."""
        found = {phase: counts.total() for phase, counts in self.counts.items()}
        return found | {"uploads": self.uploads.total(), "waits": self.waits.total()}


def _has_mask(indices: Any) -> bool:
    """Whether one of an index's tensors is a mask: then torch asks where it is true."""
    return any(isinstance(each, Tensor) and each.dtype == torch.bool for each in indices)


def _names_device(arguments: Iterable[Any]) -> bool:
    """Whether one of the arguments is the device, which is not the object that stands for the host."""
    return any(isinstance(each, torch.device) and each is not HOST for each in arguments)


class _HostCopies(TorchFunctionMode):
    """Notices copies between host and device by the calls that make them: on a CPU they reach no kernel."""

    def __init__(self, work: Operations) -> None:
        super().__init__()
        self._work = work

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.cpu, Tensor.tolist):
            self._work.waited()
        elif (
            func in (Tensor.to, torch.tensor)
            and _names_device((*args[1:], *kwargs.values()))
            # transformers' layers move only what is there already
            and not sys._getframe(1).f_globals["__name__"].startswith("transformers.")
        ):
            self._work.uploaded(waits=not kwargs.get("non_blocking"))
        return func(*args, **kwargs)


def in_phase(operations: Operations, phase: str, owner: Any, name: str) -> Any:
    """A patch: calls of `owner.name` are counted in this phase."""
    function: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        with operations.phase(phase):
            return function(*args, **kwargs)

    return patch.object(owner, name, counted)
